"""The table's file: what was done survives, a torn tail is cut, damage is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.io import append_log
from dora_rl.store import table as table_module
from dora_rl.store.table import (
    Row,
    Table,
    TableCorrupt,
    TableError,
    decode,
    describe_columns,
    encode,
    kept_columns,
    read_columns,
)
from dora_rl.types import RequestId


def row(group: int, sample: int = 0, **columns: Any) -> Row:
    return Row(RequestId(group, sample), group, columns)


def ints(*values: int) -> Any:
    return np.array(values, np.int32)


def state_of(table: Table) -> Any:
    """Everything a user can ask, in a comparable form."""
    rows = {}
    for group in table.groups():
        for found in table.read(group):
            values = {
                name: value.tolist() if isinstance(value, np.ndarray) else value
                for name, value in found.columns.items()
            }
            rows[found.request] = (found.version, values)
    return rows


def play(table: Table) -> list[Any]:
    """A story that uses every operation; returns the state after each."""
    states = [state_of(table)]

    def done() -> None:
        states.append(state_of(table))

    table.put([row(0, sample, token_ids=ints(1, 2, 3), text="é") for sample in (0, 1)])
    done()
    table.put([row(1, token_ids=np.arange(4, dtype=np.int16), raw="\0x")])
    done()
    extra = {"info": {"k": [1, None]}}
    for sample in (0, 1):
        table.extend(RequestId(0, sample), {"reward": 0.25 * sample, **extra})
        done()
    table.put([row(0, 1, token_ids=ints(7))])
    done()
    table.extend(RequestId(0, 1), {"reward": 0.5})
    done()
    table.put([row(2, token_ids=ints())])
    done()
    table.drop(1)
    done()
    return states


def test_everything_comes_back(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    states = play(table)
    table.close()
    again = Table(tmp_path / "t")
    assert state_of(again) == states[-1]
    again.put([row(9)])
    again.extend(RequestId(9, 0), {"x": 1})
    again.extend(RequestId(2, 0), {"x": 2})
    expected = state_of(again)
    again.close()
    assert state_of(Table(tmp_path / "t")) == expected


def test_a_crash_at_any_byte_leaves_an_exact_prefix(tmp_path: Path) -> None:
    whole = Table(tmp_path / "whole")
    states = play(whole)
    whole.close()
    content = (tmp_path / "whole").read_bytes()
    reached: set[int] = set()
    cut = tmp_path / "cut"
    for size in range(len(content) + 1):
        cut.write_bytes(content[:size])
        table = Table(cut)
        state = state_of(table)
        assert state in states
        number = states.index(state)
        assert not reached or number >= max(reached), "a longer file may not hold less"
        reached.add(number)
        # What was cut off is gone for good: going on gives a sound file again.
        table.put([row(50, token_ids=ints(1))])
        expected = state_of(table)
        table.close()
        reopened = Table(cut)
        assert state_of(reopened) == expected
        reopened.close()
    assert reached == set(range(len(states)))


def test_a_tail_of_zeros_is_a_torn_tail(tmp_path: Path) -> None:
    table = Table(tmp_path / "t")
    states = play(table)
    table.close()
    with (tmp_path / "t").open("ab") as file:
        file.write(bytes(100))
    assert state_of(Table(tmp_path / "t")) == states[-1]


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_damage_is_never_taken_for_data(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("table") / "t"
    table = Table(path)
    states = play(table)
    table.close()
    content = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(content)
    try:
        damaged = Table(path)
    except TableCorrupt as error:
        assert str(path) in str(error)
        return
    # Only the last record can look like one that the writer did not finish.
    assert state_of(damaged) in states[-2:]


def test_a_full_disk_refuses_the_operation_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path / "t")
    states = play(table)
    write = os.write

    def half_then_full(file: int, data: memoryview) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[: len(data) // 2])

    with monkeypatch.context() as patch:
        patch.setattr(append_log.os, "write", half_then_full)
        for operation in (
            lambda: table.put([row(5, token_ids=ints(*[1] * 50))]),
            lambda: table.extend(RequestId(2, 0), {"reward": 1.0}),
            lambda: table.drop(2),
        ):
            with pytest.raises(TableError, match="No space left"):
                operation()
    assert state_of(table) == states[-1]
    table.put([row(5, token_ids=ints(*[1] * 50))])
    expected = state_of(table)
    table.close()
    assert state_of(Table(tmp_path / "t")) == expected


def test_the_file_does_not_grow_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "REWRITE_BYTES_MIN", 20_000)
    table = Table(tmp_path / "t")
    largest = 0
    for group in range(500):
        table.put([row(group, a=np.zeros(200))])
        if group >= 5:
            table.drop(group - 5)
        largest = max(largest, (tmp_path / "t").stat().st_size)
    assert largest < 20_000 + 7 * 2_000 * (table_module.REWRITE_RATIO + 1)
    expected = state_of(table)
    table.close()
    assert len(expected) == 5
    assert state_of(Table(tmp_path / "t")) == expected


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.dictionaries(st.text(), inner, max_size=3) | st.lists(inner, max_size=3),
    max_leaves=6,
)
arrays = st.builds(
    lambda dtype, shape, seed: np.random.default_rng(seed).integers(0, 2, shape).astype(dtype),
    st.sampled_from(["int8", "uint16", "int32", "int64", "float16", "float32", "float64", "bool"]),
    st.lists(st.integers(0, 4), max_size=3).map(tuple),
    st.integers(0, 100),
)


@settings(max_examples=150, deadline=None)
@given(columns=st.dictionaries(st.text(), json_values | arrays, max_size=5))
def test_values_survive_the_codec(columns: dict[str, Any]) -> None:
    values = kept_columns(columns)
    raw: list[Any] = []
    entries = describe_columns(values, raw)
    body = memoryview(b"".join(encode({"row": entries}, raw)))
    header, place = decode(body)
    back, end = read_columns(header["row"], body, place)
    assert end == len(body)
    assert list(back) == list(values)
    for name, value in values.items():
        assert type(back[name]) is type(value)
        if isinstance(value, np.ndarray):
            assert back[name].dtype == value.dtype
            assert back[name].shape == value.shape
            assert np.array_equal(back[name], value)
        else:
            assert back[name] == value


def test_what_is_kept() -> None:
    kept = kept_columns({"a": (1, 2), "b": [1, True], "c": [2**70], "d": [1, None]})
    assert kept == {"a": [1, 2], "b": [1, True], "c": [2**70], "d": [1, None]}
    assert kept["b"][1] is True
    with pytest.raises(TypeError, match="arrays of"):
        kept_columns({"x": np.array(["x"])})
