"""The OpenAI-shaped HTTP front: requests, chat templates, sessions, answers. Generates nothing."""
