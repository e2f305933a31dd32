"""The event log: append-only, checksummed lines, with snapshots so that recovery stays short.

A run's log is a folder of segments. Each line is `crc32 json`, and its JSON ends with a digest that
is chained over all lines before it (`chain`); a segment begins with a snapshot of the core's state
(the first one with the `Started` event instead). Recovery reads the newest segment only: its cost
does not grow with the run. A torn last line, left by a crash in the middle of a write, is cut off;
a damaged line anywhere else is an error that names it.
"""

from __future__ import annotations

import json
import os
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.core.actions import Action
from dora_rl.core.codec import decoder, encoder
from dora_rl.core.events import Event, Rewound, StepCommitted, VersionDurable
from dora_rl.core.state import State
from dora_rl.core.step import initial, step
from dora_rl.observe.chain import TAIL_BYTES, ChainCheck, chained, digest_in
from dora_rl.observe.segments import segments
from dora_rl.types import UserError

SYNCED = (StepCommitted, VersionDurable, Rewound)  # on disk before anything relies on them
_encode_event, _decode_event = encoder(Event), decoder(Event)
_encode_actions, _decode_actions = encoder(list[Action]), decoder(list[Action])
_encode_state, _decode_state = encoder(State), decoder(State)


@dataclass(frozen=True, slots=True)
class Entry:
    """What the core was told, and what it answered. `number` counts from 0 over the whole run."""

    number: int
    now: float
    event: Event
    actions: list[Action]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The core's state before entry `number`."""

    number: int
    now: float
    state: dict[str, Any]

    def restore(self) -> State:
        return _decode_state(self.state)


def encode_entry(entry: Entry) -> bytes:
    """Its line, without a digest: as logs before the chain had it."""
    return _line(_entry_body(entry))


def encode_snapshot(number: int, now: float, state: State) -> bytes:
    return _line(_snapshot_body(number, now, state))


def _entry_body(entry: Entry) -> bytes:
    return _body(
        {
            "n": entry.number,
            "t": entry.now,
            "e": _encode_event(entry.event),
            "a": _encode_actions(entry.actions),
        }
    )


def _snapshot_body(number: int, now: float, state: State) -> bytes:
    return _body({"n": number, "t": now, "s": _encode_state(state)})


def _body(record: dict[str, Any]) -> bytes:
    return json.dumps(record, separators=(",", ":")).encode()


def _line(body: bytes) -> bytes:
    return b"%08x %s\n" % (zlib.crc32(body), body)


def encode_chained(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The lines of a log from its first entry on, each with its digest."""
    digest = ""
    for entry in entries:
        body, digest = chained(digest, _entry_body(entry))
        yield _line(body)


def parse_line(line: bytes) -> Entry | Snapshot | None:
    """The record of one line, or None if it is damaged."""
    if len(line) < 10 or not line.endswith(b"\n"):
        return None
    try:
        crc, body = int(line[:8], 16), line[9:-1]
    except ValueError:
        return None
    if zlib.crc32(body) != crc:
        return None
    record = json.loads(body)
    if "s" in record:
        return Snapshot(record["n"], record["t"], record["s"])
    return Entry(record["n"], record["t"], _decode_event(record["e"]), _decode_actions(record["a"]))


class FileLog:
    """A log in a folder. Lines reach the operating system at once and the disk every second."""

    def __init__(
        self, folder: Path, *, entries_per_segment: int = 20_000, fsync_s: float = 1.0
    ) -> None:
        self._folder = folder
        self._entries_per_segment = entries_per_segment
        self._fsync_s = fsync_s
        self._number = 0
        self._in_segment = 0
        self._digest = ""  # of the last line written
        self._file: int | None = None
        self._synced_at = time.monotonic()
        # What the entries rely on is on disk before they are.
        self.before_sync: Callable[[], None] = lambda: None

    @classmethod
    def create(cls, folder: Path, **options: Any) -> FileLog:
        folder.mkdir(parents=True, exist_ok=True)
        if segments(folder):
            raise UserError(f"{folder} already holds a run; use --resume or another run directory")
        log = cls(folder, **options)
        log._open(0)
        return log

    @classmethod
    def resume(cls, folder: Path, **options: Any) -> tuple[FileLog, State]:
        """The log ready to append, and the state after its last entry."""
        state, number, path, size = recover(folder)
        log = cls(folder, **options)
        log._number = number
        log._in_segment = number - int(path.stem)
        log._file = os.open(path, os.O_RDWR)
        os.ftruncate(log._file, size)  # a torn last line goes
        log._digest = digest_in(os.pread(log._file, TAIL_BYTES, size - TAIL_BYTES))
        os.lseek(log._file, 0, os.SEEK_END)
        return log, state

    @property
    def folder(self) -> Path:
        return self._folder

    @property
    def number(self) -> int:
        """Of the next entry."""
        return self._number

    def append(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        self._write(_entry_body(Entry(self._number, now, event, list(actions))))
        self._number += 1
        self._in_segment += 1
        due = time.monotonic() - self._synced_at >= self._fsync_s
        if due or isinstance(event, SYNCED):
            self.sync()

    def snapshot_due(self) -> bool:
        return self._in_segment >= self._entries_per_segment

    def snapshot(self, now: float, state: State) -> None:
        """Begin a new segment with the state as it is now."""
        self.close()
        self._open(self._number)
        self._write(_snapshot_body(self._number, now, state))
        self.sync()

    def sync(self) -> None:
        assert self._file is not None
        self.before_sync()
        os.fsync(self._file)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        if self._file is not None:
            self.sync()
            os.close(self._file)
            self._file = None

    def _open(self, number: int) -> None:
        path = self._folder / f"{number:012d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self._in_segment = 0

    def _write(self, body: bytes) -> None:
        assert self._file is not None
        body, digest = chained(self._digest, body)
        view = memoryview(_line(body))
        while view:
            view = view[os.write(self._file, view) :]
        self._digest = digest


class MemoryLog:
    """The log of a simulated run: entries as they are, nothing written."""

    def __init__(self, *, keep: bool = True) -> None:
        self.entries: list[Entry] = []
        self._keep = keep
        self.num_entries = 0

    def append(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        if self._keep:
            self.entries.append(Entry(self.num_entries, now, event, list(actions)))
        self.num_entries += 1

    def snapshot_due(self) -> bool:
        return False

    def snapshot(self, now: float, state: State) -> None:
        del now, state


def read(folder: Path, chain: ChainCheck | None = None) -> Iterator[Entry | Snapshot]:
    """Every record of a run, in order. `chain` has seen a line when its record is given."""
    paths = segments(folder)
    if not paths:
        raise UserError(f"{folder} holds no event log")
    for path in paths:
        yield from _read_segment(path, chain, last=path == paths[-1])


def _read_segment(
    path: Path, chain: ChainCheck | None, *, last: bool
) -> Iterator[Entry | Snapshot]:
    # At once: line by line, a writer could complete a torn line between two reads.
    lines = path.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        record = parse_line(line)
        if record is None:
            if last and place == len(lines) - 1:
                return  # torn by a crash
            raise UserError(f"{path.name} line {place + 1} of the event log is damaged")
        if chain is not None:
            chain.see(line)
        yield record


def entries_since(folder: Path, number: int) -> list[Entry]:
    """The entries from `number` on. Read from the end: the cost does not grow with the run."""
    found: list[Entry] = []
    for path in reversed(segments(folder)):
        for line in reversed(path.read_bytes().splitlines(keepends=True)):
            record = parse_line(line)
            if record is not None and record.number < number:
                return found[::-1]
            if isinstance(record, Entry):
                found.append(record)
    return found[::-1]


def recover(folder: Path) -> tuple[State, int, Path, int]:
    """State after the last whole entry, its number, the segment to go on with, its good length."""
    for path in reversed(segments(folder)):
        found = _recover_segment(path)
        if found is not None:
            state, number, size = found
            for later in segments(folder):
                if later > path:
                    later.unlink()  # begun and never got its snapshot
            return state, number, path, size
    raise UserError(f"{folder} holds no event log to resume from")


def _recover_segment(path: Path) -> tuple[State, int, int] | None:
    with path.open("rb") as file:
        return recover_lines(file, path.name)


def recover_lines(lines: Iterable[bytes], name: str = "the log") -> tuple[State, int, int] | None:
    """State, next entry number and good length of one segment; None if it holds nothing whole.

    Only a last line can be torn by a crash; a damaged one before it is an error.
    """
    state: State | None = None
    number = size = 0
    rest = iter(lines)
    for place, line in enumerate(rest, start=1):
        record = parse_line(line)
        if record is None:
            if next(rest, None) is not None:
                raise UserError(f"{name} line {place} of the event log is damaged")
            break
        if isinstance(record, Snapshot):
            state = record.restore()
            number = record.number
        else:
            state = state if state is not None else initial_of(record)
            actions = step(state, record.event, record.now)
            if actions != record.actions:
                raise UserError(
                    f"entry {record.number} of {name} replays differently: another release of "
                    "dora-rl wrote this log; resume with that release, or start a new run"
                )
            number = record.number + 1
        size += len(line)
    return (state, number, size) if state is not None else None


def initial_of(first: Entry) -> State:
    """The state before a run's first entry."""
    params = getattr(first.event, "params", None)
    if first.number != 0 or params is None:
        raise UserError("the event log does not begin with a Started event")
    return initial(params)
