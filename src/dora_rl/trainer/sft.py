"""Supervised warm start: imitate demonstrations, packed, with the learner's model and optimizer.

    result = run_sft(Path("model"), [Path("demos.jsonl")], Path("out"), SftOptions(epochs=2),
                     TrainerConfig(lr=2e-3), on_progress=print)

Demonstrations are rows of prompt and completion, or of messages (`trainer.demonstrations`). The
loss of an update is the mean negative log-prob over all its completion tokens, whatever the packs.

Never trains on prompt tokens; never updates from a non-finite gradient. Invariants: `out` is a
complete Hugging Face directory or is not there; a row that cannot be used is an error that names
its line, or is counted as too long.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import torch

from dora_rl.config import TrainerConfig
from dora_rl.model.directory import write_model
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.trainer.checkpoints.state import copy_side_files, write_atomically
from dora_rl.trainer.demonstrations import encode_row, read_rows
from dora_rl.trainer.documents import Document, collate, pack_balanced
from dora_rl.trainer.memory import keep_freed_memory
from dora_rl.trainer.optim import Optimizer, learning_rate
from dora_rl.trainer.policy.lora import add_lora
from dora_rl.trainer.policy.model import (
    Policy,
    load_policy,
    named_weights,
    pick_dtype,
    stored_weights,
)
from dora_rl.trainer.scoring import score
from dora_rl.types import UserError
from dora_rl.user_code import require

_SHARD_BYTES_MAX = 4 << 30


@dataclass(frozen=True, slots=True)
class SftOptions:
    """How to go through the demonstrations."""

    epochs: float = 1.0
    batch_examples: int = 64  # demonstrations of one update
    tokens_max: int = 0  # longer demonstrations are left out and counted; 0: what the model allows
    shuffle: bool = True  # False keeps the file's order, for curricula
    eval_examples: int = 0  # held out from the end, scored before and after
    add_eos: bool = True
    dtype: str = "auto"  # of the files written


@dataclass(frozen=True, slots=True)
class SftProgress:
    """Where the run is; given to `on_progress` after every update."""

    update: int
    num_updates: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class SftResult:
    """What came of it. Losses are means over completion tokens."""

    out: Path
    num_examples: int
    num_too_long: int
    num_updates: int
    num_skipped: int
    tokens: int
    wall_s: float
    loss_first: float
    loss_last: float
    eval_first: float | None
    eval_last: float | None


def run_sft(
    model: Path,
    data: Sequence[Path],
    out: Path,
    options: SftOptions,
    trainer: TrainerConfig,
    on_progress: Callable[[SftProgress], None] | None = None,
    tokenizer: Tokenizer | None = None,
) -> SftResult:
    """Train, write `out`, say what happened."""
    require(
        (
            not out.exists() or not any(out.iterdir()),
            f"sft output '{out}' is not empty; choose another directory",
        )
    )
    if tokenizer is None:
        tokenizer = _load_tokenizer(model, trainer)
    policy = load_policy(model, trainer)
    device = next(policy.parameters()).device
    if trainer.threads:
        torch.set_num_threads(trainer.threads)
    if device.type == "cpu":
        keep_freed_memory()
    limit = options.tokens_max or policy.positions_max
    rows = [encode_row(r, tokenizer, w, options.add_eos) for w, r in read_rows(data)]
    kept = [d for d in rows if d.num_tokens <= limit]
    held = kept[len(kept) - options.eval_examples :] if options.eval_examples else []
    train = kept[: len(kept) - len(held)]
    require((train, f"sft data: no demonstration of at most {limit} tokens to train on"))
    # A decaying schedule without a horizon ends with the run.
    horizon = {"num_updates": trainer.num_updates or _num_updates(train, options)}
    if trainer.lora_rank:
        add_lora(policy, trainer)
    optimizer = Optimizer(policy, trainer.model_copy(update=horizon))
    pack_tokens = trainer.pack_tokens or (32768 if device.type == "cuda" else 4096)
    before, start = _mean_loss(policy, held, pack_tokens), time.monotonic()
    done: list[SftProgress] = []
    for progress in _updates(policy, optimizer, train, options, pack_tokens):
        done.append(progress)
        if on_progress is not None:
            on_progress(progress)
    wall_s = time.monotonic() - start
    after = _mean_loss(policy, held, pack_tokens)
    name = options.dtype
    dtype = policy.compute_dtype if name == "auto" else pick_dtype(name, device, "sft.dtype")
    _write(policy, model, out, dtype)
    return SftResult(
        out=out,
        num_examples=len(train),
        num_too_long=len(rows) - len(kept),
        num_updates=optimizer.num_applied,
        num_skipped=len(done) - optimizer.num_applied,
        tokens=done[-1].tokens,
        wall_s=wall_s,
        loss_first=done[0].loss,
        loss_last=done[-1].loss,
        eval_first=before,
        eval_last=after,
    )


def _load_tokenizer(model: Path, trainer: TrainerConfig) -> Tokenizer:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(
            str(model), trust_remote_code=trainer.trust_remote_code
        )
    except (ValueError, OSError) as error:
        line = str(error).strip().splitlines()[0]
        raise UserError(f"model '{model}': no usable tokenizer ({line})") from error


def _updates(
    policy: Policy,
    optimizer: Optimizer,
    documents: list[Document],
    options: SftOptions,
    pack_tokens: int,
) -> Iterator[SftProgress]:
    """Every update of the run, once it is done."""
    start, tokens, device = time.monotonic(), 0, next(policy.parameters()).device
    num_updates = _num_updates(documents, options)
    batches = _batches(documents, options, optimizer.options.seed)
    for update, batch in zip(range(num_updates), batches, strict=False):
        total = torch.zeros((), device=device)
        for indices in pack_balanced([d.num_tokens for d in batch], pack_tokens, 1, 8192.0):
            pack = collate([batch[i] for i in indices], device)
            scores = policy(pack.token_ids_P, pack.layout, pack.rows_T, pack.target_T)
            loss = -scores.logprobs_T.sum()
            loss.backward()
            total += loss.detach()
            tokens += pack.layout.num_tokens
        trained = sum(d.num_trained for d in batch)
        norm = optimizer.apply(1.0 / trained, update, total)
        yield SftProgress(
            update=update,
            num_updates=num_updates,
            loss=float(total) / trained,
            grad_norm=math.nan if norm is None else norm,
            lr=learning_rate(optimizer.options, update),
            tokens=tokens,
            tokens_per_s=tokens / max(1e-9, time.monotonic() - start),
        )


def _num_updates(documents: list[Document], options: SftOptions) -> int:
    return max(1, round(math.ceil(len(documents) / options.batch_examples) * options.epochs))


def _batches(documents: list[Document], options: SftOptions, seed: int) -> Iterator[list[Document]]:
    """Without end: one order of examples per epoch, fixed by the seed."""
    size = options.batch_examples
    for epoch in count():
        order = [*documents]
        if options.shuffle:
            random.Random(seed * 1_000_003 + epoch).shuffle(order)
        yield from (order[at : at + size] for at in range(0, len(order), size))


def _mean_loss(policy: Policy, documents: list[Document], pack_tokens: int) -> float | None:
    """Mean negative log-prob of held-out completion tokens."""
    if not documents:
        return None
    found = score(policy, documents, 1.0, pack_tokens)
    total = sum(-float(logprobs.sum()) for logprobs in found)
    return total / sum(len(logprobs) for logprobs in found)


def _write(policy: Policy, model: Path, out: Path, dtype: torch.dtype) -> None:
    def fill(target: Path) -> None:
        copy_side_files(model, target)
        write_model(target, stored_weights(policy, named_weights(policy), dtype), _SHARD_BYTES_MAX)

    write_atomically(out, fill)
