"""Environments by name: built-ins, `package.module:Name` and `path/to/file.py:Name`.

Never runs an episode. Invariant: whatever is wrong with an environment's name, code or options is
one `UserError` line before anything starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dora_rl.config.env import EnvConfig, EnvironmentEntry
from dora_rl.envs.base import Environment
from dora_rl.types import UserError
from dora_rl.user_code import load_object, one_line

KEY = "env.environments"
BUILT_IN = {
    "single_turn": "dora_rl.envs.base:SingleTurn",
    "calculator": "dora_rl.envs.calculator:Calculator",
    "guess": "dora_rl.envs.guess:Guess",
    "agent": "dora_rl.envs.agent:Agent",
}


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """One entry of the configuration with its class."""

    label: str
    entry: EnvironmentEntry
    kind: type[Environment]

    def make(self) -> Environment:
        """A fresh one, for one episode."""
        return self.kind(**self.entry.options)


def load_environments(
    config: EnvConfig, base_dir: Path = Path(".")
) -> dict[str, LoadedEnvironment]:
    """All environments of a run by label, each made once to see that its options fit."""
    loaded: dict[str, LoadedEnvironment] = {}
    for entry in config.environments:
        label = entry.label or entry.name
        if label in loaded:
            raise UserError(f"env: two environments are called {label}; give one another label")
        if not 0 <= entry.latency_s[0] <= entry.latency_s[1]:
            raise UserError(f"env: latency_s of {label} is {entry.latency_s}; give [from, to]")
        found = LoadedEnvironment(label, entry, load_class(entry.name, base_dir))
        _check(found)
        loaded[label] = found
    return loaded


def _check(found: LoadedEnvironment) -> None:
    try:
        found.make().close()
    except UserError:
        raise
    except Exception as error:
        # The constructor is the user's code, which may raise anything.
        options = dict(found.entry.options)
        raise UserError(
            f"env: {found.label} cannot be made with the options {options} ({one_line(error)})"
        ) from error


def load_class(name: str, base_dir: Path) -> type[Environment]:
    """The class that a name means; failures are one line."""
    if name not in BUILT_IN and ":" not in name:
        raise UserError(
            f"env: no environment {name!r}; give {', '.join(BUILT_IN)}, package.module:Name or "
            f"path/to/file.py:Name"
        )
    found = load_object(BUILT_IN.get(name, name), base_dir, section="env", key=KEY)
    if not isinstance(found, type) or not callable(getattr(found, "step", None)):
        raise UserError(f"env: {name} is not a class with a method step(turn); see docs/agents.md")
    if not issubclass(found, Environment):
        raise UserError(f"env: {name} must derive from dora_rl.envs.base.Environment")
    return found


def label_of(env: str, loaded: Mapping[str, LoadedEnvironment]) -> str:
    """The environment of a prompt whose source names `env`, or names none and there is one."""
    if env:
        if env not in loaded:
            names = ", ".join(loaded) or "none is configured"
            raise UserError(f"data: no environment is called {env!r} (env.environments: {names})")
        return env
    if len(loaded) == 1:
        return next(iter(loaded))
    raise UserError(
        f"data: {len(loaded)} environments and a source without one; set env to one of "
        f"{', '.join(loaded)}"
    )
