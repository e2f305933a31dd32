"""The worker processes of a local run: started, connected, heard, replaced.

Workers are forked from one warm process that imports once and touches no device
(`workers.fork_server`), or are fresh interpreters where that is not possible. Threads only carry
messages: one accepts connections, and each worker has one that reads into the inbox, one that
writes from its outbox and one that waits for its end. The controller's single thread empties the
inbox and never blocks on a worker. A worker that ended puts None into the inbox, after everything
it had said.

A worker holds the run's lock with the controller, and ends with it: its standard input is a pipe
that nobody writes to any more, and whose end means that the controller is gone.
"""

from __future__ import annotations

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import IO, Any, Protocol

from numpy.typing import NDArray

from dora_rl.config import RunConfig
from dora_rl.io.connection import accept_each, greet
from dora_rl.io.wire import Channel, Message, pack
from dora_rl.weights.leftovers import claim, store_name, sweep
from dora_rl.workers.fork_server import ForkServer
from dora_rl.workers.last_words import why_ended

TMP_CHARS_MAX = 60
KILL_WAIT_S = 30.0  # for a killed process to be gone
SAVE_WAIT_S = 600.0  # for a worker that was asked to end and says that it is saving


class Process(Protocol):
    """What the pool asks of a worker's process, here or on another host (as `subprocess.Popen`)."""

    def poll(self) -> int | None: ...
    def wait(self, timeout: float | None = None) -> int: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Envelope:
    """What a worker said; `message` None: it is gone."""

    name: str
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


def socket_home() -> tuple[Path, int]:
    """A private directory for the socket, whose whole path must fit into about 100 bytes.

    It is claimed by the descriptor that comes with it. Those of killed controllers go now.
    """
    folder = Path(tempfile.gettempdir())
    if len(str(folder)) > TMP_CHARS_MAX:
        folder = Path("/tmp")
    sweep(folder)
    home = Path(tempfile.mkdtemp(prefix=store_name("s-"), dir=folder))
    return home, claim(home)


def worker_environment() -> dict[str, str]:
    environment = dict(os.environ)
    environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    environment.setdefault("TOKENIZERS_PARALLELISM", "false")
    return environment


class WorkerPool:
    """All workers of one run."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        *,
        first_incarnation: int = 0,
        keep_fds: tuple[int, ...] = (),
    ) -> None:
        self._config = config.model_dump(mode="json")
        self._run_dir = run_dir
        self._first_incarnation, self._keep_fds = first_incarnation, keep_fds
        self._key = secrets.token_bytes(32)
        self._claim: int | None = None
        self._listener, self.address = self._listen()
        self._lock = threading.Lock()
        self.inbox: queue.SimpleQueue[Envelope] = queue.SimpleQueue()
        self.workers: dict[str, Worker] = {}
        self.incarnations: dict[str, int] = {}
        self.num_refused = 0  # connections that did not know the key
        self.closing = False
        self._server: ForkServer | None = None
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._accept, daemon=True).start()

    def _listen(self) -> tuple[Listener, str]:
        """Where workers connect to."""
        home, self._claim = socket_home()
        address = str(home / "controller")
        return Listener(address, family="AF_UNIX"), address

    def start(self, role: str, name: str, extra: dict[str, Any]) -> Worker:
        """Start (or start again) a worker under this name."""
        incarnation = self.incarnations.get(name, self._first_incarnation - 1) + 1
        process = self._spawn(role, name)
        worker = Worker(role, name, incarnation, process, extra, time.monotonic())
        with self._lock:
            self.incarnations[name] = incarnation
            self.workers[name] = worker
        setup = {
            "role": role,
            "name": name,
            "incarnation": incarnation,
            "address": self.address,
            "key": self._key.hex(),
            "run_dir": str(self._run_dir),
            "config": self._config,
            "extra": extra,
        }
        self._deliver(process, json.dumps(setup))
        threading.Thread(target=self._wait, args=(worker,), daemon=True).start()
        return worker

    def _spawn(self, role: str, name: str) -> Process:
        """A process that waits for its setup; nobody hears of it before it has one."""
        del role
        with (self._run_dir / "logs" / f"{name}.log").open("ab") as log:
            forked = self._fork(name, log)
            if forked is not None:
                return forked
            return subprocess.Popen(
                [sys.executable, "-m", "dora_rl.workers.worker"],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=worker_environment(),
                start_new_session=True,  # a Ctrl-C reaches the controller alone
                pass_fds=self._keep_fds,
            )

    def _fork(self, name: str, log: IO[bytes]) -> Process | None:
        """From the warm process, which the first worker starts; one that died is not replaced."""
        if self._server is None and sys.platform == "linux":
            with (self._run_dir / "logs" / "fork_server.log").open("ab") as own:
                self._server = ForkServer(worker_environment(), own)
        return self._server.start(name, log, self._keep_fds) if self._server else None

    def _deliver(self, process: Process, setup: str) -> None:
        stdin = getattr(process, "stdin", None)
        assert stdin is not None
        try:
            stdin.write(setup.encode() + b"\n")
            stdin.flush()
        except BrokenPipeError:
            pass  # it is gone already, as its waiting thread will say

    def _wait(self, worker: Worker) -> None:
        worker.process.wait()
        if worker.reader is not None:
            worker.reader.join(KILL_WAIT_S)  # what it said comes before its end
        worker.outbox.put(None)
        self.inbox.put(Envelope(worker.name, worker.incarnation, None))

    def restart(self, name: str) -> None:
        """Replace a worker; returns when the old process is gone, so the two never meet."""
        worker = self.workers[name]
        self.kill(name)
        self.start(worker.role, name, worker.extra)

    def kill(self, name: str) -> None:
        """End a worker at once and wait until it is gone."""
        worker = self.workers[name]
        if worker.process.poll() is None:
            worker.process.kill()
            worker.process.wait(KILL_WAIT_S)

    def kill_all(self) -> None:
        """The second signal: nobody is asked."""
        self.closing = True
        for worker in self.workers.values():
            if worker.process.poll() is None:
                worker.process.kill()
        self._close()

    def current(self, envelope: Envelope) -> bool:
        """Whether the envelope comes from the worker that has this name now."""
        return self.incarnations.get(envelope.name) == envelope.incarnation

    def overdue(self, limit_s: float) -> list[str]:
        """Workers that were started long ago and have not said that they are ready."""
        now = time.monotonic()
        return [
            worker.name
            for worker in self.workers.values()
            if not worker.joined and now - worker.started_s > limit_s
        ]

    def send(
        self,
        name: str,
        kind: str,
        body: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """Never blocks. To a worker that is gone nothing is sent; its end is in the inbox."""
        worker = self.workers.get(name)
        if worker is not None and worker.channel is not None:
            worker.outbox.put(pack(kind, body, arrays or {}))

    def _accept(self) -> None:
        accept_each(self._listener, lambda: self.closing, self._greet)

    def _greet(self, connection: Connection) -> None:
        """Both sides prove that they know the key; then the worker says who it is."""
        try:
            greet(connection, self._key)
            channel = Channel(connection)
            hello = channel.receive()
        except AuthenticationError:
            self.num_refused += 1
            connection.close()
            return
        except (OSError, EOFError, ValueError):
            connection.close()
            return
        self._welcome(hello, channel)

    def _welcome(self, hello: Message, channel: Channel) -> None:
        name, incarnation = hello.body["name"], hello.body["incarnation"]
        with self._lock:
            worker = self.workers.get(name)
            if worker is None or worker.incarnation != incarnation:
                channel.close()
                return
            worker.channel = channel
            worker.reader = threading.Thread(target=self._read, args=(worker,), daemon=True)
        worker.reader.start()
        threading.Thread(target=self._write, args=(worker,), daemon=True).start()

    def _read(self, worker: Worker) -> None:
        assert worker.channel is not None
        while True:
            try:
                message = worker.channel.receive()
            except (EOFError, OSError):
                return
            except (ValueError, KeyError):
                worker.process.kill()  # it speaks another language
                return
            if message.kind == "saving":
                worker.saving = True
                continue
            self.inbox.put(Envelope(worker.name, worker.incarnation, message))

    def _write(self, worker: Worker) -> None:
        assert worker.channel is not None
        while True:
            data = worker.outbox.get()
            if data is None:
                return
            try:
                worker.channel.send_frame(data)
            except OSError:
                return

    def log_tail(self, name: str, num_lines: int = 3) -> str:
        path = self._run_dir / "logs" / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return " | ".join(line.strip() for line in lines[-num_lines:])

    def end(self, grace_s: float) -> None:
        """Ask everybody to end, wait a while (all together), then end the rest."""
        self.closing = True
        self._end(list(self.workers.values()), grace_s)
        self._close()

    def _end(self, workers: Sequence[Worker], grace_s: float) -> None:
        until = time.monotonic() + grace_s
        for worker in workers:
            self.send(worker.name, "end", {})
        for worker in workers:
            wait_s = until - time.monotonic() if worker.channel is not None else 0.0
            if not self._ended(worker, wait_s) and not (
                worker.saving and self._ended(worker, SAVE_WAIT_S)
            ):
                worker.process.kill()
                worker.process.wait(KILL_WAIT_S)

    def _ended(self, worker: Worker, wait_s: float) -> bool:
        """Whether it has ended by itself after so long."""
        try:
            worker.process.wait(max(0.0, wait_s))
        except subprocess.TimeoutExpired:
            return False
        return True

    def why_ended(self, name: str) -> str:
        """Of a worker whose end is in the inbox."""
        worker = self.workers[name]
        return why_ended(worker.last_words, worker.process.poll())

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
        self._listener.close()
        if self.address.startswith("/"):
            shutil.rmtree(Path(self.address).parent, ignore_errors=True)
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None
