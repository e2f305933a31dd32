"""A real model on one GPU: dora-rl against TRL's GRPOTrainer with vLLM in the same process.

    python benchmarks/vs_trl_real.py --model MODEL --train TRAIN --eval TEST --minutes 4 \\
        --trl-python /path/to/venv-with-trl-and-vllm/bin/python

Same model, prompts in the same order, groups × samples of a step, longest response, loss (DAPO, no
KL), clip range, learning rate, warm-up, betas and float32 masters under bfloat16. TRL runs every
row of `SETTINGS` for `--sweep-minutes` and the fastest one for `--minutes`; without vLLM it uses
its own generation, and says so. Trained tokens are response tokens in updates for both; speeds are
from the end of the third step to that of the last. Clocks begin with the command of each.

Accuracy is greedy on the first `--prompts` held-out prompts, by the same engine and reward for
both. TRL saves its weights every `--every` steps; the time of saving is taken off its clock, and
they are evaluated when it has ended. dora-rl evaluates beside its training, and that time is not
taken off. Writes a line of JSON for each step and result as it is known.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import real_model

START_UP_STEPS = real_model.START_UP_STEPS
GRACE_S = 240.0  # for TRL to load, and to end after its time is over
# What TRL may choose from. `micro_batch`: responses of one pass; all passes of a step make up the
# same batch. `memory`: vLLM's share of the device. `sleep`: vLLM's weights leave it meanwhile.
SETTINGS: tuple[dict[str, Any], ...] = (
    {"micro_batch": 32, "recompute": False, "memory": 0.3, "sleep": False},
    {"micro_batch": 64, "recompute": True, "memory": 0.3, "sleep": False},
    {"micro_batch": 16, "recompute": False, "memory": 0.3, "sleep": False},
    {"micro_batch": 64, "recompute": False, "memory": 0.4, "sleep": True},
)


# -- inside TRL's environment ----------------------------------------------------------------------


def has_module(name: str) -> str:
    """Empty if it can be imported, otherwise why not."""
    try:
        __import__(name)
    except Exception as error:  # noqa: BLE001 - a compiled library fails in its own ways
        return f"{type(error).__name__}: {error}"[:300]
    return ""


def run_trl(job: dict[str, Any]) -> None:
    """Train until the time is over; a line of JSON after every step."""
    import torch
    import trl
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import AutoTokenizer, TrainerCallback

    from dora_rl.rewards.base import ScoreItem
    from dora_rl.rewards.builtin import math

    scorer, lines = math(), Path(job["folder"]) / "steps.jsonl"
    excluded_s = 0.0

    def tell(row: dict[str, Any]) -> None:
        with lines.open("a") as file:
            file.write(json.dumps(row) + "\n")

    def score(
        prompts: list[str], completions: list[str], answer: list[str], **_: Any
    ) -> list[float]:
        items = [
            ScoreItem(prompt, prompt, text, (), gold, {}, "stop")
            for prompt, text, gold in zip(prompts, completions, answer, strict=True)
        ]
        return [float(scorer(item) or 0.0) for item in items]

    class Clock(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            nonlocal excluded_s
            if "completions/mean_length" not in (logs or {}):
                return
            torch.cuda.synchronize() if torch.cuda.is_available() else None
            now = time.monotonic()
            wall_s = now - job["begun"] - excluded_s
            length = float(logs["completions/mean_length"])
            row = {"step": state.global_step, "wall_s": wall_s, "reward": logs.get("reward")}
            row |= {"tokens": length * job["groups"] * job["samples"], "length": length}
            tell(row | {"clipped": logs.get("completions/clipped_ratio")})
            over = wall_s > job["minutes"] * 60
            if job["every"] and (state.global_step % job["every"] == 0 or over):
                save(trainer, job, f"{state.global_step:06d}", wall_s)
            excluded_s += time.monotonic() - now
            control.should_training_stop = control.should_training_stop or over

    missing = has_module("vllm") if job["use_vllm"] else "not wanted"
    tell({"trl": trl.__version__, "vllm": not missing, "why_not_vllm": missing})
    rows = [json.loads(line) for line in Path(job["rows"]).read_text().splitlines()]
    # With a fingerprint of its own nothing is pickled to make one.
    columns = {name: [row[name] for row in rows] for name in ("prompt", "answer")}
    dataset = Dataset(InMemoryTable.from_pydict(columns), fingerprint="prompts")
    trainer = trl.GRPOTrainer(
        model=job["model"],
        reward_funcs=score,
        args=trl_config(trl, job, use_vllm=not missing),
        train_dataset=dataset,
        processing_class=AutoTokenizer.from_pretrained(job["model"], padding_side="left"),
        callbacks=[Clock()],
    )
    trainer.train()


def save(trainer: Any, job: dict[str, Any], name: str, wall_s: float) -> None:
    """The weights as they would be published, in bfloat16, with the tokenizer."""
    import torch

    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    half = {key: value.to(torch.bfloat16) for key, value in model.state_dict().items()}
    folder = Path(job["folder"]) / "saved" / name
    model.save_pretrained(folder, state_dict=half)
    config = json.loads((folder / "config.json").read_text()) | {"dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config))
    for file in Path(job["model"]).iterdir():  # the tokenizer, whatever its files are
        text = file.suffix in (".json", ".jinja", ".txt", ".model")
        if text and "index" not in file.name and not (folder / file.name).exists():
            shutil.copy(file, folder)
    (folder / "wall_s").write_text(str(wall_s))


def trl_config(trl: Any, job: dict[str, Any], *, use_vllm: bool) -> Any:
    """Field names are those of TRL 1.16."""
    import torch

    on_gpu = torch.cuda.is_available()
    choice, batch = job["choice"], job["groups"] * job["samples"]
    micro = min(choice["micro_batch"], batch)
    flash = on_gpu and not has_module("flash_attn")
    engine: dict[str, Any] = {}
    if use_vllm:
        engine = {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": choice["memory"],
            "vllm_enable_sleep_mode": choice["sleep"],
            "vllm_max_model_length": job["context_max"],
        }
    elif on_gpu:
        engine = {"use_transformers_continuous_batching": bool(job["continuous"])}
    return trl.GRPOConfig(
        output_dir=job["folder"],
        use_cpu=not on_gpu,
        bf16=on_gpu,
        # Masters in float32, as here; torch's own attention where flash-attn is not installed.
        model_init_kwargs={
            "dtype": "float32",
            "attn_implementation": "flash_attention_2" if flash else "sdpa",
        },
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=batch // micro,
        gradient_checkpointing=choice["recompute"],
        num_generations=job["samples"],
        max_completion_length=job["tokens_max"],
        shuffle_dataset=False,
        temperature=job["temperature"],
        learning_rate=job["lr"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=job["warmup"],
        adam_beta1=job["betas"][0],
        adam_beta2=job["betas"][1],
        weight_decay=job["weight_decay"],
        max_grad_norm=job["grad_norm_max"],
        beta=0.0,
        epsilon=job["clip_low"],
        epsilon_high=job["clip_high"],
        loss_type="dapo",
        scale_rewards="group",
        max_steps=job["steps"],
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=job["seed"],
        **engine,
    )


# -- outside ---------------------------------------------------------------------------------------


def make_job(args: argparse.Namespace) -> dict[str, Any]:
    """What both sides share, out of the recipe; prompts as dora-rl renders and orders them."""
    from dora_rl.data.prompts import open_prompts
    from dora_rl.setup.prepare import open_tokenizer
    from dora_rl.setup.settings import load_config

    words = [f"model.path={args.model}", f"data.train={args.train}", f"data.eval={args.eval}"]
    config = load_config(args.recipe, [*words, f"data.seed={args.seed}", *args.set])
    source = open_prompts(config.data, open_tokenizer(args.model, False))
    groups, steps = config.orchestration.batch_groups, args.steps or 1000
    num_rows = groups * min(steps, 200)
    args.out.mkdir(parents=True, exist_ok=True)
    rows = args.out / "prompts.jsonl"
    with rows.open("w") as file:
        for index in range(num_rows):
            prompt = source.prompt(index)
            file.write(json.dumps({"prompt": prompt.text, "answer": prompt.answer}) + "\n")
    rollout, trainer = config.rollout, config.trainer
    return {
        "model": str(args.model),
        "rows": str(rows),
        "groups": groups,
        "samples": rollout.num_samples,
        "tokens_max": rollout.tokens_max,
        "context_max": (config.data.prompt_tokens_max or 1024) + rollout.tokens_max,
        "temperature": rollout.temperature,
        "lr": trainer.lr,
        "warmup": trainer.warmup_updates,
        "betas": list(trainer.betas),
        "weight_decay": trainer.weight_decay,
        "grad_norm_max": trainer.grad_norm_max,
        "clip_low": config.algorithm.clip_low or 0.2,
        "clip_high": config.algorithm.clip_high or 0.28,
        "steps": steps,
        "seed": args.seed,
        "use_vllm": not args.no_vllm,
        "continuous": True,
    }


def ask_trl(args: argparse.Namespace, job: dict[str, Any], name: str) -> dict[str, Any]:
    """One run of TRL in its own environment; what it managed, even if it was cut off."""
    folder = args.out / name
    if folder.exists():
        sys.exit(f"{folder} exists; choose another --out")
    folder.mkdir(parents=True)
    job = job | {"folder": str(folder), "begun": time.monotonic()}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    source = str(real_model.ROOT / "src")
    more = os.environ.get("PYTHONPATH", "")
    environment = dict(os.environ) | {"PYTHONPATH": f"{source}:{more}", "HF_HUB_OFFLINE": "1"}
    meter = real_model.start_gpu_meter()
    with (folder / "trl.log").open("wb") as log:
        child = subprocess.Popen(
            [args.trl_python, __file__, "--as-trl", str(path)],
            env=environment,
            stdout=log,
            stderr=log,
        )
        try:
            child.wait(job["minutes"] * 60 + GRACE_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        finally:
            if meter is not None:
                meter.end()
    return {"name": name, "choice": job["choice"], "status": child.returncode} | read_trl(folder)


def read_trl(folder: Path) -> dict[str, Any]:
    path = folder / "steps.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    about, rows = lines[:1], lines[1:]
    found: dict[str, Any] = {"steps": len(rows), **(about[0] if about else {})}
    if len(rows) <= START_UP_STEPS:
        tail = (folder / "trl.log").read_text(errors="replace").strip().splitlines()[-3:]
        return found | {"tokens_per_s": 0.0, "failed": " | ".join(tail)[-600:]}
    first, last = rows[START_UP_STEPS - 1], rows[-1]
    tokens = sum(row["tokens"] for row in rows[START_UP_STEPS:])
    found["tokens_per_s"] = tokens / (last["wall_s"] - first["wall_s"])
    found["step_s"] = (last["wall_s"] - first["wall_s"]) / (len(rows) - START_UP_STEPS)
    found["length_mean"] = last["length"]
    found["seen"] = {row["step"]: row["tokens"] for row in rows}
    return found


def trl_curve(args: argparse.Namespace, folder: Path, seen: dict[int, float]) -> list[Any]:
    """Accuracy of everything TRL saved, by our engine; what was evaluated is deleted."""
    points = []
    for saved in sorted((folder / "saved").glob("*")):
        wall_s = float((saved / "wall_s").read_text())
        found = real_model.evaluate_all(args, saved)
        tokens = sum(count for step, count in seen.items() if int(step) <= int(saved.name))
        point = {"version": int(saved.name), "wall_s": wall_s, "tokens_trained": tokens}
        points.append(point | {"greedy": found.get("strict"), "evaluation": found})
        print(f"  TRL step {saved.name}: {found}", flush=True)
        shutil.rmtree(saved)
    return [point for point in points if point["greedy"] is not None]


def tell(args: argparse.Namespace, result: dict[str, Any]) -> None:
    with (args.out / "vs_trl.jsonl").open("a") as file:
        file.write(json.dumps(result) + "\n")
    shown = {k: v for k, v in result.items() if k not in ("seen", "curve", "overrides")}
    print(json.dumps(shown), flush=True)


def sweep(args: argparse.Namespace, job: dict[str, Any]) -> dict[str, Any]:
    """The fastest of the stated settings; with one of them there is nothing to try."""
    choices = [SETTINGS[int(number)] for number in args.settings.split(",")]
    if len(choices) == 1:
        return choices[0]
    rows: list[dict[str, Any]] = []
    for number, choice in enumerate(choices):
        short = job | {"choice": choice, "minutes": args.sweep_minutes, "every": 0}
        rows.append(ask_trl(args, short, f"sweep_{number}"))
        tell(args, rows[-1])
    best = max(rows, key=lambda row: row["tokens_per_s"])
    if not best["tokens_per_s"]:
        sys.exit(f"TRL did not run with any of its settings: {best.get('failed')}")
    return best["choice"]


def compare(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    speed = (ours.get("steady") or {}).get("tokens_per_s", 0.0)
    other = theirs.get("tokens_per_s", 0.0)
    return {
        "name": "comparison",
        "ratio": speed / other if other else None,
        "ours_tokens_per_s": speed,
        "trl_tokens_per_s": other,
        "with_vllm": theirs.get("vllm"),
        "ours": points_of(ours.get("curve") or []),
        "trl": points_of(theirs.get("curve") or []),
    }


def points_of(points: Sequence[dict[str, Any]]) -> list[list[float]]:
    """(wall s, accuracy) pairs."""
    return [[round(point["wall_s"], 1), point["greedy"]] for point in points]


def run(args: argparse.Namespace) -> int:
    job = make_job(args)
    ours: dict[str, Any] = {}
    if not args.only_trl:
        ours = real_model.train(args, "dora_rl", [])
        tell(args, ours)
    choice = sweep(args, job)
    whole = job | {"choice": choice, "minutes": args.minutes, "every": args.every}
    theirs = ask_trl(args, whole, "trl")
    if theirs.get("tokens_per_s"):
        theirs["curve"] = trl_curve(args, args.out / "trl", theirs["seen"])
    tell(args, theirs)
    tell(args, compare(ours, theirs))
    named = [ours | {"name": "dora-rl"}, theirs | {"name": "TRL"}]
    real_model.draw([row for row in named if row.get("curve")], args.out / "vs_trl.png")
    return 1 if "failed" in theirs or "failed" in ours else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="dora-rl against TRL with vLLM on one GPU.")
    recipe = real_model.ROOT / "recipes" / "gsm8k_1.5b.toml"
    parser.add_argument("--recipe", type=Path, default=recipe)
    parser.add_argument("--model", type=Path, required=True, help="a model directory")
    parser.add_argument("--train", required=True, help="training rows")
    parser.add_argument("--eval", required=True, help="held-out rows")
    parser.add_argument("--minutes", type=float, default=4.0, help="of each side")
    parser.add_argument("--steps", type=int, default=0, help="0: as many as there is time for")
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=320, help="held-out, for each evaluation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/vs_trl_real"))
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value of the recipe")
    parser.add_argument("--trl-python", default=sys.executable, help="Python with trl==1.16.*")
    parser.add_argument("--sweep-minutes", type=float, default=1.5, help="for each setting")
    numbers = ",".join(map(str, range(len(SETTINGS))))
    parser.add_argument("--settings", default=numbers, help="numbers of SETTINGS to try")
    parser.add_argument("--no-vllm", action="store_true", help="TRL's own generation")
    parser.add_argument("--only-trl", action="store_true")
    parser.add_argument("--dry-run", action="store_true", help="write the job, start nothing")
    args = parser.parse_args()
    args.final_prompts = args.prompts
    return real_model.resolved(args)


def main() -> int:
    if sys.argv[1:2] == ["--as-trl"]:
        run_trl(json.loads(Path(sys.argv[2]).read_text()))
        return 0
    args = arguments()
    if args.dry_run:
        print(json.dumps(make_job(args), indent=1))
        return 0
    return run(args)


if __name__ == "__main__":
    sys.exit(main())
