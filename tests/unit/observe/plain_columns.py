"""The oracle of `observe.columns`: every line decoded, every event and action looked at."""

from __future__ import annotations

from enum import Enum
from typing import Any

import numpy as np

from dora_rl.observe.columns import FREQUENT, LEFT_OUT, Columns, Rare, names_of
from dora_rl.observe.eventlog import Entry, parse_line


def plain_columns(data: bytes) -> Columns:
    """By decoding every line and looking at each event and action."""
    texts: dict[str, int] = {}
    rows: dict[type, list[list[float]]] = {kind: [] for kind in FREQUENT}
    rare: list[Rare] = []
    times: list[float] = []
    at = 0
    for line in data.splitlines(keepends=True):
        entry = parse_line(line)
        assert isinstance(entry, Entry)
        before = times[-1] if times else float("nan")
        times.append(entry.now)
        for value in (entry.event, *entry.actions):
            at += 1
            if type(value) in FREQUENT:
                rows[type(value)].append([at, entry.now, *plain_row(value, texts)])
            elif type(value) not in LEFT_OUT:
                rare.append(Rare(at, entry.now, before, value))
    tables = {kind: plain_table(kind, rows[kind]) for kind in FREQUENT}
    ends = (times[0], times[-1]) if times else (0.0, 0.0)
    return Columns(tables, rare, list(texts), *ends, len(times))


def plain_row(value: Any, texts: dict[str, int]) -> list[float]:
    row: list[float] = []
    for name in FREQUENT[type(value)]:
        item = getattr(value, name)
        if name == "request":
            row += item
        elif name == "segments":
            row.append(min(2, len(item)))
        elif isinstance(item, str | Enum | tuple):
            text = ",".join(map(str, item)) if isinstance(item, tuple) else str(item)
            row.append(texts.setdefault(text, len(texts)))
        else:
            row.append(-1 if item is None else item)
    return row


def plain_table(kind: type, rows: list[list[float]]) -> dict[str, Any]:
    names = ["at", "now", *names_of(kind)]
    parts = list(zip(*rows, strict=True)) or [()] * len(names)
    return {
        name: np.array(part, np.float64 if name in ("now", "reward") else np.int64)
        for name, part in zip(names, parts, strict=True)
    }
