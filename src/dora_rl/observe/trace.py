"""`dora-rl trace RUN`: the run as a Chrome trace, for ui.perfetto.dev or chrome://tracing.

    learner                 a slice per step: filling, then training; waits for older groups
    one process per         its requests in lanes (a slice per stay, named group·sample, with the
    instance                version), loads of weights, incidents
    rewards                 groups being scored: from the last finished sample to ready
    counters                groups ready and not taken, running requests per instance, staleness

A migration is a flow arrow from the stay it leaves to the stay it begins. Events are written as
they are made: memory does not grow with the file.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dora_rl.observe.history import History
from dora_rl.observe.placements import Why, lanes
from dora_rl.types import UserError

LEARNER, REWARDS, FIRST_INSTANCE = 1, 2, 10
_LOADS = 0  # the thread of an instance that shows its loads; lanes come after it
# Names of Chrome's fixed palette; neighbours differ.
COLOURS = (
    "thread_state_running",
    "rail_animation",
    "good",
    "rail_response",
    "thread_state_iowait",
    "terrible",
    "yellow",
)
Event: TypeAlias = dict[str, Any]


def write_trace(history: History, path: Path) -> int:
    """Write the file (compressed if its name ends in .gz); returns the number of events."""
    number, packed = 0, path.suffix == ".gz"
    try:
        with gzip.open(path, "wt", compresslevel=5) if packed else path.open("w") as file:
            file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
            for number, event in enumerate(trace_events(history), start=1):
                file.write((",\n" if number > 1 else "") + json.dumps(event, separators=(",", ":")))
            file.write("\n]}\n")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from error
    return number


def trace_events(history: History) -> Iterator[Event]:
    """Every event, in no order."""
    yield from _names(history)
    yield from _learner(history)
    yield from _stays(history)
    yield from _loads(history)
    yield from _rewards(history)
    yield from _counters(history)
    for incident in history.incidents:
        code = history.names.get(incident.instance)
        yield {
            "ph": "i",
            "s": "p",
            "name": (f"{incident.kind}: {incident.text}" if incident.text else incident.kind),
            "pid": LEARNER if code is None else FIRST_INSTANCE + code,
            "tid": 0,
            "ts": _us(incident.now_s),
        }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def _slice(name: str, pid: int, tid: int, begin: float, end: float, **args: Any) -> Event:
    colour = args.pop("colour", None)
    shade = {} if colour is None else {"cname": COLOURS[colour % len(COLOURS)]}
    times = {"ts": _us(begin), "dur": max(_us(end) - _us(begin), 0.1)}
    return {"ph": "X", "name": name, "pid": pid, "tid": tid, **times, **shade, "args": args}


def _names(history: History) -> Iterator[Event]:
    named = {LEARNER: "learner", REWARDS: "rewards"}
    named |= {FIRST_INSTANCE + code: name for name, code in history.names.items()}
    ordered = [LEARNER, *(FIRST_INSTANCE + history.names[n] for n in sorted(history.names))]
    for place, pid in enumerate([*ordered, REWARDS]):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": named[pid]}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": place}}
    threads = {(LEARNER, 0): "steps", (LEARNER, 1): "filling", (LEARNER, 2): "waits"}
    threads |= {(pid, _LOADS): "loads" for pid in ordered[1:]}
    for (pid, tid), name in threads.items():
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}


def _learner(history: History) -> Iterator[Event]:
    for step, record in sorted(history.steps.items()):
        closed = history.or_now(record.closed_s)
        if not np.isnan(record.fed_s):
            yield _slice(f"fill {step}", LEARNER, 1, record.fed_s, closed, step=step, colour=step)
        if not np.isnan(record.closed_s):
            done = history.or_now(record.committed_s)
            yield _slice(f"train {step}", LEARNER, 0, closed, done, step=step, colour=step)
    for wait, until in history.ended_waits():
        yield _slice(
            f"step {wait.step} waits", LEARNER, 2, wait.begin_s, until, groups=list(wait.groups)
        )


def _stays(history: History) -> Iterator[Event]:
    spans, size = history.placements.all_spans(history.now_s), history.params.group_size
    spans["lane"] = lanes(spans["begin"], spans["end"], spans["instance"])
    columns = ("begin", "end", "slot", "instance", "version", "began", "ended", "lane")
    order = np.lexsort((spans["begin"], spans["slot"]))
    rows = zip(*(spans[name][order].tolist() for name in columns), strict=True)
    before: tuple[int, int, int, float] | None = None  # slot, pid, tid and end of the last stay
    flow = 0
    for begin, end, slot, instance, version, began, ended, track in rows:
        pid, tid = FIRST_INSTANCE + instance, track + 1
        group, sample = divmod(slot, size)
        why = Why(ended).name.lower() if ended >= 0 else "running"
        yield _slice(
            f"{group}·{sample}", pid, tid, begin, end, group=group, sample=sample,
            version=version, began=Why(began).name.lower(), ended=why, colour=version,
        )  # fmt: skip
        if began == Why.MOVED and before is not None and before[0] == slot:
            flow += 1
            arrow = {"name": "move", "cat": "move", "id": flow}
            yield {
                "ph": "s",
                **arrow,
                "pid": before[1],
                "tid": before[2],
                "ts": (_us(before[3]) - 0.1),
            }
            yield {"ph": "f", "bp": "e", **arrow, "pid": pid, "tid": tid, "ts": _us(begin)}
        before = (slot, pid, tid, end)


def _loads(history: History) -> Iterator[Event]:
    for load in history.loads:
        end = history.or_now(load.end_s)
        told = {"donor": load.donor or "store"} | ({"failed": load.failed} if load.failed else {})
        yield _slice(
            f"load v{load.version}", FIRST_INSTANCE + load.instance, _LOADS, load.begin_s, end,
            version=load.version, colour=load.version, **told,
        )  # fmt: skip


def _rewards(history: History) -> Iterator[Event]:
    """From the last finished sample of a group to its last reward."""
    groups, size = history.groups, history.params.group_size
    num = len(groups)
    finished = history.samples["finished_s"][: num * size].reshape(num, size)
    which = np.flatnonzero((groups["scored"] >= size) & ~np.isnan(finished).any(axis=1))
    begin, end = finished[which].max(axis=1, initial=0.0), groups["ready_s"][which]
    track = lanes(begin, end, np.zeros(len(which), np.int64))
    rows = zip(which.tolist(), begin.tolist(), end.tolist(), track.tolist(), strict=True)
    for group, start, stop, tid in rows:
        mean = float(groups["reward_sum"][group]) / size
        yield _slice(
            f"score {group}", REWARDS, tid, start, stop, group=group, reward=mean,
            colour=int(groups["version"][group]),
        )  # fmt: skip


def _counters(history: History) -> Iterator[Event]:
    groups = history.groups
    scored = groups["scored"] >= history.params.group_size
    left = np.fmin(groups["fed_s"], groups["ended_s"])[scored]
    yield from _level("ready groups", LEARNER, groups["ready_s"][scored], left[~np.isnan(left)])
    spans = history.placements.all_spans(history.now_s)
    for code in history.names.values():
        here = spans["instance"] == code
        yield from _level(
            "running requests", FIRST_INSTANCE + code, spans["begin"][here], spans["end"][here]
        )
    for step, record in sorted(history.steps.items()):
        mine = (groups["step"] == step) & (groups["end"] >= 0)
        if mine.any() and not np.isnan(record.committed_s):
            values = step - groups["version"][mine]
            yield {"ph": "C", "name": "staleness", "pid": LEARNER, "ts": _us(record.committed_s),
                   "args": {"mean": float(values.mean()), "max": int(values.max())}}  # fmt: skip


def _level(name: str, pid: int, ups: Any, downs: Any) -> Iterator[Event]:
    """A counter that goes up and down by one; of many changes at one time the last is written."""
    times = np.concatenate([ups, downs])
    change = np.concatenate([np.ones(len(ups), np.int64), -np.ones(len(downs), np.int64)])
    order = np.argsort(times, kind="stable")
    times, level = times[order], np.cumsum(change[order])
    last = np.concatenate([times[1:] != times[:-1], np.ones(min(1, len(times)), bool)])
    for now, value in zip(times[last].tolist(), level[last].tolist(), strict=True):
        yield {"ph": "C", "name": name, "pid": pid, "ts": _us(now), "args": {"count": value}}
