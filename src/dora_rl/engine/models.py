"""The old path of `dora_rl.model.directory.read_spec`: still works, with one line of warning."""

import warnings

from dora_rl.model.directory import read_spec
from dora_rl.model.families import spec_from_config

__all__ = ["read_spec", "spec_from_config"]
warnings.warn("dora_rl.engine.models is now dora_rl.model.directory", FutureWarning, stacklevel=2)
