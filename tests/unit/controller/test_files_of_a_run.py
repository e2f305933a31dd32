"""Records, lines, journals, the lock: right after a crash at any byte."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from dora_rl.controller.records import Records, TrainedSample
from dora_rl.controller.run_dir import RunLock
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.engine.journal import Journal
from dora_rl.engine.sequence import Request, new_sequence
from dora_rl.io.append_log import cut_lines, read_lines
from dora_rl.observe.eventlog import FileLog
from dora_rl.store.journals import Journals
from dora_rl.types import Finish, RequestId, SamplingParams, Segment, UserError
from dora_rl.workers.last_words import full_line, is_full


def sample(group: int, version: int, reward: float = 1.0) -> TrainedSample:
    return TrainedSample(
        group=group,
        sample=0,
        version=version,
        num_prompt=3,
        num_tokens=2,
        reward=reward,
        finish="stop",
        text="ab",
        prompt="p",
        segments=1,
        logprobs=[-0.25, -0.75],
        logprob_sum=-1.0,
        token_ids=[1, 2],
    )


def test_lines_are_cut_at_any_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    whole = "".join(json.dumps({"step": step, "text": "x" * step}) + "\n" for step in range(5))
    for size in range(len(whole) + 1):
        path.write_text(whole[:size])
        cut_lines(path, lambda line: line["step"] < 3)
        kept = [line["step"] for line in read_lines(path)]
        assert kept == list(range(min(3, whole[:size].count("\n"))))


def test_a_resumed_run_has_each_step_once_and_counts_the_whole(tmp_path: Path) -> None:
    first = Records(tmp_path, rollouts=True)
    for step in range(3):
        first.step(step, {"kl": 0.1}, [sample(step, step, reward=float(step))], {})
    first.evaluation(1, {"greedy": 0.5})
    first.totals.tokens_generated = 77
    first.usage("learner", 0, 2.0, 3.0)
    first.summary("sync", 3, "interrupted", 2)
    first.close()

    # The log knows of two steps: the third was recorded just before the crash.
    again = Records(tmp_path, rollouts=True, committed=2)
    again.step(2, {}, [sample(9, 1, reward=7.0)], {})
    again.usage("learner", 1, 10.0, 10.0)
    again.usage("learner", 1, 11.0, 12.0)
    summary = again.summary("sync", 3, "all steps are trained", 2)
    again.close()
    lines = [line for line in read_lines(tmp_path / "metrics.jsonl") if "step" in line]
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert [row["group"] for row in read_lines(tmp_path / "rollouts.jsonl")] == [0, 1, 9]
    assert summary["tokens_trained"] == 6
    assert summary["tokens_generated"] == 77
    assert summary["reward_first"] == 0.0 and summary["reward_last"] == 7.0
    assert summary["staleness_max"] == 1 and summary["num_resumes"] == 1
    assert all(path.read_text().endswith("}\n") for path in tmp_path.glob("*.json"))
    assert again.totals.busy_s["learner"] == 13.0 and again.totals.cpu_s["learner"] == 15.0


def finished(sample: int, num_tokens: int) -> ev.SampleFinished:
    one = RequestId(0, sample)
    return ev.SampleFinished(one, 0, "instance0", num_tokens, Finish.STOP, (Segment(0, 0),))


def test_what_a_killed_life_did_since_its_totals_were_kept_is_counted(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path / "events")
    log.append(time.monotonic(), ev.Started(Params()), [])
    first = Records(tmp_path, rollouts=False, log=log)
    first.work_begins()
    first.totals.tokens_generated = 5
    log.append(time.monotonic(), finished(0, 5), [])
    first.step(0, {}, [sample(0, 0)], {})
    kept_s = json.loads((tmp_path / "totals.json").read_text())["wall_s"]
    # Two samples more, the second a minute later; then the process is killed.
    log.append(time.monotonic(), finished(1, 7), [])
    log.append(time.monotonic() + 60.0, finished(2, 11), [])
    first.close()

    written = {RequestId(0, 1): 4}  # three of its tokens were an environment's
    again = Records(tmp_path, rollouts=False, committed=1, log=log, written=written.get)
    assert again.totals.tokens_generated == 5 + 4 + 11
    assert 60.0 <= again.wall_s - kept_s < 90.0
    assert 60.0 <= again.totals.cut_s < 90.0, "the step that was open"
    again.close()
    once = Records(tmp_path, rollouts=False, committed=1, log=log)  # killed at its start
    assert once.totals.tokens_generated == 20 and once.wall_s - again.wall_s < 30.0
    once.close()
    log.close()


def write_journal(folder: Path, name: str, tokens: dict[RequestId, list[int]]) -> None:
    journal = Journal(folder / name, every=1, durable=False)
    for rid, ids in tokens.items():
        seq = new_sequence(Request(rid, 3, (5, 6), SamplingParams(), 0), 0, ())
        journal.state(seq)
        journal.tokens(rid, ids, [-0.5] * len(ids), [])
    journal.close()


def test_a_journal_stays_until_its_groups_have_ended(tmp_path: Path) -> None:
    one, other = RequestId(1, 0), RequestId(2, 0)
    write_journal(tmp_path, "instance0.4.jsonl", {one: [7, 8, 9], other: [1]})
    journals = Journals(tmp_path)
    assert journals.next_incarnation() == 5
    journals.collect("instance0", alive={1, 2})
    for _ in range(2):  # whoever continues it may die, too
        saved = journals.look_up(one)
        assert saved is not None and list(saved["resume_ids"]) == [7, 8, 9]
    write_journal(tmp_path, "instance1.5.jsonl", {one: [7, 8, 9, 10]})
    journals.collect("instance1", alive={1, 2})
    longest = journals.look_up(one)
    assert longest is not None and list(longest["resume_ids"]) == [7, 8, 9, 10]
    again = Journals(tmp_path)  # a new controller finds the same
    again.collect(alive={1, 2})
    assert again.look_up(one) == journals.look_up(one)
    again.forget(1, 1)
    assert not (tmp_path / "instance1.5.jsonl").exists()
    assert (tmp_path / "instance0.4.jsonl").exists()
    again.forget(2, 1)
    assert not list(tmp_path.iterdir())


def test_journals_of_ended_groups_are_not_read(tmp_path: Path) -> None:
    write_journal(tmp_path, "instance0.0.jsonl", {RequestId(1, 0): [7]})
    journals = Journals(tmp_path)
    journals.collect(alive={2})
    assert journals.look_up(RequestId(1, 0)) is None
    assert not list(tmp_path.iterdir())


def test_a_run_directory_has_one_controller(tmp_path: Path) -> None:
    held = RunLock(tmp_path)
    with pytest.raises(UserError, match="in use by another"):
        RunLock(tmp_path, wait_s=0.1)
    inherited = os.dup(held.fd)  # as a worker has it
    held.release()
    with pytest.raises(UserError, match="in use by another"):
        RunLock(tmp_path, wait_s=0.1)
    os.close(inherited)
    RunLock(tmp_path, wait_s=0.1).release()


def test_a_full_disk_is_recognised_behind_other_errors(tmp_path: Path) -> None:
    full = OSError(28, "No space left on device")
    wrapped = RuntimeError("could not save")
    wrapped.__cause__ = full
    assert is_full(full) and is_full(wrapped)
    assert is_full(RuntimeError('IoError(Os { code: 28, kind: StorageFull, message: "..." })'))
    assert not is_full(OSError(13, "Permission denied")) and not is_full(ValueError("28"))
    assert "--resume" in full_line(tmp_path, full)


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a place without room is needed")
def test_the_place_that_has_no_room_is_named(tmp_path: Path) -> None:
    """Shared memory may be full while the disk is not."""
    full = OSError(28, "No space left on device")
    nowhere = tmp_path / "nowhere"
    assert f"write {tmp_path} (" in full_line(tmp_path, full, nowhere)
    assert "write /proc (0 MiB free" in full_line(tmp_path, full, nowhere, "/proc")
    full.filename = str(tmp_path / "table.log")
    assert f"write {tmp_path}/table.log (" in full_line(tmp_path, full, "/proc")


@pytest.mark.parametrize(
    "text", ["x", "[]", "", '{"wall_x": 1.0}', '{"wall_s": "a"}', '{"log": {"number": 1}}']
)
def test_damaged_totals_are_named_and_not_needed(tmp_path: Path, text: str) -> None:
    (tmp_path / "totals.json").write_text(text)
    said: list[str] = []
    Records(tmp_path, rollouts=False, committed=0, tell=said.append).close()
    assert len(said) == 1 and "totals.json is damaged" in said[0]


@pytest.mark.parametrize("damage", [b"}", b'{"step": 1}\n', b"[7]\n", b"\xff\xfe\n"])
def test_damaged_lines_are_named_and_not_needed(tmp_path: Path, damage: bytes) -> None:
    first = Records(tmp_path, rollouts=True)
    for step in range(3):
        first.step(step, {}, [sample(step, step)], {})
    first.close()
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = (tmp_path / name).read_bytes().splitlines(keepends=True)
        broken = damage if damage.endswith(b"\n") else lines[1].replace(b"}", damage * 2)
        (tmp_path / name).write_bytes(lines[0] + broken + lines[2])
    said: list[str] = []
    again = Records(tmp_path, rollouts=True, committed=3, tell=said.append)
    again.step(3, {}, [sample(3, 3)], {})
    again.close()
    assert any("metrics.jsonl" in line and "left out" in line for line in said)
    kept = [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")]
    assert kept == [0, 2, 3] and again.totals.tokens_trained == 6


def test_a_damaged_last_line_of_rollouts_goes(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    (tmp_path / "rollouts.jsonl").write_text('{"step": 0}\n{"step": 0\n')
    said: list[str] = []
    Records(tmp_path, rollouts=True, committed=1, tell=said.append).close()
    assert (tmp_path / "rollouts.jsonl").read_text() == '{"step": 0}\n'
    assert "rollouts.jsonl" in said[0]
