"""Segments of a long log as columns, read by other processes: what is said between them.

A reader gets paths and answers each with a JSON header, the rare values as the log has them, and
the arrays, whole numbers as short as they may be. A reader that dies (killed for its memory, say)
is an error that names its segment; nothing is passed over. `segments` starts the processes.

    python -m dora_rl.observe.column_readers FD FD < paths.json
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.io.codec import dumps, loads
from dora_rl.observe.columns import FREQUENT, Columns, Rare, raw_columns, value_of
from dora_rl.observe.segments import SegmentReaders
from dora_rl.types import UserError

_KINDS = {kind.__name__: kind for kind in FREQUENT}
_RARE = "rare"
_SIZES = 3  # of header, rare values and arrays, eight bytes each


def read_segments(readers: SegmentReaders) -> Iterator[Columns]:
    """The columns of whole segments, in order."""
    try:
        for place, path in enumerate(readers.paths):
            found = receive(readers.streams[place % len(readers.streams)])
            if found is None:
                raise UserError(f"{path} could not be read: its reader has ended")
            yield found
    finally:
        readers.close()


def send(found: Columns, out: IO[bytes]) -> None:
    """One answer."""
    arrays = [(k.__name__, n, _short(a)) for k, t in found.tables.items() for n, a in t.items()]
    for name in ("at", "now", "before"):
        column = np.array([getattr(rare, name) for rare in found.rare])
        arrays.append((_RARE, name, _short(column)))
    arrays.sort(key=lambda row: -row[2].itemsize)  # so that each lies where its type may
    header = {
        "arrays": [[kind, name, a.dtype.str, len(a)] for kind, name, a in arrays],
        "texts": found.texts,
        "lines": [found.now_first, found.now_last, found.num_lines],
    }
    values = dumps([rare.value for rare in found.rare])
    parts = [dumps(header), values, b"".join(a.tobytes() for *_, a in arrays)]
    sizes = [len(part).to_bytes(8, "little") for part in parts]
    out.write(b"".join(sizes + parts))
    out.flush()


def _short(array: NDArray[Any]) -> NDArray[Any]:
    """Whole numbers as bytes or four bytes each, where they fit."""
    if array.dtype != np.int64 or not len(array):
        return array
    low, high = array.min(), array.max()
    if low >= 0 and high < 1 << 8:
        return array.astype(np.uint8)
    fits = low >= -(1 << 31) and high < 1 << 31
    return array.astype(np.int32) if fits else array


def receive(stream: IO[bytes]) -> Columns | None:
    """The next answer, None if there is no whole one."""
    sizes = np.frombuffer(stream.read(8 * _SIZES), "<i8").tolist()
    parts = [stream.read(size) for size in sizes]
    if len(sizes) < _SIZES or [len(part) for part in parts] != sizes:
        return None
    header: dict[str, Any] = loads(parts[0])
    tables: dict[str, dict[str, Any]] = {name: {} for name in (*_KINDS, _RARE)}
    offset = 0
    for kind, name, dtype, num in header["arrays"]:
        array = np.frombuffer(parts[2], dtype, num, offset)
        offset += array.nbytes
        tables[kind][name] = array.astype(np.int64) if array.dtype.kind in "iu" else array
    rows = [tables[_RARE][name].tolist() for name in ("at", "now", "before")]
    values = map(value_of, loads(parts[1]))
    rare = [Rare(*row) for row in zip(*rows, values, strict=True)]
    by_kind = {kind: tables[name] for name, kind in _KINDS.items()}
    return Columns(by_kind, rare, header["texts"], *header["lines"])


def main() -> None:
    ends = [int(word) for word in sys.argv[1:]]
    paths = json.load(sys.stdin)
    gc.disable()  # nothing lives longer than an answer
    mine = next((place for place in range(1, len(ends)) if os.fork() == 0), 0)
    for place, end in enumerate(ends):
        if place != mine:
            os.close(end)  # or nobody would notice that its reader has ended
    with open(ends[mine], "wb") as out:
        for path in paths[mine :: len(ends)]:
            send(raw_columns(Path(path).read_bytes()), out)


if __name__ == "__main__":
    main()
