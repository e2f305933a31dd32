"""The configuration: parsed once, checked across fields, frozen, written out next to the run.

Each section of the TOML file is one class. Unknown keys are errors that name the nearest key.
Nothing here imports torch or performs work. Units stand last in a name (`timeout_s`), limits end
in `_max`, counts begin with `num_`.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

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


class DataSource(Section):
    """One entry of `data.train` or `data.eval`. A plain string stands for its `path`."""

    # A .jsonl, .json or .parquet file, a directory of those, a directory that `datasets` saved, a
    # Hugging Face id, or code that makes rows: `package.module:name` or `path/to/file.py:name`.
    path: str = Field(min_length=1)
    weight: float = Field(default=1.0, gt=0)
    name: str = ""
    split: str = ""
    subset: str = ""
    prompt_column: str = "prompt"
    # Empty: the first of answer, ground_truth, solution, label, reward_model.ground_truth.
    answer_column: str = ""
    # Arguments of a source that is code.
    options: dict[str, str | int | float | bool] = {}


class DataConfig(Section):
    """[data] where prompts come from."""

    train: tuple[DataSource, ...] = ()
    eval: tuple[DataSource, ...] = ()
    seed: int = 0
    shuffle: bool = True
    # Longer prompts are left out and counted. 0: no limit.
    prompt_tokens_max: int = Field(default=1024, ge=0)
    # `auto`: message lists go through the chat template, strings stay as they are.
    # `always`: a string becomes a user message. `never`: message lists are an error.
    chat: Literal["auto", "always", "never"] = "auto"
    system_prompt: str = ""
    template_options: dict[str, str | int | float | bool] = {}
    # Rows of an endless source that are looked at before the run starts.
    check_rows: int = Field(default=256, ge=1)
    # Refuse to start when an evaluation prompt is also a training prompt.
    check_disjoint: bool = True

    @field_validator("train", "eval", mode="before")
    @classmethod
    def _strings_are_paths(cls, value: object) -> object:
        entries = value if isinstance(value, (list, tuple)) else (value,)
        return tuple({"path": entry} if isinstance(entry, str) else entry for entry in entries)


class WeightsConfig(Section):
    """[weights] the store of sealed versions."""

    # Where live versions lie. Empty: a directory of the run's own in /dev/shm.
    root: str = ""
    # Hash a version's bytes before its first use in each process.
    verify: bool = True
