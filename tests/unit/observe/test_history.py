"""The history that people look at agrees with the audit and with a plain walk over the log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit import audit
from dora_rl.observe.columns import LogTail, columns
from dora_rl.observe.eventlog import Entry, encode_entry
from dora_rl.observe.history import ENDS, History, read_history, repeats
from dora_rl.observe.placements import busy_s, coverage, lanes
from dora_rl.observe.segments import SegmentReaders, segments
from dora_rl.sim.soak import Soak
from dora_rl.types import Mode, RequestId
from tests.kit.simulated_logs import resumed_run, whole_run
from tests.unit.observe.plain_columns import plain_columns

Stay = tuple[RequestId, str, int, float, float]


def follow(history: History, tail: LogTail) -> bool:
    """Bring a history up to date; true if there was anything new."""
    before = history.num_entries
    for read in tail.columns():
        history.add(read)
    return history.num_entries > before


def history_of(entries: list[Entry], per_chunk: int) -> History:
    history = History()
    for begin in range(0, len(entries), per_chunk):
        history.add(columns(b"".join(map(encode_entry, entries[begin : begin + per_chunk]))))
    return history


def plain_stays(entries: list[Entry]) -> list[Stay]:
    """Entry by entry, with a dictionary of what is open."""
    opened: dict[RequestId, tuple[str, int, float]] = {}
    found: list[Stay] = []
    version_of: dict[RequestId, int] = {}
    lives: dict[str, int] = {}

    def close(request: RequestId, now: float) -> None:
        if request in opened:
            found.append((request, *opened.pop(request), now))

    def begin(request: RequestId, name: str, now: float, version: int | None = None) -> None:
        close(request, now)
        version_of[request] = version_of.get(request, -1) if version is None else version
        opened[request] = (name, version_of[request], now)

    def end(request: RequestId, name: str, now: float) -> None:
        if request in opened and opened[request][0] == name:
            close(request, now)

    def lose(name: str | None, now: float) -> None:
        for request in [r for r, stay in opened.items() if name in (None, stay[0])]:
            close(request, now)

    offset = -entries[0].now
    last = 0.0
    for entry in entries:
        if isinstance(entry.event, ev.Resumed):
            offset = last - entry.now  # the pause before it does not count
        last = now = entry.now + offset
        for value in (entry.event, *entry.actions):
            match value:
                case act.Dispatch():
                    for sample in value.samples:
                        rid = RequestId(value.group, sample)
                        begin(rid, value.instance, now, value.version)
                case ev.Moved():
                    begin(value.request, value.dst, now)
                case act.Unpark() | act.Reversion():
                    begin(value.request, value.instance, now, value.version)
                case ev.SampleFinished() | ev.SampleFailed() | act.Park() | act.Abort():
                    end(value.request, value.instance, now)
                case ev.InstanceLost() | act.Restart():
                    lose(value.instance, now)
                case ev.InstanceJoined():
                    if lives.get(value.instance, value.life) != value.life:
                        lose(value.instance, now)  # nobody saw it go
                    lives[value.instance] = value.life
                case ev.Resumed():
                    lose(None, now)
                case _:
                    pass
    return found


def stays_of(history: History) -> list[Stay]:
    spans, size, names = history.placements.spans, history.params.group_size, list(history.names)
    rows = zip(*(spans[n] for n in ("slot", "instance", "version", "begin", "end")), strict=True)
    return [
        (RequestId(int(s) // size, int(s) % size), names[int(i)], int(v), float(b), float(e))
        for s, i, v, b, e in rows
    ]


def same(some: list[Stay], others: list[Stay]) -> None:
    some, others = (
        sorted(some, key=lambda s: (s[0], s[3])),
        sorted(others, key=lambda s: (s[0], s[3])),
    )
    assert [stay[:3] for stay in some] == [stay[:3] for stay in others]
    times = [[stay[3:] for stay in stays] for stays in (some, others)]
    np.testing.assert_allclose(times[0], times[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("per_chunk", [7, 100, 10_000])
@pytest.mark.parametrize("mode", list(Mode))
def test_stays_are_those_of_a_plain_walk(mode: Mode, per_chunk: int) -> None:
    entries = whole_run(mode)
    history = history_of(entries, per_chunk)
    same(stays_of(history), plain_stays(entries))
    assert not (history.placements.open["instance"] >= 0).any() or mode is Mode.REPLICATION


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_stays_are_right_where_everything_breaks(seed: int) -> None:
    """Dying instances, learners and controllers, late and repeated messages."""
    soak = Soak(seed)
    soak.run()
    entries = soak.log.entries
    same(stays_of(history_of(entries, 50)), plain_stays(entries))
    data = b"".join(map(encode_entry, entries))
    fast, plain = columns(data), plain_columns(data)
    assert [r.value for r in fast.rare] == [r.value for r in plain.rare]
    for kind, table in fast.tables.items():
        for name in set(table) - {"instance", "src", "dst", "finish", "end", "reason"}:
            np.testing.assert_array_equal(table[name], plain.tables[kind][name])


@pytest.mark.parametrize("mode", list(Mode))
def test_figures_are_those_of_the_audit(mode: Mode) -> None:
    entries = resumed_run(mode)
    history, figures = history_of(entries, 40), audit(entries).figures
    groups = history.groups
    trained = groups["end"] == ENDS.index(act.End.TRAINED)
    assert len(groups) == figures.groups_issued
    assert int(trained.sum()) == figures.groups_trained
    assert int((groups["end"] == ENDS.index(act.End.SURPLUS)).sum()) == figures.groups_surplus
    staleness = (groups["step"] - groups["version"])[trained]
    assert np.bincount(staleness).tolist() == list(figures.staleness_counts)
    assert int(groups["tokens"][trained].sum()) == figures.tokens_trained
    assert len(history.moves) == figures.migrations
    assert int(history.moves["num_bytes"].sum()) == figures.kv_bytes_moved
    mixed = groups["mixed"][trained].sum() / groups["scored"][trained].sum()
    assert mixed == pytest.approx(figures.mixed_version_frac)
    assert history.committed == figures.steps and history.num_entries == figures.num_entries
    assert history.stop is not None and history.stop.done


def test_time_goes_on_over_a_resume_with_another_clock() -> None:
    entries = whole_run(Mode.MULTI_VERSION)
    place = len(entries) // 2
    params = entries[0].event.params  # type: ignore[union-attr]
    again = Entry(place, 5.0, ev.Resumed(params), [])
    later = [Entry(e.number + 1, e.now - 1e4, e.event, e.actions) for e in entries[place:]]
    moved = [Entry(e.number, e.now + 2e5, e.event, e.actions) for e in entries[:place]]
    history = history_of([*moved, again, *later], 30)
    before = entries[place - 1].now - entries[0].now
    resumed = next(i for i in history.incidents if i.kind == "resumed")
    assert resumed.now_s == pytest.approx(before)
    issued = history.groups["issued_s"]
    assert issued[0] < before


def test_a_growing_log_is_read_once_and_torn_lines_wait(tmp_path: Path) -> None:
    entries = whole_run(Mode.MULTI_VERSION)
    lines = [encode_entry(entry) for entry in entries]
    first, second = tmp_path / "000000000000.jsonl", tmp_path / f"{200:012d}.jsonl"
    history, tail = History(), LogTail(tmp_path)
    first.write_bytes(b"".join(lines[:100]) + lines[100][:30])
    assert follow(history, tail) and history.num_entries == 100
    assert not follow(history, tail)
    first.write_bytes(b"".join(lines[:200]))
    second.write_bytes(b"".join(lines[200:]))
    assert follow(history, tail) and history.num_entries == len(lines)
    assert tail.num_bytes == sum(map(len, lines))
    same(stays_of(history), stays_of(read_history(tmp_path)))


def test_coverage_adds_up_to_the_time_spent() -> None:
    rng = np.random.default_rng(0)
    begin = rng.uniform(-5, 15, 500)
    end = begin + rng.exponential(2.0, 500)
    row = rng.integers(0, 3, 500)
    mean = coverage(begin, end, row, 3, (0.0, 10.0, 40))
    for which in range(3):
        here = row == which
        inside = np.clip(end[here], 0, 10) - np.clip(begin[here], 0, 10)
        assert mean[which].sum() * 10 / 40 == pytest.approx(inside.sum())
        steps = np.arange(0, 10, 0.25)
        plain = [
            np.clip(np.minimum(end[here], s + 0.25) - np.maximum(begin[here], s), 0, None).sum()
            for s in steps
        ]
        np.testing.assert_allclose(mean[which] * 0.25, plain, atol=1e-9)


def test_stays_in_one_lane_do_not_overlap() -> None:
    rng = np.random.default_rng(1)
    begin = rng.uniform(0, 100, 300)
    end, row = begin + rng.exponential(5.0, 300), rng.integers(0, 4, 300)
    lane = lanes(begin, end, row)
    for key in {(int(r), int(k)) for r, k in zip(row, lane, strict=True)}:
        mine = np.flatnonzero((row == key[0]) & (lane == key[1]))
        mine = mine[np.argsort(begin[mine])]
        assert (begin[mine][1:] >= end[mine][:-1]).all()
    busiest = max(((begin <= t) & (end > t) & (row == 0)).sum() for t in begin[row == 0])
    assert lane[row == 0].max() + 1 == busiest  # no lane more than needed


def test_busy_seconds_are_the_union_of_stays() -> None:
    begin, end = np.array([0.0, 1.0, 5.0, 2.0]), np.array([2.0, 3.0, 6.0, 4.0])
    assert busy_s(begin, end, np.array([0, 0, 0, 1]), 3).tolist() == [4.0, 2.0, 0.0]


def test_readers_started_early_read_what_follows_from_the_log(tmp_path: Path) -> None:
    entries = whole_run(Mode.MULTI_VERSION)
    for begin in range(0, len(entries), 30):
        lines = map(encode_entry, entries[begin : begin + 30])
        (tmp_path / f"{begin:012d}.jsonl").write_bytes(b"".join(lines))
    early, history = SegmentReaders(segments(tmp_path)[:2]), History()
    assert follow(history, LogTail(tmp_path, early))
    plain = read_history(tmp_path)
    assert len(segments(tmp_path)) > 3 and history.num_entries == len(entries)
    for name in ("version", "issued_s", "ready_s", "fed_step", "end", "tokens", "reward_sum"):
        np.testing.assert_array_equal(history.groups[name], plain.groups[name], name)
    spans, expected = (one.placements.all_spans(one.now_s) for one in (history, plain))
    for name in spans:
        np.testing.assert_array_equal(spans[name], expected[name], name)
    ended = SegmentReaders(segments(tmp_path))
    ended.close()
    assert all(stream.closed for stream in ended.streams)


@given(st.lists(st.integers(0, 50) | st.integers(0, 10**9)))
def test_a_request_that_is_there_twice_is_found(slots: list[int]) -> None:
    assert repeats(np.array(slots, np.int64)) == (len(set(slots)) < len(slots))


def test_prompts_that_are_set_aside_are_named() -> None:
    said = act.SetAside(7, 3, 4, False, "raised KeyError")
    entries = [*whole_run(Mode.SYNC)]
    entries[-1] = replace(entries[-1], actions=[*entries[-1].actions, said])
    history = history_of(entries, 50)
    assert history.set_aside == {7: "raised KeyError"}
    (incident,) = [i for i in history.incidents if i.kind == "set aside"]
    assert incident.text == "prompt 7: raised KeyError"


@pytest.mark.parametrize("per_chunk", [1, 100])
def test_a_step_that_was_undone_is_not_committed_before_it_is_again(per_chunk: int) -> None:
    """After a lost host, as the dashboard shows it."""
    entries = whole_run(Mode.MULTI_VERSION)
    place = next(i for i, e in enumerate(entries) if isinstance(e.event, ev.StepCommitted)) + 1
    params, now = entries[0].event.params, entries[place].now  # type: ignore[union-attr]
    told = [*entries[:place]]
    for event in (ev.Resumed(params), ev.Rewound(0)):
        told.append(Entry(len(told), now, event, []))
    history = history_of(told, per_chunk)
    assert history.committed == 0 and np.isnan(history.steps[0].committed_s)
    assert [incident.kind for incident in history.incidents][-2:] == ["resumed", "rewound"]
    told.append(replace(entries[place - 1], number=len(told), now=now + 1))
    assert history_of(told, per_chunk).committed == 1
