"""Many segments of a long log as columns, read by processes on other cores.

Threads would only wait for each other at the interpreter's lock. Each process gets paths on its
standard input, one a line, and answers on its standard output with a JSON header and the raw
arrays behind it. Answers come back in the order of the segments. A process that dies (killed for
its memory, say) is an error that names its segment; nothing is passed over.

    python -m dora_rl.observe.column_readers
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from dora_rl.observe.columns import FREQUENT, Columns, Rare, decoded, raw_columns
from dora_rl.types import UserError

READERS = 2
_KINDS = {kind.__name__: kind for kind in FREQUENT}


def read_segments(paths: Sequence[Path]) -> Iterator[Columns]:
    """The columns of whole segments, in order."""
    command = [sys.executable, "-m", "dora_rl.observe.column_readers"]
    pipe = subprocess.PIPE
    readers = [
        subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True)
        for _ in range(min(READERS, len(paths)))
    ]
    try:
        for place, reader in enumerate(readers):
            assert reader.stdin is not None
            lines = [f"{json.dumps(str(path))}\n" for path in paths[place :: len(readers)]]
            reader.stdin.write("".join(lines).encode())
            reader.stdin.close()
        for place, path in enumerate(paths):
            out = readers[place % len(readers)].stdout
            assert out is not None
            found = receive(out)
            if found is None:
                raise UserError(f"{path} could not be read: its reader has ended")
            yield found
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()


def send(found: Columns, out: IO[bytes]) -> None:
    """One answer."""
    arrays = [(k, n, a) for k, table in found.tables.items() for n, a in table.items()]
    rare = [[r.at, r.now, r.before, r.value] for r in found.rare]
    header = {
        "arrays": [[kind.__name__, name, a.dtype.str, len(a)] for kind, name, a in arrays],
        "rare": rare,
        "texts": found.texts,
        "lines": [found.now_first, found.now_last, found.num_lines],
    }
    text = json.dumps(header).encode()
    out.write(len(text).to_bytes(8, "little") + text)
    for _, _, array in arrays:
        out.write(np.ascontiguousarray(array).data.cast("B") if len(array) else b"")
    out.flush()


def receive(stream: IO[bytes]) -> Columns | None:
    """The next answer, None if there is no whole one."""
    size = stream.read(8)
    if len(size) < 8:
        return None
    header: dict[str, Any] = json.loads(stream.read(int.from_bytes(size, "little")))
    tables: dict[type, dict[str, Any]] = {kind: {} for kind in FREQUENT}
    for kind, name, dtype, num in header["arrays"]:
        num_bytes = num * np.dtype(dtype).itemsize
        data = stream.read(num_bytes)
        if len(data) < num_bytes:
            return None
        tables[_KINDS[kind]][name] = np.frombuffer(data, dtype)
    rare = [Rare(*row) for row in header["rare"]]
    return decoded(Columns(tables, rare, header["texts"], *header["lines"]))


def main() -> None:
    gc.disable()  # nothing lives longer than an answer
    for line in sys.stdin:
        send(raw_columns(Path(json.loads(line)).read_bytes()), sys.stdout.buffer)


if __name__ == "__main__":
    main()
