"""The sample store: the payload of every sample, from its first token to the end of its group."""
