"""The paradigms on one GPU: 128 M random weights, responses up to 4,096 tokens with a long tail.

    python benchmarks/paradigms_gpu.py --json paradigms_gpu.json

Every response's length is drawn once per (prompt, sample) from a log-normal (p99 / median = 11) and
forced, so all modes generate the very same lengths. Rewards are a hash of the tokens: what is
compared is speed. One instance and the learner share the device (side by side under MPS, with
`--no-mps` time-sliced; the same for all modes). Speeds are trained tokens per second between the
commits of the window (start-up and drain left out). Kernels are compiled when they are first
needed, and kept on disk: a short run of every mode goes before the measured ones, so that those
compile less. Ends with status 1 if a ratio is below its minimum.
`--width 64 --layers 2 --tokens-max 256 --device cpu --warm-steps 0` is a quick look without a GPU.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from dora_rl.cli import main as dora_rl

RATIOS_MIN = {"sync": 2.0, "one_step_off": 1.3, "partial": 1.05}
NUM_WORDS = 32_000
SIGMA = 1.03  # p99 / median = exp(2.326 sigma) = 11

REWARD = '''"""A coin that depends on the tokens alone."""
import zlib

def reward(completion_ids, **_):
    return [float(zlib.crc32(repr(tuple(ids)).encode()) & 1) for ids in completion_ids]
'''


def make_model(folder: Path, width: int, layers: int, tokens_max: int) -> None:
    """Random weights in the shape of Qwen3, with a vocabulary of made-up words."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    vocab = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, NUM_WORDS)}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=core, **tokens).save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=NUM_WORDS,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=max(1, width // 64),
        num_key_value_heads=max(1, width // 192),
        head_dim=64,
        max_position_embeddings=tokens_max + 256,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder)


def make_data(path: Path, num_rows: int = 4096) -> None:
    draw = random.Random(0)
    with path.open("w") as file:
        for _ in range(num_rows):
            words = (f"w{draw.randrange(2, NUM_WORDS)}" for _ in range(draw.randrange(48, 128)))
            file.write(json.dumps({"prompt": " ".join(words), "answer": ""}) + "\n")


def make_config(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    gpu = args.device != "cpu"
    return {
        "model": {"path": str(folder / "model")},
        "data": {"train": [str(folder / "prompts.jsonl")]},
        "reward": {"functions": [f"{folder / 'reward.py'}:reward"], "num_workers": 2},
        "rollout": {
            "num_samples": 8,
            "tokens_max": args.tokens_max,
            "forced_length_median": args.tokens_max / 16,
            "forced_length_sigma": SIGMA,
            "seqs_max": 384,
            "step_tokens_max": 4096,
            "kv_bytes_max": (24 << 30) if gpu else (256 << 20),
        },
        "algorithm": {"loss": "grpo", "aggregation": "token_mean"},
        "orchestration": {
            "max_staleness": args.staleness,
            "batch_groups": args.batch,
            "inflight_groups": args.inflight or (args.staleness + 1) * args.batch,
        },
        "trainer": {"lr": 1e-6, "compile": args.compile, "pack_tokens": 32_768 if gpu else 2048},
        "runtime": {
            "device": args.device,
            "mps": args.mps and gpu,
            "mps_learner_percent": args.learner_percent,
            "mps_learner_yields": args.learner_yields,
            "run_dir": str(folder / "unused"),
        },
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Compare the paradigms on one GPU.")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens-max", type=int, default=4096)
    parser.add_argument("--batch", type=int, default=16, help="groups of 8 in a step")
    parser.add_argument("--staleness", type=int, default=3)
    parser.add_argument("--inflight", type=int, default=0, help="groups; 0: a batch per version")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--warm-steps", type=int, default=8, help="of the short runs before")
    parser.add_argument("--modes", default="sync,one_step_off,partial,multi_version")
    parser.add_argument("--compile", default="auto")
    parser.add_argument("--device", default="cuda")
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--mps", action=switch, default=True)
    parser.add_argument("--learner-percent", type=int, default=50, help="where modes overlap")
    parser.add_argument("--learner-yields", action=switch, default=True, help="where modes overlap")
    parser.add_argument("--runs", type=Path, help="keep the run directories here")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def run_modes(folder: Path, args: argparse.Namespace, steps: int, runs: Path, path: Path) -> int:
    argv = ["bench", "paradigms", str(folder / "config.json"), "--json", str(path)]
    argv += ["--modes", args.modes, "--steps", str(steps), "--split", "1x1+2", "--runs", str(runs)]
    return dora_rl(argv)


def main() -> int:
    args = parse()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model", args.width, args.layers, args.tokens_max)
        make_data(folder / "prompts.jsonl")
        (folder / "reward.py").write_text(REWARD)
        (folder / "config.json").write_text(json.dumps(make_config(folder, args)) + "\n")
        path = (args.json or folder / "result.json").resolve()
        if args.warm_steps:
            steps = max(args.warm_steps, args.staleness + 4)
            print(f"{steps} steps of every mode, for the compilers", flush=True)
            status = run_modes(folder, args, steps, folder / "warm", folder / "warm.json")
            if status:
                return status
        status = run_modes(folder, args, args.steps, args.runs or folder / "runs", path)
        if status:
            return status
        result = json.loads(path.read_text())
    missed = 0
    for name, least in RATIOS_MIN.items():
        if name in result["ratios"]:
            value = result["ratios"][name]
            missed += value < least
            word = "reached" if value >= least else "BELOW  "
            print(f"{word}  multi_version / {name}: {value:.2f} (at least {least:.2f})")
    for row in result["rows"]:
        if row["name"] == "multi_version":
            idle = row["mean"]["device_idle_ratio"]
            missed += idle >= 0.1
            print(f"device idle under multi_version: {idle:.3f} (below 0.1)")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
