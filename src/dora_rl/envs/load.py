"""Environments by name: built-ins, `package.module:Name` and `path/to/file.py:Name`.

Never runs an episode. Invariant: whatever is wrong with an environment's name, code or options is
one `UserError` line before anything starts.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from dora_rl.config.env import EnvConfig, EnvironmentEntry
from dora_rl.envs.base import Environment
from dora_rl.types import UserError

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
    found = load_object(BUILT_IN.get(name, name), base_dir)
    if not isinstance(found, type) or not callable(getattr(found, "step", None)):
        raise UserError(f"env: {name} is not a class with a method step(turn); see docs/agents.md")
    if not issubclass(found, Environment):
        raise UserError(f"env: {name} must derive from dora_rl.envs.base.Environment")
    return found


def load_object(name: str, base_dir: Path) -> Any:
    """What stands in a file or module; failures are one line."""
    place, _, attribute = name.rpartition(":")
    try:
        module = _load_file(base_dir / place) if place.endswith(".py") else _import(place, base_dir)
        return getattr(module, attribute)
    except UserError:
        raise
    except Exception as error:
        # Importing runs the user's code, which may raise anything.
        raise UserError(
            f"env: cannot load {name} ({one_line(error)}); "
            f"give package.module:Name or path/to/file.py:Name"
        ) from error


def _import(place: str, base_dir: Path) -> ModuleType:
    _search_in(base_dir)
    return importlib.import_module(place)


def _load_file(path: Path) -> ModuleType:
    path = path.expanduser().resolve()
    if not path.is_file():
        raise UserError(f"env: {path} does not exist; check env.environments")
    # The name is unique to the file, so that two files called env.py do not meet.
    digest = blake2b(str(path).encode(), digest_size=6).hexdigest()
    name = f"dora_rl_env_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    _search_in(path.parent)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and typing look a class's module up by name while it is being executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_in(directory: Path) -> None:
    """Environment files import their neighbours; last on the path, they shadow nothing."""
    place = str(directory.resolve())
    if place not in sys.path:
        sys.path.append(place)


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


def one_line(error: BaseException) -> str:
    """Kind and first line of an error that others raised."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__
