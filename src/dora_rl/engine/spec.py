"""The old path of `dora_rl.model.spec`: still works, with one line of warning."""

import warnings

from dora_rl.model.spec import ModelSpec, MoeSpec, RopeSpec, dense_spec

__all__ = ["ModelSpec", "MoeSpec", "RopeSpec", "dense_spec"]
warnings.warn("dora_rl.engine.spec is now dora_rl.model.spec", FutureWarning, stacklevel=2)
