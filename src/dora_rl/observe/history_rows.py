"""The frequent part of a run's history: whole tables at a time, never row by row.

Each function puts one chunk of columns into the tables of a `History`. Late or repeated messages
(of an instance that was given up, say) change nothing that is there.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.columns import Columns, Rare, Table
from dora_rl.observe.growing import Growing
from dora_rl.observe.placements import KEEP, Rows, Why
from dora_rl.types import Finish

if TYPE_CHECKING:
    from dora_rl.observe.history import History

ENDS = tuple(act.End)  # the code of an end is its place here
FINISHES = tuple(Finish)
_PLACES = {
    act.Unpark: Why.UNPARKED,
    act.Reversion: Why.REVERSED,
    ev.SampleFailed: Why.FAILED,
    act.Abort: Why.ABORTED,
}
_LOSSES = (ev.InstanceLost, act.Restart, ev.Resumed)


def new_groups() -> Growing:
    """`end` -1: outstanding; times nan and steps -1: not yet. `step` trained it."""
    return Growing(
        version=("i4", -1), prompt=("i8", -1), issued_s=("f8", np.nan), ready_s=("f8", np.nan),
        fed_s=("f8", np.nan), fed_step=("i4", -1), ended_s=("f8", np.nan), end=("i1", -1),
        step=("i4", -1), finished=("i4", 0), scored=("i4", 0), reward_sum=("f8", 0),
        tokens=("i8", 0), moves=("i4", 0), mixed=("i4", 0),
    )  # fmt: skip


def new_samples() -> Growing:
    return Growing(
        tokens=("i4", -1), reward=("f4", np.nan), finish=("i1", -1), finished_s=("f8", np.nan),
        instance=("i4", -1), mixed=("?", 0),
    )  # fmt: skip


def new_moves() -> Growing:
    return Growing(
        now=("f8", 0), slot=("i4", 0), src=("i4", 0), dst=("i4", 0), num_bytes=("i8", 0),
        num_tokens=("i8", 0),
    )  # fmt: skip


def _codes(texts: list[str], words: tuple[str, ...]) -> NDArray[Any]:
    """For each text its place among `words`, -1 if it is none of them."""
    return np.array([words.index(text) if text in words else -1 for text in texts] or [-1])


def add_groups(history: History, chunk: Columns) -> None:
    issued, groups = chunk.tables[act.IssueGroup], history.groups
    if len(issued["at"]):
        groups.reach(int(issued["group"].max()) + 1)
        history.samples.reach(len(groups) * history.params.group_size)
        at = issued["group"]
        groups["version"][at], groups["prompt"][at] = issued["version"], issued["prompt"]
        groups["issued_s"][at] = history.seconds(issued)
    fed = chunk.tables[act.Feed]
    now = history.seconds(fed)
    groups["fed_s"][fed["group"]], groups["fed_step"][fed["group"]] = now, fed["step"]
    steps, first = np.unique(fed["step"], return_index=True)
    for step, now_s in zip(steps.tolist(), now[first].tolist(), strict=True):
        record = history.step(step)
        record.fed_s = now_s if np.isnan(record.fed_s) else record.fed_s
    ended = chunk.tables[act.EndGroup]
    at = ended["group"]
    groups["ended_s"][at], groups["step"][at] = history.seconds(ended), ended["step"]
    groups["end"][at] = _codes(chunk.texts, ENDS)[ended["end"]]
    told = np.array([bool(text) for text in chunk.texts] or [False])[ended["reason"]]
    for group, code in zip(at[told].tolist(), ended["reason"][told].tolist(), strict=True):
        history.reasons[group] = chunk.texts[code]


def add_samples(history: History, chunk: Columns) -> None:
    groups, samples = history.groups, history.samples
    done, slots = _with_slots(history, chunk.tables[ev.SampleFinished])
    new = samples["tokens"][slots] < 0
    samples["tokens"][slots] = done["num_tokens"]
    samples["finish"][slots] = _codes(chunk.texts, FINISHES)[done["finish"]]
    samples["finished_s"][slots] = history.seconds(done)
    samples["instance"][slots] = _instances(history, chunk, done["instance"])
    samples["mixed"][slots] = done["segments"] > 1
    at = done["group"][new]
    _count(groups, "finished", at)
    _count(groups, "mixed", at, done["segments"][new] > 1)
    _count(groups, "tokens", at, done["num_tokens"][new])
    scored, slots = _with_slots(history, chunk.tables[ev.Scored])
    good = np.isnan(samples["reward"][slots]) & np.isfinite(scored["reward"])
    at = scored["group"][good]
    samples["reward"][slots[good]] = scored["reward"][good]
    _count(groups, "scored", at)
    _count(groups, "reward_sum", at, scored["reward"][good])
    groups["ready_s"][at] = history.seconds(scored)[good]  # the last of a group stays


def _count(groups: Growing, name: str, at: NDArray[Any], by: NDArray[Any] | None = None) -> None:
    """Add to a column at these groups, which may repeat. A chunk touches a short range of them."""
    if len(at):
        low = int(at.min())
        sums = np.bincount(at - low, by)
        column = groups[name][low : low + len(sums)]
        column += sums.astype(column.dtype)


def _with_slots(history: History, table: Table) -> tuple[Table, NDArray[Any]]:
    """The last row of every request, in the order of the log, and the requests' slots."""
    slots = table["group"] * history.params.group_size + table["sample"]
    if repeats(slots):  # a late or repeated message
        _, last = np.unique(slots[::-1], return_index=True)
        keep = np.sort(len(slots) - 1 - last)
        table, slots = {name: column[keep] for name, column in table.items()}, slots[keep]
    known = slots < len(history.samples)
    if not known.all():
        table, slots = {name: column[known] for name, column in table.items()}, slots[known]
    return table, slots


def repeats(slots: NDArray[Any]) -> bool:
    """Whether a request is there twice. Those of a chunk are mostly close to each other."""
    if len(slots) and np.ptp(slots) < 16 * len(slots):
        return bool((np.bincount(slots - slots.min()) > 1).any())
    ordered = np.sort(slots)
    return bool((ordered[1:] == ordered[:-1]).any())


def add_moves(history: History, chunk: Columns) -> None:
    moved = chunk.tables[ev.Moved]
    _count(history.groups, "moves", moved["group"])
    history.moves.extend(
        {
            "now": history.seconds(moved),
            "slot": moved["group"] * history.params.group_size + moved["sample"],
            "src": _instances(history, chunk, moved["src"]),
            "dst": _instances(history, chunk, moved["dst"]),
            "num_bytes": moved["num_bytes"],
            "num_tokens": moved["num_tokens"],
        }
    )


def _instances(history: History, chunk: Columns, codes: NDArray[Any]) -> NDArray[Any]:
    table = np.full(len(chunk.texts) + 1, -1)
    for code in np.flatnonzero(np.bincount(codes)).tolist():
        table[code] = history.instance(chunk.texts[code])
    return table[codes]


def stays_of(
    history: History, chunk: Columns
) -> Iterator[tuple[Rows, tuple[int | None, float] | None]]:
    """Placement rows in stretches; after each, the instance that was lost there (None: all)."""
    parts = [_dispatched(history, chunk), _finished(history, chunk), _moved(history, chunk)]
    parts.append(_parked(history, chunk))
    few = [_one(history, rare) for rare in chunk.rare if type(rare.value) in _PLACES]
    if few:
        parts.append(Rows(*(np.array(column) for column in zip(*few, strict=True))))
    rows = Rows.join(parts)
    begin = -1
    for rare in chunk.rare:
        if type(rare.value) in _LOSSES:
            here = (rows.at > begin) & (rows.at < rare.at)
            name = getattr(rare.value, "instance", None)
            lost = history.instance(name) if name is not None else None
            yield rows.at_places(here), (lost, history.seconds_at(rare.at, rare.now))
            begin = rare.at
    yield rows.at_places(rows.at > begin) if begin >= 0 else rows, None


def _dispatched(history: History, chunk: Columns) -> Rows:
    table = chunk.tables[act.Dispatch]
    codes = table["samples"]
    used = np.flatnonzero(np.bincount(codes))
    lists = [np.array(json.loads(f"[{chunk.texts[code]}]"), np.int64) for code in used]
    size_of, begin_of = np.zeros((2, len(chunk.texts) + 1), np.int64)
    size_of[used] = [len(one) for one in lists]
    begin_of[used] = np.cumsum(size_of[used]) - size_of[used]
    sizes = size_of[codes]
    which = np.repeat(np.arange(len(codes)), sizes)
    within = np.arange(len(which)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    samples = np.concatenate([*lists, np.zeros(0, np.int64)])[begin_of[codes][which] + within]
    slot = table["group"][which] * history.params.group_size + samples
    instance = _instances(history, chunk, table["instance"])[which]
    now = history.seconds(table)[which]
    why = np.full(len(which), Why.DISPATCHED)
    return Rows(table["at"][which], now, slot, instance, table["version"][which], why)


def _finished(history: History, chunk: Columns) -> Rows:
    return _plain_rows(history, chunk, ev.SampleFinished, "instance", Why.FINISHED)


def _moved(history: History, chunk: Columns) -> Rows:
    return _plain_rows(history, chunk, ev.Moved, "dst", Why.MOVED)


def _parked(history: History, chunk: Columns) -> Rows:
    return _plain_rows(history, chunk, act.Park, "instance", Why.PARKED)


def _plain_rows(history: History, chunk: Columns, kind: type, where: str, why: Why) -> Rows:
    table = chunk.tables[kind]
    slot = table["group"] * history.params.group_size + table["sample"]
    instance = _instances(history, chunk, table[where])
    keep, reason = np.full(len(slot), KEEP), np.full(len(slot), why)
    return Rows(table["at"], history.seconds(table), slot, instance, keep, reason)


def _one(history: History, rare: Rare) -> tuple[float, ...]:
    """The columns of `Rows` for an event that is rare."""
    value = rare.value
    return (
        rare.at,
        history.seconds_at(rare.at, rare.now),
        history.slot(*value.request),
        history.instance(value.instance),
        getattr(value, "version", KEEP),
        int(_PLACES[type(value)]),
    )
