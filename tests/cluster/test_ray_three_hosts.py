"""Three hosts: one is cut off and returns, one is killed, the learner is killed; nothing is lost.

The hosts share no directory that the run writes to: weights, KV, rows and journals pass a network.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.engine.journal import read_journal
from tests.kit.hosts import VirtualHost, can_make_hosts, descendants, virtual_hosts
from tests.kit.places import ROOT
from tests.kit.ray_hosts import RayHosts
from tests.kit.tiny_runs import TinyRun, open_files

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.kills,
    pytest.mark.skipif(
        not can_make_hosts(),
        reason="hosts need root, iproute2 and a kernel that lets us make namespaces",
    ),
]

STEPS = 24
# Scores are slow while a file is there, however fast the machine decodes: the run must last
# for a cut, a return and two deaths.
REWARD = """
import functools, time
from pathlib import Path
from dora_rl.data import chains

@functools.wraps(chains.reward)
def reward(*args, **kwargs):
    if Path({hold!r}).exists():
        time.sleep(0.15)
    return chains.reward(*args, **kwargs)
"""
# The quick start, shortened and without evaluations; short deadlines, so that a lost host costs
# seconds.
SETTINGS = (
    f"orchestration.num_steps={STEPS}",
    "orchestration.batch_groups=8",
    "orchestration.report_timeout_s=15",
    "orchestration.load_timeout_s=90",
    "orchestration.move_timeout_s=10",
    "orchestration.attempts_max=100",
    "rollout.tokens_max=256",
    "rollout.seqs_max=48",
    "rollout.journal_steps=1",  # so that the journal says exactly what is under way
    "rollout.compiled_kernels=false",  # so that requests are under way for a while
    "rollout.versions_max=1",  # so that instances flip, and requests move with their KV
    "rollout.kv_bytes_max=33554432",
    "data.eval=[]",
    "logging.progress=false",
    "checkpoint.every_steps=2",
    "runtime.grace_s=10",
)


def wait_for(what: str, ready: Callable[[], bool], run_s_max: float = 300.0) -> None:
    until = time.monotonic() + run_s_max
    while not ready():
        assert time.monotonic() < until, f"waited too long for {what}"
        time.sleep(0.1)


def where(run: TinyRun) -> dict[str, str]:
    """The newest host of each worker: {name: address}."""
    return {line["name"]: line["host"] for line in run.lines("placements.jsonl")}


def starts(run: TinyRun, name: str) -> list[str]:
    """The hosts on which a worker was started, one after the other."""
    return [line["host"] for line in run.lines("placements.jsonl") if line["name"] == name]


def num_starts_on(run: TinyRun, host: VirtualHost) -> int:
    """How often an instance was started there."""
    lines = run.lines("placements.jsonl")
    return sum(line["role"] == "instance" and line["host"] == host.ip for line in lines)


def host_of(run: TinyRun, hosts: list[VirtualHost], name: str) -> VirtualHost:
    return next(host for host in hosts if host.ip == where(run)[name])


def kill_learner(run: TinyRun, head: VirtualHost) -> None:
    """Its process, found by its lock."""
    lock = str(run.run_dir / ".learner-lock")
    for pid in descendants(os.getpid()) + all_in(head):
        try:
            held = open_files(Path(f"/proc/{pid}"))
        except OSError:
            continue
        if lock in held:
            os.kill(pid, signal.SIGKILL)
            return
    raise AssertionError("no process holds the learner's lock")


def all_in(host: VirtualHost) -> list[int]:
    """Every process of a host, as this side numbers them."""
    mine = os.readlink(f"/proc/{host.init_pid}/ns/pid")
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and os.readlink(entry / "ns" / "pid") == mine:
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def test_hosts_are_lost_and_nothing_is(tmp_path: Path) -> None:
    run = TinyRun(ROOT / "recipes" / "quickstart.toml", tmp_path / "run")
    logs = tmp_path / "logs"
    logs.mkdir()
    run.run_dir.mkdir()
    hold, reward = tmp_path / "hold", tmp_path / "slow_reward.py"
    hold.touch()
    reward.write_text(REWARD.format(hold=str(hold)))
    score = f'reward.functions=["{reward}:reward"]'
    with virtual_hosts(3, hidden=(run.run_dir,)) as hosts:
        cluster = RayHosts(hosts, logs)
        cluster.start()
        cluster.wait_for(3)
        os.chdir(ROOT)
        process = cluster.train(str(run.config), f"runtime.run_dir={run.run_dir}", score, *SETTINGS)
        wait_for("step 1", lambda: 1 in run.steps() or process.poll() is not None)
        assert process.poll() is None, process.communicate()[0]
        cut = host_of(run, hosts, "instance0")
        assert {where(run)[f"instance{n}"] for n in (0, 1)} == {host.ip for host in hosts[1:]}

        cut.cut_off()
        wait_for("the silent host's instance to be given up", lambda: lost(run, "instance0"))
        cut.connect()
        step = max(run.steps())
        wait_for("steps after the cut", lambda: max(run.steps()) >= step + 2)
        wait_for("the host to come back", lambda: num_starts_on(run, cut) >= 2)

        other = host_of(run, hosts, "instance1")
        wait_for("a host stopped in its work", lambda: stopped_at_work(run, other, "instance1"))
        other.kill()
        wait_for("the killed host to be missed", lambda: lost(run, "instance1"))
        step = max(run.steps())
        kill_learner(run, hosts[0])
        wait_for("a step after the learner", lambda: max(run.steps()) >= step + 1)
        assert max(run.steps()) < STEPS - 1, "it ended too early to see anything"
        hold.unlink()
        out, _ = process.communicate(timeout=600)
        assert process.returncode == 0, out

    report = run.proven()
    figures = report.figures
    assert figures.finished and figures.steps == STEPS
    assert figures.groups_trained == 8 * STEPS and figures.groups_failed == 0
    assert run.steps() == list(range(STEPS))
    rows = Counter((row["group"], row["sample"]) for row in run.lines("rollouts.jsonl"))
    assert set(rows.values()) == {1} and len(rows) == 8 * STEPS * 8, "each sample trained once"
    continued = [line for line in run.lines("continued.jsonl") if line["token_ids"]]
    tokens = {
        (row["group"], row["sample"]): row["token_ids"] for row in run.lines("rollouts.jsonl")
    }
    assert continued, "requests of a lost host went on from their journals elsewhere"
    for line in continued:
        whole = tokens.get((line["group"], line["sample"]))
        assert whole is None or whole[: len(line["token_ids"])] == line["token_ids"]
    assert len(starts(run, "learner")) >= 2 and len(starts(run, "instance0")) >= 2
    print(json.dumps(run.summary(), indent=1))


def stopped_at_work(run: TinyRun, host: VirtualHost, name: str) -> bool:
    """Stop the host with requests under way: something to continue from a journal.

    What it had sent has arrived when this returns; where the requests ended meanwhile, it goes on.
    """
    if not num_under_way(run, name):
        return False
    pids = all_in(host)
    send(signal.SIGSTOP, pids)
    before, after = -1, num_journal_bytes(run, name)
    while before != after:
        time.sleep(1.0)
        before, after = after, num_journal_bytes(run, name)
    if num_under_way(run, name):
        return True
    send(signal.SIGCONT, pids)
    return False


def send(number: int, pids: list[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def journal_of(run: TinyRun, name: str) -> Path:
    """The newest journal of an instance at home."""
    journals = (run.run_dir / "journal").glob(f"{name}.*.jsonl")
    return max(journals, key=lambda path: int(path.suffixes[0][1:]), default=Path("/nowhere"))


def num_journal_bytes(run: TinyRun, name: str) -> int:
    path = journal_of(run, name)
    return path.stat().st_size if path.is_file() else 0


def num_under_way(run: TinyRun, name: str) -> int:
    """Requests of which the instance's journal at home has tokens, and no end."""
    requests = read_journal(journal_of(run, name))
    return sum(bool(request.resume_ids) for request in requests)


def lost(run: TinyRun, name: str) -> bool:
    """Whether the log says that the instance was given up or lost."""
    for entry in run.entries():
        if isinstance(entry.event, ev.InstanceLost) and entry.event.instance == name:
            return True
        if any(isinstance(a, act.Restart) and a.instance == name for a in entry.actions):
            return True
    return False
