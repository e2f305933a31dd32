"""Tokens/s end to end on the CPU: dora-rl against TRL's GRPOTrainer with its own generation.

    python benchmarks/vs_trl.py --trl-python /path/to/venv-with-trl/bin/python --json vs_trl.json

Same tiny model, chains task, prompts per step, samples per prompt, longest response, loss, learning
rate and number of steps, one after the other in one run of this program. Tokens are prompt plus
response tokens that were trained, padding not counted; the clock runs from the end of the third
step to the end of the last (of the last but K for dora-rl, whose end drains). TRL runs the sweep
that is printed (threads, micro-batch, continuous batching) and its best row is compared. TRL lives
in an environment of its own because it pins its libraries; this file runs there as `--as-trl`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECIPE = ROOT / "recipes" / "longtail.toml"
RATIO_MIN = 5.0
START_UP_STEPS = 3
TRL_TIMEOUT_S = 1200.0


def trl_sweep(num_completions: int, num_cores: int) -> list[dict[str, Any]]:
    """What TRL may choose from; the batch of a step is always the same."""
    whole, quarter, eighth = (max(1, num_completions // parts) for parts in (1, 4, 8))
    return [
        {"threads": num_cores, "micro_batch": whole, "continuous": False},
        {"threads": num_cores, "micro_batch": quarter, "continuous": False},
        {"threads": num_cores, "micro_batch": eighth, "continuous": False},
        {"threads": 1, "micro_batch": whole, "continuous": False},
        {"threads": num_cores, "micro_batch": whole, "continuous": True},
    ]


# -- inside TRL's environment ---------------------------------------------------------------------


def run_trl(job: dict[str, Any]) -> dict[str, Any]:
    """Train with GRPOTrainer; (time, tokens) after every step."""
    import torch

    torch.set_num_threads(job["threads"])
    import trl
    from datasets import Dataset
    from transformers import AutoTokenizer, TrainerCallback

    from dora_rl.data.chains import ChainSpec, Split, problem_at, reward

    num_rows = job["batch_groups"] * job["num_steps"]
    problems = [problem_at(ChainSpec(), Split.TRAIN, job["seed"], i) for i in range(num_rows)]
    dataset = Dataset.from_list([{"prompt": p.text, "answer": p.answer} for p in problems])
    ends: list[tuple[float, float]] = []
    rewards: list[float] = []

    def score(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        del columns
        return [reward(text, gold) for text, gold in zip(completions, answer, strict=True)]

    class Clock(TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any
        ) -> None:
            del args, state, control, rest
            if "num_tokens" in (logs or {}):
                ends.append((time.monotonic(), float(logs["num_tokens"])))
                rewards.append(float(logs["reward"]))

    trainer = trl.GRPOTrainer(
        model=job["model"],
        reward_funcs=score,
        args=trl_config(trl, job),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()
    (t0, n0), (t1, n1) = ends[START_UP_STEPS - 1], ends[-1]
    return {
        **{key: job[key] for key in ("threads", "micro_batch", "continuous")},
        "tokens_per_s": (n1 - n0) / (t1 - t0),
        "tokens_per_step": (n1 - n0) / (len(ends) - START_UP_STEPS),
        "reward_first": rewards[0],
        "reward_last": rewards[-1],
        "trl": trl.__version__,
    }


def trl_config(trl: Any, job: dict[str, Any]) -> Any:
    num_completions = job["batch_groups"] * job["num_samples"]
    return trl.GRPOConfig(
        output_dir=job["folder"],
        use_cpu=True,
        bf16=False,
        per_device_train_batch_size=job["micro_batch"],
        gradient_accumulation_steps=num_completions // job["micro_batch"],
        num_generations=job["num_samples"],
        max_completion_length=job["tokens_max"],
        temperature=1.0,
        learning_rate=job["lr"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_steps=job["num_steps"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        gradient_checkpointing=False,
        use_transformers_continuous_batching=job["continuous"],
        disable_tqdm=True,
        seed=job["seed"],
    )


# -- outside --------------------------------------------------------------------------------------


def ask_trl(python: str, job: dict[str, Any]) -> dict[str, Any]:
    environment = dict(os.environ) | {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    environment["OMP_NUM_THREADS"] = str(job["threads"])
    done = subprocess.run(
        [python, __file__, "--as-trl", json.dumps(job)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TRL_TIMEOUT_S,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return {**job, "tokens_per_s": 0.0, "failed": last[0][:300]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def sweep_trl(python: str, job: dict[str, Any], num_cores: int, sweep_steps: int) -> list[Any]:
    rows = []
    for choice in trl_sweep(job["batch_groups"] * job["num_samples"], num_cores):
        row = ask_trl(python, job | choice | {"num_steps": sweep_steps})
        print(
            f"  TRL {choice}: {row['tokens_per_s']:.0f} tokens/s {row.get('failed', '')}",
            flush=True,
        )
        rows.append(row)
    return rows


def run_ours(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    from dora_rl.bench.paradigms import Bench, BenchOptions
    from dora_rl.setup.settings import load_config
    from dora_rl.types import Mode

    options = BenchOptions(
        modes=[Mode.MULTI_VERSION],
        seeds=[args.seed],
        num_steps=args.steps,
        sweep_steps=args.sweep_steps,
        folder=folder,
        num_eval_prompts=200,
        num_cores=args.cores,
    )

    def see(name: str, figures: dict[str, Any]) -> None:
        print(f"  dora-rl {name}: {figures['tokens_per_s']:.0f} tokens/s", flush=True)

    return Bench(load_config(args.config), options, see).run()["rows"][0]


def compare(args: argparse.Namespace) -> int:
    from dora_rl.setup.settings import load_config

    os.chdir(ROOT)
    config = load_config(args.config)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: args.cores])
    print(f"load average {os.getloadavg()[0]:.1f}, {args.cores} cores")
    with tempfile.TemporaryDirectory() as name:
        ours = run_ours(args, Path(name) / "ours")
        job = {
            "model": config.model.path,
            "batch_groups": config.orchestration.batch_groups,
            "num_samples": config.rollout.num_samples,
            "tokens_max": config.rollout.tokens_max,
            "lr": config.trainer.lr,
            "seed": args.seed,
            "folder": str(Path(name) / "trl"),
        }
        rows = sweep_trl(args.trl_python, job, args.cores, args.sweep_steps)
        best = max(rows, key=lambda row: row["tokens_per_s"])
        if not best["tokens_per_s"]:
            print(f"TRL did not run: {best['failed']}", file=sys.stderr)
            return 2
        choice = {key: best[key] for key in ("threads", "micro_batch", "continuous")}
        theirs = ask_trl(args.trl_python, job | choice | {"num_steps": args.steps})
    ratio = ours["mean"]["tokens_per_s"] / theirs["tokens_per_s"]
    print(f"dora-rl  {ours['mean']['tokens_per_s']:8.0f} tokens/s  split {ours['split']}")
    print(f"TRL {theirs['trl']}  {theirs['tokens_per_s']:8.0f} tokens/s  {choice}")
    print(f"ratio {ratio:.2f} (at least {RATIO_MIN})")
    result = {"ratio": ratio, "ours": ours, "trl": theirs, "trl_sweep": rows}
    result["load_1m"] = os.getloadavg()[0]
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")
    return 0 if ratio >= RATIO_MIN else 1


def main() -> int:
    parser = argparse.ArgumentParser(description="dora-rl against TRL on the CPU.")
    parser.add_argument("--trl-python", help="Python of an environment with trl==1.16.0")
    parser.add_argument("--config", type=lambda text: Path(text).resolve(), default=RECIPE)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--sweep-steps", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--json", type=lambda text: Path(text).resolve())
    parser.add_argument("--as-trl", metavar="JOB", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_trl:
        print("RESULT " + json.dumps(run_trl(json.loads(args.as_trl))))
        return 0
    if not args.trl_python:
        parser.error("--trl-python is needed: the Python of an environment with trl==1.16.0")
    return compare(args)


if __name__ == "__main__":
    sys.exit(main())
