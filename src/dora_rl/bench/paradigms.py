"""The paradigms compared: every mode trains for real, on the same cores, seeds, model and task.

Each mode first runs briefly on every split of the cores that it can use and keeps the fastest; then
all seeds run with that split. Modes that alternate (sync, partial, replication) give every core to
both phases; the others share the cores between instances and learner. Every run is a process of its
own (`dora-rl train`), so that nothing is warm for one and cold for another; the final weights are
evaluated after the run, never beside it. Never changes what a mode does: only `rollout` and
`trainer` threads, seeds, steps and the mode differ between runs. The tables and the picture of a
comparison are at the end; they only format.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray
from rich.box import SIMPLE
from rich.table import Table

from dora_rl.config import RunConfig
from dora_rl.observe.columns import Table as Columns
from dora_rl.observe.columns import rows_of
from dora_rl.observe.eval_figures import Figures
from dora_rl.observe.history import read_history
from dora_rl.observe.meters import CpuMeter, GpuMeter, start_meter
from dora_rl.observe.placements import busy_s
from dora_rl.setup.prepare import choose_device, open_tokenizer
from dora_rl.setup.settings import resolve
from dora_rl.types import Mode, UserError

ALTERNATING = (Mode.SYNC, Mode.PARTIAL, Mode.REPLICATION)
START_UP_STEPS = 3
RUN_TIMEOUT_S = 1800.0


@dataclass(frozen=True, slots=True)
class Split:
    """How the cores are used: `Split(2, 1, 2)` is two instances of one thread, learner with two."""

    num_instances: int
    threads: int
    learner_threads: int

    def __str__(self) -> str:
        return f"{self.num_instances}x{self.threads}+{self.learner_threads}"


def splits_of(mode: Mode, num_cores: int) -> tuple[Split, ...]:
    """The stated sweep.

    >>> [str(split) for split in splits_of(Mode.SYNC, 2)]
    ['2x1+2', '1x2+2']
    """
    if mode in ALTERNATING:
        found = (Split(num_cores, 1, num_cores), Split(1, num_cores, num_cores))
    else:
        half = max(1, num_cores // 2)
        found = (
            Split(half, 1, max(1, num_cores - half)),
            Split(num_cores, 1, max(1, num_cores - half)),
            Split(num_cores, 1, num_cores),
        )
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the comparison: a mode, or an ablation of one, with what it changes."""

    name: str
    mode: Mode
    changes: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])


# Flips and moves only happen where an instance cannot hold every live version, so two of the
# ablations start from one resident version, as in the paper.
ONE_RESIDENT = {"rollout": {"versions_max": 1}}
ABLATIONS = (
    Case("no streaming", Mode.MULTI_VERSION, {"orchestration": {"streaming": False}}),
    Case("one resident version", Mode.MULTI_VERSION, ONE_RESIDENT),
    Case(
        "one resident, no KV moves",
        Mode.MULTI_VERSION,
        ONE_RESIDENT | {"orchestration": {"kv_moves": False}},
    ),
    Case(
        "one resident, no repartition",
        Mode.MULTI_VERSION,
        ONE_RESIDENT | {"orchestration": {"repartition": False}},
    ),
)


@dataclass(frozen=True, slots=True)
class BenchOptions:
    modes: Sequence[Mode]
    seeds: Sequence[int]
    num_steps: int
    sweep_steps: int
    folder: Path
    ablations: bool = False
    num_eval_prompts: int = 400
    num_cores: int = 0  # 0: all that may be used
    split: Split | None = None  # given: no sweep


def case_config(
    config: RunConfig, case: Case, split: Split, seed: int, num_steps: int, run_dir: Path
) -> RunConfig:
    """The configuration of one run."""
    data = config.model_dump(mode="json")
    changes: dict[str, dict[str, Any]] = {
        "orchestration": {"mode": case.mode.value, "num_steps": num_steps},
        "rollout": {"num_instances": split.num_instances, "threads": split.threads},
        "trainer": {"threads": split.learner_threads, "seed": seed},
        # Held-out prompts are answered after the run; beside it they would take its cores.
        "data": {"seed": seed, "eval": []},
        "logging": {"rollouts": False, "progress": False},
        "checkpoint": {"every_steps": 0},
        "runtime": {"seed": seed, "run_dir": str(run_dir)},
    }
    for part in (changes, case.changes):
        for section, values in part.items():
            data[section] |= values
    return resolve(data, "bench")


class Bench:
    """All runs of one comparison; `see` is told of each as it ends."""

    def __init__(
        self, config: RunConfig, options: BenchOptions, see: Callable[[str, dict[str, Any]], None]
    ) -> None:
        self.config, self.options, self._see = config, options, see
        cores = sorted(os.sched_getaffinity(0))
        self.cores = cores[: options.num_cores or len(cores)]
        # Every child inherits it, and the layout counts the cores it may use.
        os.sched_setaffinity(0, self.cores)
        self._difficulty = _difficulties(config)
        self.device = choose_device(config.runtime.device)
        staleness = config.orchestration.max_staleness
        self.window = Window.of(options.num_steps, staleness, START_UP_STEPS)
        self.sweep_window = Window.of(options.sweep_steps, staleness, START_UP_STEPS)

    def run(self) -> dict[str, Any]:
        """All cases of one seed before the next seed: a machine that slows down slows all."""
        options = self.options
        cases = [Case(mode.value, mode) for mode in options.modes]
        chosen = {case.name: self._best_split(case) for case in cases}
        ours = chosen.get(Mode.MULTI_VERSION.value)
        if options.ablations and ours is not None:
            cases += ABLATIONS
            chosen |= {case.name: (ours[0], {}) for case in ABLATIONS}
        runs: dict[str, list[dict[str, Any]]] = {case.name: [] for case in cases}
        for seed in options.seeds:
            for case in cases:
                split = chosen[case.name][0]
                runs[case.name].append(self._one(case, split, seed, options.num_steps))
        return {
            "cores": len(self.cores),
            "seeds": list(options.seeds),
            "steps": options.num_steps,
            "window": [self.window.first, self.window.last],
            "model": self.config.model.path,
            "rows": [_row(case, *chosen[case.name], runs[case.name]) for case in cases],
        }

    def _best_split(self, case: Case) -> tuple[Split, dict[str, float]]:
        if self.options.split is not None:
            return self.options.split, {}
        seed, num_steps = self.options.seeds[0], self.options.sweep_steps
        tried = {
            split: self._one(case, split, seed, num_steps, sweep=True)
            for split in splits_of(case.mode, len(self.cores))
        }
        best = max(tried, key=lambda split: tried[split]["tokens_per_s"])
        return best, {str(split): run["tokens_per_s"] for split, run in tried.items()}

    def _one(
        self, case: Case, split: Split, seed: int, num_steps: int, *, sweep: bool = False
    ) -> dict[str, Any]:
        name = f"{case.name.replace(' ', '_').replace(',', '')}-{split}-{seed}"
        run_dir = self.options.folder / ("sweep" if sweep else "runs") / name
        if (run_dir / "events").exists():
            raise UserError(f"{run_dir} already holds a run; choose another --runs folder")
        run_dir.mkdir(parents=True, exist_ok=True)
        config = case_config(self.config, case, split, seed, num_steps, run_dir)
        meter, gpu = _train(config, run_dir, self.device)
        window = self.sweep_window if sweep else self.window
        figures = run_figures(run_dir, window, self._difficulty)
        begin, end = figures.pop("begin"), figures.pop("end")
        cpu = figures["cores_used"] = meter.between(begin, end)
        figures["cpu_unused_ratio"] = max(0.0, 1 - sum(cpu.values()) / len(self.cores))
        figures["still_ratio"] = meter.still_between(begin, end)
        if gpu is not None:
            figures["device_idle_ratio"] = figures["still_ratio"] = gpu.idle_ratio(begin, end)
        if not sweep and self.config.data.eval:
            figures["eval"] = self._evaluate(run_dir)
        figures |= {"seed": seed, "split": str(split), "load_1m": os.getloadavg()[0]}
        self._see(f"{case.name} {split} seed {seed}{' (sweep)' if sweep else ''}", figures)
        return figures

    def _evaluate(self, run_dir: Path) -> Figures:
        from dora_rl.weights.run_models import find_model
        from dora_rl.worlds.evaluate_once import evaluate_once

        num = self.options.num_eval_prompts
        return evaluate_once(self.config, find_model(run_dir), num_prompts=num, num_samples=1)


def _train(config: RunConfig, run_dir: Path, device: str) -> tuple[CpuMeter, GpuMeter | None]:
    """One run to its end, in a process of its own, watched from outside."""
    path = run_dir.with_name(f"{run_dir.name}.json")  # beside it: a run begins in an empty folder
    path.write_text(config.model_dump_json(indent=1) + "\n")
    with (run_dir / "train.log").open("wb") as log:
        child = subprocess.Popen(
            [sys.executable, "-P", "-m", "dora_rl.cli", "train", str(path)], stdout=log, stderr=log
        )
        meter, gpu = CpuMeter(child.pid), start_meter(device)
        meter.start()
        try:
            status = child.wait(RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise UserError(f"{run_dir} did not end within {RUN_TIMEOUT_S:.0f} s") from None
        finally:
            if child.poll() is None:
                child.terminate()
                child.wait()
            meter.end()
            if gpu is not None:
                gpu.end()
    if status != 0:
        last = (run_dir / "train.log").read_text().strip().splitlines()[-1:]
        raise UserError(f"{run_dir} ended with status {status}: {' '.join(last)}")
    return meter, gpu


def _difficulties(config: RunConfig) -> Callable[[int], float | None]:
    """The expected length of a prompt's answer, where the data has a `difficulty` column."""
    from dora_rl.data.prompts import open_prompts

    tokenizer = open_tokenizer(Path(config.model.path), config.model.trust_remote_code)
    source = open_prompts(config.data, tokenizer)

    def difficulty(index: int) -> float | None:
        value = source.prompt(index).columns.get("difficulty")
        return float(value) if isinstance(value, int | float) else None

    return difficulty


def _row(
    case: Case, split: Split, tried: dict[str, float], runs: list[dict[str, Any]]
) -> dict[str, Any]:
    mean = {
        key: sum(run[key] for run in runs) / len(runs)
        for key, value in runs[0].items()
        if isinstance(value, int | float) and all(run[key] is not None for run in runs)
    }
    for name in ("sampled", "greedy") if "eval" in runs[0] else ():
        scores = [run["eval"][name] for run in runs]
        if None not in scores:  # an evaluation that failed has none
            mean[f"eval_{name}"] = sum(scores) / len(scores)
    return {
        "name": case.name,
        "mode": case.mode.value,
        "split": str(split),
        "split_parts": [split.num_instances, split.threads, split.learner_threads],
        "tried": tried,
        "mean": mean,
        "runs": runs,
    }


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Tokens/s of multi-version over each other mode: means over the seeds."""
    speed = {row["name"]: row["mean"]["tokens_per_s"] for row in result["rows"]}
    if (ours := speed.get(Mode.MULTI_VERSION.value)) is None:
        return {}
    others = (mode.value for mode in Mode if mode is not Mode.MULTI_VERSION)
    return {name: ours / speed[name] for name in others if name in speed}


# -- tables and the picture ------------------------------------------------------------------------


Column: TypeAlias = tuple[str, str, str]  # label, figure, format

SPEED: tuple[Column, ...] = (
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("wall s", "wall_s", ".1f"),
    ("GPU idle", "device_idle_ratio", ".2f"),
    ("CPU not used", "cpu_unused_ratio", ".2f"),
    ("nothing runs", "still_ratio", ".2f"),
    ("rollout idle", "rollout_idle_ratio", ".2f"),
    ("trainer idle", "trainer_idle_ratio", ".2f"),
)
PRICE: tuple[Column, ...] = (
    ("running", "requests_mean", ".0f"),
    ("staleness", "staleness_mean", ".2f"),
    ("mixed", "mixed_version_frac", ".2f"),
    ("discarded", "discarded_tokens", ".0f"),
    ("length bias", "length_bias", ".2f"),
    ("greedy", "eval_greedy", ".3f"),
    ("sampled", "eval_sampled", ".3f"),
)


def tables_of(result: dict[str, Any]) -> list[Table]:
    """How fast each mode was, and what that took: two tables that a terminal has room for."""
    begin, end = result["window"]
    seeds = ", ".join(map(str, result["seeds"]))
    title = f"{result['cores']} cores, seeds {seeds}, {result['steps']} steps"
    return [
        _table(f"{title}, steady state = steps {begin} to {end}", SPEED, result["rows"]),
        _table("what it took", PRICE, result["rows"]),
    ]


def _table(title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> Table:
    """Without the columns that no row has a figure for."""
    table = Table(title=title, title_justify="left", box=SIMPLE, collapse_padding=True)
    table.add_column("", no_wrap=True)
    table.add_column("split", no_wrap=True)
    known = [column for column in columns if any(column[1] in row["mean"] for row in rows)]
    for label, _, _ in known:
        table.add_column(label, justify="right")
    for row in rows:
        mean: dict[str, float] = row["mean"]
        cells = [format(mean[key], form) if key in mean else "-" for _, key, form in known]
        table.add_row(row["name"], row["split"], *cells)
    return table


def ratio_lines(result: dict[str, Any]) -> list[str]:
    return [f"multi_version / {name}: {ratio:.2f}x" for name, ratio in ratios(result).items()]


def draw_bench(result: dict[str, Any], path: Path) -> None:
    """Bars of the speed with every seed as a dot, and where the time went."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    places = list(range(len(rows)))
    figure, (speed, idle) = plt.subplots(
        1, 2, figsize=(12, 1.6 + 0.5 * len(rows)), layout="constrained", sharey=True
    )
    colours = ["#1f6f8b" if row["mode"] == "multi_version" else "#b9c4c9" for row in rows]
    speed.barh(places, [row["mean"]["tokens_per_s"] for row in rows], color=colours)
    for place, row in zip(places, rows, strict=True):
        values = [run["tokens_per_s"] for run in row["runs"]]
        speed.plot(values, [place] * len(values), "k.", markersize=5)
    speed.set(title="trained tokens/s, steady state (dots: seeds)", yticks=places)
    speed.set_yticklabels([row["name"] for row in rows])
    speed.invert_yaxis()
    on_gpu = all("device_idle_ratio" in row["mean"] for row in rows)
    device = ("device_idle_ratio", "GPU idle") if on_gpu else ("cpu_unused_ratio", "CPU not used")
    bars = (
        (-0.27, *device, "#444444"),
        (0.0, "rollout_idle_ratio", "rollout idle", "#e08e45"),
        (0.27, "trainer_idle_ratio", "trainer idle", "#7aa95c"),
    )
    for offset, key, label, colour in bars:
        shifted, shares = [place + offset for place in places], [row["mean"][key] for row in rows]
        idle.barh(shifted, shares, height=0.25, color=colour, label=label)
    idle.set(title="share of the time", xlim=(0, 1))
    idle.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# -------------------------------------------------------------------------------------------------
# What a finished run was worth, from its directory alone: speed, idleness, staleness, losses.
#
# Speeds are of the steady state: from the commit of the last start-up step to the commit of the
# last step before the run drains (`Window`), the same steps for every mode. Tokens are those
# trained, prompts included. Never looks at wall clocks outside the event log.
#
#     slots   ____####################______      a step's tokens count at its commit
#             start-up |  steady state | drain


@dataclass(frozen=True, slots=True)
class Window:
    """Steps `first`..`last` count; the commit of step `first` - 1 starts the clock."""

    first: int
    last: int

    @staticmethod
    def of(num_steps: int, max_staleness: int, num_skipped: int) -> Window:
        if (last := num_steps - 1 - max_staleness) < num_skipped:
            raise UserError(
                f"{num_steps} steps are too few: {num_skipped} start up, {max_staleness} drain"
            )
        return Window(num_skipped, last)


@dataclass(frozen=True, slots=True)
class LogFigures:
    """From the event log, on the controller's clock."""

    begin: float
    end: float
    first_issue: float
    last_commit: float
    rollout_idle_ratio: float
    requests_mean: float  # running at once, while an instance ran any
    issued: list[int]  # prompts of the groups
    trained: list[int]


def read_log(events: Path, window: Window) -> LogFigures:
    history = read_history(events)
    commits = {
        step: record.committed_s
        for step, record in history.steps.items()
        if not np.isnan(record.committed_s)
    }
    if missing := {window.first - 1, window.last} - commits.keys():
        raise UserError(f"{events.parent} did not commit step {min(missing)}; see its logs/")
    begin, end = commits[window.first - 1], commits[window.last]
    spans, num = history.placements.all_spans(history.now_s), len(history.names)
    running = _running_s(spans, begin, end, num)
    for instance, since, until in history.asleep:
        here = rows_of(spans, spans["instance"] == instance)
        running -= _running_s(here, max(since, begin), min(until, end), num)
    busy, request = running.tolist()
    prompts, began = history.groups["prompt"], history.began_at
    return LogFigures(
        begin=began + begin,
        end=began + end,
        first_issue=began + float(np.nanmin(history.groups["issued_s"], initial=np.inf)),
        last_commit=began + max(commits.values()),
        rollout_idle_ratio=1 - busy / ((end - begin) * max(1, num)),
        requests_mean=request / max(busy, 1e-9),
        issued=prompts[prompts >= 0].tolist(),
        trained=prompts[history.trained()].tolist(),
    )


def _running_s(spans: Columns, begin: float, end: float, num: int) -> NDArray[np.float64]:
    """Seconds with a request, over all instances, and seconds of all requests in this window."""
    starts, ends = (np.clip(spans[name], begin, max(begin, end)) for name in ("begin", "end"))
    busy = busy_s(starts, ends, spans["instance"], num).sum()
    return np.array([busy, (ends - starts).sum()])


def run_figures(
    run_dir: Path, window: Window, difficulty: Callable[[int], float | None]
) -> dict[str, Any]:
    """The figures of one run; `difficulty` maps a prompt to its expected length, if known."""
    log = read_log(run_dir / "events", window)
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    steps = {line["step"]: line for line in lines if "step" in line}
    inside = [steps[step] for step in range(window.first, window.last + 1)]
    took, whole = log.end - log.begin, log.last_commit - log.first_issue
    return {
        "tokens_per_s": sum(line["train/tokens"] for line in inside) / took,
        "tokens_per_s_whole": sum(line["train/tokens"] for line in steps.values()) / whole,
        "steps_per_s": len(inside) / took,
        "wall_s": whole,
        "steady_s": took,
        "trainer_idle_ratio": 1 - sum(line.get("time/train", 0.0) for line in inside) / took,
        "rollout_idle_ratio": log.rollout_idle_ratio,
        "requests_mean": log.requests_mean,
        "weight_sync_s": _mean(line.get("time/weight_sync", 0.0) for line in inside),
        "train_s": _mean(line.get("time/train", 0.0) for line in inside),
        "staleness_mean": _mean(line["staleness/mean"] for line in inside),
        "staleness_max": summary["staleness_max"],
        "mixed_version_frac": summary["mixed_version_frac"],
        "discarded_tokens": summary["discarded_tokens"],
        "length_mean": _mean(line["response_length/mean"] for line in inside),
        "length_p99": _mean(line["response_length/p99"] for line in inside),
        "length_bias": length_bias(log, difficulty),
        "reward_last": summary["reward_last"],
        "migrations": summary["migrations"],
        "begin": log.begin,
        "end": log.end,
    }


def length_bias(log: LogFigures, difficulty: Callable[[int], float | None]) -> float | None:
    """Expected length of what was trained over that of what was issued; 1 is unbiased."""
    known, kept = (
        [value for value in map(difficulty, prompts) if value is not None]
        for prompts in (log.issued, log.trained)
    )
    if not known or len(known) < len(log.issued):
        return None
    return _mean(kept) / _mean(known)


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / max(1, len(held))
