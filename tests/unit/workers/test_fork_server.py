"""Workers from one warm process: told how they end, gone with it, and replaced without it."""

from __future__ import annotations

import os
import queue
import signal
import time
from pathlib import Path

import pytest

from dora_rl.config import ModelConfig, RewardConfig, RunConfig
from dora_rl.workers.fork_server import ForkedProcess
from dora_rl.workers.messages import Ready
from dora_rl.workers.pool import Envelope, LocalProcesses, WorkerPool

CONFIG = RunConfig(
    model=ModelConfig(path="unused"), reward=RewardConfig.model_validate({"functions": ["exact"]})
)


@pytest.fixture
def pool(tmp_path: Path):
    pool = WorkerPool(CONFIG, tmp_path, LocalProcesses(tmp_path))
    yield pool
    pool.end(10.0)


def next_envelope(pool: WorkerPool) -> Envelope:
    return pool.inbox.get(timeout=60)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


def wait_until_gone(pid: int) -> None:
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, f"{pid} is still there"
        time.sleep(0.02)


def test_workers_share_one_parent_and_have_sessions_of_their_own(pool: WorkerPool) -> None:
    workers = [pool.start("reward", f"reward{i}", {"base_dir": "."}) for i in range(2)]
    for _ in workers:
        envelope = next_envelope(pool)
        assert envelope.message == Ready()
    processes = [worker.process for worker in workers]
    assert all(isinstance(process, ForkedProcess) for process in processes)
    pids = [process.pid for process in processes if isinstance(process, ForkedProcess)]
    assert len({parent_of(pid) for pid in pids}) == 1 and parent_of(pids[0]) != os.getpid()
    assert [os.getsid(pid) for pid in pids] == pids


def test_how_a_worker_ended_is_known(pool: WorkerPool) -> None:
    worker = pool.start("reward", "reward0", {"base_dir": "."})
    assert next_envelope(pool).message is not None
    assert worker.process.poll() is None
    worker.process.kill()
    assert worker.process.wait(60) == -signal.SIGKILL == worker.process.poll()
    worker.process.kill()  # of one that is gone: nothing happens
    pool.start("nobody", "strange", {})
    last = next_envelope(pool)
    while last.name != "strange" or last.message is not None:
        last = next_envelope(pool)
    assert pool.workers["strange"].process.poll() == 1
    assert "no worker has the role" in pool.log_tail("strange")


def test_a_killed_server_takes_its_workers_along_and_others_start_without_it(
    pool: WorkerPool,
) -> None:
    worker = pool.start("reward", "reward0", {"base_dir": "."})
    assert next_envelope(pool).message is not None
    assert isinstance(worker.process, ForkedProcess)
    pid = worker.process.pid
    os.kill(parent_of(pid), signal.SIGKILL)
    assert next_envelope(pool) == Envelope("reward0", "reward", worker.incarnation, None)
    wait_until_gone(pid)
    pool.restart("reward0")
    envelope = next_envelope(pool)
    assert envelope.message == Ready()
    assert not isinstance(pool.workers["reward0"].process, ForkedProcess)


def test_descriptors_to_keep_arrive_under_their_numbers(tmp_path: Path) -> None:
    """The lock of a run is one: a worker holds it as long as it lives."""
    with (tmp_path / "lock").open("w") as file:
        pool = WorkerPool(CONFIG, tmp_path, LocalProcesses(tmp_path, (file.fileno(),)))
        try:
            worker = pool.start("reward", "reward0", {"base_dir": "."})
            assert next_envelope(pool).message is not None
            assert isinstance(worker.process, ForkedProcess)
            held = os.readlink(f"/proc/{worker.process.pid}/fd/{file.fileno()}")
            assert held == str(tmp_path / "lock")
            names = os.listdir(f"/proc/{worker.process.pid}/fd")
            where = [os.readlink(f"/proc/{worker.process.pid}/fd/{name}") for name in names]
            assert where.count(held) == 1
        finally:
            pool.end(10.0)
    with pytest.raises(queue.Empty):
        while True:
            assert pool.inbox.get(timeout=1.0).message is None
