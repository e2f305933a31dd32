"""The state of a learner: what a checkpoint, and what a sealed version, holds beyond the model.

    checkpoint        everything, in one directory                     `save`, `restore`
    sealed version    the published weights                            (`publish`)
      beside it       what rounding took from the masters, adapters,   `unpublished`, `adopt`
                      critic, counters, random generators
    moments           the optimizers', of some version up to that      `moments`, `load_moments`

A checkpoint is a Hugging Face directory with the trainer's state beside the model.

    step_000010/
      config.json  model.safetensors  tokenizer files ...   loads anywhere, no conversion
      trainer/state.json            step, counters, a digest of every file (`digests`)
      trainer/masters.safetensors   float32 weights, if the model files are not float32
      trainer/optimizer.safetensors moments; also critic.safetensors, rng.safetensors

Never pickles. Invariants: `restore(save(learner))` gives a learner whose next step is bit-identical
on a CPU, and so does a sealed version with what is beside it and the moments of the same version. A
directory with its final name is complete: everything is written under a temporary name, flushed to
disk, then renamed.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dora_rl.config import CheckpointConfig
from dora_rl.io.append_log import flush, write_whole
from dora_rl.model.directory import write_model
from dora_rl.trainer.checkpoints.digests import (
    FORMAT,
    SCORE,
    STATE,
    TRAINER,
    check_saved,
    file_digests,
    read_state,
    seal_of,
)
from dora_rl.trainer.checkpoints.finite import Ranges
from dora_rl.trainer.checkpoints.masters import prefixed, whole, with_prefix
from dora_rl.trainer.distributed import gathered, like_shard, wait_for_all
from dora_rl.trainer.optim import Optimizer
from dora_rl.trainer.policy.lora import (
    adapter_tensors,
    is_adapter,
    load_adapter_tensors,
    name_now,
    plain_name,
    save_adapter,
)
from dora_rl.trainer.policy.model import (
    load_weights,
    named_weights,
    pick_dtype,
    stored_weights,
)
from dora_rl.types import StepIndex, UserError, Version

if TYPE_CHECKING:
    from dora_rl.ports import SealedWeights
    from dora_rl.trainer.learner import Learner

BESIDE_FORMAT = 1  # of the counters beside a version
# Names of what lies beside a version and of moments, before the parameter's own.
ADAPTER, CRITIC, POLICY, RANDOM = "adapter:", "critic:", "policy:", "random:"
COUNTERS = "counters"  # of a version: JSON as bytes
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5", ".index.json")


def save(learner: Learner, directory: Path, options: CheckpointConfig) -> Path:
    """Write everything atomically; rank 0 writes, the others take part in gathering and wait."""
    dtype = learner.policy.compute_dtype
    if options.dtype != "auto":
        dtype = pick_dtype(options.dtype, learner.device, "checkpoint.dtype")
    lora = learner.options.lora_rank > 0
    weights = {n: t.float() for n, t in named_weights(learner.policy, gathered)}
    masters = dict(named_weights(learner.policy, gathered, None)) if lora else weights
    parts = {
        name: {n: gathered(t) for n, t in optimizer.state_tensors().items()}
        for name, optimizer in _saved_optimizers(learner)
    }
    if lora:
        parts["adapters"] = {n: gathered(t) for n, t in adapter_tensors(learner.policy).items()}
    if learner.critic is not None:
        parts["critic"] = {n: gathered(p) for n, p in learner.critic.named_parameters()}
    if learner.reference is not None and not learner.options.reference_model:
        parts["reference"] = _frozen(learner.reference)
    ranges = Ranges()
    for name, tensors in {"": weights, **parts}.items():
        for tensor_name, tensor in tensors.items():
            ranges.add(f"{name} {tensor_name}".strip(), tensor)
    ranges.check(f"the checkpoint {directory}")

    def fill(target: Path) -> None:
        trainer = target / TRAINER
        trainer.mkdir()
        if learner.directory is not None:
            copy_side_files(learner.directory, target)
        tensors = stored_weights(learner.policy, weights.items(), dtype)
        write_model(target, tensors, options.shard_bytes_max)
        if lora or dtype != torch.float32:
            save_tensors(trainer / "masters.safetensors", masters)
        for name, tensors in parts.items():
            save_tensors(trainer / f"{name}.safetensors", tensors)
        if lora:
            base = str(learner.directory or "")
            save_adapter(target / "adapter", parts["adapters"], learner.options, base)
        save_tensors(trainer / "rng.safetensors", rng_tensors())
        state = {**_counters(learner), "format": FORMAT, "files": file_digests(target)}
        state["seal"] = seal_of(state)
        (trainer / STATE).write_text(json.dumps(state, indent=2) + "\n")

    if learner.rank == 0:
        write_atomically(directory, fill)
    wait_for_all()
    return directory


def _frozen(reference: nn.Module) -> dict[str, Tensor]:
    """A reference's weights by the model's own names. Its adapters, if any, are new ones."""
    named = reference.named_parameters()
    return {plain_name(n): p.detach() for n, p in named if not is_adapter(n)}


def restore(learner: Learner, directory: Path) -> None:
    """Bring a fresh learner, already holding the directory's weights, to where `save` was."""
    state = read_state(directory)
    trainer = directory / TRAINER
    if (trainer / "masters.safetensors").is_file():
        masters = load_tensors(trainer / "masters.safetensors")
        load_weights(learner.policy, masters.__getitem__)
    _load_saved_moments(learner, directory)
    if learner.options.lora_rank:
        load_adapter_tensors(learner.policy, load_tensors(trainer / "adapters.safetensors"))
    if learner.critic is not None:
        _fill(learner.critic, load_tensors(trainer / "critic.safetensors"))
    if learner.reference is not None and not learner.options.reference_model:
        saved = load_tensors(trainer / "reference.safetensors")
        for name, p in _frozen(learner.reference).items():
            p.copy_(saved[name])
    _set_counters(learner, state)
    restore_rng(load_tensors(trainer / "rng.safetensors"))


def _counters(learner: Learner) -> dict[str, int]:
    return {
        "format": BESIDE_FORMAT,
        "next_step": learner.next_step,
        "num_updates": learner.num_updates,  # where the schedule is
        "num_applied": learner.optimizer.num_applied,
    }


def _set_counters(learner: Learner, counters: dict[str, int]) -> None:
    learner.optimizer.num_applied = int(counters["num_applied"])
    learner.next_step = int(counters["next_step"])
    learner.num_updates = int(counters["num_updates"])


def unpublished(learner: Learner, first: bool) -> dict[str, Tensor]:
    """Copies of what makes a version exact, without the masters' lower halves (see `publish`).
    All ranks take part; the first one has the result."""
    out = prefixed(ADAPTER, adapter_tensors(learner.policy)) if learner.options.lora_rank else {}
    if learner.critic is not None:
        out |= prefixed(CRITIC, {n: p.detach() for n, p in learner.critic.named_parameters()})
    copies: dict[str, Tensor] = {}
    for name, tensor in out.items():
        full = gathered(tensor)
        if first:
            copies[name] = full.to("cpu", copy=True)
    copies |= prefixed(RANDOM, rng_tensors())
    text = json.dumps(_counters(learner)).encode()
    copies[COUNTERS] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return copies


def adopt(learner: Learner, sealed: SealedWeights, beside: SealedWeights) -> None:
    """Everything but the moments as it was when the version was published."""
    if sealed.canary != beside.canary:
        raise UserError(
            f"version {sealed.version}: the learner's masters beside it belong to other weights"
        )
    if learner.options.lora_rank:
        load_adapter_tensors(learner.policy, with_prefix(ADAPTER, beside))
    else:
        load_weights(learner.policy, lambda name: whole(name, sealed.tensor(name), beside))
    if learner.critic is not None:
        _fill(learner.critic, with_prefix(CRITIC, beside))
    _set_counters(learner, json.loads(bytes(beside.tensor(COUNTERS).tolist())))
    restore_rng(with_prefix(RANDOM, beside))


def moments(learner: Learner) -> Iterator[tuple[str, Tensor]]:
    """The optimizers' moments as they are, whole, one at a time: on several ranks a collective."""
    for prefix, optimizer in zip((POLICY, CRITIC), learner.optimizers, strict=False):
        for name, tensor in optimizer.state_tensors().items():
            yield prefix + name, gathered(tensor)


def load_moments(learner: Learner, sealed: SealedWeights) -> None:
    """Of the version that `sealed` was written for; the learner may be at a later one."""
    for prefix, optimizer in zip((POLICY, CRITIC), learner.optimizers, strict=False):
        optimizer.load_state_tensors(
            {name: tensor.clone() for name, tensor in with_prefix(prefix, sealed).items()}
        )


def load_saved_moments(learner: Learner, directory: Path) -> None:
    """Those of a checkpoint. Raises `UserError` where they are damaged."""
    names = [f"{TRAINER}/{name}.safetensors" for name, _ in _saved_optimizers(learner)]
    check_saved(directory, names)
    _load_saved_moments(learner, directory)


def _load_saved_moments(learner: Learner, directory: Path) -> None:
    for name, optimizer in _saved_optimizers(learner):
        optimizer.load_state_tensors(load_tensors(directory / TRAINER / f"{name}.safetensors"))


def _saved_optimizers(learner: Learner) -> Iterable[tuple[str, Optimizer]]:
    """By the names of their files."""
    return zip(("optimizer", "critic_optimizer"), learner.optimizers, strict=False)


@torch.no_grad()
def _fill(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    named = dict(module.named_parameters())
    for name, tensor in tensors.items():
        p = named.pop(name_now(name, named))
        p.copy_(like_shard(tensor, p))
    assert not named, f"nothing fills {sorted(named)}"


# -- files ----------------------------------------------------------------------------------------


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
            flush(Path(folder) / name)
        flush(Path(folder))
    # rename cannot replace a full directory; the old one steps aside first.
    aside = target.with_name(f".{target.name}.old")
    if target.exists():
        if aside.exists():  # of a process that was killed in the middle
            shutil.rmtree(aside)
        target.rename(aside)
    temporary.rename(target)
    if aside.exists():
        shutil.rmtree(aside)
    flush(target.parent)


def copy_side_files(source: Path, target: Path) -> None:
    """Tokenizer, config and the like: every small file of the model directory but the weights.

    The README.md is the card of the model that training began with, and untrue of this one.
    """
    for path in sorted(source.iterdir()):
        is_card = path.name.lower() == "readme.md"
        if path.is_file() and not is_card and not path.name.endswith(_NOT_COPIED):
            shutil.copy2(path, target / path.name)


def save_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    save_file({k: v.detach().to("cpu").contiguous() for k, v in tensors.items()}, path)


def load_tensors(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise UserError(f"checkpoint: '{path}' is missing; resume from another directory")
    return load_file(path)


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


def _score_of(checkpoint: Path) -> float | None:
    path = checkpoint / TRAINER / SCORE
    if not path.is_file():
        return None
    try:
        said = json.loads(path.read_text())
        if said.get("seal") in (None, seal_of(said)):  # none: of an older release
            return float(said["score"])
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UserError(f"{path} is damaged; delete it, it is the score of an evaluation")


# -- the checkpoints of a run ---------------------------------------------------------------------


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
        return [
            Saved(int(path.name.removeprefix("step_")), path, _score_of(path))
            for path in sorted(self.root.glob("step_*"))
            if (path / TRAINER / STATE).is_file()
        ]

    def best(self) -> Saved | None:
        scored = [s for s in self.saved() if s.score is not None]
        sign = 1.0 if self.options.best_is_max else -1.0
        # Of equals the later one is best: it has learned from more.
        return max(scored, key=lambda s: (sign * (s.score or 0.0), s.step), default=None)

    def rate(self, step: StepIndex, score: float) -> None:
        """Note the evaluation of a checkpoint, if there is one of this step; it may be the best."""
        path = self.path_of(step) / TRAINER / SCORE
        if not path.parent.is_dir():
            return
        said = {"metric": self.options.best_metric, "score": score}
        text = json.dumps(said | {"seal": seal_of(said)}) + "\n"
        write_whole(path, [text.encode()])

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
