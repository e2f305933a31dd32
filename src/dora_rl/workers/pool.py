"""The worker processes of a run: started, connected, heard, replaced.

Threads only carry messages: one accepts connections, and each worker has one that reads into the
inbox, one that writes from its outbox and one that waits for its end. The controller's single
thread empties the inbox and never blocks on a worker. A worker that ended puts None into the inbox,
after everything it had said.

Who starts the processes, and where workers connect to, is a `Launcher`: `LocalProcesses` here, or
one over several hosts (`worlds.hosts`). What the controller needs of all this is `Workers`, which
the inline world implements without any process.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from dora_rl.config import RunConfig
from dora_rl.io.connection import Listener
from dora_rl.io.proof import PROOF_S_MAX, Damaged, Proven
from dora_rl.weights.leftovers import claim, store_name, sweep
from dora_rl.workers.fork_server import ForkServer
from dora_rl.workers.last_words import why_ended
from dora_rl.workers.messages import NO_MESSAGE, Channel, End, Hello, Message, Saving, pack
from dora_rl.workers.worker import key_of

TMP_CHARS_MAX = 60
HELLO_BYTES_MAX = 1 << 16
KILL_WAIT_S = 30.0  # for a killed process to be gone
SAVE_WAIT_S = 600.0  # for a worker that was asked to end and says that it is saving
SERVING = ("storage", "relay")  # roles that serve the others, and end after them
SERVING_END_S = 2.0


class Process(Protocol):
    """A worker's process, here or on another host (as `subprocess.Popen`)."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a worker said; `message` None: it is gone."""

    name: str
    role: str
    incarnation: int
    message: Message | None


@dataclass(slots=True)
class Worker:
    role: str
    name: str
    incarnation: int
    process: Process
    extra: dict[str, Any]
    started_s: float
    channel: Channel | None = None
    reader: threading.Thread | None = None
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    joined: bool = False  # it has said that it is ready for work
    last_words: str = ""  # why it ends, in its own words
    saving: bool = False  # it was asked to end, and writes what the next start needs

    def why_ended(self) -> str:
        return why_ended(self.last_words, self.process.poll())


class Workers(Protocol):
    """The workers of a run, as its controller uses them."""

    workers: dict[str, Worker]
    closing: bool

    def now(self) -> float:
        """Seconds, by the clock that all limits of time are kept by."""
        ...

    def start(self, role: str, name: str, extra: dict[str, Any]) -> Worker:
        """Start (or start again) a worker under this name."""
        ...

    def restart(self, name: str) -> None:
        """Replace a worker; returns when the old one is gone, so the two never meet."""

    def kill(self, name: str) -> None:
        """End a worker at once and wait until it is gone."""

    def send(self, name: str, message: Message) -> None:
        """Never blocks. To a worker that is gone nothing is sent; its end is in the inbox."""

    def next_said(self, wait_s: float) -> Envelope | None:
        """What a worker said, None if none did for so long."""
        ...

    def is_current(self, envelope: Envelope) -> bool:
        """Whether it comes from the worker that has this name now."""
        ...

    def overdue(self, limit_s: float) -> list[str]:
        """Workers that were started long ago and have not said that they are ready."""
        ...

    def log_tail(self, name: str) -> str: ...
    def end(self, grace_s: float) -> None:
        """Ask everybody to end, wait a while (all together), then end the rest."""

    def kill_all(self) -> None:
        """The second signal: nobody is asked."""


class Launcher(Protocol):
    """Where workers connect to, and who starts their processes."""

    address: str
    listener: Listener
    last_words_s: float  # for what a worker said to arrive after its end is known

    def launch(self, setup: dict[str, Any]) -> Process: ...
    def begun_s(self, worker: Worker) -> float | None:
        """When its process began; None: it waits for a host, or has ended."""
        ...

    def close(self) -> None: ...


class WorkerPool:
    """All workers of one run. Implements `Workers`."""

    def __init__(
        self, config: RunConfig, run_dir: Path, launcher: Launcher, *, first_incarnation: int = 0
    ) -> None:
        self._config, self.key = config.model_dump(mode="json"), secrets.token_bytes(32)
        self._run_dir, self._launcher = run_dir, launcher
        self._first_incarnation = first_incarnation
        self._lock = threading.Lock()
        self.inbox: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self.workers: dict[str, Worker] = {}
        self._incarnations: dict[str, int] = {}
        self.num_refused = 0  # connections that did not prove themselves
        self.closing = False
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        accept = (key_of(config, self.key), self._meet, self._refused)
        threading.Thread(target=launcher.listener.accept_each, args=accept, daemon=True).start()

    def now(self) -> float:
        return time.monotonic()

    def start(self, role: str, name: str, extra: dict[str, Any]) -> Worker:
        incarnation = self._incarnations.get(name, self._first_incarnation - 1) + 1
        setup = {
            "role": role,
            "name": name,
            "incarnation": incarnation,
            "address": self._launcher.address,
            "key": self.key.hex(),
            "run_dir": str(self._run_dir),
            "config": self._config,
            "extra": extra,
        }
        with self._lock:  # it may connect before this is over, and waits to be welcomed
            process = self._launcher.launch(setup)
            worker = Worker(role, name, incarnation, process, extra, time.monotonic())
            self._incarnations[name] = incarnation
            self.workers[name] = worker
        threading.Thread(target=self._wait, args=(worker,), daemon=True).start()
        return worker

    def _wait(self, worker: Worker) -> None:
        worker.process.wait()
        if worker.reader is not None:
            worker.reader.join(self._launcher.last_words_s)  # what it said comes before its end
        if worker.channel is not None:
            worker.channel.cut()  # a host that vanished says no goodbye
        worker.outbox.put(None)
        self.inbox.put(Envelope(worker.name, worker.role, worker.incarnation, None))

    def restart(self, name: str) -> None:
        worker = self.workers[name]
        self.kill(name)
        self.start(worker.role, name, worker.extra)

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait(KILL_WAIT_S)

    def dismiss(self, name: str) -> None:
        """End a worker for good."""
        self.kill(name)
        with self._lock:
            self._incarnations[name] += 1  # its end is no news
            del self.workers[name]

    def kill_all(self) -> None:
        self.closing = True
        for worker in self.workers.values():
            if worker.process.poll() is None:
                worker.process.kill()
        self._launcher.close()

    def next_said(self, wait_s: float) -> Envelope | None:
        with contextlib.suppress(queue.Empty):
            return self.inbox.get(timeout=wait_s)
        return None

    def is_current(self, envelope: Envelope) -> bool:
        return self._incarnations.get(envelope.name) == envelope.incarnation

    def overdue(self, limit_s: float) -> list[str]:
        now = time.monotonic()
        waited = ((worker, self._launcher.begun_s(worker)) for worker in self.workers.values())
        return [
            worker.name
            for worker, begun_s in waited
            if not worker.joined and begun_s is not None and now - begun_s > limit_s
        ]

    def send(self, name: str, message: Message) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.channel is not None:
            worker.outbox.put(pack(message))

    def _refused(self) -> None:
        self.num_refused += 1

    def _meet(self, proven: Proven) -> None:
        """Who has proved itself says who it is."""
        channel = Channel(proven)
        channel.within(PROOF_S_MAX)
        try:
            hello = channel.receive(HELLO_BYTES_MAX)
        except (OSError, EOFError, *NO_MESSAGE):
            hello = None
        channel.within(None)
        if isinstance(hello, Hello):
            self._welcome(hello, channel)
        else:
            channel.close()

    def _welcome(self, hello: Hello, channel: Channel) -> None:
        with self._lock:
            worker = self.workers.get(hello.name)
            if worker is None or worker.incarnation != hello.incarnation:
                channel.close()
                return
            worker.channel, both = channel, (worker, channel)
            worker.reader = threading.Thread(target=self._read, args=both, daemon=True)
        worker.reader.start()
        threading.Thread(target=self._write, args=both, daemon=True).start()

    def _read(self, worker: Worker, channel: Channel) -> None:
        while True:
            try:
                message = channel.receive()
            except (Damaged, *NO_MESSAGE):
                worker.process.kill()  # it speaks another language, or somebody is in between
                return
            except (EOFError, OSError):
                return
            if isinstance(message, Saving):
                worker.saving = True
                continue
            self.inbox.put(Envelope(worker.name, worker.role, worker.incarnation, message))

    def _write(self, worker: Worker, channel: Channel) -> None:
        while (data := worker.outbox.get()) is not None:
            try:
                channel.send_frame(data)
            except OSError:
                return

    def log_tail(self, name: str, num_lines: int = 3) -> str:
        path = self._run_dir / "logs" / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return " | ".join(line.strip() for line in lines[-num_lines:])

    def end(self, grace_s: float) -> None:
        """Those that serve the others end last: journals and rows are still on their way."""
        self.closing = True
        workers = list(self.workers.values())
        self.end_some([worker for worker in workers if worker.role not in SERVING], grace_s)
        self.end_some([worker for worker in workers if worker.role in SERVING], SERVING_END_S)
        self._launcher.close()

    def end_some(self, workers: Sequence[Worker], grace_s: float) -> None:
        until = time.monotonic() + grace_s
        for worker in workers:
            self.send(worker.name, End())
        for worker in workers:
            wait_s = until - time.monotonic() if worker.channel is not None else 0.0
            if not _ends(worker, wait_s) and not (worker.saving and _ends(worker, SAVE_WAIT_S)):
                worker.process.kill()
                worker.process.wait(KILL_WAIT_S)


def _ends(worker: Worker, wait_s: float) -> bool:
    """Whether it ends by itself within so long."""
    try:
        worker.process.wait(max(0.0, wait_s))
    except subprocess.TimeoutExpired:
        return False
    return True


# -- processes of this machine ---------------------------------------------------------------------


def socket_folder() -> tuple[Path, int]:
    """A private directory for the socket, whose whole path must fit into about 100 bytes.

    It is claimed by the descriptor that comes with it. Those of killed controllers go now.
    """
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) > TMP_CHARS_MAX:
        folder = Path("/tmp")
    sweep(folder)
    private = Path(tempfile.mkdtemp(prefix=store_name("s-"), dir=folder))
    return private, claim(private)


def worker_environment() -> dict[str, str]:
    """Ours, and what the user has not set otherwise."""
    return {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false", **os.environ}


def begin_server(config: RunConfig) -> ForkServer | None:
    """The warm process of a run that is about to be prepared: it imports meanwhile. What it says is
    lost; where it has ended by the time it is needed, another is started, with a log."""
    if sys.platform != "linux" or config.runtime.world != "local":
        return None
    gpu = config.runtime.device != "cpu" and Path("/dev/nvidiactl").exists()
    with open(os.devnull, "wb") as nowhere:
        return ForkServer(worker_environment(), nowhere, gpu=gpu)


class LocalProcesses:
    """Workers as processes of this machine. Implements `Launcher`.

    They are forked from one warm process that imports once and touches no device
    (`workers.fork_server`), or are fresh interpreters where that is not possible. A worker holds
    the run's lock with the controller, and ends with it: its standard input is a pipe that nobody
    writes to any more, and whose end means that the controller is gone.
    """

    last_words_s = KILL_WAIT_S

    def __init__(
        self, run_dir: Path, keep_fds: tuple[int, ...] = (), server: ForkServer | None = None
    ) -> None:
        """`server`: a warm process that was begun before."""
        self._run_dir, self._keep_fds = run_dir, keep_fds
        self._folder, self._claim = socket_folder()
        self.address = str(self._folder / "controller")
        self.listener = Listener(self.address)
        self._server = server if server is not None and server.is_alive else None
        self._closed = False

    def begun_s(self, worker: Worker) -> float | None:
        return worker.started_s

    def launch(self, setup: dict[str, Any]) -> Process:
        with (self._run_dir / "logs" / f"{setup['name']}.log").open("ab") as log:
            process = self._fork(setup["name"], log) or subprocess.Popen(
                [sys.executable, "-P", "-m", "dora_rl.workers.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=worker_environment(),
                start_new_session=True,  # a Ctrl-C reaches the controller alone
                pass_fds=self._keep_fds,
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already, as its thread will say
            process.stdin.write(json.dumps(setup).encode() + b"\n")
            process.stdin.flush()
        return process

    def _fork(self, name: str, log: IO[bytes]) -> Any:
        """From the warm process, which the first worker starts; one that died is not replaced."""
        if self._server is None and sys.platform == "linux":
            with (self._run_dir / "logs" / "fork_server.log").open("ab") as own:
                self._server = ForkServer(worker_environment(), own)
        if self._server is None:
            return None
        return self._server.start(name, log, self._keep_fds, worker_environment())

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._server is not None:
            self._server.close()
        self.listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        os.close(self._claim)
