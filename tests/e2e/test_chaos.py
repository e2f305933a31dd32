"""Killed at random moments, again and again: nothing is lost, nothing is done twice.

The moments come from a seed that is printed; what the kill hits depends on the machine, the
promises do not.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from dora_rl.core.actions import End, EndGroup, IssueGroup
from tests.kit.tiny_runs import (
    ENDLESS,
    RUN_S_MAX,
    STOPPED,
    TinyRun,
    finish,
    tiny_run,
    wait_until,
    workers_of,
)

pytestmark = pytest.mark.full

NUM_KILLS = 20
IDLE = (b'"Tick"', b'"InstanceReport"', b'"LearnerReport"')
NUM_STEPS = 12
HELD_OUT = [{"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 12}}]


def assert_every_group_ended_once(run: TinyRun, num_steps: int) -> None:
    report = run.proven()
    assert report.figures.finished and report.figures.steps == num_steps
    issued: list[int] = []
    ended: dict[int, End] = {}
    for entry in run.entries():
        for action in entry.actions:
            if isinstance(action, IssueGroup):
                issued.append(action.group)
            elif isinstance(action, EndGroup):
                assert action.group not in ended, f"group {action.group} ended twice"
                ended[action.group] = action.end
    assert len(set(issued)) == len(issued)
    assert set(issued) == set(ended), "every issued group ended"
    assert run.steps() == list(range(num_steps)), "each step was trained and recorded once"
    rows = run.lines("rollouts.jsonl")
    trained = {group for group, end in ended.items() if end is End.TRAINED}
    assert {row["group"] for row in rows} == trained
    assert len({(row["group"], row["sample"]) for row in rows}) == len(rows)


def assert_journals_were_kept(run: TinyRun) -> int:
    """What was journaled is a prefix of what was trained, on the same version."""
    rows = {(row["group"], row["sample"]): row for row in run.lines("rollouts.jsonl")}
    kept = 0
    for line in run.lines("continued.jsonl"):
        row = rows.get((line["group"], line["sample"]))
        if row is not None and line["token_ids"]:
            assert line["journal_version"] == line["version"] == row["version"]
            assert row["token_ids"][: len(line["token_ids"])] == line["token_ids"]
            kept += 1
    return kept


def num_entries(run: TinyRun) -> int:
    """Of the log, without what is written while nothing happens."""
    lines = [
        line
        for path in (run.run_dir / "events").glob("*.jsonl")
        for line in path.read_bytes().splitlines()
    ]
    return sum(not any(word in line[:120] for word in IDLE) for line in lines)


@pytest.mark.kills
def test_twenty_kills(tmp_path: Path) -> None:
    seed = int(os.environ.get("CHAOS_SEED", time.time_ns() % 100_000))
    print(f"CHAOS_SEED={seed}")
    draw = random.Random(seed)
    run = tiny_run(
        tmp_path,
        data__eval=HELD_OUT,
        evaluation__num_prompts=8,
        evaluation__every_steps=4,
        orchestration__num_steps=NUM_STEPS,
        orchestration__attempts_max=100,
        rollout__journal_steps=1,
        rollout__tokens_max=300,
        rollout__ignore_eos=True,
    )
    process, num_steps, killed = run.start(), NUM_STEPS, []
    while len(killed) < NUM_KILLS:
        more = ("--resume", f"orchestration.num_steps={num_steps}")
        # A moment is a number of log entries from now: it is the same on a slow machine, where
        # workers take longer to start.
        moment = num_entries(run) + draw.randrange(2, 50)
        if not _reached(run, moment, process):
            finish(process)  # all steps are trained: a run can also be made longer
            num_steps += 4
            process = run.start("--resume", f"orchestration.num_steps={num_steps}")
            continue
        workers = [pid for pid in sorted(workers_of(run.run_dir)) if pid != process.pid]
        controller = len(killed) % 3 == 2 or not workers
        _kill(process.pid if controller else draw.choice(workers))
        killed.append("controller" if controller else "worker")
        if controller:
            process.communicate()
            wait_until("the workers' end", lambda: not workers_of(run.run_dir))
            process = run.start(*more)
    finish(process)
    print(f"{killed.count('worker')} workers and {killed.count('controller')} controllers killed")
    assert not workers_of(run.run_dir)
    assert_every_group_ended_once(run, num_steps)
    assert assert_journals_were_kept(run) > 0
    assert run.summary()["num_resumes"] >= killed.count("controller")
    versions = [line["version"] for line in run.lines("metrics.jsonl") if "version" in line]
    assert len(set(versions)) == len(versions) and num_steps in versions


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself in this moment
        os.kill(pid, signal.SIGKILL)


def _reached(run: TinyRun, moment: int, process: subprocess.Popen[str]) -> bool:
    until = time.monotonic() + RUN_S_MAX
    while num_entries(run) < moment:
        if process.poll() is not None:
            return False
        assert time.monotonic() < until, "the run does not move"
        time.sleep(0.01)
    return True


BAD_REWARD = '''
import os, time

FLAGS = {folder!r}

def first(name):
    """True once in the whole run, over all processes and restarts."""
    try:
        os.close(os.open(os.path.join(FLAGS, name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True

def reward(prompt, completion, **columns):
    if first("hang"):
        time.sleep(3600)
    if first("raise"):
        raise RuntimeError("a bug in the reward")
    if first("nan"):
        return float("nan")
    if first("exit"):
        os._exit(7)
    return float(len(completion) % 3)
'''


def test_rewards_that_hang_raise_return_nan_or_end_their_process(tmp_path: Path) -> None:
    flags = tmp_path / "flags"
    flags.mkdir()
    code = tmp_path / "bad_reward.py"
    code.write_text(BAD_REWARD.format(folder=str(flags)))
    run = tiny_run(
        tmp_path,
        reward__functions=[f"{code}:reward"],
        reward__timeout_s=10.0,
        runtime__watchdog_s=1.0,
        rollout__tokens_max=32,  # so that nothing else goes on during most of the hang
        orchestration__num_steps=2,
    )
    run.train()
    assert sorted(path.name for path in flags.iterdir()) == ["exit", "hang", "nan", "raise"]
    assert_every_group_ended_once(run, 2)
    report = run.proven()
    assert report.figures.groups_trained == 8
    assert all(row["reward"] in (0.0, 1.0, 2.0) for row in run.lines("rollouts.jsonl"))
    failed = [e.event for e in run.entries() if type(e.event).__name__ == "ScoreFailed"]
    assert len(failed) >= 4
    waits = [wait for line in run.lines("watchdog.jsonl") for wait in line["waits"]]
    hung = [wait for wait in waits if re.search("[1-9][0-9]* with rewards", wait["for"])]
    assert hung and max(wait["since_s"] for wait in hung) > 1, "the watchdog named the wait"


def test_a_reward_that_always_fails_stops_the_run_with_its_reason(tmp_path: Path) -> None:
    code = tmp_path / "worse.py"
    code.write_text("def reward(completion, **columns):\n    raise RuntimeError('no such key')\n")
    run = tiny_run(tmp_path, reward__functions=[f"{code}:reward"])
    said = run.train(status=STOPPED)
    assert "failed_share_max" in said and "RuntimeError: no such key" in said
    run.proven()


def test_a_loss_that_fails_stops_the_run_at_once(tmp_path: Path) -> None:
    code = tmp_path / "flat.py"
    code.write_text(  # on the small batches that it is tried with before the start, it is right
        "def flat(inputs, options):\n"
        "    loss = -inputs.logprobs_T * inputs.advantages_T\n"
        "    return loss if inputs.num_sequences <= 4 else loss.mean()\n"
    )
    longer = tmp_path / "longer.py"
    longer.write_text("def longer(completion, answer):\n    return float(len(completion))\n")
    functions = [f"{longer}:longer"]
    run = tiny_run(tmp_path, algorithm__loss=f"{code}:flat", reward__functions=functions)
    said = run.train(status=STOPPED)
    assert "learner: algorithm.loss" in said and "must return one loss per token" in said
    assert not any(type(e.event).__name__ == "LearnerLost" for e in run.entries())


@pytest.mark.kills
@pytest.mark.parametrize("place", [20, -100], ids=["header", "tensor"])
def test_damaged_weights_in_shared_memory_are_refused_and_restored(
    tmp_path: Path, place: int
) -> None:
    root = Path("/dev/shm") / f"dora-rl-test-{os.getpid()}"
    run = tiny_run(
        tmp_path, weights__root=str(root), orchestration__num_steps=2, rollout__num_instances=1
    )
    process = run.start()
    path = root / "00000000" / "model.safetensors"
    # Before that a learner that starts anew would find the damage itself, and seal it once more.
    on_disk = run.run_dir / "weights" / "00000000"
    wait_until("version 0", lambda: path.is_file() and on_disk.is_dir(), process)
    process.send_signal(signal.SIGSTOP)
    for pid in workers_of(run.run_dir):
        if pid != process.pid:
            _kill(pid)
    _damage(path, place)
    process.send_signal(signal.SIGCONT)
    finish(process)
    failed = [e.event for e in run.entries() if type(e.event).__name__ == "LoadFailed"]
    assert failed, "the damage went unnoticed"
    assert_every_group_ended_once(run, 2)


def _damage(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 0xFF
    path.chmod(0o644)
    path.write_bytes(data)


def test_a_full_disk_stops_the_run_and_it_goes_on_when_there_is_room(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    size = "size=48m"
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", str(disk)], check=False)
    if made.returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        run = tiny_run(disk, orchestration__num_steps=ENDLESS)
        process = run.start()
        wait_until("step 0", lambda: 0 in run.steps(), process)
        filler = disk / "filler"
        _fill(filler)
        said = finish(process, STOPPED)
        assert "room" in said and "Traceback" not in said
        assert not workers_of(run.run_dir)
        filler.unlink()
        num_steps = run.steps_enough()
        run.train("--resume", f"orchestration.num_steps={num_steps}")
        assert_every_group_ended_once(run, num_steps)
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(path: Path) -> None:
    """Write until there is no room for one byte more."""
    with path.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


@pytest.mark.kills
def test_state_files_are_whole_after_any_kill(tmp_path: Path) -> None:
    """The records end in whole lines and the run's own JSON files can be read at any moment."""
    run = tiny_run(tmp_path, orchestration__num_steps=ENDLESS)
    process = run.start()
    wait_until("step 1", lambda: 1 in run.steps(), process)
    _kill(process.pid)
    process.communicate()
    wait_until("the workers' end", lambda: not workers_of(run.run_dir))
    for name in ("config.json", "totals.json", "learner.json"):
        json.loads((run.run_dir / name).read_text())
    num_steps = run.steps_enough()
    run.train("--resume", f"orchestration.num_steps={num_steps}")
    assert_every_group_ended_once(run, num_steps)
