"""`dora-rl serve`: the native engine behind the OpenAI-shaped front. See `docs/serving.md`."""
