"""The old path of `dora_rl.weights.store`: still works, with one line of warning."""

import warnings

from dora_rl.weights.store import *  # noqa: F403

warnings.warn("dora_rl.runtime.weights is now dora_rl.weights.store", FutureWarning, stacklevel=2)
