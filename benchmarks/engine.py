"""Decode throughput of the native engine: prompt of 128 random tokens, 512 new ones, log-probs on.

    python benchmarks/engine.py --model tiny --requests 1,16,64
    python benchmarks/engine.py --model qwen3-0.6b --device cuda --dtype bfloat16 \
        --requests 1,16,64,256,1024 --versions 1,3 --json engine.json
    python benchmarks/engine.py --model qwen3-0.6b --device cuda --dtype bfloat16 --vllm
    python benchmarks/engine.py --model tiny --requests 64 --engines 2 --vllm
    python benchmarks/engine.py --model qwen3-0.6b --device cuda --dtype bfloat16 \
        --requests 256 --lora-versions 1,3

Weights are random, temperature is 1 and end-of-sequence is ignored, so every request runs to its
full length. `floor` is the time a step would take if it only read the weights and the KV cache
once at the memory bandwidth given (`--bandwidth-gbs`, else measured by a copy). `--vllm` also runs
vLLM, where it is installed, on the same shape in the same call (before ours takes the memory), with
its own settings but for the prefix cache. Both show the best of `--repeat` runs after a warm-up.
`--engines N` shares the requests out to N engines in processes of their own, one thread each, which
is how a run uses the cores of a CPU. `--lora-versions` decodes that many LoRA versions on one base.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.random_weights import RandomAdapter, RandomWeights
from dora_rl.model.spec import ModelSpec, RopeSpec
from dora_rl.types import RequestId, SamplingParams


def qwen3_shape(**fields: Any) -> ModelSpec:
    return ModelSpec(
        family="qwen3",
        norm_eps=1e-6,
        rope=RopeSpec(theta=1_000_000.0),
        tied=True,
        qk_norm=True,
        context_max=40_960,
        **fields,
    )


SHAPES = {
    "tiny": qwen3_shape(
        vocab=4096,
        hidden=256,
        intermediate=512,
        num_layers=4,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
    ),
    "qwen3-0.6b": qwen3_shape(
        vocab=151_936,
        hidden=1024,
        intermediate=3072,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    ),
    "qwen3-1.7b": qwen3_shape(
        vocab=151_936,
        hidden=2048,
        intermediate=6144,
        num_layers=28,
        num_heads=16,
        num_kv_heads=8,
        head_dim=128,
    ),
}


def make_engine(
    spec: ModelSpec, args: argparse.Namespace, num_requests: int, versions: int = 0
) -> Engine:
    """An engine with room for the largest number of requests, and its versions loaded."""
    context = args.prompt + args.new + 1
    blocks_each = -(-context // args.block_tokens) + 1
    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        block_tokens=args.block_tokens,
        num_blocks=num_requests * blocks_each,
        seqs_max=num_requests,
        step_tokens_max=max(args.step_tokens, num_requests),
        context_max=context,
        versions_max=versions or max(args.versions),
        prefix_cache=False,  # prompts are the same in every repetition
        lora_rank=args.lora_rank if args.lora_versions else 0,
        one_pass=not args.plain,
        compiled_kernels=not args.torch,
        async_steps=not args.sync_steps,
        cuda_graphs=not args.eager,
    )
    engine = Engine(spec, options)
    if args.lora_versions:
        engine.load_base(RandomWeights(spec, 0, device=args.device))
    for version in range(engine.options.versions_max):
        if args.lora_versions:
            source: Any = RandomAdapter(spec, version, args.lora_rank, args.device)
        else:
            source = RandomWeights(spec, version, device=args.device)
        engine.load(version, source)
    return engine


def generate(engine: Engine, args: argparse.Namespace, num_requests: int, versions: int) -> dict:
    """One timed run of all prompts, which are computed anew: nothing is cached from the last."""
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(tokens_max=args.new, temperature=1.0, ignore_eos=True)
    prompts = torch.randint(
        0, engine.spec.vocab, (num_requests, args.prompt), generator=generator
    ).tolist()
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        version = index % versions
        engine.submit(Request(RequestId(index, 0), version, tuple(prompt), params))
    num_tokens, first_s, first_step = 0, 0.0, 0
    begun: set[RequestId] = set()
    before = engine.stats()
    while engine.has_work():
        for output in engine.step():
            num_tokens += len(output.token_ids)
            begun.add(output.id)
        if not first_s and len(begun) == num_requests:
            first_s, first_step = time.perf_counter() - start, engine.stats().steps
    wall_s = time.perf_counter() - start
    after = engine.stats()
    assert num_tokens == num_requests * args.new, (num_tokens, num_requests * args.new)
    prefilled = after.prefill_tokens - before.prefill_tokens
    assert prefilled >= num_requests * args.prompt, f"only {prefilled} prompt tokens were computed"
    return {
        "requests": num_requests,
        "versions": versions,
        "tokens_per_s": num_tokens / wall_s,
        "wall_s": wall_s,
        "prefill_s": first_s,
        "step_ms": (wall_s - first_s) / max(1, after.steps - first_step) * 1e3,
    }


def floor_ms(engine: Engine, args: argparse.Namespace, num_requests: int, versions: int) -> float:
    """Weights once per version and engine plus the KV of the mean context, at the memory bandwidth
    (which all engines share)."""
    context = args.prompt + args.new / 2
    kv = engine.options.block_bytes(engine.spec) / engine.options.block_tokens
    stacked = engine.runner.weights
    weights = stacked.bytes_per_version * (1 if stacked.adapters else versions) * args.engines
    return (weights + num_requests * context * kv) / (args.bandwidth_gbs * 1e9) * 1e3


def measure_bandwidth_gbs(device: str) -> float:
    """Bytes read and written per second by a large copy."""
    source = torch.empty(1 << (30 if device != "cpu" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    if device != "cpu":
        torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    if device != "cpu":
        torch.cuda.synchronize()
    return 20 * source.numel() / (time.perf_counter() - start) / 1e9


def run_vllm(spec: ModelSpec, args: argparse.Namespace) -> dict[int, float]:
    """Tokens per second of vLLM on a dummy model of the same shape, by number of requests."""
    from vllm import LLM
    from vllm import SamplingParams as VllmParams

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": spec.vocab,
        "hidden_size": spec.hidden,
        "intermediate_size": spec.intermediate,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope.theta,
        "max_position_embeddings": spec.context_max,
        "tie_word_embeddings": spec.tied,
        "hidden_act": "silu",
        "dtype": args.dtype,
    }
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config) + "\n")
        llm = LLM(
            directory,
            load_format="dummy",
            dtype=args.dtype,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            max_model_len=args.prompt + args.new + 16,
            max_num_seqs=max(16, *args.requests),
            # On a CPU this share is of the machine's memory; its default leaves no room for others.
            **({"gpu_memory_utilization": 0.5} if args.device == "cpu" else {}),
        )
        params = VllmParams(
            max_tokens=args.new, temperature=1.0, ignore_eos=True, logprobs=0, detokenize=False
        )
        generator = torch.Generator().manual_seed(0)
        found: dict[int, float] = {}
        for num_requests in args.requests:
            ids = torch.randint(0, spec.vocab, (num_requests, args.prompt), generator=generator)
            prompts = [{"prompt_token_ids": row} for row in ids.tolist()]
            speeds: list[float] = []
            for _ in range(1 + args.repeat):
                start = time.perf_counter()
                outputs = llm.generate(prompts, params, use_tqdm=False)
                wall_s = time.perf_counter() - start
                num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
                speeds.append(num_tokens / wall_s)
            found[num_requests] = max(speeds[1:])  # the first one warms up
            print(f"vllm {num_requests} requests {found[num_requests]:,.0f} tok/s", flush=True)
        llm.llm_engine.engine_core.shutdown()
    return found


def engine_process(args: argparse.Namespace, barrier: Any, rows: Any) -> None:
    """One of several engines: the runs start together, each row goes back on the queue."""
    torch.set_num_threads(1)
    spec = dataclasses.replace(SHAPES[args.model], dtype=args.dtype)
    engine = make_engine(spec, args, max(args.requests) // args.engines)
    for num_requests in args.requests:
        for versions in args.versions:
            for _ in range(1 + args.repeat):
                barrier.wait()
                row = generate(engine, args, num_requests // args.engines, versions)
                rows.put(row | {"floor_ms": floor_ms(engine, args, num_requests, versions)})


def generate_engines(args: argparse.Namespace) -> list[dict]:
    """Rows as `generate` gives them, of all engines together; a run lasts as long as its last."""
    context = multiprocessing.get_context("spawn")
    barrier, queue = context.Barrier(args.engines), context.Queue()
    children = [
        context.Process(target=engine_process, args=(args, barrier, queue))
        for _ in range(args.engines)
    ]
    for child in children:
        child.start()
    best: list[dict] = []
    for num_requests in args.requests:
        for versions in args.versions:
            runs = []
            for _ in range(1 + args.repeat):
                parts = [queue.get() for _ in range(args.engines)]
                row = max(parts, key=lambda part: part["wall_s"])
                row |= {"requests": num_requests, "versions": versions}
                row["tokens_per_s"] = num_requests * args.new / row["wall_s"]
                runs.append(row)
            best.append(max(runs[1:], key=lambda run: run["tokens_per_s"]))
    for child in children:
        child.join()
    return best


def profile(engine: Engine, args: argparse.Namespace, num_requests: int, versions: int) -> None:
    """Kernels of twenty decode steps in the middle of a run."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    params = SamplingParams(tokens_max=args.new, temperature=1.0, ignore_eos=True)
    for index in range(num_requests):
        prompt = tuple((index * 7 + i) % engine.spec.vocab for i in range(args.prompt))
        engine.submit(Request(RequestId(index, 1), index % versions, prompt, params))
    for _ in range(args.new // 2):
        engine.step()
    kinds = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if args.device != "cpu" else [])
    with torch_profile(activities=kinds) as profiler:
        for _ in range(20):
            engine.step()
        engine.drain()
    key = "self_cpu_time_total" if args.device == "cpu" else "self_cuda_time_total"
    print(profiler.key_averages().table(sort_by=key, row_limit=18, max_name_column_width=60))
    while engine.has_work():
        engine.step()


def set_kernels(args: argparse.Namespace) -> None:
    """Other choices of the decode kernels than the engine's own."""
    from dora_rl.engine.cuda.kernels import attention, driver, fused, skinny

    if args.triton:
        driver.is_here = lambda: False
    if args.warps:
        attention.DECODE_WARPS = fused.WARPS = args.warps
    if args.stages:
        attention.DECODE_STAGES = fused.STAGES = args.stages
    if args.fused_rows is not None:
        fused.ROWS_MAX = args.fused_rows
    if args.skinny_rows is not None:
        skinny.ROWS_MAX = args.skinny_rows


def parse(argv: list[str]) -> argparse.Namespace:
    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=sorted(SHAPES), default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=numbers, default=[1, 16, 64])
    parser.add_argument("--versions", type=numbers, default=[1])
    parser.add_argument("--lora-versions", type=numbers, default=[])
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=512)
    parser.add_argument(
        "--repeat", type=int, default=2, help="runs after a warm-up; the best is shown"
    )
    parser.add_argument("--block-tokens", type=int, default=64)
    parser.add_argument("--step-tokens", type=int, default=8192)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--bandwidth-gbs", type=float, default=0.0)
    parser.add_argument("--plain", action="store_true", help="one pass per version")
    parser.add_argument("--torch", action="store_true", help="on the CPU: no compiled kernels")
    parser.add_argument("--sync-steps", action="store_true", help="read tokens before planning")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--engines", type=int, default=1, help="processes that share the requests")
    parser.add_argument("--triton", action="store_true", help="no kernels in CUDA C")
    parser.add_argument("--warps", type=int, default=0, help="of decode attention in Triton")
    parser.add_argument("--stages", type=int, default=0, help="of decode attention in Triton")
    parser.add_argument("--fused-rows", type=int, help="up to which attention in Triton is fused")
    parser.add_argument("--skinny-rows", type=int, help="rows up to which cuBLAS is not used")
    parser.add_argument("--profile", action="store_true", help="print the kernels of 20 steps")
    parser.add_argument("--json", type=Path)
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    args = parse(argv)
    args.versions = args.lora_versions or args.versions
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.device != "cpu":
        set_kernels(args)
    spec = dataclasses.replace(SHAPES[args.model], dtype=args.dtype)
    args.bandwidth_gbs = args.bandwidth_gbs or measure_bandwidth_gbs(args.device)
    print(f"{args.model} {args.device} {args.dtype}  copy bandwidth {args.bandwidth_gbs:.0f} GB/s")
    print(
        f"{'requests':>8} {'versions':>8} {'tok/s':>10} {'step ms':>8} {'floor ms':>8} {'vllm':>8}"
    )
    vllm_of = run_vllm(spec, args) if args.vllm else {}
    rows = generate_engines(args) if args.engines > 1 else []
    engine = None if rows else make_engine(spec, args, max(args.requests))
    for num_requests in args.requests:
        for versions in args.versions if engine else ():
            if args.lora_versions:  # room for these versions and no more, as a run would make it
                engine = None
                engine = make_engine(spec, args, num_requests, versions)
            runs = [generate(engine, args, num_requests, versions) for _ in range(1 + args.repeat)]
            row = max(runs[1:], key=lambda run: run["tokens_per_s"])  # the first one warms up
            row["floor_ms"] = floor_ms(engine, args, num_requests, versions)
            rows.append(row)
            if args.profile:
                profile(engine, args, num_requests, versions)
        vllm = vllm_of.get(num_requests, float("nan"))
        for row in rows:
            if row["requests"] != num_requests:
                continue
            if num_requests in vllm_of:
                row["vllm_tokens_per_s"] = vllm
            print(
                f"{row['requests']:>8} {row['versions']:>8} {row['tokens_per_s']:>10,.0f} "
                f"{row['step_ms']:>8.2f} {row['floor_ms']:>8.2f} {vllm:>8,.0f}",
                flush=True,
            )
    if args.json:
        machine = torch.cuda.get_device_name() if args.device != "cpu" else platform.processor()
        report = {"model": args.model, "machine": machine, "torch": torch.__version__, "rows": rows}
        args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
