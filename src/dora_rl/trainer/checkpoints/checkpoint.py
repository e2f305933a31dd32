"""A checkpoint is a Hugging Face directory with the trainer's state beside the model.

    step_000010/
      config.json  model.safetensors  tokenizer files ...   loads anywhere, no conversion
      trainer/state.json            step, counters, digests of every file of tensors
      trainer/masters.safetensors   float32 weights, if the model files are not float32
      trainer/optimizer.safetensors moments; also critic.safetensors, rng.safetensors

Never pickles. Invariant: a directory with its final name is complete: everything is written under
a temporary name, flushed to disk, then renamed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dora_rl.config import CheckpointConfig
from dora_rl.types import StepIndex, UserError, Version

TRAINER = "trainer"
FORMAT = 2  # of state.json; before it `files` had the model's own files, or was not there
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")


def write_atomically(target: Path, fill: Callable[[Path], None]) -> None:
    """Let `fill` write a temporary directory, flush it, then give it its name."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.tmp")
    if temporary.exists():
        shutil.rmtree(temporary)
    temporary.mkdir()
    fill(temporary)
    for folder, _, files in os.walk(temporary, topdown=False):
        for name in files:
            _flush(Path(folder) / name)
        _flush(Path(folder))
    if target.exists():
        # rename cannot replace a full directory; the old one steps aside first.
        aside = target.with_name(f".{target.name}.old")
        target.rename(aside)
        temporary.rename(target)
        shutil.rmtree(aside)
    else:
        temporary.rename(target)
    _flush(target.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, config and the like: every small file of the model directory but the weights.

    The README.md is the card of the model that training began with, and untrue of this one.
    """
    for path in sorted(source.iterdir()):
        is_card = path.name.lower() == "readme.md"
        if path.is_file() and not is_card and not path.name.endswith(_NOT_COPIED):
            shutil.copy2(path, target / path.name)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    path.parent.mkdir(exist_ok=True)
    save_file({k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"checkpoint: '{path}' is missing; resume from another directory")
    return load_file(path)


def tensor_digests(directory: Path, *, trainer: bool = True) -> dict[str, str]:
    """SHA-256 of each file of tensors, by its path: a file put there later is recognised.

    Without `trainer` only of the model's own.
    """
    found = directory.rglob("*.safetensors") if trainer else directory.glob("*.safetensors")
    paths = sorted(path for path in found if path.is_file())

    def digest(path: Path) -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as pool:  # the moments are larger than the model
        digests = pool.map(digest, paths)
        return {p.relative_to(directory).as_posix(): d for p, d in zip(paths, digests, strict=True)}


def rng_tensors() -> dict[str, Tensor]:
    """The state of torch's generators."""
    out = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        out["cuda"] = torch.cuda.get_rng_state()
    return out


def restore_rng(tensors: dict[str, Tensor]) -> None:
    torch.set_rng_state(tensors["cpu"])
    if "cuda" in tensors and torch.cuda.is_available():
        torch.cuda.set_rng_state(tensors["cuda"])


def read_state(directory: Path) -> dict[str, Any]:
    path = directory / TRAINER / "state.json"
    if not path.is_file():
        raise UserError(f"checkpoint '{directory}': no {TRAINER}/state.json; nothing to resume")
    try:
        state = json.loads(path.read_text())
    except ValueError:
        state = None
    if not isinstance(state, dict) or not isinstance(state.get("next_step"), int):
        raise UserError(f"checkpoint '{directory}': {TRAINER}/state.json is damaged; use another")
    return state


def _score_of(path: Path) -> float | None:
    if not path.is_file():
        return None
    try:
        return float(json.loads(path.read_text())["score"])
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{path} is damaged; remove it, it is the score of an evaluation") from None


@dataclass(frozen=True, slots=True)
class Saved:
    """One finished checkpoint of a run."""

    step: StepIndex
    path: Path
    score: float | None


class Checkpoints:
    """The checkpoints of one run: newest `keep`, and the best by evaluation."""

    def __init__(self, root: Path, options: CheckpointConfig) -> None:
        self.root, self.options = root, options

    def path_of(self, step: StepIndex) -> Path:
        return self.root / f"step_{step:06d}"

    def due(self, step: StepIndex, *, last: bool = False) -> bool:
        """Whether the end of step `step` (the first is 0) should be saved; of the last it is."""
        every = self.options.every_steps
        return every > 0 and (last or (step + 1) % every == 0)

    def saved(self) -> list[Saved]:
        """Complete checkpoints, oldest first."""
        out = []
        for path in sorted(self.root.glob("step_*")):
            if (path / TRAINER / "state.json").is_file():
                value = _score_of(path / TRAINER / "score.json")
                out.append(Saved(int(path.name.removeprefix("step_")), path, value))
        return out

    def latest(self) -> Path | None:
        saved = self.saved()
        return saved[-1].path if saved else None

    def best(self) -> Saved | None:
        scored = [s for s in self.saved() if s.score is not None]
        sign = 1.0 if self.options.best_is_max else -1.0
        # Of equals the later one is best: it has learned from more.
        return max(scored, key=lambda s: (sign * (s.score or 0.0), s.step), default=None)

    def rate(self, step: StepIndex, score: float) -> None:
        """Note the evaluation of a checkpoint, if there is one of this step; it may be the best."""
        path = self.path_of(step) / TRAINER / "score.json"
        if not path.parent.is_dir():
            return
        temporary = path.with_suffix(".tmp")
        temporary.write_text(
            json.dumps({"metric": self.options.best_metric, "score": score}) + "\n"
        )
        _flush(temporary)
        temporary.rename(path)

    def prune(self, sealed: Version) -> list[Path]:
        """Delete what is neither among the newest nor the best; returns what went.

        A checkpoint of a version that is not sealed does not count: nobody resumes from it.
        """
        for rest in self.root.glob(".step_*.gone"):  # a crash came while it was deleted
            shutil.rmtree(rest)
        saved = [s for s in self.saved() if s.step < sealed]
        if not self.options.keep:
            return []
        keep = {s.step for s in saved[-self.options.keep :]}
        best = self.best() if self.options.keep_best else None
        if best is not None:
            keep.add(best.step)
        gone = [s.path for s in saved if s.step not in keep]
        for path in gone:
            _delete(path)
        return gone

    def forget(self, step: StepIndex) -> None:
        """Delete what a life that ended before it sealed the version left of this step."""
        if self.path_of(step).is_dir():
            _delete(self.path_of(step))


def _delete(path: Path) -> None:
    """Renamed first, so that a crash while deleting leaves no half checkpoint behind."""
    doomed = path.with_name(f".{path.name}.gone")
    path.rename(doomed)
    shutil.rmtree(doomed)
