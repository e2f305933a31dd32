"""Decode throughput of each family against Llama of the same shape, in one run.

    python benchmarks/families.py --threads 1
    python benchmarks/families.py --threads 1 --torch
    python benchmarks/families.py --device cuda --dtype bfloat16 --requests 64 --hidden 2048

Weights are random. Every family decodes the same prompts, in turns, so that a slow minute of the
machine meets all of them; the best of `--repeat` turns counts. Windows are a quarter of a context.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.families import spec_from_config
from dora_rl.model.random_weights import RandomWeights
from dora_rl.types import RequestId, SamplingParams

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "mistral": ("MistralForCausalLM", {}),
    "ministral": ("MinistralForCausalLM", {"layer_types": "half"}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
    "gemma3": ("Gemma3ForCausalLM", {}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "olmo3": ("Olmo3ForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {"sliding_window": None, "partial_rotary_factor": 0.75}),
    "glm4": ("Glm4ForCausalLM", {}),
}


def engine_of(family: str, args: argparse.Namespace) -> Engine:
    name, own = FAMILIES[family]
    context = args.prompt + args.new + 1
    kinds = ["sliding_attention", "full_attention"] * (args.layers // 2)
    config = {
        "architectures": [name],
        "vocab_size": 4096,
        "hidden_size": args.hidden,
        "intermediate_size": 2 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.hidden // 64,
        "num_key_value_heads": max(1, args.hidden // 128),
        "head_dim": 64,
        "max_position_embeddings": 4096,
        "sliding_window": context // 4,
        "tie_word_embeddings": False,
        **own,
    }
    if config.get("layer_types") == "half":
        config["layer_types"] = kinds
    options = EngineOptions(
        device=args.device,
        dtype=args.dtype,
        context_max=context,
        num_blocks=args.requests * (-(-context // 64) + 1),
        block_tokens=64,
        seqs_max=args.requests,
        versions_max=1,
        prefix_cache=False,
        compiled_kernels=not args.torch,
        speculation="off",
    )
    spec = spec_from_config(config)
    engine = Engine(spec, options)
    engine.load(0, RandomWeights(spec, 0, device=args.device))
    return engine


def tokens_per_s(engine: Engine, args: argparse.Namespace) -> float:
    generator = torch.Generator().manual_seed(0)
    params = SamplingParams(tokens_max=args.new, temperature=1.0, ignore_eos=True)
    prompts = torch.randint(0, 4096, (args.requests, args.prompt), generator=generator).tolist()
    start = time.perf_counter()
    for index, prompt in enumerate(prompts):
        engine.submit(Request(RequestId(index, 0), 0, tuple(prompt), params))
    while engine.has_work():
        engine.step()
    return args.requests * args.new / (time.perf_counter() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--repeat", type=int, default=3, help="turns after a warm-up")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--torch", action="store_true", help="on the CPU: no compiled kernels")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    engines = {family: engine_of(family, args) for family in FAMILIES}
    turns = [{f: tokens_per_s(e, args) for f, e in engines.items()} for _ in range(1 + args.repeat)]
    best = {family: max(turn[family] for turn in turns[1:]) for family in FAMILIES}
    print(f"{'family':10} {'tok/s':>9} {'of llama':>9}  runner")
    for family, speed in best.items():
        runner = type(engines[family].runner).__name__
        print(f"{family:10} {speed:>9,.0f} {speed / best['llama']:>9.2f}  {runner}")
    if args.json:
        args.json.write_text(json.dumps(best, indent=1) + "\n")


if __name__ == "__main__":
    main()
