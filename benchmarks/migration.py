"""Moving a running request between two engines against re-prefilling it, in time and bytes.

    python benchmarks/migration.py --model tiny --contexts 256,1024
    python benchmarks/migration.py --model qwen3-0.6b --device cuda --dtype bfloat16 \
        --contexts 4096,16384 --json migration.json

`move` keeps the KV on the device (both engines share one GPU, or peers do); `wire` takes it through
host memory as raw bytes, as between two hosts, without the network; `re-prefill` is a journal's
continuation on the second engine. Each time runs from the request leaving one engine to the first
new token on the other. The tokens must be the same in all three (on a GPU in bfloat16 they may
differ by the batch variance of the kernels, which is reported).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import continuation
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import (
    begin_import,
    chunk_bytes,
    chunk_from_bytes,
    export_request,
    move,
)
from dora_rl.model.random_weights import RandomWeights
from dora_rl.types import RequestId, SamplingParams
from engine import SHAPES

KEY = RequestId(0, 0)
NEW_TOKENS = 16


def make_engine(args: argparse.Namespace, context: int) -> Engine:
    spec = dataclasses.replace(SHAPES[args.model], dtype=args.dtype)
    length = context + 2 * NEW_TOKENS
    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        block_tokens=args.block_tokens,
        num_blocks=-(-length // args.block_tokens) + 3,
        seqs_max=4,
        step_tokens_max=args.step_tokens,
        context_max=length,
        versions_max=1,
        prefix_cache=False,
    )
    engine = Engine(spec, options)
    engine.load(0, RandomWeights(spec, device=args.device))
    return engine


def sync(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def start(engine: Engine, context: int) -> None:
    """A request of `context` tokens that has begun to decode."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, engine.spec.vocab, (context - 4,), generator=generator).tolist()
    params = SamplingParams(tokens_max=NEW_TOKENS, ignore_eos=True)
    engine.submit(Request(KEY, 0, tuple(prompt), params))
    tokens = 0
    while tokens < 4:
        tokens += sum(len(output.token_ids) for output in engine.step())
    engine.drain()


def by_move(source: Engine, target: Engine) -> int:
    return move(source, target, KEY)


def by_wire(source: Engine, target: Engine) -> int:
    export = export_request(source, KEY)
    arrival = begin_import(target, export.meta)
    for chunk in export.chunks():
        arrival.write(chunk_from_bytes(target, chunk_bytes(chunk)))
    arrival.commit()
    export.done()
    return arrival.num_bytes + len(export.meta)


def by_prefill(source: Engine, target: Engine) -> int:
    seq = source.scheduler.find(KEY)
    assert seq is not None
    request = continuation(seq)
    source.abort(KEY)
    target.submit(request)
    return 0


def measure(
    args: argparse.Namespace, context: int, hand_over: Callable[[Engine, Engine], int]
) -> dict[str, object]:
    """Best of `repeat` hand-overs, there and back, after one to warm up."""
    engines = [make_engine(args, context), make_engine(args, context)]
    best_s, num_bytes, tokens = float("inf"), 0, ()
    for turn in range(args.repeat + 1):
        source, target = engines[turn % 2], engines[1 - turn % 2]
        start(source, context)
        before = target.stats().prefill_tokens
        sync(args.device)
        begin = time.perf_counter()
        num_bytes = hand_over(source, target)
        gained = 0
        while not gained:
            gained += sum(len(output.token_ids) for output in target.step())
        sync(args.device)
        wall_s = time.perf_counter() - begin
        prefilled = target.stats().prefill_tokens - before
        while target.has_work():
            for output in target.step():
                if output.trajectory is not None:
                    tokens = output.trajectory.token_ids.tolist()
        if turn:
            best_s = min(best_s, wall_s)
    return {"ms": best_s * 1e3, "bytes": num_bytes, "prefill": prefilled, "tokens": tokens}


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--contexts", default="256,1024")
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=16_384)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = []
    print(f"{args.model} {args.device} {args.dtype}")
    print(f"{'context':>8} {'way':>10} {'ms':>9} {'MB':>9} {'prefilled':>10} same tokens")
    for context in (int(part) for part in args.contexts.split(",")):
        results = {}
        for name, way in (("move", by_move), ("wire", by_wire), ("re-prefill", by_prefill)):
            results[name] = measure(args, context, way)
            row = results[name]
            same = row["tokens"] == results["move"]["tokens"]
            print(
                f"{context:>8} {name:>10} {row['ms']:>9.2f} {row['bytes'] / 1e6:>9.1f} "
                f"{row['prefill']:>10} {same}",
                flush=True,
            )
            rows.append(row | {"context": context, "way": name, "same_tokens": same})
    if args.json:
        args.json.write_text(json.dumps({"model": args.model, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
