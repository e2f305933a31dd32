"""The old path of the reader of `config.json`: still works, with one line of warning."""

import warnings

from dora_rl.model.directory import read_config as load_config
from dora_rl.trainer.policy.model import lean_spec as read_architecture

__all__ = ["load_config", "read_architecture"]
warnings.warn(
    "dora_rl.trainer.architecture: load_config and read_architecture are now read_config of "
    "dora_rl.model.directory and lean_spec of dora_rl.trainer.policy.model",
    FutureWarning,
    stacklevel=2,
)
