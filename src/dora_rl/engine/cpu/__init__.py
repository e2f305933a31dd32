"""The CPU engine's forward pass in C, compiled on the machine it runs on.

`library` builds and loads it, `runner` drives it. Where there is no C compiler, or a model is not
dense float32, `engine.runner` computes the same with torch.
"""
