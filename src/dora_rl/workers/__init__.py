"""The worker processes of a run: how they come to be."""
