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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import Entry, read
from dora_rl.types import InstanceId, RequestId, UserError


@dataclass(frozen=True, slots=True)
class Window:
    """Steps `first`..`last` count; the commit of step `first` - 1 starts the clock."""

    first: int
    last: int

    @staticmethod
    def of(num_steps: int, max_staleness: int, num_skipped: int) -> Window:
        last = num_steps - 1 - max_staleness
        if last < num_skipped:
            raise UserError(
                f"{num_steps} steps are too few: {num_skipped} start up, {max_staleness} drain"
            )
        return Window(num_skipped, last)


@dataclass(slots=True)
class Busy:
    """How long an instance had a request to decode and was awake."""

    awake: bool = True
    requests: set[RequestId] = field(default_factory=set[RequestId])
    since: float = 0.0
    busy_s: float = 0.0
    request_s: float = 0.0

    def account(self, now: float, begin: float, end: float) -> None:
        """Count the time since the last change, as far as it lies in the window."""
        took = min(now, end) - max(self.since, begin)
        if took > 0 and self.awake and self.requests:
            self.busy_s += took
            self.request_s += took * len(self.requests)
        self.since = now


@dataclass(frozen=True, slots=True)
class LogFigures:
    """From the event log; seconds are of the window unless they say otherwise."""

    begin: float
    end: float
    first_issue: float
    last_commit: float
    rollout_idle_ratio: float
    requests_mean: float  # running at once, while an instance ran any
    issued: dict[int, int]  # group -> prompt
    trained: frozenset[int]


def read_log(events: Path, window: Window) -> LogFigures:
    entries = [record for record in read(events) if isinstance(record, Entry)]
    commits = {
        entry.event.step: entry.now
        for entry in entries
        if isinstance(entry.event, ev.StepCommitted)
    }
    missing = {window.first - 1, window.last} - commits.keys()
    if missing:
        raise UserError(f"{events.parent} did not commit step {min(missing)}; see its logs/")
    begin, end = commits[window.first - 1], commits[window.last]
    fleet: dict[InstanceId, Busy] = {}
    issued: dict[int, int] = {}
    trained: set[int] = set()
    first_issue = 0.0
    for entry in entries:
        _follow(fleet, entry, begin, end)
        for action in entry.actions:
            if isinstance(action, act.IssueGroup):
                first_issue = first_issue or entry.now
                issued[action.group] = action.prompt
            elif isinstance(action, act.EndGroup) and action.end is act.End.TRAINED:
                trained.add(action.group)
    busy_s = sum(busy.busy_s for busy in fleet.values())
    return LogFigures(
        begin=begin,
        end=end,
        first_issue=first_issue,
        last_commit=max(commits.values()),
        rollout_idle_ratio=1 - busy_s / ((end - begin) * max(1, len(fleet))),
        requests_mean=sum(b.request_s for b in fleet.values()) / max(busy_s, 1e-9),
        issued=issued,
        trained=frozenset(trained),
    )


def _follow(fleet: dict[InstanceId, Busy], entry: Entry, begin: float, end: float) -> None:
    """Keep the instances' running requests up to date."""

    def changed(name: InstanceId) -> Busy:
        busy = fleet.setdefault(name, Busy(since=entry.now))
        busy.account(entry.now, begin, end)
        return busy

    for what in (entry.event, *entry.actions):
        match what:
            case ev.InstanceJoined():
                busy = changed(what.instance)
                busy.requests, busy.awake = set(), True  # a new life begins with nothing
            case ev.Moved():
                changed(what.src).requests.discard(what.request)
                changed(what.dst).requests.add(what.request)
            case act.Dispatch():
                new = {RequestId(what.group, sample) for sample in what.samples}
                changed(what.instance).requests.update(new)
            case act.Unpark() | act.Reversion():
                changed(what.instance).requests.add(what.request)
            case ev.SampleFinished() | ev.SampleFailed() | act.Abort() | act.Park():
                changed(what.instance).requests.discard(what.request)
            case act.Sleep() | act.Wake():
                changed(what.instance).awake = isinstance(what, act.Wake)
            case _:
                pass


def run_figures(
    run_dir: Path, window: Window, difficulty: Callable[[int], float | None]
) -> dict[str, Any]:
    """The figures of one run; `difficulty` maps a prompt to its expected length, if known."""
    log = read_log(run_dir / "events", window)
    summary = json.loads((run_dir / "summary.json").read_text())
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if "step" in line}
    inside = [steps[step] for step in range(window.first, window.last + 1)]
    took = log.end - log.begin
    whole = log.last_commit - log.first_issue
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
    issued = [difficulty(prompt) for prompt in log.issued.values()]
    trained = [difficulty(log.issued[group]) for group in log.trained if group in log.issued]
    known = [value for value in issued if value is not None]
    kept = [value for value in trained if value is not None]
    if not known or len(known) < len(issued):
        return None
    return _mean(kept) / _mean(known)


def _mean(values: Iterable[float]) -> float:
    held = list(values)
    return sum(held) / max(1, len(held))
