"""The manifest of a checkpoint: a digest of every file, and one over the list itself.

    trainer/state.json   {"format": 3, counters, "files": {path: sha256}, "seal": of the rest}

Every file has one but `state.json`, which has the seal, and `score.json`, which an evaluation adds
later. Checkpoints of older releases (formats 1 and 2) have digests of their tensors, or none.

Reads only. Invariant: `check_saved` returns only where every byte that is loaded is what was saved.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dora_rl.types import UserError

TRAINER, STATE, SCORE = "trainer", "state.json", "score.json"
FORMAT = 3  # of state.json; 2: digests of tensors alone; 1: of the model's own, or none
_TENSORS = ".safetensors"
_NOTES = ".md"  # of people, like hidden files: nothing reads them
_UNLISTED = (f"{TRAINER}/{STATE}", f"{TRAINER}/{SCORE}")


class CheckpointDamaged(UserError):
    """A file of a checkpoint is not the one that was saved."""


def file_digests(
    directory: Path,
    *,
    form: int = FORMAT,
    trainer: bool = True,
    only: Collection[str] | None = None,
) -> dict[str, str]:
    """SHA-256 of each file by its path, as many as a state of this format lists; a file put there
    later is recognised. Without `trainer` only of the model's own; `only` of these."""
    found = directory.rglob("*") if trainer else directory.glob("*")
    named = [(path.relative_to(directory).as_posix(), path) for path in found if path.is_file()]
    wanted = [
        (name, path)
        for name, path in sorted(named)
        if name not in _UNLISTED
        and not path.name.startswith(".")
        and path.suffix != _NOTES
        and (form >= FORMAT or name.endswith(_TENSORS))
        and (only is None or name in only)
    ]

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:  # the moments are larger than the model
        digests = pool.map(digest, [path for _, path in wanted])
        return {name: found for (name, _), found in zip(wanted, digests, strict=True)}


def seal_of(state: dict[str, Any]) -> str:
    """Over all of a state but its seal."""
    body = {name: value for name, value in state.items() if name != "seal"}
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def read_state(directory: Path) -> dict[str, Any]:
    path = directory / TRAINER / STATE
    if not path.is_file():
        raise UserError(f"checkpoint '{directory}': no {TRAINER}/{STATE}; nothing to resume")
    try:
        state: dict[str, Any] = json.loads(path.read_text())
        has_seal = "seal" in state or (state.get("format") or 0) >= FORMAT
        intact = isinstance(state["next_step"], int)
        intact &= not has_seal or state.get("seal") == seal_of(state)
    except (ValueError, KeyError, TypeError, AttributeError):
        intact, state = False, {}
    if not intact:
        raise CheckpointDamaged(f"checkpoint '{directory}': {TRAINER}/{STATE} is damaged")
    return state


def files_problem(
    directory: Path,
    state: dict[str, Any],
    *,
    trainer: bool = True,
    only: Collection[str] | None = None,
) -> str:
    """What speaks against the files being those that were saved; "" if nothing does. `only`: of
    these files, by their paths."""
    form, noted = state.get("format"), state.get("files")
    if not isinstance(form, int):
        return f"its {TRAINER}/{STATE} has no format"
    if not isinstance(noted, dict):
        unknown = noted is None and form < FORMAT - 1
        return "" if unknown else f"its {TRAINER}/{STATE} has no digests of its files"
    every = trainer and form >= FORMAT - 1
    if not every:
        noted = {name: digest for name, digest in noted.items() if "/" not in name}
    if only is not None:
        noted = {name: digest for name, digest in noted.items() if name in only}
    found = file_digests(directory, form=form, trainer=every, only=only)
    names = sorted(name for name in {*noted, *found} if noted.get(name) != found.get(name))
    return f"{names[0]} is not the file that was saved" if names else ""


def check_saved(directory: Path, only: Collection[str] | None = None) -> None:
    """Raise unless the checkpoint is what was saved."""
    if problem := files_problem(directory, read_state(directory), only=only):
        raise CheckpointDamaged(f"checkpoint '{directory}': {problem}")
