"""The oracle of `observe.columns`: every line decoded, every event and action looked at."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from dora_rl.core import actions as act
from dora_rl.observe.columns import FREQUENT, LEFT_OUT, Columns, Rare
from dora_rl.observe.eventlog import Entry, parse_line


def plain_columns(data: bytes) -> Columns:
    """By decoding every line and looking at each event and action."""
    texts: dict[str, int] = {}
    rows: dict[type, list[list[float]]] = {kind: [] for kind in FREQUENT}
    rare: list[Rare] = []
    times: list[float] = []
    num_lines = 0
    for line in data.splitlines(keepends=True):
        entry = parse_line(line)
        assert isinstance(entry, Entry)
        num_lines += 1
        for value in (entry.event, *entry.actions):
            at = len(times)
            times.append(entry.now)
            if type(value) in FREQUENT:
                row = plain_row(value, texts)
                samples = value.samples if isinstance(value, act.Dispatch) else [None]
                more = [[] if sample is None else [sample] for sample in samples]
                rows[type(value)] += [[at, *row, *sample] for sample in more]
            elif type(value) not in LEFT_OUT:
                rare.append(Rare(at, value))
    tables = {kind: plain_table(kind, rows[kind]) for kind in FREQUENT}
    return Columns(tables, rare, list(texts), np.array(times), num_lines)


def plain_row(value: Any, texts: dict[str, int]) -> list[float]:
    """Without the samples of a dispatch: each has a row of its own."""
    row: list[float] = []
    for name in FREQUENT[type(value)]:
        item = getattr(value, name)
        if name == "request":
            row += item
        elif name == "segments":
            row.append(len(item))
        elif isinstance(item, str | Enum):
            row.append(texts.setdefault(str(item), len(texts)))
        elif name != "samples":
            row.append(-1 if item is None else item)
    return row


def names_of(kind: type) -> list[str]:
    """The columns that a frequent kind has, apart from `at`."""
    names: list[str] = []
    for name in FREQUENT[kind]:
        names += ["group", "sample"] if name == "request" else [name.replace("samples", "sample")]
    return names


def plain_table(kind: type, rows: list[list[float]]) -> dict[str, Any]:
    names = ["at", *names_of(kind)]
    parts = list(zip(*rows, strict=True)) or [()] * len(names)
    return {
        name: np.array(part, np.float64 if name == "reward" else np.int64)
        for name, part in zip(names, parts, strict=True)
    }
