"""The sample table as its users see it: readiness, takes, waiting, back-pressure, ending."""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from dora_rl.data.table import NewRow, Row, Table, TableClosed, TableError, TableFull

CONSUMERS = {"rewarder": ("token_ids",), "trainer": ("token_ids", "reward")}


def group_rows(group: int, size: int = 2, version: int = 0, length: int = 3) -> list[NewRow]:
    return [
        NewRow(group, version, {"prompt_ids": [1, 2], "token_ids": list(range(length))}, i, size)
        for i in range(size)
    ]


def indices(rows: list[Row]) -> list[int]:
    return [row.index for row in rows]


def start(target: object, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)  # type: ignore[arg-type]
    thread.start()
    return thread


def until_waiting(table: Table, number: int = 1) -> None:
    """Until so many threads really sleep (a test may poll; the table does not)."""
    deadline = time.monotonic() + 120
    while len(table.waiting()) < number:
        assert time.monotonic() < deadline, "nobody waits"
        time.sleep(0.001)


def test_a_row_is_ready_when_the_columns_a_consumer_needs_are_there() -> None:
    table = Table(CONSUMERS)
    first, second = table.put(group_rows(7))
    assert indices(table.peek("rewarder", num_rows=9)) == [first, second]
    assert table.peek("trainer", num_rows=9) == []
    table.extend({second: {"reward": 1.0}})
    (row,) = table.take("trainer", num_rows=1)
    assert (row.index, row.group, row.version, row.sample, row.num_tokens) == (second, 7, 0, 1, 5)
    assert row.columns.keys() == {"token_ids", "reward"}
    assert row.columns["token_ids"].tolist() == [0, 1, 2]
    assert table.take("trainer", num_rows=1) == []
    assert indices(table.take("rewarder", num_rows=2)) == [first, second]
    table.check_invariants()


def test_taking_is_per_consumer_and_once() -> None:
    table = Table(CONSUMERS)
    (index,) = table.put(group_rows(0, size=1))
    assert indices(table.take("rewarder", num_rows=1)) == [index]
    assert table.take("rewarder", num_rows=1) == []
    table.extend({index: {"reward": 0.5}})
    assert indices(table.take("trainer", num_rows=1, columns=["reward"])) == [index]


def test_groups_are_taken_whole_oldest_version_first() -> None:
    table = Table({"trainer": ("token_ids",)})
    table.put(group_rows(5, version=2))
    table.put(group_rows(6, version=1)[:1])
    table.put(group_rows(8, version=1))
    assert [row.group for row in table.take("trainer", num_groups=2)] == [8, 8, 5, 5]
    assert not table.take("trainer", num_groups=1), "half a group is not a group"
    table.put(group_rows(6, version=1)[1:])
    assert [row.sample for row in table.take("trainer", num_groups=1)] == [0, 1]


def test_a_named_group_and_a_range_of_versions() -> None:
    table = Table({"trainer": ("token_ids",)})
    for group in range(4):
        table.put(group_rows(group, version=group))
    assert {row.group for row in table.take("trainer", group=2)} == {2}
    assert table.take("trainer", group=2) == []
    assert table.take("trainer", group=99) == []
    later = table.take("trainer", num_groups=1, versions=range(1, 10))
    assert {row.group for row in later} == {1}
    assert not table.wait("trainer", num_groups=1, versions=range(1, 3), timeout_s=0)
    assert table.wait("trainer", num_groups=2, timeout_s=0)


def test_balanced_takes_give_every_rank_its_share_of_tokens() -> None:
    table = Table({"trainer": ("token_ids",)})
    for group, length in enumerate([100, 10, 20, 30, 40, 90, 10, 10]):
        table.put(group_rows(group, size=1, length=length))
    ranks = table.take_balanced("trainer", 2, num_rows=8)
    tokens = [sum(row.num_tokens for row in rank) for rank in ranks]
    assert sum(tokens) == 310 + 8 * 2
    assert max(tokens) - min(tokens) <= 10
    assert sorted(i for rank in ranks for i in indices(rank)) == list(range(8))


def test_rows_go_when_everybody_is_done_and_they_are_released() -> None:
    table = Table(CONSUMERS)
    rows = table.put(group_rows(0))
    table.extend({i: {"reward": 1.0} for i in rows})
    table.take("trainer", num_rows=2)
    table.release(rows)
    assert table.stats().num_rows == 2
    table.take("rewarder", num_rows=1)
    stats = table.stats()
    assert (stats.num_rows, stats.num_put, stats.num_dropped) == (1, 2, 1)
    table.take("rewarder", num_rows=1)
    assert (table.stats().num_rows, table.stats().num_bytes) == (0, 0)
    with pytest.raises(TableError, match="row 0 was dropped"):
        table.read([0])
    with pytest.raises(TableError, match="row 9 does not exist"):
        table.read([9])


def test_auto_release_and_untake() -> None:
    table = Table({"trainer": ()}, auto_release=True)
    table.put(group_rows(0))
    table.take("trainer", num_groups=1)
    assert table.stats().num_rows == 0
    table = Table({"trainer": ()})
    rows = table.put(group_rows(0))
    table.take("trainer", num_groups=1)
    assert table.taken_by("trainer") == rows
    table.untake("trainer", rows)
    assert indices(table.take("trainer", num_groups=1)) == rows
    with pytest.raises(TableError, match="has not taken row 5"):
        table.put(group_rows(1, size=4))
        table.untake("trainer", [5])


def test_a_dropped_group_frees_its_rows_and_its_reservation() -> None:
    table = Table({"trainer": ()}, rows_max=4)
    table.put(group_rows(0, size=4)[:1])
    with pytest.raises(TableFull):
        table.put(group_rows(1))
    table.drop(0)
    table.drop(0)
    table.put(group_rows(1))
    assert {row.group for row in table.take("trainer", num_rows=2)} == {1}
    table.check_invariants()


def test_wrong_rows_are_refused_whole() -> None:
    table = Table(CONSUMERS)
    table.put(group_rows(0)[:1])
    bad = [
        ([NewRow(0, 0, {}, 0, 2)], "sample 0 is put a second time"),
        ([NewRow(0, 1, {}, 1, 2)], r"\(version, rows\) is \(0, 2\), not \(1, 2\)"),
        ([NewRow(0, 0, {}, 1, 3)], "rows"),
        ([NewRow(1, 0, {}, 2, 2)], "sample 2 of 2"),
        ([NewRow(1, 0, {}, 0, 2), NewRow(1, 0, {}, 0, 2)], "a second time"),
        ([NewRow(1, 0, {}, 0, 2), NewRow(1, 1, {}, 1, 2)], "not"),
    ]
    for rows, message in bad:
        with pytest.raises(TableError, match=message):
            table.put(rows)
    with pytest.raises(TypeError, match="cannot hold object"):
        table.put([NewRow(2, 0, {"x": object()})])
    with pytest.raises(TableError, match=r"already has \['token_ids'\]"):
        table.extend({0: {"token_ids": [1]}})
    with pytest.raises(TableError, match="does not exist"):
        table.extend({0: {"reward": 1.0}, 5: {"reward": 1.0}})
    with pytest.raises(TableError, match="no consumer 'nobody'"):
        table.take("nobody", num_rows=1)
    assert table.stats().num_put == 1
    assert table.peek("trainer", num_rows=1) == []
    table.check_invariants()


def test_values_are_copied_and_read_only() -> None:
    table = Table({"trainer": ()})
    mine = np.arange(3)
    table.put([NewRow(0, 0, {"a": mine})])
    mine[0] = 99
    (row,) = table.peek("trainer", num_rows=1, columns=["a"])
    assert row.columns["a"].tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        row.columns["a"][0] = 5


# Waiting


def test_a_reader_sleeps_until_the_last_column_comes() -> None:
    table = Table(CONSUMERS)
    rows = table.put(group_rows(0))
    got: list[Row] = []
    reader = start(lambda: got.extend(table.take("trainer", num_groups=1, timeout_s=30, name="t")))
    until_waiting(table)
    (note,) = table.waiting()
    assert (note.name, note.wants) == ("t", "1 groups")
    table.extend({rows[0]: {"reward": 1.0}})
    until_waiting(table)
    table.extend({rows[1]: {"reward": 1.0}})
    reader.join(10)
    assert indices(got) == rows
    assert table.waiting() == []


def test_a_deadline_that_passes_is_a_value() -> None:
    table = Table(CONSUMERS)
    assert table.wait("trainer", num_rows=1, timeout_s=0.01) is False
    assert table.take("trainer", num_groups=1, timeout_s=0.01) == []
    assert table.waiting() == []


def test_closing_wakes_everybody(tmp_path: Path) -> None:
    table = Table(CONSUMERS, rows_max=2, path=tmp_path / "t")
    table.put(group_rows(0))
    ended: list[str] = []

    def expect_closed(what: str) -> None:
        try:
            if what == "put":
                table.put(group_rows(1), timeout_s=30)
            else:
                table.wait("trainer", num_rows=1, timeout_s=30)
        except TableClosed:
            ended.append(what)

    threads = [start(expect_closed, "put"), start(expect_closed, "wait")]
    until_waiting(table, 2)
    table.close()
    table.close()
    for thread in threads:
        thread.join(10)
    assert sorted(ended) == ["put", "wait"]
    with pytest.raises(TableClosed):
        table.extend({0: {"reward": 1.0}})


def test_an_event_loop_goes_on_while_it_waits() -> None:
    table = Table(CONSUMERS)

    async def story() -> tuple[bool, bool, int]:
        late = await table.wait_async("trainer", num_rows=1, timeout_s=0.01)
        waiter = asyncio.create_task(table.wait_async("rewarder", num_groups=1, timeout_s=30))
        ticks = 0
        while not table.waiting():
            await asyncio.sleep(0)
            ticks += 1
        writer = start(table.put, group_rows(0))
        ready = await waiter
        writer.join(10)
        return late, ready, ticks

    late, ready, ticks = asyncio.run(story())
    assert (late, ready) == (False, True)
    assert ticks > 0
    assert table.waiting() == []


# Back-pressure


def test_a_new_group_waits_for_room_until_rows_are_released() -> None:
    table = Table({"trainer": ()}, rows_max=4)
    table.put(group_rows(0))
    table.put(group_rows(1)[:1])
    with pytest.raises(TableFull, match=r"no room for 2 rows.*4 of 4 rows"):
        table.put(group_rows(2))
    done: list[int] = []
    writer = start(lambda: done.extend(table.put(group_rows(2), timeout_s=30, name="rollout")))
    until_waiting(table)
    # A group that has begun is never held up, or nobody could ever read it.
    table.put(group_rows(1)[1:])
    rows = indices(table.take("trainer", group=0))
    assert not done
    table.release(rows)
    writer.join(10)
    assert len(done) == 2
    table.check_invariants()


def test_bytes_are_limited_too_and_what_can_never_fit_is_refused_at_once() -> None:
    table = Table({"trainer": ()}, bytes_max=100, auto_release=True)
    table.put([NewRow(0, 0, {"a": np.zeros(80, np.uint8)})])
    with pytest.raises(TableFull, match="80 of 100 bytes"):
        table.put([NewRow(1, 0, {"a": np.zeros(30, np.uint8)})])
    with pytest.raises(TableFull, match="can never fit"):
        table.put([NewRow(1, 0, {"a": np.zeros(101, np.uint8)})], timeout_s=30)
    table.take("trainer", num_rows=1)
    table.put([NewRow(1, 0, {"a": np.zeros(30, np.uint8)})])


def test_threads_take_every_row_exactly_once(tmp_path: Path) -> None:
    num_groups, size = 60, 4
    table = Table(CONSUMERS, rows_max=40, auto_release=True, path=tmp_path / "t")
    trained: list[int] = []

    def write(part: int) -> None:
        for group in range(part, num_groups, 2):
            for row in group_rows(group, size=size):
                table.put([row], timeout_s=120)

    def score() -> None:
        while len(trained) < num_groups * size:
            rows = table.take("rewarder", num_rows=1, timeout_s=0.2)
            table.extend({row.index: {"reward": 1.0} for row in rows})

    def train() -> None:
        while len(trained) < num_groups * size:
            rows = table.take("trainer", num_groups=1, timeout_s=0.2)
            assert len({row.group for row in rows}) <= 1
            trained.extend(indices(rows))

    threads = [start(write, part) for part in range(2)]
    threads += [start(score) for _ in range(3)] + [start(train) for _ in range(3)]
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive()
    assert Counter(trained) == Counter(range(num_groups * size))
    stats = table.stats()
    assert (stats.num_put, stats.num_dropped) == (num_groups * size, num_groups * size)
    table.check_invariants()
    table.close()
    again = Table(CONSUMERS, auto_release=True, path=tmp_path / "t")
    assert again.stats() == stats
