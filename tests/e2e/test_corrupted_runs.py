"""A finished run is corrupted in every way we know of: whatever changes its meaning is noticed."""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from dora_rl.audit.files import FileAudit
from dora_rl.cli import main
from dora_rl.io.append_log import checked
from dora_rl.observe.audit import Promise, audit_run, read_through
from dora_rl.observe.eventlog import Entry, chained, digest_in, encode_entry, read, replay
from dora_rl.types import UserError
from tests.e2e.run_corruptions import FILES, LOG, FileCorruption, LogCorruption, in_json, lines
from tests.kit.tiny_runs import TinyRun, tiny_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """Three steps of the shipped model. Never written to; see `copy`. With fewer slots than there
    are requests, so that decisions depend on how many there are."""
    run = tiny_run(tmp_path_factory.mktemp("honest"), rollout__seqs_max=4)
    run.train()
    return run


@pytest.fixture
def copy(run: TinyRun, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run.run_dir, tmp_path / "run"))


def segment_of(run: Path) -> Path:
    (path,) = (run / "events").glob("*.jsonl")
    return path


def entries_of(run: Path) -> list[Entry]:
    return [record for record in read(run / "events") if isinstance(record, Entry)]


def encode_chained(entries: Iterable[Entry]) -> Iterator[bytes]:
    """The lines of a log from its first entry on, each with its digest."""
    digest = ""
    for entry in entries:
        body, digest = chained(digest, encode_entry(entry)[9:-1])
        yield checked(body)


def edited(entry: Entry, line: bytes) -> bytes:
    """What an editor leaves: other content, the digest of the line, a checksum that fits."""
    body = encode_entry(entry)[9:-2] + b',"h":"%s"}' % digest_in(line).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def files_of(run: Path) -> FileAudit:
    return FileAudit(run, read_through(run / "events", keep=True))


def caught_by(run: Path) -> str:
    """The first that objects."""
    auditor = read_through(run / "events", keep=True)
    if not auditor.report().proved:
        return "audit"
    if FileAudit(run, auditor).check():
        return "files"
    try:
        return "" if replay(read(run / "events")).ok else "replay"
    except (UserError, AssertionError, KeyError):
        return "replay"


def test_the_honest_run_passes(run: TinyRun) -> None:
    assert caught_by(run.run_dir) == ""
    auditor = read_through(run.run_dir / "events", keep=True)
    files = FileAudit(run.run_dir, auditor)
    assert files.check() == ()
    # Nothing is left out but what the log cannot know.
    assert [note.split(":")[0].split(",")[0] for note in files.notes] == [
        "summary.json",
        "journals",
    ]
    assert "tokens_generated" in files.notes[0] and "updates_applied" not in files.notes[0]


def test_there_are_enough_of_them() -> None:
    everything = [*LOG.values(), *FILES.values()]
    assert len(everything) >= 60
    assert all(bool(one.why) == (one.by == "") for one in everything)


@pytest.mark.parametrize("name", LOG)
def test_a_wrong_log_is_noticed_even_with_a_chain_of_its_own(name: str, copy: Path) -> None:
    wrong: LogCorruption = LOG[name]
    before = entries_of(copy)
    after = wrong.change(before)
    assert after != before
    segment_of(copy).write_bytes(b"".join(encode_chained(after)))
    assert caught_by(copy) == wrong.by


@pytest.mark.parametrize("name", LOG)
def test_a_changed_log_breaks_the_chain(name: str, run: TinyRun, tmp_path: Path) -> None:
    """Lines that were not changed are as they were; changed ones keep the digest they had."""
    before, old_lines = (
        entries_of(run.run_dir),
        segment_of(run.run_dir).read_bytes().splitlines(keepends=True),
    )
    as_written = dict(zip(map(encode_entry, before), old_lines, strict=True))
    after = LOG[name].change(before)
    new_lines = [
        as_written.get(encode_entry(e)) or edited(e, old_lines[min(e.number, len(old_lines) - 1)])
        for e in after
    ]
    (tmp_path / "000000000000.jsonl").write_bytes(b"".join(new_lines))
    report = audit_run(tmp_path)
    assert not report.proved
    if new_lines != old_lines[: len(new_lines)]:
        assert any(f.promise is Promise.LOG for f in report.findings)


@pytest.mark.parametrize("name", FILES)
def test_a_wrong_file_is_noticed(name: str, copy: Path) -> None:
    wrong: FileCorruption = FILES[name]
    wrong.change(copy)
    assert caught_by(copy) == wrong.by


def test_the_command_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--files", str(copy)]) == 0
    assert "the files are what the log tells of" in capsys.readouterr().out
    FILES["weights: flipped bit"].change(copy)
    out = copy.parent / "found.json"
    assert main(["audit", "--files", str(copy), "--json", str(out)]) == 1
    assert "version 3" in capsys.readouterr().out
    (finding,) = json.loads(out.read_text())["findings"]
    assert finding["promise"] == "files" and finding["subject"] == "version 3"
    assert main(["audit", str(copy)]) == 0  # the log alone has no fault


@pytest.mark.parametrize(
    "name", ["checkpoint: model of another step", "checkpoint: all of another step"]
)
def test_export_refuses_a_model_of_another_step(
    name: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    FILES[name].change(copy)
    assert main(["export", str(copy), str(tmp_path / "out"), "--step", "3"]) == 2
    assert "is not what the run made" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert main(["export", str(copy), str(tmp_path / "out"), "--step", "2"]) == 0


DAMAGED = {
    "a list": lambda all: ["[1,2]\n", *all[1:]],
    "a step alone": lambda all: ['{"step":1}\n', *all[1:]],
    "cut in a line": lambda all: [*all[:-1], all[-1][:40]],
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_line_is_named_by_recompute(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines("rollouts.jsonl", DAMAGED[name])(copy)
    assert main(["audit", "--recompute", "2", str(copy)]) == 1
    said = capsys.readouterr().out
    assert "rollouts.jsonl line " in said and "is damaged" in said


def test_nothing_recomputed_is_no_proof(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "--recompute", "-5", str(copy)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    shutil.rmtree(copy / "weights")
    assert main(["audit", "--recompute", "5", str(copy)]) == 3
    said = capsys.readouterr().out
    assert "nothing could be recomputed" in said and "every promise was kept" not in said


@pytest.mark.parametrize("text", ["x", "{}", "[]"])
def test_export_says_in_a_line_that_a_checkpoint_is_damaged(
    text: str, copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copy / "checkpoints" / "step_000002" / "trainer" / "state.json").write_text(text)
    assert main(["export", str(copy), str(tmp_path / "out"), "--step", "3"]) == 2
    said = capsys.readouterr().err
    assert "state.json is damaged" in said and said.count("\n") == 1


def test_a_killed_life_owes_no_summary(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The log ends before its stop; the summary is gone, or that of a life before."""
    kept = segment_of(copy).read_bytes().splitlines(keepends=True)[:-1]
    segment_of(copy).write_bytes(b"".join(kept))
    in_json("summary.json", steps=1, reward_last=9.0)(copy)
    found = [finding.subject for finding in files_of(copy).check()]
    (copy / "summary.json").unlink()
    found += [finding.subject for finding in files_of(copy).check()]
    assert "summary.json" not in found
    main(["audit", "--files", str(copy)])
    expected = "not compared: summary.json, it is written at an end and this life has none"
    assert expected in capsys.readouterr().out


def test_replay_of_an_empty_log_proves_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "events").mkdir()
    (tmp_path / "events" / "000000000000.jsonl").write_bytes(b"")
    assert main(["replay", str(tmp_path)]) == 3
    assert "the log is empty" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["log emptied", "log cut after a step"])
def test_a_log_without_an_end_is_never_called_proved(
    name: str, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = LOG[name].change(entries_of(copy))
    lines = segment_of(copy).read_bytes().splitlines(keepends=True)
    segment_of(copy).write_bytes(b"".join(lines[: len(kept)]))
    assert main(["audit", str(copy)]) == 3
    said = capsys.readouterr().out
    assert "unfinished" in said and "every promise was kept" not in said
