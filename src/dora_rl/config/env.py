"""[env]: which environments a run plays, how long they may take, how many at once.

Only says what is wanted; `dora_rl.envs.host` finds the classes. Nothing here performs work.
"""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from dora_rl.config.section import Section


class EnvironmentEntry(Section):
    """One entry of `env.environments`. A plain string stands for its `name`."""

    # A built-in (agent, calculator, guess, single_turn), `package.module:Name` or
    # `path/to/file.py:Name`.
    name: str = Field(min_length=1)
    label: str = ""  # what `data.train[].env` and the records call it; empty: the name
    options: dict[str, Any] = Field(
        default_factory=dict
    )  # arguments of the environment's constructor
    weight: float = Field(default=1.0, gt=0)  # how often its prompts come, against the others'
    turns_max: int = Field(default=8, ge=1)  # of an episode; then it ends as it is
    timeout_s: float = Field(default=60.0, gt=0)  # of one reset or step
    concurrent_max: int = Field(default=256, ge=1)  # steps under way at once, in all workers
    latency_s: tuple[float, float] = (0.0, 0.0)  # waited before each step, for tests: from, to


class EnvConfig(Section):
    """[env] multi-turn environments; without one, every run has a single turn."""

    environments: tuple[EnvironmentEntry, ...] = ()  # names, or tables with a name; see below
    num_workers: int = Field(default=1, ge=1)  # processes that hold environments
    # Requests an instance takes over those it decodes at once: the others wait for their step.
    slots_factor: float = Field(default=2.0, ge=1)

    @field_validator("environments", mode="before")
    @classmethod
    def _strings_are_names(cls, value: object) -> object:
        entries = value if isinstance(value, (list, tuple)) else (value,)
        return tuple({"name": entry} if isinstance(entry, str) else entry for entry in entries)
