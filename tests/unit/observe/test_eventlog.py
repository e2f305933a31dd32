"""The event log on disk: whole after any crash, named when damaged, short to recover."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core import actions as act
from dora_rl.core.state import State
from dora_rl.core.step import step
from dora_rl.io.codec import encode
from dora_rl.observe.audit import audit_run
from dora_rl.observe.eventlog import (
    Entry,
    FileLog,
    Snapshot,
    initial_of,
    parse_line,
    read,
    recover,
    replay,
    segments,
)
from dora_rl.types import Mode, UserError
from tests.kit.simulated_logs import small_world, whole_run

PER_SEGMENT = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a whole run, in several segments. Never written to; see `copy_of`."""
    folder = tmp_path_factory.mktemp("run") / "events"
    log = FileLog.create(folder, entries_per_segment=PER_SEGMENT, fsync_s=60)
    world = small_world(Mode.MULTI_VERSION, 2, log=log)
    world.start()
    assert world.run(1e6)
    log.close()
    assert len(segments(folder)) >= 4
    return folder


@pytest.fixture(scope="module")
def states(folder: Path) -> list[object]:
    """states[n] is the written form of the state before entry n."""
    entries = [record for record in read(folder) if isinstance(record, Entry)]
    state = initial_of(entries[0])
    found = [encode(State, state)]
    for entry in entries:
        step(state, entry.event, entry.now)
        found.append(encode(State, state))
    return found


def copy_of(folder: Path, to: Path) -> Path:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)
    return to


def whole_lines(path: Path) -> int:
    return sum(parse_line(line) is not None for line in path.open("rb"))


# Writing and reading.


def test_what_is_read_is_what_was_written(folder: Path) -> None:
    entries = [record for record in read(folder) if isinstance(record, Entry)]
    assert entries == whole_run(Mode.MULTI_VERSION, 2)


def test_every_segment_but_the_first_begins_with_a_snapshot(folder: Path) -> None:
    for place, path in enumerate(segments(folder)):
        first = parse_line(path.open("rb").readline())
        assert isinstance(first, Snapshot) == (place > 0)
        assert first is not None and first.number == int(path.stem)


def test_a_run_directory_is_not_overwritten(folder: Path) -> None:
    with pytest.raises(UserError, match="--resume"):
        FileLog.create(folder)


def test_a_folder_without_a_log_is_the_users_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no event log"):
        list(read(tmp_path))
    with pytest.raises(UserError, match="no event log to resume from"):
        FileLog.resume(tmp_path)


# Crashes.


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_a_crash_at_any_byte_leaves_a_whole_prefix(
    data: st.DataObject,
    folder: Path,
    states: list[object],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """The newest segment ends anywhere: recovery finds the state after its last whole entry."""
    copy = copy_of(folder, tmp_path_factory.getbasetemp() / "crashed")
    paths = segments(copy)
    newest = data.draw(st.integers(0, len(paths) - 1))
    for path in paths[newest + 1 :]:
        path.unlink()
    written = paths[newest].read_bytes()
    # In the middle of a line as often as at its ends, whatever the length of the lines.
    ends = [place + 1 for place, byte in enumerate(written) if byte == ord("\n")]
    near = st.sampled_from(ends).flatmap(lambda e: st.integers(e - 2, min(e + 2, len(written))))
    size = data.draw(st.integers(0, len(written)) | near)
    paths[newest].write_bytes(written[:size])

    if newest == 0 and size < ends[0]:
        with pytest.raises(UserError):
            recover(copy)
        return
    state, number, path, good = recover(copy)
    lost_snapshot = newest > 0 and size < ends[0]
    assert path == paths[newest - lost_snapshot]
    assert encode(State, state) == states[number]
    expected = sum(end <= size for end in ends) - (newest > 0)
    assert lost_snapshot or number == int(path.stem) + expected
    assert good == len(path.read_bytes()) or parse_line(path.read_bytes()[good:]) is None


def test_a_resumed_log_goes_on_where_it_ended(folder: Path, tmp_path: Path) -> None:
    copy = copy_of(folder, tmp_path / "events")
    newest = segments(copy)[-1]
    lines = newest.read_bytes().splitlines(keepends=True)
    assert len(lines) > 4
    entries = [record for record in read(copy) if isinstance(record, Entry)]
    newest.write_bytes(b"".join(lines[:-3]) + lines[-3][:-10])  # torn in its last line
    log, state = FileLog.resume(copy)
    for entry in entries[-3:]:
        log.append(entry.now, entry.event, step(state, entry.event, entry.now))
    log.close()
    assert [r for r in read(copy) if isinstance(r, Entry)] == entries
    assert audit_run(copy).ok and replay(read(copy)).ok


def test_recovery_reads_the_newest_segment_only(
    folder: Path, states: list[object], tmp_path: Path
) -> None:
    copy = copy_of(folder, tmp_path / "events")
    *older, newest = segments(copy)
    for path in older:
        path.write_bytes(b"gone\n")
    state, number, path, _ = recover(copy)
    assert path == newest and encode(State, state) == states[number] == states[-1]


def test_the_newest_segment_stays_short(folder: Path) -> None:
    assert all(whole_lines(path) <= PER_SEGMENT + 1 for path in segments(folder))


def test_the_newest_segment_stays_short_when_the_run_keeps_crashing(
    folder: Path, tmp_path: Path
) -> None:
    entries = [record for record in read(folder) if isinstance(record, Entry)]
    copy = tmp_path / "events"
    log = FileLog.create(copy, entries_per_segment=PER_SEGMENT, fsync_s=60)
    state = initial_of(entries[0])
    for entry in entries:
        log.append(entry.now, entry.event, step(state, entry.event, entry.now))
        if log.snapshot_due():
            log.snapshot(entry.now, state)
        if entry.number % (PER_SEGMENT // 2) == 0:
            log.close()
            log, state = FileLog.resume(copy, entries_per_segment=PER_SEGMENT, fsync_s=60)
    log.close()
    assert max(whole_lines(path) for path in segments(copy)) <= 2 * PER_SEGMENT


# Damage.


def damaged(path: Path, line: int) -> None:
    """One bit of one line (counted from 1) is another."""
    lines = path.read_bytes().splitlines(keepends=True)
    body = bytearray(lines[line - 1])
    body[len(body) // 2] ^= 1
    lines[line - 1] = bytes(body)
    path.write_bytes(b"".join(lines))


@pytest.mark.parametrize("place", [0, 1, -1])
def test_a_damaged_line_in_the_middle_is_named(folder: Path, tmp_path: Path, place: int) -> None:
    copy = copy_of(folder, tmp_path / "events")
    path = segments(copy)[place]
    damaged(path, 5)
    with pytest.raises(UserError, match=f"{path.name} line 5 "):
        list(read(copy))


def test_a_last_line_that_is_complete_and_damaged_is_named_not_cut(
    folder: Path, tmp_path: Path
) -> None:
    """It has its end, so no writer died in it: reading it as torn would lose an entry."""
    copy = copy_of(folder, tmp_path / "events")
    newest = segments(copy)[-1]
    last = whole_lines(newest)
    damaged(newest, last)
    before = newest.read_bytes()
    for look in (lambda: list(read(copy)), lambda: FileLog.resume(copy)):
        with pytest.raises(UserError, match=f"{newest.name} line {last} "):
            look()
    assert newest.read_bytes() == before


@pytest.mark.parametrize("line", [1, 5])
def test_a_damaged_line_is_an_error_on_resume_not_the_end_of_the_log(
    folder: Path, tmp_path: Path, line: int
) -> None:
    """Whole lines follow it, so it was not torn by a crash: nothing may be thrown away."""
    copy = copy_of(folder, tmp_path / "events")
    newest = segments(copy)[-1]
    damaged(newest, line)
    before = {path.name: path.read_bytes() for path in segments(copy)}
    refused = False
    try:
        FileLog.resume(copy)
    except UserError as error:
        refused = f"{newest.name} line {line} " in str(error)
    assert refused
    assert {path.name: path.read_bytes() for path in segments(copy)} == before


# Replay.


@pytest.mark.parametrize("mode", list(Mode))
def test_replay_gets_the_same_actions(mode: Mode) -> None:
    entries = whole_run(mode, 1)
    result = replay(entries)
    assert result.ok and result.num_entries == len(entries)


def test_replay_compares_the_snapshots_too(folder: Path) -> None:
    result = replay(read(folder))
    assert result.ok and result.num_snapshots == len(segments(folder)) - 1


def test_a_tampered_action_is_reported_by_replay() -> None:
    entries = whole_run(Mode.MULTI_VERSION, 2)
    place, inner = next(
        (place, inner)
        for place, entry in enumerate(entries)
        for inner, action in enumerate(entry.actions)
        if isinstance(action, act.Dispatch)
    )
    actions = list(entries[place].actions)
    actions[inner] = replace(actions[inner], instance="i99999")  # type: ignore[arg-type]
    entries[place] = replace(entries[place], actions=actions)
    result = replay(entries)
    assert not result.ok and result.num_entries == place
    assert f"entry {place} action {inner}" in (result.difference or "")
    assert "i99999" in (result.difference or "")


def test_a_missing_action_is_reported_by_replay() -> None:
    entries = whole_run(Mode.MULTI_VERSION, 2)
    place = next(p for p, entry in enumerate(entries) if len(entry.actions) > 1)
    entries[place] = replace(entries[place], actions=entries[place].actions[:-1])
    assert f"entry {place}: " in (replay(entries).difference or "")


def test_a_tampered_snapshot_is_reported_by_replay(folder: Path) -> None:
    records = list(read(folder))
    place = next(p for p, record in enumerate(records) if isinstance(record, Snapshot))
    snapshot = records[place]
    assert isinstance(snapshot, Snapshot)
    records[place] = replace(snapshot, state=snapshot.state | {"next_prompt": 0})
    result = replay(records)
    assert f"before entry {snapshot.number} is another state" in (result.difference or "")


def test_a_log_that_does_not_begin_at_its_beginning_is_refused(folder: Path) -> None:
    entries = [record for record in read(folder) if isinstance(record, Entry)]
    with pytest.raises(UserError, match="Started"):
        replay(entries[5:])
