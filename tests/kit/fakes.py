"""Workers that are not there, and a run directory: with these a controller is tested."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.controller.run_dir import RunFiles, RunLock
from dora_rl.controller.world import Notify
from dora_rl.store.samples import Samples
from dora_rl.workers.messages import Message
from dora_rl.workers.pool import Envelope, Worker
from tests.kit.places import MODEL


class FakeProcess:
    """Ends when it is told to."""

    def __init__(self) -> None:
        self.status: int | None = None

    def poll(self) -> int | None:
        return self.status

    def wait(self, timeout: float | None = None) -> int:
        del timeout
        return self.status or 0

    def kill(self) -> None:
        self.status = -9


class FakeWorkers:
    """Keeps what was sent and who was started. Implements `Workers`."""

    def __init__(self) -> None:
        self.workers: dict[str, Worker] = {}
        self.closing = False
        self.time_s = 0.0
        self.sent: list[tuple[str, Message]] = []
        self.started: list[str] = []
        self.killed: list[str] = []
        self.said: list[Envelope] = []
        self.log = "no GPU"

    def now(self) -> float:
        return self.time_s

    def start(self, role: str, name: str, extra: dict[str, Any]) -> Worker:
        before = self.workers.get(name)
        incarnation = before.incarnation + 1 if before is not None else 0
        worker = Worker(role, name, incarnation, FakeProcess(), extra, 0.0)
        self.workers[name] = worker
        self.started.append(name)
        return worker

    def restart(self, name: str) -> None:
        self.start(self.workers[name].role, name, self.workers[name].extra)

    def kill(self, name: str) -> None:
        self.killed.append(name)
        self.workers[name].process.kill()

    def send(self, name: str, message: Message) -> None:
        self.sent.append((name, message))

    def next_said(self, wait_s: float) -> Envelope | None:
        del wait_s
        return self.said.pop(0) if self.said else None

    def is_current(self, envelope: Envelope) -> bool:
        worker = self.workers.get(envelope.name)
        return worker is not None and worker.incarnation == envelope.incarnation

    def overdue(self, limit_s: float) -> list[str]:
        del limit_s
        return []

    def log_tail(self, name: str) -> str:
        del name
        return self.log

    def end(self, grace_s: float) -> None:
        del grace_s
        self.closing = True

    def kill_all(self) -> None:
        self.closing = True

    def take(self, kind: type[Any]) -> list[tuple[str, Any]]:
        """What was sent of this kind; it is gone then."""
        found = [(name, message) for name, message in self.sent if isinstance(message, kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found


class Console(Notify):
    """Keeps what a watcher is told."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.steps: list[dict[str, Any]] = []
        self.on_lines, self.on_step = self.lines.extend, self.steps.append


def config_of(run_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(MODEL)},
            "orchestration": {"batch_groups": 1, "num_steps": 2},
            "rollout": {"num_samples": 2},
            "reward": {"functions": ["dora_rl.data.chains:reward"]},
            "weights": {"root": str(run_dir / "shared")},
            "runtime": {"device": "cpu", "run_dir": str(run_dir)},
            **sections,
        }
    )


def files_of(config: RunConfig, console: Notify, *, resume: bool = False) -> RunFiles:
    run_dir = Path(config.runtime.run_dir)
    lock, samples = RunLock(run_dir), Samples(run_dir / "table.log")
    return RunFiles(config, Path(config.weights.root), lock, samples, console, resume=resume)
