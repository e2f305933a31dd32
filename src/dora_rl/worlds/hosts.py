"""The hosts of a run on several machines: where each worker is placed, started and ended.

Who starts a process on another host is behind `Cluster` (Ray, or plain processes in tests); here it
is decided on which host, and a worker is kept waiting while no host has room for it. Messages
travel as on one machine, over TCP instead of a local socket.

A host takes workers only while its relay is heard: one that is cut off gets nothing new, long
before the cluster itself has noticed. Invariant: what is placed on a host never needs more than
the host has.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dora_rl.config import RunConfig
from dora_rl.io.connection import Listener, tcp
from dora_rl.setup.devices import EVALUATOR_SHARE, LEARNER_SHARE
from dora_rl.setup.layout import Layout
from dora_rl.types import UserError
from dora_rl.weights.leftovers import transfer_of
from dora_rl.workers.pool import Process, Worker

LAST_WORDS_S = 2.0  # for what a worker said to arrive after its end is known
AT_HEAD = ("evaluator", "storage")  # roles that need the run directory


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

    def __init__(self, setup: dict[str, Any], log: Path) -> None:
        self.setup, self._log = setup, log
        self.role, self.name = str(setup["role"]), str(setup["name"])
        self.host: Host | None = None
        self.demand: Mapping[str, float] = {}
        self.task: Task | None = None
        self.placed_s = 0.0
        self._ended = threading.Event()

    def start(self, host: Host, demand: Mapping[str, float], task: Task) -> None:
        self.host, self.demand, self.task = host, demand, task
        self.placed_s = time.monotonic()
        threading.Thread(target=self._watch, args=(task,), daemon=True).start()

    def _watch(self, task: Task) -> None:
        reason = task.wait()
        if reason and not self._ended.is_set():
            with self._log.open("a") as log:
                log.write(reason.rstrip() + "\n")
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


class HostProcesses:
    """Workers as processes on the hosts of a cluster. Implements `pool.Launcher`."""

    last_words_s = LAST_WORDS_S

    def __init__(
        self,
        run_dir: Path,
        cluster: Cluster,
        demands: Callable[[str, str], Mapping[str, float]],
        for_host: Callable[[Host], dict[str, Any]],
        bind_address: str = "",
    ) -> None:
        """`for_host`: what a worker is told of the host it is placed on."""
        self._run_dir, self.cluster = run_dir, cluster
        self._demands, self._for_host = demands, for_host
        self.usable: Callable[[], list[Host]] = lambda: [cluster.head]
        self._waiting: list[RemoteProcess] = []
        self._newest: dict[str, RemoteProcess] = {}  # by name
        self.listener = Listener(tcp(bind_address or cluster.head.ip))
        self.address = tcp(cluster.head.ip, self.listener.port)

    def close(self) -> None:
        self.listener.close()

    def begun_s(self, worker: Worker) -> float | None:
        """A worker that waits for a host is no fault of its own."""
        process = self._newest[worker.name]
        return process.placed_s if process.host is not None and process.poll() is None else None

    def launch(self, setup: dict[str, Any]) -> Process:
        process = RemoteProcess(setup, self._run_dir / "logs" / f"{setup['name']}.log")
        self._newest[process.name] = process
        if not self._place(process):
            self._waiting.append(process)
        return process

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
        setup = process.setup | {"extra": process.setup["extra"] | self._for_host(host)}
        process.start(host, demand, self.cluster.launch(host, demand, json.dumps(setup)))
        who = {"role": process.role, "name": process.name, "life": setup["incarnation"]}
        with (self._run_dir / "placements.jsonl").open("a") as file:
            file.write(json.dumps({**who, "host": host.ip}) + "\n")
        return True

    def _host_for(self, process: RemoteProcess, demand: Mapping[str, float]) -> Host | None:
        head, extra = self.cluster.head, process.setup["extra"]
        if extra.get("host") is not None:
            return next((h for h in self.cluster.hosts() if h.id == extra["host"]), None)
        if process.name == "learner" or process.role in AT_HEAD:
            hosts = [head]
        else:
            beside = extra.get("beside_learner")
            hosts = [host for host in self.usable() if not beside or host.id == head.id]
        return choose_host(hosts, self.placed(), process.role, demand)

    def placed(self) -> dict[str, list[tuple[str, Mapping[str, float]]]]:
        """What lives on each host now."""
        found: dict[str, list[tuple[str, Mapping[str, float]]]] = {}
        for process in self._newest.values():
            if process.host is not None and process.poll() is None:
                found.setdefault(process.host.id, []).append((process.role, process.demand))
        return found

    def host_of(self, name: str) -> Host | None:
        process = self._newest.get(name)
        return process.host if process is not None else None


def demand_of(config: RunConfig, layout: Layout, role: str, name: str) -> dict[str, float]:
    """What a worker takes of its host: whole devices, or cores where there are none.

    Elastic instances sleep while the learner computes, on the same devices: each takes half of one.
    The evaluator shares the device of the first rank.
    """
    resources, on_gpus = config.resources, layout.device.startswith("cuda")
    elastic = role == "instance" and layout.is_elastic(name)
    share = LEARNER_SHARE if layout.num_elastic else 1.0
    devices = {
        "learner": share - EVALUATOR_SHARE * (name == "learner"),
        "evaluator": EVALUATOR_SHARE,
        "instance": 0.5 if elastic else float(resources.devices_per_instance),
    }
    threads = float(config.rollout.threads * resources.devices_per_instance)
    cores = {"learner": 1.0, "instance": 0.0 if elastic else threads}
    amount = (devices if on_gpus else cores).get(role, 0.0)
    return {"GPU" if on_gpus else "CPU": amount} if amount else {}


def check_room(config: RunConfig, layout: Layout, cluster: Cluster) -> None:
    """The learner's first rank needs room on the controller's host: say so before it waits."""
    demand, head = demand_of(config, layout, "learner", "learner"), cluster.head
    for what, amount in demand.items():
        there = head.resources.get(what, 0.0)
        if there < amount:
            raise UserError(
                f"the learner runs on the controller's host ({head.ip}) and needs {amount:g} "
                f"{what}; the cluster counts {there:g} there: start dora-rl on a host with more"
            )


def about_host(
    host: Host, head: Host, weights: Path, lineage: int, shards: Sequence[str]
) -> dict[str, Any]:
    """What a worker is told of the host it is placed on. Elsewhere the store is a cache."""
    if host.id != head.id:
        # A cache that a lost lineage has left there is never taken for this one's.
        suffix = f"-{lineage}" if lineage else ""
        weights = weights.with_name(f"{weights.name}@{host.ip}{suffix}")
    return {
        "at_head": host.id == head.id,
        "ip": host.ip,
        "storage": list(shards),
        "weights_root": str(weights),
        "transfer_root": str(transfer_of(weights)),
    }
