"""The chain of the event log: unbroken over crashes, segments and resumes; broken by any change."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dora_rl.core import events as ev
from dora_rl.core.step import step
from dora_rl.io.append_log import checked
from dora_rl.observe.audit import Promise, audit_run
from dora_rl.observe.eventlog import (
    ChainCheck,
    Entry,
    FileLog,
    chained,
    encode_entry,
    parse_line,
    read,
    segments,
)
from dora_rl.types import Mode
from tests.kit.simulated_logs import small_world, whole_run

PER_SEGMENT = 60


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return whole_run(Mode.MULTI_VERSION, 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Never written to."""
    folder = tmp_path_factory.mktemp("run") / "events"
    log = FileLog.create(folder, entries_per_segment=PER_SEGMENT, fsync_s=60)
    world = small_world(Mode.MULTI_VERSION, 2, log=log)
    world.start()
    assert world.run(1e6)
    log.close()
    return folder


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "events"))


def encode_chained(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The lines of a log from its first entry on, each with its digest."""
    digest = ""
    for entry in entries:
        body, digest = chained(digest, encode_entry(entry)[9:-1])
        yield checked(body)


def broken(folder: Path) -> list[str]:
    return [f.subject for f in audit_run(folder).findings if f.promise is Promise.LOG]


def rewrite(path: Path, change) -> None:
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def test_an_honest_log_is_chained_from_end_to_end(folder: Path) -> None:
    chain = ChainCheck()
    problems = [chain.problem for _ in read(folder, chain)]
    assert set(problems) == {""} and chain.num_unchained == 0
    assert chain.num_chained == len(problems) and len(segments(folder)) > 3


def test_what_is_written_at_once_is_what_the_log_writes(
    entries: list[Entry], tmp_path: Path
) -> None:
    log = FileLog.create(tmp_path, fsync_s=60)
    for entry in entries:
        log.append(entry.now, entry.event, entry.actions)
    log.close()
    assert segments(tmp_path)[0].read_bytes() == b"".join(encode_chained(entries))


@pytest.mark.parametrize("torn", [0, 10])
def test_the_chain_goes_on_after_a_crash(copy: Path, torn: int) -> None:
    """The last lines are lost, one perhaps in the middle; the resumed log is one chain."""
    rewrite(segments(copy)[-1], lambda lines: [*lines[:-3], lines[-3][:torn]])
    log, state = FileLog.resume(copy, entries_per_segment=PER_SEGMENT)
    number = sum(isinstance(record, Entry) for record in read(copy))
    for entry in [r for r in whole_run(Mode.MULTI_VERSION, 2) if r.number >= number]:
        log.append(entry.now, entry.event, step(state, entry.event, entry.now))
    log.close()
    assert broken(copy) == []


def test_the_chain_goes_on_where_the_next_segment_was_never_begun(copy: Path) -> None:
    *_, before, last = segments(copy)
    rewrite(last, lambda lines: [lines[0][:20]])  # the crash came while its snapshot was written
    log, state = FileLog.resume(copy)
    log.snapshot(1e6, state)
    log.close()
    assert segments(copy)[-2] == before and broken(copy) == []


def test_a_log_of_an_older_release_is_audited_and_goes_on_with_a_chain(
    entries: list[Entry], tmp_path: Path
) -> None:
    half = len(entries) // 2
    path = tmp_path / "000000000000.jsonl"
    path.write_bytes(b"".join(map(encode_entry, entries[:half])))
    figures = audit_run(tmp_path).figures
    assert (figures.num_chained, figures.num_unchained) == (0, half)
    log, state = FileLog.resume(tmp_path)
    for entry in entries[half:]:
        log.append(entry.now, entry.event, step(state, entry.event, entry.now))
    log.close()
    report = audit_run(tmp_path)
    assert report.findings == () and report.proved
    assert report.figures.num_chained == len(entries) - half


def test_a_line_without_a_digest_among_others_is_named(copy: Path) -> None:
    path = segments(copy)[0]
    record = parse_line(path.read_bytes().splitlines(keepends=True)[9])
    assert isinstance(record, Entry)
    rewrite(path, lambda lines: [*lines[:9], encode_entry(record), *lines[10:]])
    assert broken(copy)[0] == "entry 9"


@pytest.mark.parametrize("place", [3, 20])
def test_lines_exchanged_removed_or_repeated_are_named(copy: Path, place: int) -> None:
    path = segments(copy)[1]
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in (
        [*lines[:place], lines[place + 1], lines[place], *lines[place + 2 :]],
        [*lines[:place], *lines[place + 1 :]],
        [*lines[:place], lines[place], *lines[place:]],
    ):
        path.write_bytes(b"".join(wrong))
        first = parse_line(wrong[place])
        following = parse_line(wrong[place + 1])
        assert first is not None and following is not None
        assert {f"entry {first.number}", f"entry {following.number}"} & set(broken(copy))


def test_a_changed_snapshot_is_named(copy: Path) -> None:
    """Nobody believes it while the log is whole; a resume would."""
    path = segments(copy)[1]
    other = segments(copy)[2].read_bytes().splitlines(keepends=True)[0]
    rewrite(path, lambda lines: [other, *lines[1:]])
    assert any(name.startswith("snapshot before") for name in broken(copy))


def test_a_segment_taken_out_is_named(copy: Path) -> None:
    segments(copy)[1].unlink()
    assert any(name.startswith("snapshot before") for name in broken(copy))


def test_an_event_says_what_it_did_before_the_chain(entries: list[Entry]) -> None:
    """What an older release wrote has none of the fields that came with it."""
    finished = next(e for e in entries if isinstance(e.event, ev.SampleFinished))
    line = encode_entry(finished).replace(b',"digest":""', b"")
    line = b"%08x %s" % (zlib.crc32(line[9:-1]), line[9:])
    record = parse_line(line)
    assert record == finished
