"""What a finished run was worth, from its directory alone: speed, idleness, staleness, losses.

Speeds are of the steady state: from the commit of the last start-up step to the commit of the last
step before the run drains (`Window`), the same steps for every mode. Tokens are those trained,
prompts included. Never looks at wall clocks outside the event log.

    slots   ____####################______      a step's tokens count at its commit
            start-up |  steady state | drain
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.observe.columns import Table, rows_of
from dora_rl.observe.history import read_history
from dora_rl.observe.placements import busy_s
from dora_rl.types import UserError


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


def _running_s(spans: Table, begin: float, end: float, num: int) -> NDArray[np.float64]:
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
