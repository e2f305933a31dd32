"""The workers of a run on several hosts: where each one is placed, started, heard and replaced.

Who starts a process on another host is behind `Cluster` (Ray, or plain processes in tests); the
pool decides on which host, keeps a worker waiting while no host has room for it, and hears of its
end. Messages travel as on one machine, over TCP instead of a local socket: see `wire`.

A host takes workers only while its relay is heard: one that is cut off gets nothing new, long
before the cluster itself has noticed. Invariant: what is placed on a host never needs more than
the host has.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any, Protocol

from dora_rl.config import RunConfig
from dora_rl.io.connection import answer_at_once
from dora_rl.workers.pool import WorkerPool, Envelope, Process, Worker

LAST_WORDS_S = 2.0  # for what a worker said to arrive after its end is known
AT_HEAD = ("evaluator", "storage")  # roles that need the run directory
SERVING = ("storage", "relay")


@dataclass(frozen=True, slots=True)
class Host:
    """One machine of the cluster, while it is in it: a host that comes back has another id."""

    id: str
    ip: str
    resources: Mapping[str, float]


class Task(Protocol):
    """A worker that was started on a host."""

    def wait(self) -> str:
        """Returns at its end: why, or nothing where it ended by itself."""
        ...

    def kill(self) -> None: ...


class Cluster(Protocol):
    """Hosts that come and go, and processes on them."""

    @property
    def head(self) -> Host:
        """The controller's own host."""
        ...

    def hosts(self) -> Sequence[Host]: ...
    def launch(self, host: Host, demand: Mapping[str, float], setup: str) -> Task: ...
    def close(self) -> None: ...


def choose_host(
    hosts: Iterable[Host],
    placed: Mapping[str, Sequence[tuple[str, Mapping[str, float]]]],
    role: str,
    demand: Mapping[str, float],
) -> Host | None:
    """The host with room and the fewest workers of this role; of equals the emptiest, the first.

    `placed` has, per host, the (role, demand) of what is there.
    """

    def free(host: Host, what: str) -> float:
        used = sum(needs.get(what, 0.0) for _, needs in placed.get(host.id, ()))
        return host.resources.get(what, 0.0) - used

    fitting = [
        host for host in hosts if all(free(host, what) >= n for what, n in demand.items() if n)
    ]
    return min(
        fitting,
        key=lambda host: (
            sum(other == role for other, _ in placed.get(host.id, ())),
            -min((free(host, what) for what in demand), default=0.0),
            len(placed.get(host.id, ())),
            host.id,
        ),
        default=None,
    )


class RemoteProcess:
    """A worker's process, perhaps still waiting for a host. Implements `pool.Process`."""

    def __init__(self, role: str, name: str) -> None:
        self.role, self.name = role, name
        self.setup = ""
        self.host: Host | None = None
        self.demand: Mapping[str, float] = {}
        self.task: Task | None = None
        self.placed_s = 0.0
        self.reason = ""
        self._ended = threading.Event()

    def start(self, host: Host, demand: Mapping[str, float], task: Task) -> None:
        self.host, self.demand, self.task = host, demand, task
        self.placed_s = time.monotonic()
        threading.Thread(target=self._watch, args=(task,), daemon=True).start()

    def _watch(self, task: Task) -> None:
        self.reason = task.wait()
        self._ended.set()

    def poll(self) -> int | None:
        return 1 if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return 1

    def kill(self) -> None:
        """Without waiting: nobody knows how long a host that is cut off takes to hear of it."""
        self._ended.set()
        if self.task is not None:
            self.task.kill()


class HostPool(WorkerPool):
    """The pool over several hosts."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        cluster: Cluster,
        demands: Callable[[str, str], Mapping[str, float]],
        for_host: Callable[[Host], dict[str, Any]],
        *,
        first_incarnation: int = 0,
    ) -> None:
        self.cluster, self._demands, self._for_host = cluster, demands, for_host
        self.usable: Callable[[], list[Host]] = lambda: [cluster.head]
        self._waiting: list[RemoteProcess] = []
        super().__init__(config, run_dir, first_incarnation=first_incarnation)

    def _listen(self) -> tuple[Listener, str]:
        listener = Listener((self.cluster.head.ip, 0), family="AF_INET", backlog=64)
        return listener, f"tcp://{self.cluster.head.ip}:{listener.address[1]}"

    def _greet(self, connection: Connection) -> None:
        with contextlib.suppress(OSError):
            answer_at_once(connection)
        super()._greet(connection)

    @property
    def key(self) -> bytes:
        """Of the run: what workers prove to each other."""
        return self._key

    # -- placing ----------------------------------------------------------------------------------

    def _spawn(self, role: str, name: str) -> Process:
        return RemoteProcess(role, name)

    def _deliver(self, process: Process, setup: str) -> None:
        assert isinstance(process, RemoteProcess)
        process.setup = setup
        if not self._place(process):
            self._waiting.append(process)

    def place_waiting(self) -> None:
        """Give hosts to workers that had none; called now and then by the controller."""
        self._waiting = [p for p in self._waiting if p.poll() is None and not self._place(p)]

    def num_waiting(self) -> int:
        return len(self._waiting)

    def has_room(self, role: str, name: str) -> bool:
        """Whether a worker would find a host at once."""
        demand = self._demands(role, name)
        return choose_host(self.usable(), self.placed(), role, demand) is not None

    def _place(self, process: RemoteProcess) -> bool:
        demand = self._demands(process.role, process.name)
        host = self._host_for(process, demand)
        if host is None:
            return False
        setup = json.loads(process.setup)
        setup["extra"] |= self._for_host(host)
        process.start(host, demand, self.cluster.launch(host, demand, json.dumps(setup)))
        record = {"role": process.role, "name": process.name, "life": setup["incarnation"]}
        record["host"] = host.ip
        with (self._run_dir / "placements.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
        return True

    def _host_for(self, process: RemoteProcess, demand: Mapping[str, float]) -> Host | None:
        head = self.cluster.head
        wanted = json.loads(process.setup)["extra"].get("host")
        if wanted is not None:
            return next((h for h in self.cluster.hosts() if h.id == wanted), None)
        if process.name == "learner" or process.role in AT_HEAD:
            hosts = [head]
        else:
            hosts = self.usable()
            if json.loads(process.setup)["extra"].get("beside_learner"):
                hosts = [host for host in hosts if host.id == head.id]
        return choose_host(hosts, self.placed(), process.role, demand)

    def placed(self) -> dict[str, list[tuple[str, Mapping[str, float]]]]:
        """What lives on each host now."""
        found: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
        for worker in self.workers.values():
            process = worker.process
            assert isinstance(process, RemoteProcess)
            if process.host is not None and process.poll() is None:
                found.setdefault(process.host.id, []).append((worker.role, process.demand))
        return found

    def host_of(self, name: str) -> Host | None:
        worker = self.workers.get(name)
        if worker is None:
            return None
        process = worker.process
        assert isinstance(process, RemoteProcess)
        return process.host

    # -- ends -------------------------------------------------------------------------------------

    def _wait(self, worker: Worker) -> None:
        """A host that vanished says no goodbye: its connection is ended from this side."""
        process = worker.process
        assert isinstance(process, RemoteProcess)
        process.wait()
        if worker.reader is not None:
            worker.reader.join(LAST_WORDS_S)
        if worker.channel is not None:
            worker.channel.cut()
        if process.reason:
            with (self._run_dir / "logs" / f"{worker.name}.log").open("a") as log:
                log.write(process.reason.rstrip() + "\n")
        worker.outbox.put(None)
        self.inbox.put(Envelope(worker.name, worker.incarnation, None))

    def overdue(self, limit_s: float) -> list[str]:
        """As in one machine, but a worker that waits for a host is no fault of its own."""
        now, late = time.monotonic(), []
        for worker in self.workers.values():
            process = worker.process
            assert isinstance(process, RemoteProcess)
            begun = process.host is not None and process.poll() is None
            if begun and not worker.joined and now - process.placed_s > limit_s:
                late.append(worker.name)
        return late

    def end(self, grace_s: float) -> None:
        """Those that serve the others end last: journals and rows are still on their way."""
        self.closing = True
        workers = list(self.workers.values())
        self._end([worker for worker in workers if worker.role not in SERVING], grace_s)
        self._end([worker for worker in workers if worker.role in SERVING], LAST_WORDS_S)
        self._close()

    def discharge(self, name: str) -> None:
        """End a worker for good."""
        self.kill(name)
        with self._lock:
            self.incarnations[name] += 1  # its end is no news
            del self.workers[name]
