"""A real model on one GPU: accuracy against wall time and tokens, speeds, modes side by side.

    python benchmarks/real_model.py --what train --model MODEL --train TRAIN --eval TEST --minutes 9
    python benchmarks/real_model.py --what modes ... --minutes 3
    python benchmarks/real_model.py --what sweep ... --minutes 4
    python benchmarks/real_model.py --what evaluate --model MODEL_OR_RUN --train TRAIN --eval TEST
    python benchmarks/real_model.py --what figures --model RUN

`train` is the command line on a recipe, stopped as by Ctrl-C after `--minutes`; then every prompt
of the test set is answered greedily by the last version, scored as the recipe does (strict) and by
the last number of the answer (lenient). `modes` trains with each of the five modes and reports the
wall time to the same accuracy; `sweep` does the same with variants of the recipe (`--variants`).
The clock begins with the command. Trained tokens are response tokens in updates. The steady state
is from the commit of step 2 to the last commit, without the last K if the run came to its end.
Accuracies on the way come from the run's own evaluator, beside training, and cost it time.
Writes a line of JSON for each result as it is known, and pictures.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
START_UP_STEPS = 3
STOP_S_MAX = 180.0  # for a run to end after it was asked to
STOPPED = 3  # the exit status of a run that can be resumed
MODES = ("multi_version", "one_step_off", "partial", "replication", "sync")
# What `sweep` compares unless `--variants` says otherwise: name -> overrides of the recipe.
VARIANTS: dict[str, list[str]] = {
    "recipe": [],
    "lr 4e-6": ["trainer.lr=4e-6"],
    "two updates": ["trainer.updates_per_step=2"],
}
NUMBER = re.compile(r"-?\$?\d[\d,]*(?:\.\d+)?")


# -- one training run ------------------------------------------------------------------------------


def train(args: argparse.Namespace, name: str, overrides: Sequence[str]) -> dict[str, Any]:
    """`dora-rl train` for at most `--minutes`; what it came to."""
    run_dir = args.out / name.replace(" ", "_")
    if run_dir.exists():
        sys.exit(f"{run_dir} exists; choose another --out")
    words = [*common(args), f"runtime.run_dir={run_dir}", *overrides, *args.set]
    command = [sys.executable, "-m", "dora_rl.cli", "train", str(args.recipe), *words]
    args.out.mkdir(parents=True, exist_ok=True)
    meter = start_gpu_meter()
    with (args.out / f"{run_dir.name}.log").open("wb") as log:
        begun = time.monotonic()
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        stopped = False
        try:
            child.wait(args.minutes * 60)
        except subprocess.TimeoutExpired:
            stopped = True
            child.send_signal(signal.SIGINT)
            child.wait(STOP_S_MAX)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
            if meter is not None:
                meter.end()
    found: dict[str, Any] = {"name": name, "overrides": list(overrides), "stopped": stopped}
    found["status"], found["run_dir"] = child.returncode, str(run_dir)
    if child.returncode not in (0, STOPPED):
        text = (args.out / f"{run_dir.name}.log").read_text(errors="replace")
        return found | {"failed": " | ".join(text.strip().splitlines()[-3:])}
    return found | figures(run_dir, begun, meter)


def common(args: argparse.Namespace) -> list[str]:
    words = [
        f"model.path={args.model}",
        f"data.train={args.train}",
        f"data.eval={args.eval}",
        f"evaluation.every_steps={args.every}",
        f"evaluation.num_prompts={args.prompts}",
        f"runtime.seed={args.seed}",
        f"data.seed={args.seed}",
        f"trainer.seed={args.seed}",
        "logging.progress=false",
    ]
    return [*words, *([f"orchestration.num_steps={args.steps}"] if args.steps else [])]


def start_gpu_meter() -> Any:
    from dora_rl.observe.meters import start_meter

    return start_meter(device_of())


def device_of() -> str:
    from dora_rl.setup.prepare import choose_device

    return choose_device("auto")


# -- what a run directory says ---------------------------------------------------------------------


def figures(run_dir: Path, begun: float | None = None, meter: Any = None) -> dict[str, Any]:
    """Speeds of the steady state, publication, and the curve; `begun`: of the command."""
    commits, loads, first = read_times(run_dir)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "step" in line and line["step"] in commits}
    summary_path, config = (
        run_dir / "summary.json",
        json.loads((run_dir / "config.json").read_text()),
    )
    summary = json.loads(summary_path.read_text()) if summary_path.is_file() else {}
    origin = first if begun is None else begun
    found: dict[str, Any] = {
        "steps": len(steps),
        "first_step_committed_s": commits[min(commits)] - origin if commits else None,
        "restarts": summary.get("restarts"),
        "memory_retries": sum(line.get("memory/retries", 0) for line in steps.values()),
        "curve": curve(lines, steps, commits, origin),
    }
    drained = config["orchestration"]["max_staleness"]
    done = len(steps) >= config["orchestration"]["num_steps"]
    last = max(steps, default=-1) - (drained if done else 0)
    window = [step for step in range(START_UP_STEPS, last + 1) if step in steps]
    if not window or START_UP_STEPS - 1 not in commits:
        return found | {"steady": None}
    begin, end = commits[START_UP_STEPS - 1], commits[last]
    inside = [steps[step] for step in window]
    found["steady"] = {
        "steps": [window[0], last],
        "tokens_per_s": sum(line["tokens_trained"] for line in inside) / (end - begin),
        "step_s": (end - begin) / len(inside),
        "device_idle_ratio": meter.idle_ratio(begin, end) if meter is not None else None,
        "staleness_mean": mean(line["staleness/mean"] for line in inside),
        "response_length_mean": mean(line["response_length/mean"] for line in inside),
        "response_length_p99_over_median": mean(
            line["response_length/p99"] / max(1.0, line["response_length/median"])
            for line in inside
        ),
        # Between two commits the learner either trains or waits, for groups or for a version.
        "learner_not_training_s": (end - begin) / len(inside)
        - mean(line.get("time/train", 0.0) for line in inside),
        # From the commit to the first instance that holds the version; before the commit lies
        # time/weight_sync, which begins with the end of training.
        "loaded_after_commit_s": mean(
            max(0.0, loads[step + 1] - commits[step]) for step in window if step + 1 in loads
        ),
        **{
            name: {"mean": mean(values), "max": max(values)}
            for name in sorted({key for line in inside for key in line if key.startswith("time/")})
            if (values := [line[name] for line in inside if name in line])
        },
    }
    return found


def read_times(run_dir: Path) -> tuple[dict[int, float], dict[int, float], float]:
    """When each step was committed, when each version was first held by an instance, and the time
    of the log's first entry; all on the system's monotonic clock."""
    from dora_rl.core import events as ev
    from dora_rl.observe.eventlog import Entry, read

    commits: dict[int, float] = {}
    loads: dict[int, float] = {}
    first = None
    for record in read(run_dir / "events"):
        if not isinstance(record, Entry):
            continue
        first = record.now if first is None else first
        if isinstance(record.event, ev.StepCommitted):
            commits[record.event.step] = record.now
        elif isinstance(record.event, ev.Loaded):
            loads.setdefault(record.event.version, record.now)
    return commits, loads, first or 0.0


def curve(
    lines: Sequence[dict[str, Any]],
    steps: dict[int, dict[str, Any]],
    commits: dict[int, float],
    origin: float,
) -> list[dict[str, Any]]:
    """Accuracy of evaluated versions against the time they were made and the tokens they saw."""
    out = []
    for line in lines:
        if "version" not in line or line.get("eval/greedy") is None:
            continue
        version = line["version"]
        if version and version - 1 not in commits:
            continue
        seen = sum(found["tokens_trained"] for step, found in steps.items() if step < version)
        out.append(
            {
                "version": version,
                "wall_s": commits[version - 1] - origin if version else 0.0,
                "tokens_trained": seen,
                "greedy": line["eval/greedy"],
                "sampled": line.get("eval/sampled"),
                "num_prompts": line.get("eval/num_prompts"),
            }
        )
    return sorted(out, key=lambda point: point["version"])


def time_to(points: Sequence[dict[str, Any]], accuracy: float) -> float | None:
    """When a curve first reaches an accuracy, on the line between two evaluations; None: never."""
    for before, after in zip([None, *points], points, strict=False):
        if after["greedy"] >= accuracy:
            if before is None or after["greedy"] == before["greedy"]:
                return after["wall_s"]
            share = (accuracy - before["greedy"]) / (after["greedy"] - before["greedy"])
            return before["wall_s"] + share * (after["wall_s"] - before["wall_s"])
    return None


def mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / max(1, len(held))


# -- the whole test set ----------------------------------------------------------------------------


def lenient(completion: str, answer: str) -> float:
    """1 if the last number of the completion is the answer, whatever stands around it."""
    found = [as_number(text) for text in NUMBER.findall(completion)]
    gold = as_number(answer)
    return 1.0 if found and gold is not None and found[-1] == gold else 0.0


def as_number(text: str) -> float | None:
    try:
        return float(re.sub(r"[$,\s]", "", text))
    except ValueError:
        return None


def evaluate_all(args: argparse.Namespace, model: Path) -> dict[str, Any]:
    """Greedy answers to every held-out prompt, in a process of its own that frees its memory."""
    command = [sys.executable, __file__, "--what", "evaluate", "--model", str(model)]
    command += ["--recipe", str(args.recipe), "--train", str(args.train), "--eval", str(args.eval)]
    command += ["--final-prompts", str(args.final_prompts), "--set", *args.set]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return {"failed": " | ".join(done.stderr.strip().splitlines()[-3:])}
    return json.loads(lines[-1])


def evaluate(args: argparse.Namespace) -> dict[str, Any]:
    """Strict and lenient accuracy of a model directory or of a run's last version."""
    import torch

    from dora_rl.data.prompts import open_prompts
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.options import EngineOptions
    from dora_rl.model.directory import read_spec
    from dora_rl.rewards.base import ScoreItem, build
    from dora_rl.setup.prepare import open_tokenizer
    from dora_rl.setup.settings import load_config
    from dora_rl.weights.run_models import find_model
    from dora_rl.workers.environment import row_of
    from dora_rl.workers.evaluator import evaluate as answer_all
    from dora_rl.workers.messages import EvalPrompt

    model = find_model(args.model)
    words = [f"model.path={model.directory}", f"data.train={args.train}", f"data.eval={args.eval}"]
    config = load_config(args.recipe, [*words, *args.set])
    torch.set_num_threads(max(1, config.rollout.threads))
    tokenizer = open_tokenizer(model.directory, config.model.trust_remote_code)
    count = args.final_prompts
    prompts = list(open_prompts(config.data, tokenizer, "eval").once(count))[:count]
    options: dict[str, Any] = config.engine_options(device_of(), 1)
    options |= {"versions_max": 1, "lora_rank": 0}
    engine = Engine(read_spec(model.directory), EngineOptions(**options))
    engine.load(model.version, model.source)
    begun = time.monotonic()
    asked = [EvalPrompt(row_of(prompt)) for prompt in prompts]
    answers = answer_all(engine, model.version, asked, 0, config.rollout.sampling_params())
    took = time.monotonic() - begun
    strict, loose, cut, failed = 0.0, 0.0, 0, 0
    reward = build(config.reward, ROOT)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = tuple(answer.token_ids.tolist())
        text = tokenizer.decode(ids, skip_special_tokens=True)
        cut += answer.finish == "length"
        item = ScoreItem(
            prompt=prompt.text,
            prompt_text=prompt.text,
            completion=text,
            completion_ids=ids,
            answer=prompt.answer,
            columns=prompt.columns,
            finish=answer.finish,
        )
        score = reward.score([item])[0]
        if isinstance(score, int | float):
            strict += score
        else:
            failed += 1
        loose += lenient(text, prompt.answer or "")
    reward.close()
    share = strict / len(prompts)
    return {
        "model": model.label,
        "version": model.version,
        "num_prompts": len(prompts),
        "strict": share,
        "lenient": loose / len(prompts),
        "standard_error": (share * (1 - share) / len(prompts)) ** 0.5,
        "truncated": cut / len(prompts),
        "num_failed": failed,
        "generation_s": took,
    }


# -- the program -----------------------------------------------------------------------------------


def tell(args: argparse.Namespace, result: dict[str, Any]) -> None:
    """A line of JSON as soon as it is known."""
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "results.jsonl").open("a") as file:
        file.write(json.dumps({"what": args.what, **result}) + "\n")
    steady = result.get("steady") or {}
    points = [(point["wall_s"], point["greedy"]) for point in result.get("curve") or []]
    print(
        f"{result.get('name', ''):<16} steps {result.get('steps', '-')}  "
        f"tokens/s {steady.get('tokens_per_s', float('nan')):,.0f}  "
        f"step s {steady.get('step_s', float('nan')):.2f}  "
        f"idle {steady.get('device_idle_ratio')}  "
        f"greedy {' '.join(f'{wall_s:.0f}s:{score:.3f}' for wall_s, score in points)}  "
        f"{json.dumps(result['final']) if 'final' in result else ''}{result.get('failed', '')}",
        flush=True,
    )


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Accuracy against wall time and against trained tokens."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for result in results:
        points = result.get("curve") or []
        greedy = [point["greedy"] for point in points]
        axes[0].plot([p["wall_s"] / 60 for p in points], greedy, "o-", label=result["name"])
        axes[1].plot([p["tokens_trained"] / 1e6 for p in points], greedy, "o-")
    axes[0].set(xlabel="minutes since the command", ylabel="greedy accuracy (run's evaluator)")
    axes[1].set(xlabel="million response tokens in updates")
    if any(result.get("curve") for result in results):
        axes[0].legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def run_train(args: argparse.Namespace) -> int:
    result = train(args, "train", [])
    if "failed" not in result:
        result["final"] = evaluate_all(args, Path(result["run_dir"]))
    tell(args, result)
    draw([result], args.out / "train.png")
    return 1 if "failed" in result or "failed" in result.get("final", {}) else 0


def run_many(args: argparse.Namespace, cases: dict[str, list[str]]) -> int:
    """One after the other, on the same device; then the time each took to the same accuracy."""
    results = []
    for name, overrides in cases.items():
        result = train(args, name, overrides)
        if "failed" not in result and args.final_prompts:
            result["final"] = evaluate_all(args, Path(result["run_dir"]))
        results.append(result)
        tell(args, result)
        draw(results, args.out / f"{args.what}.png")
    curves = {result["name"]: result["curve"] for result in results if result.get("curve")}
    if curves:
        # Unless one is given: what the slowest has reached, at its best evaluation.
        reached = min(max(p["greedy"] for p in points) for points in curves.values())
        target = args.target or reached
        times = {name: time_to(points, target) for name, points in curves.items()}
        tell(args, {"name": "time to", "accuracy": target, "wall_s": times})
        for name, wall_s in times.items():
            said = "never" if wall_s is None else f"{wall_s:.0f} s"
            print(f"  greedy {target:.3f}: {name} {said}", flush=True)
    return 1 if any("failed" in result for result in results) else 0


def variants(path: Path | None) -> dict[str, list[str]]:
    """A JSON object of names and overrides, or the ones above."""
    return json.loads(path.read_text()) if path else VARIANTS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    whats = ("train", "modes", "sweep", "evaluate", "figures")
    parser.add_argument("--what", choices=whats, default="train")
    parser.add_argument("--recipe", type=Path, default=ROOT / "recipes" / "gsm8k_1.5b.toml")
    parser.add_argument("--model", type=Path, required=True, help="a model directory, or a run")
    parser.add_argument("--train", default="", help="training rows; the recipe names its columns")
    parser.add_argument("--eval", default="", help="held-out rows")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="of one run, from the command on"
    )
    parser.add_argument("--steps", type=int, default=0, help="0: those of the recipe")
    parser.add_argument("--every", type=int, default=10, help="steps between evaluations")
    parser.add_argument("--prompts", type=int, default=320, help="of an evaluation on the way")
    parser.add_argument("--final-prompts", type=int, default=1319, help="0: none at the end")
    parser.add_argument("--target", type=float, default=0.0, help="accuracy to time")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--variants", type=Path, help="JSON: {name: [override, ...]}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("runs/real_model"))
    parser.add_argument("--set", nargs="*", default=[], help="section.key=value for every run")
    return parser


def resolved(args: argparse.Namespace) -> argparse.Namespace:
    """Paths that mean the same wherever the children are started."""
    for name in ("recipe", "model", "out"):
        setattr(args, name, getattr(args, name).resolve())
    for name in ("train", "eval"):
        if getattr(args, name):
            setattr(args, name, str(Path(getattr(args, name)).resolve()))
    return args


def main() -> int:
    args = resolved(make_parser().parse_args())
    if args.what == "evaluate":
        print(json.dumps(evaluate(args)))
        return 0
    if args.what == "figures":
        print(json.dumps(figures(args.model), indent=1))
        return 0
    if not args.train or not args.eval:
        sys.exit("--train and --eval are needed")
    if args.what == "train":
        return run_train(args)
    if args.what == "modes":
        modes = [name for name in args.modes.split(",") if name]
        return run_many(args, {name: [f"orchestration.mode={name}"] for name in modes})
    return run_many(args, variants(args.variants))


if __name__ == "__main__":
    sys.exit(main())
