"""The old names of the sections of `dora_rl.config`: still work, with one line of warning."""

import warnings

from dora_rl.config import AlgorithmConfig as AlgorithmOptions
from dora_rl.config import CheckpointConfig as CheckpointOptions
from dora_rl.config import TrainerConfig as TrainerOptions

__all__ = ["AlgorithmOptions", "CheckpointOptions", "TrainerOptions"]
warnings.warn(
    "dora_rl.trainer.options: AlgorithmOptions, TrainerOptions and CheckpointOptions are now "
    "AlgorithmConfig, TrainerConfig and CheckpointConfig of dora_rl.config",
    FutureWarning,
    stacklevel=2,
)
