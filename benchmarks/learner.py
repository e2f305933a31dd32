"""Training throughput of the learner: long-tailed lengths in packs, against padding the same batch.

    python benchmarks/learner.py --model tiny
    python benchmarks/learner.py --model qwen3-0.6b,qwen3-1.7b --device cuda --padded --gap
    python benchmarks/learner.py --model qwen2.5-1.5b --device cuda --checkpointing layer \
        --pack-tokens 16384 --samples 512 --mean 300 --longest 768 --lora-rank 0,32

One step trains `--samples` responses (GRPO, every response with a gradient, AdamW, clipping). Model
FLOPs count 6 per matrix parameter and token (4 where only adapters are trained) and causal
attention, no recomputation; MFU is against `--peak-tflops` (989: dense bfloat16 of an H100 or
H200). `--padded` also runs the same batch padded
to its longest response per micro-batch of the same token count, as a plain trainer does. `--gap`
generates with the native engine and compares its log-probs with the learner's on the same tokens.
Prints a table, writes JSON.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import platform
import random
import sys
import time
from pathlib import Path

import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.model.random_weights import RandomWeights
from dora_rl.model.spec import ModelSpec, RopeSpec
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.model import (
    build_decoder,
    load_weights,
    named_weights,
    pick_device,
    pick_dtype,
)
from dora_rl.types import Group, RequestId, Trajectory


def qwen3_shape(**fields: int) -> ModelSpec:
    return ModelSpec(
        family="qwen3",
        norm_eps=1e-6,
        tied=True,
        context_max=40_960,
        rope=RopeSpec(1_000_000.0),
        qk_norm=True,
        **fields,
    )


SHAPES = {
    "nano": qwen3_shape(
        vocab=32, hidden=128, intermediate=384, num_layers=2, num_heads=4, num_kv_heads=2,
        head_dim=32,
    ),
    "tiny": qwen3_shape(
        vocab=4096, hidden=256, intermediate=512, num_layers=4, num_heads=4, num_kv_heads=2,
        head_dim=64,
    ),
    "qwen3-0.6b": qwen3_shape(
        vocab=151_936, hidden=1024, intermediate=3072, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128,
    ),
    "qwen3-1.7b": qwen3_shape(
        vocab=151_936, hidden=2048, intermediate=6144, num_layers=28, num_heads=16,
        num_kv_heads=8, head_dim=128,
    ),
    "qwen2.5-1.5b": ModelSpec(
        family="qwen2", vocab=151_936, hidden=1536, intermediate=8960, num_layers=28, num_heads=12,
        num_kv_heads=2, head_dim=128, norm_eps=1e-6, tied=True, context_max=32_768,
        rope=RopeSpec(1_000_000.0), qkv_bias=True,
    ),
}  # fmt: skip


def long_tail(count: int, mean: int, longest: int, seed: int) -> list[int]:
    """Log-normal response lengths (sigma 1.0, so the median is 0.6 of the mean), one of them the
    longest allowed, scaled to the mean."""
    rng = random.Random(seed)
    raw = [math.exp(rng.gauss(0.0, 1.0)) for _ in range(count)]
    scale = mean
    for _ in range(20):  # clipping lowers the mean, so the scale is corrected
        lengths = [max(1, min(longest, round(r * scale / math.exp(0.5)))) for r in raw]
        scale *= mean * count / sum(lengths)
    lengths[lengths.index(max(lengths))] = longest
    return lengths


def make_groups(lengths: list[int], prompt: int, vocab: int, group: int) -> list[Group]:
    """Groups of random tokens; rewards alternate, so that every response has a gradient."""
    generator = torch.Generator().manual_seed(0)
    groups = []
    for start in range(0, len(lengths), group):
        samples = []
        for i, n in enumerate(lengths[start : start + group]):
            ids = torch.randint(vocab, (n,), generator=generator).tolist()
            rid, logprobs, reward = RequestId(start, i), [-math.log(vocab)] * n, float(i % 2)
            samples.append(Trajectory(rid, 0, ids, logprobs, [1] * n, reward=reward))
        prompt_ids = torch.randint(vocab, (prompt,), generator=generator).tolist()
        groups.append(Group(start, 0, prompt_ids, tuple(samples)))
    return groups


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def make_learner(name: str, rank: int, args: argparse.Namespace) -> Learner:
    trainer = TrainerConfig(
        lr=1e-6,
        device=args.device,
        compute_dtype=args.dtype,
        pack_tokens=args.pack_tokens,
        attention=args.attention,
        compile=args.compile,
        activation_checkpointing=args.checkpointing,
        threads=args.threads,
        lora_rank=rank,
        lora_alpha=2.0 * rank or 1.0,
        lora_publish=args.lora_publish,
    )
    device = pick_device(args.device)
    # As a model directory in bfloat16 is read: masters in float32, a frozen base as it is stored.
    stored = pick_dtype(args.dtype, device) if rank else torch.float32
    decoder = build_decoder(SHAPES[name], trainer, stored)
    load_weights(decoder, RandomWeights(SHAPES[name], device=device.type).tensor)
    # The ratio is far from 1 for random tokens under random weights; only speed matters here.
    algorithm = AlgorithmConfig(loss="grpo", clip_low=0.99, clip_high=1e9)
    return Learner(decoder, algorithm, trainer)


def time_steps(learner: Learner, groups: list[Group], repeats: int) -> list[float]:
    times = []
    for step in range(repeats + 1):
        synchronise(learner.device)
        start = time.perf_counter()
        learner.begin_step(step)
        learner.feed(groups)
        learner.finish_step()
        synchronise(learner.device)
        times.append(time.perf_counter() - start)
    return times[1:]  # the first compiles and fills caches


def time_padded(learner: Learner, groups: list[Group], repeats: int) -> float:
    """The same model and tokens, each micro-batch padded to its longest response.

    Micro-batches hold as many rows, in arrival order, as fit `pack_tokens` once padded. Padding is
    real work here as in a padded trainer: it goes through every matrix and through attention.
    """
    documents = []
    for group in groups:
        for s in group.samples:
            ids = torch.tensor([*group.prompt_ids, *s.token_ids])
            documents.append((ids, len(group.prompt_ids)))
    batches: list[list[tuple[torch.Tensor, int]]] = [[]]
    for d in documents:
        longest = max(len(ids) for ids, _ in [*batches[-1], d])
        if batches[-1] and longest * (len(batches[-1]) + 1) > learner.pack_tokens:
            batches.append([])
        batches[-1].append(d)
    policy, times = learner.policy, []
    for _ in range(repeats + 1):
        synchronise(learner.device)
        start = time.perf_counter()
        for batch in batches:
            _padded_pass(policy, batch, learner.device)  # type: ignore[arg-type]
        learner.optimizer.apply(1.0 / sum(len(ids) for ids, _ in documents), 0)
        synchronise(learner.device)
        times.append(time.perf_counter() - start)
    return min(times[1:])


def _padded_pass(
    policy: Decoder, batch: list[tuple[torch.Tensor, int]], device: torch.device
) -> None:
    longest = max(len(ids) for ids, _ in batch)
    rows = []
    for ids, start in batch:
        padded = torch.zeros(longest, dtype=torch.int64)
        padded[: len(ids)] = ids
        rows.append(Document(padded, torch.arange(start - 1, longest - 1), torch.empty(0), 0.0, 0))
    pack = collate(rows, device)
    scores = policy(pack.token_ids_P, pack.layout, pack.rows_T, pack.target_T)
    scores.logprobs_T.sum().backward()


def measure(name: str, rank: int, args: argparse.Namespace) -> dict[str, float | str]:
    gc.collect()  # of the model before: what it held would count as memory of this one
    arch = SHAPES[name]
    lengths = long_tail(args.samples, args.mean, args.longest, seed=0)
    groups = make_groups(lengths, args.prompt, arch.vocab, group=8)
    learner = make_learner(name, rank, args)
    if learner.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    best = min(time_steps(learner, groups, args.repeats))
    tokens = [n + args.prompt for n in lengths]
    flops = arch.train_flops(tokens, learner.optimizer.num_parameters if rank else 0)
    row: dict[str, float | str] = {
        "model": f"{name} r{rank}" if rank else name,
        "lora_rank": rank,
        "parameters": sum(p.numel() for p in learner.policy.parameters()),
        "dtype": str(learner.policy.compute_dtype).removeprefix("torch."),
        "pack_tokens": learner.pack_tokens,
        "tokens": sum(tokens),
        "step_s": best,
        "tokens_per_s": sum(tokens) / best,
        "tflops": flops / best / 1e12,
    }
    if learner.device.type == "cuda":
        row["mfu"] = flops / best / (args.peak_tflops * 1e12)
        row["memory_gib_max"] = torch.cuda.max_memory_allocated() / 2**30
    if args.padded:
        row["padded_s"] = time_padded(learner, groups, args.repeats)
        row["speedup_over_padding"] = float(row["padded_s"]) / best
    if args.gap:
        row.update(engine_gap(learner, args))
    return row


def engine_gap(learner: Learner, args: argparse.Namespace) -> dict[str, float]:
    """Log-probs of the native engine's own samples, against the learner's on the same tokens."""
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.options import EngineOptions
    from dora_rl.engine.sequence import Request
    from dora_rl.model.spec import ModelSpec, RopeSpec
    from dora_rl.trainer.scoring import score
    from dora_rl.types import RequestId, SamplingParams

    arch = learner.policy.arch  # type: ignore[union-attr]
    spec = ModelSpec(
        family=arch.family, vocab=arch.vocab, hidden=arch.hidden, intermediate=arch.intermediate,
        num_layers=arch.num_layers, num_heads=arch.num_heads, num_kv_heads=arch.num_kv_heads,
        head_dim=arch.head_dim, norm_eps=arch.norm_eps, rope=RopeSpec(theta=arch.rope_theta),
        tied=arch.tied, qk_norm=arch.qk_norm, context_max=arch.positions_max,
    )  # fmt: skip
    device = learner.device.type
    dtype = str(learner.policy.compute_dtype).removeprefix("torch.")
    with torch.no_grad():  # random weights make flat distributions; sharpen them a little
        for p in learner.policy.parameters():
            if p.dim() > 1:
                p.mul_(1.5)
    tensors = {n: t.to(learner.policy.compute_dtype) for n, t in named_weights(learner.policy)}
    options = EngineOptions(
        device=device, dtype=dtype, context_max=1024, versions_max=1, num_blocks=1024
    )
    engine = Engine(spec, options)
    engine.load(0, _Named(tensors))
    generator = torch.Generator().manual_seed(1)
    params = SamplingParams(tokens_max=args.gap_tokens, ignore_eos=True)
    for i in range(16):
        ids = torch.randint(arch.vocab, (24,), generator=generator).tolist()
        engine.submit(Request(RequestId(i, 0), 0, tuple(ids), params))
    groups = []
    while engine.has_work():
        for output in engine.step():
            t = output.trajectory
            if t is not None:
                groups.append((Group(t.request.group, 0, t.prompt_ids, (t,)), t))
    from dora_rl.trainer.documents import documents_of

    documents = [d for g, _ in groups for d in documents_of(g, g.samples[0], 0.0)]
    ours = torch.cat(score(learner.policy, documents, 1.0, learner.pack_tokens))
    theirs = torch.cat([d.rollout_logprobs for d in documents])
    gap = (ours - theirs).abs()
    return {"gap_tokens": float(gap.numel()), "gap_mean": float(gap.mean()),
            "gap_max": float(gap.max())}  # fmt: skip


class _Named:
    """Tensors by name, as the engine reads them."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="nano", help=f"of {', '.join(SHAPES)}, comma-separated")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--attention", default="auto")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--checkpointing", default="none", choices=("none", "layer"))
    parser.add_argument("--pack-tokens", type=int, default=0)
    parser.add_argument(
        "--lora-rank",
        type=lambda text: [int(rank) for rank in text.split(",")],
        default=[0],
        help="comma-separated; 0 trains all weights",
    )
    parser.add_argument("--lora-publish", default="adapters", choices=("adapters", "merged"))
    parser.add_argument("--samples", type=int, default=0, help="responses per step")
    parser.add_argument("--mean", type=int, default=0, help="mean response length")
    parser.add_argument("--longest", type=int, default=0)
    parser.add_argument("--prompt", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--peak-tflops", type=float, default=989.0)
    parser.add_argument("--padded", action="store_true", help="also run the batch padded")
    parser.add_argument("--gap", action="store_true", help="also compare with the native engine")
    parser.add_argument("--gap-tokens", type=int, default=128)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cuda = args.device.startswith("cuda") or (args.device == "auto" and torch.cuda.is_available())
    defaults = (64, 2048, 16_384, 128) if cuda else (256, 60, 500, 12)
    for name, value in zip(("samples", "mean", "longest", "prompt"), defaults, strict=True):
        setattr(args, name, getattr(args, name) or value)
    return args


def show(row: dict[str, float | str]) -> None:
    def number(key: str, form: str) -> str:
        return format(row[key], form) if key in row else "-"

    print(
        f"{row['model']:<17}{row['dtype']:<10}{row['pack_tokens']:>7}{row['tokens']:>9}"
        f"{number('step_s', '9.3f')}{number('tokens_per_s', '10.0f')}"
        f"{number('tflops', '9.3f')}{number('mfu', '7.1%'):>7}"
        f"{number('memory_gib_max', '9.1f'):>9}{number('padded_s', '9.3f'):>9}"
        f"{number('speedup_over_padding', '8.2f'):>8}{number('gap_mean', '10.1e'):>10}"
        f"{number('gap_max', '10.1e'):>10}",
        flush=True,
    )


def main() -> int:
    args = arguments()
    if args.threads:
        torch.set_num_threads(args.threads)
    machine = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    print(f"{machine}, torch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{args.samples} responses, mean {args.mean}, longest {args.longest}")  # fmt: skip
    print(
        f"{'model':<17}{'dtype':<10}{'pack':>7}{'tokens':>9}{'step s':>9}{'tokens/s':>10}"
        f"{'TFLOP/s':>9}{'MFU':>7}{'peak GiB':>9}{'padded s':>9}{'speedup':>8}"
        f"{'gap mean':>10}{'gap max':>10}"
    )
    rows = []
    for name in args.model.split(","):
        if name not in SHAPES:
            print(f"unknown model '{name}'; known: {', '.join(SHAPES)}", file=sys.stderr)
            return 2
        for rank in args.lora_rank:
            row = measure(name, rank, args)
            rows.append(row)
            show(row)
            if torch.cuda.is_available():
                gc.collect()
                torch.cuda.empty_cache()
    if args.json:
        args.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
