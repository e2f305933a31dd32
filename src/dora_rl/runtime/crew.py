"""The worker processes of a local run: started, connected, heard, replaced.

Every worker is a fresh interpreter (no fork, no pickle). One thread accepts connections, one per
worker reads; all they do is put messages into the inbox, which the controller's single thread
empties. A worker that ends puts None there.
"""

from __future__ import annotations

import json
import os
import queue
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from dora_rl.config import RunConfig
from dora_rl.runtime.wire import Channel, Message


@dataclass(frozen=True, slots=True)
class Letter:
    """What a worker said; `message` None: it is gone."""

    name: str
    life: int
    message: Message | None


@dataclass(slots=True)
class Worker:
    role: str
    name: str
    life: int
    process: subprocess.Popen[bytes]
    extra: dict[str, Any]
    channel: Channel | None = None


class Crew:
    """All workers of one run."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config = config.model_dump(mode="json")
        self._run_dir = run_dir
        self._key = secrets.token_bytes(32)
        self._home = Path(tempfile.mkdtemp(prefix="dora-rl-"))
        self._address = str(self._home / "controller")
        self._listener = Listener(self._address, family="AF_UNIX", authkey=self._key)
        self._lock = threading.Lock()
        self.inbox: queue.Queue[Letter] = queue.Queue()
        self.workers: dict[str, Worker] = {}
        self.lives: dict[str, int] = {}
        self.closing = False
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._accept, daemon=True).start()

    def start(self, role: str, name: str, extra: dict[str, Any]) -> Worker:
        """Start (or start again) a worker under this name."""
        life = self.lives.get(name, -1) + 1
        self.lives[name] = life
        log = (self._run_dir / "logs" / f"{name}.log").open("ab")
        environment = dict(os.environ)
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        environment.setdefault("TOKENIZERS_PARALLELISM", "false")
        process = subprocess.Popen(
            [sys.executable, "-m", "dora_rl.runtime.worker"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environment,
            start_new_session=True,  # a Ctrl-C reaches the controller alone
        )
        log.close()
        setup = {
            "role": role,
            "name": name,
            "life": life,
            "address": self._address,
            "key": self._key.hex(),
            "run_dir": str(self._run_dir),
            "config": self._config,
            "extra": extra,
        }
        assert process.stdin is not None
        process.stdin.write(json.dumps(setup).encode() + b"\n")
        process.stdin.flush()
        worker = Worker(role, name, life, process, extra)
        with self._lock:
            self.workers[name] = worker
        threading.Thread(target=self._wait, args=(worker,), daemon=True).start()
        return worker

    def _wait(self, worker: Worker) -> None:
        worker.process.wait()
        self.inbox.put(Letter(worker.name, worker.life, None))

    def restart(self, name: str) -> None:
        worker = self.workers[name]
        self.kill(name)
        self.start(worker.role, name, worker.extra)

    def kill(self, name: str) -> None:
        worker = self.workers[name]
        if worker.process.poll() is None:
            worker.process.send_signal(signal.SIGKILL)

    def current(self, letter: Letter) -> bool:
        """Whether the letter comes from the worker that has this name now."""
        return self.lives.get(letter.name) == letter.life

    def send(
        self,
        name: str,
        kind: str,
        body: Mapping[str, Any],
        arrays: Mapping[str, NDArray[Any]] | None = None,
    ) -> None:
        """To a worker that is gone nothing is sent; its end is already in the inbox."""
        worker = self.workers.get(name)
        if worker is None or worker.channel is None:
            return
        try:
            worker.channel.send(kind, body, arrays)
        except OSError:
            return

    def _accept(self) -> None:
        while not self.closing:
            try:
                channel = Channel(self._listener.accept())
                hello = channel.receive()
            except (OSError, EOFError, AuthenticationError):
                continue  # somebody without the key, or a worker that died at once
            name, life = hello.body["name"], hello.body["life"]
            with self._lock:
                worker = self.workers.get(name)
                if worker is None or worker.life != life:
                    channel.close()
                    continue
                worker.channel = channel
            threading.Thread(target=self._read, args=(name, life, channel), daemon=True).start()

    def _read(self, name: str, life: int, channel: Channel) -> None:
        while True:
            try:
                message = channel.receive()
            except (EOFError, OSError):
                return
            self.inbox.put(Letter(name, life, message))

    def log_tail(self, name: str, num_lines: int = 3) -> str:
        path = self._run_dir / "logs" / f"{name}.log"
        lines = path.read_text(errors="replace").splitlines() if path.is_file() else []
        return " | ".join(line.strip() for line in lines[-num_lines:])

    def end(self, grace_s: float) -> None:
        """Ask everybody to end, wait a while, then end the rest."""
        self.closing = True
        for name in self.workers:
            self.send(name, "end", {})
        for worker in self.workers.values():
            try:
                worker.process.wait(grace_s)
            except subprocess.TimeoutExpired:
                worker.process.kill()
        self._listener.close()
        shutil.rmtree(self._home, ignore_errors=True)
