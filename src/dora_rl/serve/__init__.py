"""`dora-rl serve`: the native engine behind the OpenAI-shaped front. See `docs/serving.md`."""

KEY_VARIABLE = "DORA_RL_API_KEY"  # of the environment: the key, where no file has any
