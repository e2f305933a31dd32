"""Who is placed where, and what a pool over several hosts does when hosts come and go."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_rl.config import ModelConfig, RewardConfig, RunConfig
from dora_rl.controller.world import Notify
from dora_rl.core.actions import Load
from dora_rl.workers.pool import WorkerPool
from dora_rl.worlds.hosts import Host, HostProcesses, choose_host
from dora_rl.worlds.services import Relays

CONFIG = RunConfig(
    model=ModelConfig(path="unused"), reward=RewardConfig.model_validate({"functions": ["exact"]})
)
A, B, C = (Host(name, f"127.0.0.{n}", {"CPU": 2.0}) for n, name in enumerate("abc", start=1))


class Program:
    """A worker as a plain process. Implements `cluster.Task`."""

    def __init__(self, setup: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "dora_rl.workers.worker"], stdin=subprocess.PIPE
        )
        assert self.process.stdin is not None
        self.process.stdin.write(setup.encode() + b"\n")
        self.process.stdin.flush()

    def wait(self) -> str:
        return f"status {self.process.wait()}"

    def kill(self) -> None:
        self.process.kill()


class Neighbours:
    """Hosts that are addresses of this machine. Implements `cluster.Cluster`."""

    def __init__(self, *hosts: Host) -> None:
        self.head, self.now = hosts[0], list(hosts)
        self.launched: list[tuple[str, dict[str, object], Program]] = []

    def hosts(self) -> list[Host]:
        return self.now

    def launch(self, host: Host, demand: object, setup: str) -> Program:
        program = Program(setup)
        self.launched.append((host.id, json.loads(setup), program))
        return program

    def close(self) -> None:
        pass


def test_workers_spread_over_hosts_with_room() -> None:
    one = {"CPU": 1.0}
    assert choose_host([A, B], {}, "instance", one) == A
    assert choose_host([A, B], {"a": [("instance", one)]}, "instance", one) == B
    assert choose_host([A, B], {"a": [("learner", one)]}, "instance", one) == B, "the emptier one"
    full = [("learner", one), ("reward", one)]
    assert choose_host([A, B], {"a": full, "b": [("instance", one)]}, "instance", one) == B
    assert choose_host([A], {"a": full}, "instance", one) is None
    assert choose_host([A], {"a": full}, "reward", {}) == A, "who needs nothing fits anywhere"
    assert choose_host([A], {}, "instance", {"GPU": 1.0}) is None
    assert choose_host([], {}, "instance", one) is None


@pytest.fixture
def team(tmp_path: Path):
    cluster = Neighbours(A)
    roots = {"at_head": True, "weights_root": str(tmp_path / "w"), "transfer_root": "unused"}

    def for_host(host: Host) -> dict[str, object]:
        folder = str(tmp_path / host.id)
        return roots | {
            "at_head": host == A,
            "ip": host.ip,
            "weights_root": folder,
            "transfer_root": folder + "kv",
        }

    hosts = HostProcesses(tmp_path, cluster, lambda role, name: {}, for_host)
    pool = WorkerPool(CONFIG, tmp_path, hosts)
    yield cluster, hosts, pool, Relays(pool, hosts, Notify())
    pool.end(5.0)
    for _, _, program in cluster.launched:
        program.kill()


def until(pool: WorkerPool, carrier: Relays, what: str, ready: Callable[[], bool]) -> None:
    """The controller's loop, reduced to relays."""
    deadline = time.monotonic() + 240.0
    while not ready():
        assert time.monotonic() < deadline, f"waited too long for {what}"
        carrier.tick()
        while not pool.inbox.empty():
            envelope = pool.inbox.get()
            if not pool.is_current(envelope) or envelope.role != "relay":
                continue
            if envelope.message is None:
                carrier.lost(envelope.name)
            else:
                carrier.hear(pool.workers[envelope.name], envelope.message)
        time.sleep(0.02)


def test_a_worker_waits_until_a_host_with_a_relay_is_there(team) -> None:
    cluster, hosts, pool, carrier = team
    pool.start("reward", "reward0", {"base_dir": "."})
    assert hosts.num_waiting() == 1 and not pool.overdue(-1.0), "it waits, and that is no fault"
    until(pool, carrier, "the relay of a", lambda: bool(carrier.usable()))
    carrier.tick()
    assert hosts.num_waiting() == 0 and hosts.host_of("reward0") == A
    cluster.now.append(B)
    until(pool, carrier, "the relay of b", lambda: len(carrier.usable()) == 2)
    carrier.sites["b"].heard_s -= 60.0
    assert carrier.usable() == [A], "a host that is not heard gets nothing new"
    cluster.now.remove(B)
    until(pool, carrier, "b to be forgotten", lambda: "b" not in carrier.sites)


def test_a_relay_that_ends_is_started_again_on_its_host(team) -> None:
    cluster, _, pool, carrier = team
    cluster.now.append(B)
    until(pool, carrier, "two relays", lambda: len(carrier.usable()) == 2)
    before = carrier.sites["b"].address
    next(program for host, _, program in cluster.launched if host == "b").kill()
    until(pool, carrier, "the end", lambda: carrier.sites["b"].address != before)
    until(pool, carrier, "the next one", lambda: len(carrier.usable()) == 2)


def test_hosts_that_load_together_form_a_chain(team) -> None:
    cluster, _, pool, carrier = team
    cluster.now += [B, C]
    until(pool, carrier, "three relays", lambda: len(carrier.usable()) == 3)
    head, b, c = (carrier.sites[name] for name in "abc")
    assert carrier.sources(b, 1, None) == [head]
    assert carrier.sources(c, 1, None) == [b, head], (
        "from the one before, the learner's if it fails"
    )
    carrier.retire([1])
    assert carrier.sources(c, 2, A) == [head], "the donor that the core named"
    assert carrier.sources(b, 2, C) == [c, head]
    pool.start("reward", "reward0", {"base_dir": "."})
    carrier.load(Load("reward0", 3, None))
    assert not head.wanted, "on the learner's host nothing has to be fetched"
