"""One row of a table's file, while another process goes on writing it.

Reads only, and never cuts a torn tail off as the owner would. The file holds the rows of groups
under way, and for a while those of groups that have ended: it is bounded, so one look at all of it
is cheap enough for a reader who asks for a sample now and then.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from dora_rl.data.table_codec import Value, decode, read_columns
from dora_rl.data.table_log import MAGIC, RECORD
from dora_rl.types import GroupId

_GROUP, _SAMPLE, _COLUMNS = 1, 3, 9  # places in a row of a put record


def peek(path: Path, group: GroupId, sample: int) -> dict[str, Value] | None:
    """The columns of a sample as it was put last; None if it is not there (any more)."""
    if not path.is_file():
        return None
    found: dict[str, Value] | None = None
    for body in _bodies(memoryview(path.read_bytes())):
        header, place = decode(body)
        for row in header["rows"] if header["do"] == "put" else ():
            columns, place = read_columns(row[_COLUMNS], body, place)
            if row[_GROUP] == group and row[_SAMPLE] == sample:
                found = columns
    return found


def _bodies(content: memoryview) -> Iterator[memoryview]:
    """Whole records, up to what is being written."""
    place = len(MAGIC)
    while place + RECORD.size <= len(content):
        length, _, _ = RECORD.unpack_from(content, place)
        end = place + RECORD.size + length
        if end > len(content):
            return
        yield content[place + RECORD.size : end]
        place = end
