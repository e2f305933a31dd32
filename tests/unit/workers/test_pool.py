"""Workers and strangers: who may speak, who is heard, how one ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import ModelConfig, RewardConfig, RunConfig
from dora_rl.io.connection import HEADER, Connection, Listener
from dora_rl.io.proof import TAG_BYTES, AuthenticationError, RunKey
from dora_rl.workers.messages import Channel, Hello, Note, Ready, pack
from dora_rl.workers.pool import (
    HELLO_BYTES_MAX,
    KILL_WAIT_S,
    SAVE_WAIT_S,
    Envelope,
    LocalProcesses,
    Worker,
    WorkerPool,
)

CONFIG = RunConfig(
    model=ModelConfig(path="unused"), reward=RewardConfig.model_validate({"functions": ["exact"]})
)


def next_envelope(pool: WorkerPool) -> Envelope:
    return pool.inbox.get(timeout=60)


@pytest.fixture
def pool(tmp_path: Path):
    pool = WorkerPool(CONFIG, tmp_path, LocalProcesses(tmp_path))
    yield pool
    pool.end(10.0)


def test_a_stranger_is_refused_and_the_workers_go_on(tmp_path: Path) -> None:
    processes = LocalProcesses(tmp_path)
    pool = WorkerPool(CONFIG, tmp_path, processes)
    with pytest.raises(AuthenticationError):
        Connection.connect(processes.address, RunKey(b"a guess"))
    silent = socket.socket(socket.AF_UNIX)  # connects and proves nothing
    silent.connect(processes.address)
    pool.start("reward", "reward0", {"base_dir": "."})
    envelope = next_envelope(pool)
    assert envelope.name == "reward0" and envelope.message is not None
    assert envelope.message == Ready()
    assert pool.num_refused >= 1
    silent.close()
    pool.end(10.0)


def test_an_old_life_is_not_heard(pool: WorkerPool) -> None:
    pool.start("reward", "reward0", {"base_dir": "."})
    first = next_envelope(pool)
    pool.restart("reward0")
    assert not pool.is_current(first)
    envelopes = [next_envelope(pool), next_envelope(pool)]
    assert [pool.is_current(e) for e in envelopes if e.message is None] == [False]
    assert [pool.is_current(e) for e in envelopes if e.message is not None] == [True]


def test_a_killed_worker_is_reported_after_its_last_word(pool: WorkerPool) -> None:
    worker = pool.start("reward", "reward0", {"base_dir": "."})
    assert next_envelope(pool).message is not None
    os.kill(worker.process.pid, signal.SIGKILL)
    assert next_envelope(pool) == Envelope("reward0", "reward", worker.incarnation, None)
    pool.send("reward0", Note("nothing"))  # to nobody: no error


def test_a_worker_that_does_not_read_never_blocks_the_controller(pool: WorkerPool) -> None:
    worker = pool.start("reward", "reward0", {"base_dir": "."})
    assert next_envelope(pool).message is not None
    os.kill(worker.process.pid, signal.SIGSTOP)
    began = time.monotonic()
    for _ in range(64):
        pool.send("reward0", Note("x" * (1 << 20)))
    assert time.monotonic() - began < 60, "64 MiB to a stopped process are queued, not waited for"
    pool.kill("reward0")


def test_a_worker_that_is_never_ready_is_overdue(pool: WorkerPool) -> None:
    pool.start("reward", "reward0", {"base_dir": "."})
    assert pool.overdue(0.0) == ["reward0"]
    assert pool.overdue(1e6) == []


class Busy:
    """A process that needs longer than it is given at first."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []
        self.killed = False

    def poll(self) -> int | None:
        return 0 if len(self.waited_s) > 1 else None

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None
        self.waited_s.append(timeout)
        if len(self.waited_s) == 1:
            raise subprocess.TimeoutExpired("busy", timeout)
        return 0

    def kill(self) -> None:
        self.killed = True


@pytest.mark.parametrize("saving", [False, True])
def test_a_worker_that_is_saving_is_waited_for(pool: WorkerPool, saving: bool) -> None:
    process = Busy()
    worker = Worker("learner", "learner", 0, process, {}, 0.0, saving=saving)
    pool.end_some([worker], 0.0)
    assert process.killed != saving
    assert process.waited_s == [0.0, SAVE_WAIT_S if saving else KILL_WAIT_S]


def test_workers_end_with_their_controller(tmp_path: Path) -> None:
    code = (
        "import json, sys, time\n"
        "from pathlib import Path\n"
        "from dora_rl.config import RunConfig\n"
        "from dora_rl.workers.pool import LocalProcesses, WorkerPool\n"
        f"config = RunConfig.model_validate(json.loads({CONFIG.model_dump_json()!r}))\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "processes = LocalProcesses(folder)\n"
        "pool = WorkerPool(config, folder, processes)\n"
        "worker = pool.start('reward', 'reward0', {'base_dir': '.'})\n"
        "pool.inbox.get(timeout=60)\n"
        "print(json.dumps(worker.process.pid), flush=True)\n"
        "time.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = json.loads(parent.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.communicate()
    until = time.monotonic() + 60
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < until, "an orphan stays behind"
        time.sleep(0.05)


def test_the_socket_of_a_killed_controller_goes_with_the_next_start(tmp_path: Path) -> None:
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from dora_rl.config import RunConfig\n"
        "from dora_rl.workers.pool import LocalProcesses, WorkerPool\n"
        f"config = RunConfig.model_validate(json.loads({CONFIG.model_dump_json()!r}))\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "processes = LocalProcesses(folder)\n"
        "pool = WorkerPool(config, folder, processes)\n"
        "print(Path(processes.address).parent, flush=True)\n"
        "sys.stdin.readline()\n"
        "pool.end(1.0)\n"
    )
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:  # a short path, as sockets need

        def start() -> tuple[subprocess.Popen[str], Path]:
            process = subprocess.Popen(
                [sys.executable, "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | {"TMPDIR": folder},
            )
            assert process.stdout is not None
            return process, Path(process.stdout.readline().strip())

        killed, left = start()
        alive, kept = start()
        assert left.exists() and kept.exists(), "both live"
        killed.kill()
        killed.communicate()
        assert left.exists()
        last, own = start()
        assert not left.exists() and kept.exists() and own.exists()
        for process in (alive, last):
            process.communicate("end\n")
        assert list(Path(folder).iterdir()) == [], "who ends normally leaves nothing"


class Pretended:
    """A worker whose process is a thread of the test. Implements `Process`."""

    def __init__(self) -> None:
        self.killed = threading.Event()

    def poll(self) -> int | None:
        return -9 if self.killed.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self.killed.wait(timeout):
            raise subprocess.TimeoutExpired("pretended", timeout or 0.0)
        return -9

    def kill(self) -> None:
        self.killed.set()


class PretendedProcesses:
    """Implements `Launcher`."""

    last_words_s = 1.0

    def __init__(self, folder: Path) -> None:
        self.address = str(folder / "s")
        self.listener = Listener(self.address)

    def launch(self, setup: dict[str, Any]) -> Pretended:
        return Pretended()

    def begun_s(self, worker: Worker) -> float | None:
        return worker.started_s

    def close(self) -> None:
        self.listener.close()


@pytest.fixture
def hall(tmp_path: Path):
    pool = WorkerPool(CONFIG, tmp_path, PretendedProcesses(tmp_path))
    yield pool, str(tmp_path / "s")
    pool.kill_all()


def test_a_worker_whose_words_were_changed_on_the_way_is_ended(hall) -> None:
    pool, address = hall
    worker = pool.start("reward", "reward0", {})
    channel = Channel.connect(address, RunKey(pool.key))
    channel.send(Hello("reward", "reward0", worker.incarnation))
    channel.send(Ready())
    assert pool.inbox.get(timeout=60).message == Ready()
    channel._wire.write(HEADER.pack(4) + bytes(TAG_BYTES) + b"evil")
    assert worker.process.killed.wait(60)
    assert pool.inbox.get(timeout=60).message is None


def test_who_knows_the_key_and_says_something_else_first_is_sent_away(hall) -> None:
    pool, address = hall
    pool.start("reward", "reward0", {})
    for words in (pack(Ready()), bytes(HELLO_BYTES_MAX + 1)):
        channel = Channel.connect(address, RunKey(pool.key))
        channel.within(60.0)
        with pytest.raises((EOFError, ConnectionError)):
            channel.send_frame(words)  # it may be sent away before the end
            channel.receive_frame()
    assert pool.workers["reward0"].channel is None
