"""The configuration: parsed once, checked across fields, frozen, written out next to the run.

Each section of the TOML file is one class. Unknown keys are errors that name the nearest key.
Nothing here imports torch or performs work. Units stand last in a name (`timeout_s`), limits end
in `_max`, counts begin with `num_`.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from dora_rl.types import Mode


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)


class OrchestrationConfig(Section):
    """[orchestration] which paradigm, how stale, how much in flight."""

    mode: Mode = Mode.MULTI_VERSION
    max_staleness: int = 2


class RolloutConfig(Section):
    """[rollout] the generation engine and how it samples."""


class AlgorithmConfig(Section):
    """[algorithm] the loss, its corrections and the advantages."""


class TrainerConfig(Section):
    """[trainer] optimizer, packing, precision, sharding."""


class CheckpointConfig(Section):
    """[checkpoint] how often, how many, which is best."""


class DataConfig(Section):
    """[data] where prompts come from."""


class WeightsConfig(Section):
    """[weights] the store of sealed versions."""

    # Where live versions lie. Empty: a directory of the run's own in /dev/shm.
    root: str = ""
    # Hash a version's bytes before its first use in each process.
    verify: bool = True
