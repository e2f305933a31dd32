"""dora-rl: reinforcement-learning post-training with multi-version streaming rollout.

Importing the package is light: torch, ray, vllm and the like are imported where they are used.
"""

__version__ = "0.1.0"
