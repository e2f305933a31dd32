"""The old path of `dora_rl.model.random_weights`: still works, with one line of warning."""

import warnings

from dora_rl.model.random_weights import RandomAdapter, RandomWeights

__all__ = ["RandomAdapter", "RandomWeights"]
warnings.warn(
    "dora_rl.engine.random_weights is now dora_rl.model.random_weights", FutureWarning, stacklevel=2
)
