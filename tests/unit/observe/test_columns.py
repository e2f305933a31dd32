"""The log as columns: what decoding every line gives, on any log."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.step import initial
from dora_rl.observe.columns import (
    FREQUENT,
    Columns,
    columns,
    read_segments,
)
from dora_rl.observe.eventlog import Entry, encode_entry, encode_snapshot
from dora_rl.observe.segments import SegmentReaders
from dora_rl.types import Finish, Mode, RequestId, Segment, UserError
from tests.kit.simulated_logs import resumed_run, whole_run
from tests.unit.observe.plain_columns import names_of, plain_columns

TEXTS = {"instance", "src", "dst", "finish", "end", "reason"}


def same(one: Columns, other: Columns) -> None:
    """Equal but for the eighth digit of a second."""
    assert one.num_lines == other.num_lines
    assert one.rare == other.rare
    np.testing.assert_allclose(one.times, other.times, rtol=0, atol=1e-7)
    assert order(one) == order(other)
    for kind in FREQUENT:
        a, b = one.tables[kind], other.tables[kind]
        assert a.keys() == b.keys() == {"at", *names_of(kind)}
        np.testing.assert_array_equal(a["at"], b["at"], f"{kind.__name__}.at")
        for name in names_of(kind):
            if name in TEXTS:
                assert [one.texts[c] for c in a[name]] == [other.texts[c] for c in b[name]]
            else:
                np.testing.assert_array_equal(a[name], b[name], f"{kind.__name__}.{name}")


def order(found: Columns) -> list[str]:
    """Kinds in the order of the log."""
    rows = [(int(at), kind.__name__) for kind, t in found.tables.items() for at in t["at"]]
    rows += [(rare.at, type(rare.value).__name__) for rare in found.rare]
    return [name for _, name in sorted(rows)]


def text_of(entries: list[Entry]) -> bytes:
    return b"".join(map(encode_entry, entries))


@pytest.mark.parametrize("mode", list(Mode))
def test_fast_and_plain_agree_on_whole_runs(mode: Mode) -> None:
    data = text_of(whole_run(mode))
    same(columns(data), plain_columns(data))
    assert len(columns(data).tables[ev.SampleFinished]["at"]) >= 48


def test_a_snapshot_is_passed_over() -> None:
    entries = resumed_run(Mode.MULTI_VERSION)
    first = entries[0].event
    assert isinstance(first, ev.Started)
    snapshot = encode_snapshot(0, 0.0, initial(first.params))
    same(columns(snapshot + text_of(entries)), plain_columns(text_of(entries)))
    assert columns(snapshot).num_lines == 0 == columns(b"").num_lines


names = st.text(st.characters(codec="ascii", exclude_characters='"\\'), min_size=1, max_size=40)
numbers = st.integers(0, 10**15 - 1)
times = st.floats(0, 1e9, allow_nan=False)
rewards = st.floats(allow_nan=False, allow_infinity=False, width=32)


REASONS = ["{a} [b] ", "a} b", 'no "x"} ', "back\\slash} {", "", "plain "]


@st.composite
def entries(draw: st.DrawFn) -> list[Entry]:
    made: list[Entry] = []
    for number in range(draw(st.integers(1, 12))):
        request = RequestId(draw(numbers), draw(st.integers(0, 63)))
        name, now = draw(names), draw(times)
        segments = tuple(Segment(i, draw(numbers)) for i in range(draw(st.integers(1, 3))))
        event = draw(
            st.sampled_from(
                [
                    ev.Scored(request, 0, draw(rewards)),
                    ev.SampleFinished(request, 3, name, draw(numbers), Finish.LENGTH, segments),
                    ev.Moved(request, 0, name, draw(names), draw(numbers), 5),
                    ev.InstanceReport(name, 1, 2),
                    ev.InstanceLost(name, draw(st.sampled_from(REASONS)) + name),
                    ev.Tick(),
                ]
            )
        )
        actions = draw(
            st.lists(
                st.sampled_from(
                    [
                        act.IssueGroup(request.group, 4, 2, 1),
                        act.Dispatch(name, request.group, 1, 7, (0, 5, 11), (0, 0, 0), False),
                        act.Feed(1, 0, request.group, 2, (0,)),
                        act.EndGroup(request.group, 2, act.End.FAILED, None, name),
                        act.EndGroup(request.group, 2, act.End.TRAINED, 3, ""),
                        act.WaitFor(1, (3, 4)),
                    ]
                ),
                max_size=4,
            )
        )
        made.append(Entry(number, now, event, actions))
    return made


@given(entries())
def test_fast_and_plain_agree_on_anything(made: list[Entry]) -> None:
    data = text_of(made)
    same(columns(data), plain_columns(data))


def test_processes_read_what_one_would(tmp_path: Path) -> None:
    made = [whole_run(mode) for mode in (Mode.PARTIAL, Mode.MULTI_VERSION, Mode.REPLICATION)]
    paths = [tmp_path / f"{number}.jsonl" for number in range(3)]
    for path, run in zip(paths, made, strict=True):
        path.write_bytes(text_of(run))
    for found, run in zip(read_segments(SegmentReaders(paths)), made, strict=True):
        same(found, plain_columns(text_of(run)))
    with pytest.raises(UserError, match=r"gone\.jsonl could not be read"):
        list(read_segments(SegmentReaders([paths[0], tmp_path / "gone.jsonl"])))


def test_quotes_large_numbers_and_rewards_that_are_no_numbers() -> None:
    quoted = act.EndGroup(1, 0, act.End.FAILED, None, 'it said "no", é')
    huge = ev.Scored(RequestId(10**17, 0), 0, float("nan"))
    data = text_of([Entry(0, 1.0, huge, []), Entry(1, 2.0, ev.Tick(), [quoted])])
    found = columns(data)
    same(found, plain_columns(data))
    assert found.texts[found.tables[act.EndGroup]["reason"][0]] == 'it said "no", é'
    assert found.tables[ev.Scored]["group"].tolist() == [10**17]
    assert np.isnan(found.tables[ev.Scored]["reward"]).all()


def test_a_long_chunk_is_one_stretch() -> None:
    """Longer than what is read at once: places, times and texts go on."""
    entries = whole_run(Mode.MULTI_VERSION)
    many = [replace(e, number=i) for i, e in enumerate(entries * (1 + 2500 // len(entries)))]
    same(columns(text_of(many)), plain_columns(text_of(many)))
