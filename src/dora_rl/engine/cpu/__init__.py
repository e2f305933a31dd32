"""The CPU's way to run a plan: `compiled` in C, or `runner` with torch, which is its oracle.

Torch computes where there is no C compiler, or a model is not dense float32.
"""
