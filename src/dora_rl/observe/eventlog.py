"""The event log: append-only, checksummed lines, with snapshots so that recovery stays short.

A run's log is a folder of segments. Each line is `crc32 json`; a segment begins with a snapshot of
the core's state (the first one with the `Started` event instead). Recovery reads the newest segment
only: its cost does not grow with the run. A torn last line, left by a crash in the middle of a
write, is cut off; a damaged line is an error that names it (see `io.append_log`).

The chain: every line carries a digest over itself and the digest before it. A line that was
changed, removed, added or moved breaks the chain at the next line, whatever its own checksum says.
Against accidents and buggy code: whoever rewrites every line can make a new chain. Lines of
releases before the chain have no digest; they are counted, never believed to be chained.

    {"n":7, ..., "h":"90f1c8a1d2b3c4e5"}     h = blake2b-64(h of the line before + line without h)

Replay (`dora-rl replay RUN`) feeds a log to the core again; it must give the same actions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from dora_rl.core.actions import Action
from dora_rl.core.events import Event, Resumed, Rewound, Started, StepCommitted, VersionDurable
from dora_rl.core.state import State
from dora_rl.core.step import initial, step
from dora_rl.io.append_log import AppendLog, Damaged, checked, text_of, whole_lines
from dora_rl.io.codec import dumps, encode, loads, rule
from dora_rl.observe.segments import segments
from dora_rl.types import UserError

SYNCED = (StepCommitted, VersionDurable, Rewound)  # on disk before anything relies on them
_EVENT, _ACTIONS, _STATE = rule(Event), rule(list[Action]), rule(State)


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
        return _STATE.decode(self.state)


def encode_entry(entry: Entry) -> bytes:
    """Its line, without a digest: as logs before the chain had it."""
    return checked(_entry_body(entry))


def encode_snapshot(number: int, now: float, state: State) -> bytes:
    return checked(_snapshot_body(number, now, state))


def _entry_body(entry: Entry) -> bytes:
    told = {"e": _EVENT.encode(entry.event), "a": _ACTIONS.encode(entry.actions)}
    return dumps({"n": entry.number, "t": entry.now, **told})


def _snapshot_body(number: int, now: float, state: State) -> bytes:
    return dumps({"n": number, "t": now, "s": _STATE.encode(state)})


def parse_line(line: bytes) -> Entry | Snapshot | None:
    """The record of one line, or None if it is damaged."""
    if (body := text_of(line)) is None:
        return None
    record = loads(body)
    if "s" in record:
        return Snapshot(record["n"], record["t"], record["s"])
    event, actions = _EVENT.decode(record["e"]), _ACTIONS.decode(record["a"])
    return Entry(record["n"], record["t"], event, actions)


class FileLog:
    """A log in a folder. Lines reach the operating system at once and the disk every second."""

    def __init__(
        self, folder: Path, *, entries_per_segment: int = 20_000, fsync_s: float = 1.0
    ) -> None:
        self.folder = folder
        self._entries_per_segment = entries_per_segment
        self._fsync_s = fsync_s
        self.number = 0  # of the next entry
        self._in_segment = 0
        self._digest = ""  # of the last line written
        self._file: AppendLog  # opened by `create`, `resume` and `snapshot`
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
        log.number = number
        log._in_segment = number - int(path.stem)
        log._file = AppendLog(path, size=size)  # a torn last line goes
        with path.open("rb") as file:
            file.seek(size - TAIL_BYTES)
            log._digest = digest_in(file.read())
        return log, state

    def append(self, now: float, event: Event, actions: Sequence[Action]) -> None:
        self._write(_entry_body(Entry(self.number, now, event, list(actions))))
        self.number += 1
        self._in_segment += 1
        if self._file.unsynced_s() >= self._fsync_s or isinstance(event, SYNCED):
            self.sync()

    def snapshot_due(self) -> bool:
        return self._in_segment >= self._entries_per_segment

    def snapshot(self, now: float, state: State) -> None:
        """Begin a new segment with the state as it is now."""
        self.close()
        self._open(self.number)
        self._write(_snapshot_body(self.number, now, state))
        self.sync()

    def sync(self) -> None:
        self.before_sync()
        self._file.sync()

    def close(self) -> None:
        self.sync()
        self._file.close()

    def _open(self, number: int) -> None:
        self._file = AppendLog(self.folder / f"{number:012d}.jsonl", new=True)
        self._in_segment = 0

    def _write(self, body: bytes) -> None:
        body, digest = chained(self._digest, body)
        self._file.append(checked(body))
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
        """Never due."""


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
    data = path.read_bytes()
    lines = whole_lines(data)
    for place, line in enumerate(lines, start=1):
        if (record := parse_line(line)) is None:
            raise _damaged(path.name, place)
        if chain is not None:
            chain.see(line)
        yield record
    if not last and not data.endswith(b"\n"):
        raise _damaged(path.name, len(lines) + 1)


def entries_since(folder: Path, number: int) -> list[Entry]:
    """The entries from `number` on. Read from the end: the cost does not grow with the run."""
    found: list[Entry] = []
    for path in reversed(segments(folder)):
        for line in reversed(whole_lines(path.read_bytes())):
            if (record := parse_line(line)) is not None and record.number < number:
                return found[::-1]
            if isinstance(record, Entry):
                found.append(record)
    return found[::-1]


def config_digests(folder: Path) -> set[str]:
    """Of the configurations that a run was begun and resumed with. Other lines are only searched
    for the words; those of older releases have none."""
    found: set[str] = set()
    for path in segments(folder):
        data = path.read_bytes()
        for words in (b'"is":"Started"', b'"is":"Resumed"'):
            at = data.find(words)
            while at >= 0:
                begin, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at) + 1
                record = parse_line(data[begin:end]) if end else None
                if isinstance(record, Entry) and isinstance(record.event, (Started, Resumed)):
                    found.add(record.event.config)
                at = data.find(words, at + 1)
    return found - {""}


def recover(folder: Path) -> tuple[State, int, Path, int]:
    """State after the last whole entry, its number, the segment to go on with, its good length."""
    for path in reversed(segments(folder)):
        with path.open("rb") as file:
            try:
                found = recover_lines(file, path.name)
            except Damaged as error:
                raise Damaged(f"{error}; {_what_is_left(folder)}") from None
        if found is not None:
            state, number, size = found
            for later in segments(folder):
                if later > path:
                    later.unlink()  # begun and never got its snapshot
            return state, number, path, size
    raise UserError(f"{folder} holds no event log to resume from; {_what_is_left(folder)}")


def _what_is_left(folder: Path) -> str:
    run = folder.parent
    return (
        f"restore {folder} from a copy of the run; the newest model is still to be had with  "
        f"dora-rl export {run} OUT_DIR"
    )


def recover_lines(lines: Iterable[bytes], name: str = "the log") -> tuple[State, int, int] | None:
    """State, next entry number and good length of one segment; None if it holds nothing whole.

    A last line without its end was torn by a crash; a damaged one is an error.
    """
    state: State | None = None
    number = size = 0
    for place, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
            break
        if (record := parse_line(line)) is None:
            raise _damaged(name, place)
        if isinstance(record, Snapshot):
            state = record.restore()
            number = record.number
        else:
            state = state if state is not None else initial_of(record)
            if step(state, record.event, record.now) != record.actions:
                raise UserError(
                    f"entry {record.number} of {name} replays differently: another release of "
                    "dora-rl wrote this log; resume with that release, or start a new run"
                )
            number = record.number + 1
        size += len(line)
    return (state, number, size) if state is not None else None


def _damaged(name: str, place: int) -> Damaged:
    return Damaged(f"{name} line {place} of the event log is damaged")


def initial_of(first: Entry) -> State:
    """The state before a run's first entry."""
    params = getattr(first.event, "params", None)
    if first.number != 0 or params is None:
        raise UserError("the event log does not begin with a Started event")
    return initial(params)


# -- the chain -------------------------------------------------------------------------------------


_BEGIN, _END = b',"h":"', b'"}\n'
_CHARS = 16
_SUFFIX = len(_BEGIN) + _CHARS + len(_END)
TAIL_BYTES = _SUFFIX  # of a file, enough to read the digest of its last line


def chained(previous: str, body: bytes) -> tuple[bytes, str]:
    """A JSON object with its digest as the last field, and the digest."""
    digest = blake2b(previous.encode() + body, digest_size=_CHARS // 2).hexdigest()
    return b"%s%s%s%s" % (body[:-1], _BEGIN, digest.encode(), _END[:-1]), digest


def digest_in(tail: bytes) -> str:
    """The digest at the end of a line, "" if it has none."""
    there = tail[-_SUFFIX : -_SUFFIX + len(_BEGIN)] == _BEGIN and tail.endswith(_END)
    return tail[-_SUFFIX + len(_BEGIN) : -len(_END)].decode(errors="replace") if there else ""


@dataclass(slots=True)
class ChainCheck:
    """Follows the chain line by line. `problem` is what is wrong with the last line, or ""."""

    num_chained: int = 0
    num_unchained: int = 0
    problem: str = ""
    _previous: str = ""

    def see(self, line: bytes) -> None:
        """`line` as it lies in the file: checksum, blank, JSON, newline."""
        self.problem = ""
        digest = digest_in(line)
        if not digest and self.num_chained:
            self.problem = "has no digest, and entries before it have one"
        elif digest and chained(self._previous, line[9:-_SUFFIX] + b"}")[1] != digest:
            self.problem = (
                "its digest does not follow from the line before it: a line was changed, "
                "removed, added or moved"
            )
        self.num_chained += bool(digest)
        self.num_unchained += not digest
        self._previous = digest


# -- replay ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ReplayResult:
    num_entries: int
    num_snapshots: int
    difference: str | None

    @property
    def ok(self) -> bool:
        return self.difference is None


def replay(records: Iterable[Entry | Snapshot]) -> ReplayResult:
    """Drive the core with a run's events. Stops at the first difference."""
    state, difference = None, None
    num_entries = num_snapshots = 0
    for record in records:
        if isinstance(record, Snapshot):
            num_snapshots += 1
            state = state if state is not None else record.restore()
            if encode(State, state) != encode(State, record.restore()):
                difference = f"the snapshot before entry {record.number} is another state"
        else:
            state = state if state is not None else initial_of(record)
            if (actions := step(state, record.event, record.now)) != record.actions:
                difference = _difference(record, actions)
            num_entries += difference is None
        if difference is not None:
            break
    return ReplayResult(num_entries, num_snapshots, difference)


def _difference(record: Entry, actions: Sequence[object]) -> str:
    name = f"entry {record.number}"
    for place, (now, then) in enumerate(zip(actions, record.actions, strict=False)):
        if now != then:
            return f"{name} action {place}: logged {then!r}, replayed {now!r}"
    return f"{name}: {len(record.actions)} actions were logged, {len(actions)} replayed"
