"""Which weights a run directory or a model directory stands for, and how to write them out.

Reads only; a run may still be going on. Invariant: what is found is complete: checkpoints and
sealed versions appear under their names only when every byte is there.

    find_model(Path("runs/quickstart"), "last")   the newest version that the log has committed
    find_model(Path("runs/quickstart"), "best")   the version with the best evaluation
    find_model(Path("Qwen3-0.6B"))                a Hugging Face directory, as it is
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

from dora_rl.config import RunConfig
from dora_rl.io.append_log import read_lines
from dora_rl.io.system_errors import number_of
from dora_rl.observe.eval_figures import Figures, best_evaluated
from dora_rl.types import UserError, Version
from dora_rl.user_code import require
from dora_rl.weights.proof import (
    checkpoint_problem,
    committed_checksums,
    newest_committed,
    seals_whole_models,
)
from dora_rl.weights.store import DiskWeightStore, SealedFile


@dataclass(frozen=True, slots=True)
class FoundModel:
    """`directory` has config and tokenizer; the weights are `sealed`, or lie in `directory`."""

    label: str
    version: Version
    directory: Path
    sealed: SealedFile | None = None

    @property
    def source(self) -> Any:
        """What `Engine.load` takes."""
        return self.directory if self.sealed is None else self.whole()

    def whole(self) -> Any:
        """The sealed version with its adapter, if it is one, merged."""
        from dora_rl.weights.lora_base import whole

        return whole(self.sealed, self.directory)


Open: TypeAlias = Callable[[], FoundModel]
"""Opens a version that is there; sealed weights are hashed then."""


def is_run(path: Path) -> bool:
    """A run directory has an event log; its config.json has the sections of a run."""
    if (path / "events").is_dir():
        return True
    config = path / "config.json"
    if not config.is_file():
        return False
    try:
        return "orchestration" in json.loads(config.read_text())
    except ValueError:
        return False


def run_config(run: Path) -> RunConfig:
    from dora_rl.setup.settings import load_config

    if not is_run(run):
        raise UserError(f"{run} is not a run directory (no events/)")
    return load_config(run / "config.json")


def find_model(path: Path, step: str = "last") -> FoundModel:
    """The weights that `path` and `step` name. `step`: last, best, or a number."""
    if not path.is_dir():
        raise UserError(f"{path} is neither a run nor a model directory")
    if not is_run(path):
        require(
            (
                (path / "config.json").is_file(),
                f"{path} has no config.json; give a run or a Hugging Face directory",
            ),
            (step == "last", f"--step {step}: {path} is a model directory; only a run has steps"),
        )
        return FoundModel(f"model {path}", 0, path)
    found = _in_run(path)
    newest = _newest(path, found) if step == "last" else max(found, default=None)
    if newest is None and found:
        there = ", ".join(map(str, sorted(found)))
        raise UserError(f"{path}: its log ends before version {min(found)}; give --step of {there}")
    if newest is None:
        raise UserError(f"{path} has no checkpoint and no sealed weights yet")
    if step == "best":
        return _proved(path, _best(path, found))
    version = newest if step == "last" else _number(step, found)
    return _proved(path, found[version]())


def _proved(run: Path, found: FoundModel) -> FoundModel:
    """Refuse weights that are not whole, or not those of the version they stand for."""
    committed = committed_checksums(run, [found.version]).get(found.version, "")
    problem = ""
    if found.sealed is None and found.version:  # no step has made the model that a run begins with
        known = committed if seals_whole_models(run_config(run)) else ""
        problem = checkpoint_problem(found.directory, found.version - 1, known)
    elif found.sealed is not None and committed not in ("", found.sealed.checksum):
        problem = "its weights are not those that the log committed"
    if problem:
        hint = f"see dora-rl audit --files {run}; choose another --step"
        raise UserError(f"{found.label} is not what the run made: {problem}; {hint}")
    return found


def newer_model(run: Path, than: Version) -> FoundModel | None:
    """The newest weights of a run, if they are newer; only those are opened.

    Raises `WeightsError` where they are damaged, or were retired at this very moment.
    """
    found = {version: open_ for version, open_ in _in_run(run).items() if version > than}
    newest = _newest(run, found)
    return None if newest is None else _proved(run, found[newest]())


def _newest(run: Path, found: Collection[Version]) -> Version | None:
    """Of those found. What is sealed and not in the log yet is not the run's, unless a resume
    takes it."""
    committed = newest_committed(run) if found else None
    return max((v for v in found if committed is None or v <= committed), default=None)


def has_weights(run: Path, version: Version) -> bool:
    """Whether the run still keeps this version; what it began with is its model."""
    root = run / "weights"
    if version == 0 or (root.is_dir() and version in DiskWeightStore(root).versions()):
        return True
    # As `Checkpoints` names them; those are not imported here, as they bring torch with them.
    return (run / "checkpoints" / f"step_{version - 1:06d}" / "trainer" / "state.json").is_file()


def _in_run(run: Path) -> dict[Version, Open]:
    """Every version that is still there; a checkpoint is preferred to sealed weights. Only what is
    wanted is opened: another may be damaged."""
    config = run_config(run)
    found: dict[Version, Open] = {}
    if (run / "weights").is_dir():
        store = DiskWeightStore(run / "weights")
        found |= {v: partial(_sealed, run, config, store, v) for v in store.versions()}
    for saved in _checkpoints(run, config).saved():
        found[saved.step + 1] = partial(_saved, run, saved)
    return found


def _sealed(run: Path, config: RunConfig, store: Any, version: Version) -> FoundModel:
    label = f"version {version} of {run} (sealed)"
    return FoundModel(label, version, Path(config.model.path), store.open(version))


def _saved(run: Path, saved: Any) -> FoundModel:
    version = saved.step + 1
    return FoundModel(f"version {version} of {run} ({saved.path.name})", version, saved.path)


def _checkpoints(run: Path, config: RunConfig) -> Any:
    from dora_rl.trainer.checkpoints.state import Checkpoints

    return Checkpoints(run / "checkpoints", config.checkpoint)


def _number(step: str, found: Collection[Version]) -> Version:
    there = ", ".join(str(version) for version in sorted(found))
    if not step.isdigit():
        raise UserError(f"--step {step!r}: give a number of steps trained, best or last")
    if int(step) not in found:
        raise UserError(f"--step {step}: the run keeps only the weights after steps {there}")
    return int(step)


def _best(run: Path, found: dict[Version, Open]) -> FoundModel:
    """The version that was evaluated best, and no other, whether or not it has a checkpoint."""
    config = run_config(run)
    metric, is_max = config.checkpoint.best_metric, config.checkpoint.best_is_max
    evaluations = _evaluations(run)
    best = best_evaluated(evaluations, metric, is_max=is_max)
    if best is None:
        raise UserError(f"--step best: {run} has no evaluation with a score; use last")
    version, name, value = best
    if version in found:
        return found[version]()
    if version == 0:  # what the run began with
        return FoundModel(f"version 0 of {run} ({config.model.path})", 0, Path(config.model.path))
    kept = {v: figures for v, figures in evaluations.items() if v in found}
    next_best = best_evaluated(kept, metric, is_max=is_max)
    instead = f"--step {next_best[0]} ({next_best[2]:.4g})" if next_best else "--step last"
    raise UserError(
        f"--step best: version {version} is best ({name} {value:.4g}) and {run} does not keep its "
        f"weights; use {instead}"
    )


def _evaluations(run: Path) -> dict[Version, Figures]:
    return {
        line["version"]: {name.removeprefix("eval/"): line[name] for name in line}
        for line in read_lines(run / "metrics.jsonl")
        if "step" not in line and "version" in line
    }


def export_model(found: FoundModel, out: Path, shard_bytes_max: int = 4 << 30) -> None:
    """Write a complete Hugging Face directory, or nothing."""
    from dora_rl.model.directory import tensor_files, write_model
    from dora_rl.trainer.checkpoints.state import copy_side_files, write_atomically

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not an empty directory; choose another")
    sealed = found.sealed

    def fill(target: Path) -> None:
        copy_side_files(found.directory, target)
        if sealed is not None:
            write_model(target, found.whole().tensors(), shard_bytes_max)
            return
        indices = found.directory.glob("*.index.json")
        for file in sorted({*tensor_files(found.directory).values(), *indices}):
            shutil.copy2(file, target / file.name)

    try:
        write_atomically(out, fill)
    except Exception as error:
        shutil.rmtree(out.with_name(f".{out.name}.tmp"), ignore_errors=True)
        number = number_of(error)
        if number is None:
            raise
        raise UserError(
            f"cannot write {out} ({os.strerror(number)}); choose another directory"
        ) from error
