"""Causal attention over packed documents: where they lie, and the ways to compute it."""
