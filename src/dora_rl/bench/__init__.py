"""Comparisons of whole runs: the paradigms side by side."""
