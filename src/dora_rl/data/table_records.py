"""What the table's file says: one record for each operation, and a snapshot of everything.

Never decides anything. Invariant: replaying the records of a table, in order, on an empty index
gives the same rows, the same readiness and the same counters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from dora_rl.data.table_codec import Value, decode, describe_columns, encode, read_columns
from dora_rl.data.table_index import RowMeta, TableError, TableIndex
from dora_rl.types import GroupId

Payload = dict[int, dict[str, Value]]
Extend = Callable[[Mapping[int, dict[str, Value]]], None]


def put_record(
    metas: Sequence[tuple[RowMeta, int]], payloads: Sequence[Mapping[str, Value]]
) -> list[Any]:
    blobs: list[Any] = []
    rows = [
        [
            m.index,
            m.group,
            m.version,
            m.sample,
            num_in_group,
            m.num_tokens,
            m.num_bytes,
            sorted(m.taken),
            m.released,
            describe_columns(values, blobs),
        ]
        for (m, num_in_group), values in zip(metas, payloads, strict=True)
    ]
    return encode({"do": "put", "rows": rows}, blobs)


def extend_record(values_of: Mapping[int, Mapping[str, Value]]) -> list[Any]:
    blobs: list[Any] = []
    rows = [[index, describe_columns(values, blobs)] for index, values in values_of.items()]
    return encode({"do": "extend", "rows": rows}, blobs)


def take_record(consumer: str, indices: Sequence[int]) -> list[Any]:
    return encode({"do": "take", "consumer": consumer, "rows": indices}, ())


def untake_record(consumer: str, indices: Sequence[int]) -> list[Any]:
    return encode({"do": "untake", "consumer": consumer, "rows": indices}, ())


def release_record(indices: Sequence[int]) -> list[Any]:
    return encode({"do": "release", "rows": indices}, ())


def drop_record(group: GroupId) -> list[Any]:
    return encode({"do": "drop", "group": group}, ())


def snapshot(index: TableIndex, payload: Payload) -> Iterator[list[Any]]:
    """Counters and half-gone groups first, then each live row."""
    groups = [
        [key, g.version, g.num_rows, [[s, i] for s, i in g.rows.items() if i not in index.rows]]
        for key, g in index.groups.items()
        if g.num_dropped
    ]
    yield encode(
        {
            "do": "state",
            "consumers": index.consumers,
            "next_index": index.next_index,
            "num_dropped": index.num_dropped,
            "groups": groups,
        },
        (),
    )
    for row in index.rows.values():
        num_in_group = index.groups[row.group].num_rows
        yield put_record([(row, num_in_group)], [payload[row.index]])


def replay(body: memoryview, index: TableIndex, payload: Payload, extend: Extend) -> None:
    header, place = decode(body)
    kind = header["do"]
    if kind == "put":
        _replay_put(header["rows"], body, place, index, payload)
    elif kind == "extend":
        values_of: Payload = {}
        for number, entries in header["rows"]:
            values_of[number], place = read_columns(entries, body, place)
        extend(values_of)
    elif kind == "take":
        _forget(payload, index.take(header["consumer"], header["rows"]))
    elif kind == "untake":
        index.untake(header["consumer"], header["rows"])
    elif kind == "release":
        _forget(payload, index.release(header["rows"]))
    elif kind == "drop":
        _forget(payload, index.drop_group(header["group"]))
    else:
        assert kind == "state", f"unknown record {kind!r}"
        _replay_state(header, index)


def _replay_put(
    rows: Sequence[Sequence[Any]],
    body: memoryview,
    place: int,
    index: TableIndex,
    payload: Payload,
) -> None:
    for (
        number,
        group,
        version,
        sample,
        num_in_group,
        tokens,
        size,
        taken,
        released,
        entries,
    ) in rows:
        values, place = read_columns(entries, body, place)
        row = RowMeta(
            index=number,
            group=group,
            version=version,
            sample=sample,
            num_tokens=tokens,
            num_bytes=size,
            columns=set(values),
            missing=[],
            taken=set(taken),
            released=released,
        )
        payload[number] = values
        index.add(row, num_in_group)


def _replay_state(header: Mapping[str, Any], index: TableIndex) -> None:
    stored = {name: tuple(needs) for name, needs in header["consumers"].items()}
    if stored != index.consumers:
        raise TableError(f"the file was written for consumers {stored}, not {index.consumers}")
    index.next_index = header["next_index"]
    index.num_dropped = header["num_dropped"]
    for group, version, num_rows, dropped in header["groups"]:
        index.begin_group(group, version, num_rows, dict(dropped))


def _forget(payload: Payload, dropped: Sequence[int]) -> None:
    for number in dropped:
        del payload[number]
