"""Who is placed where, and what a pool over several hosts does when hosts come and go."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dora_rl.config import ModelConfig, RewardConfig, RunConfig
from dora_rl.config.running import RuntimeConfig
from dora_rl.controller.world import Notify
from dora_rl.core.actions import Load
from dora_rl.io.connection import Link, host_and_port
from dora_rl.io.proof import RunKey, Wire, prove
from dora_rl.types import UserError
from dora_rl.workers.pool import WorkerPool
from dora_rl.workers.worker import key_of
from dora_rl.worlds.hosts import Host, HostProcesses, choose_host
from dora_rl.worlds.kinds import check_certificates
from dora_rl.worlds.services import Relays
from tests.kit.certificates import authority, signed

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
    yield from made_team(tmp_path, CONFIG)


def made_team(tmp_path: Path, config: RunConfig):
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
    pool = WorkerPool(config, tmp_path, hosts)
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


def under_certificates(folder: Path) -> RunConfig:
    authority(folder, "ours")
    host = signed(folder, "host", "ours")
    keys = {"tls_certificate": host.certificate, "tls_key": host.private_key}
    runtime = {"world": "ray", **keys, "tls_authority": host.authority}
    return RunConfig.model_validate(CONFIG.model_dump() | {"runtime": runtime})


@pytest.fixture
def secured(tmp_path: Path):
    config = under_certificates(tmp_path)
    for made in made_team(tmp_path, config):
        yield *made, config


def test_workers_meet_under_certificates(secured) -> None:
    cluster, hosts, pool, carrier, config = secured
    cluster.now.append(B)
    until(pool, carrier, "two relays", lambda: len(carrier.usable()) == 2)
    # A relay listens at its own host's address, and to nobody without a certificate.
    own = carrier.sites["b"].address
    assert own.startswith(f"tcp://{B.ip}:")
    with pytest.raises(OSError):
        socket.create_connection((A.ip, int(own.rpartition(":")[2])), 5.0)
    for address in (own, hosts.address):
        link = socket.create_connection(host_and_port(address), 5.0)
        with pytest.raises((OSError, EOFError)):  # it waits for a certificate, we for its greeting
            prove(Wire(link), RunKey(pool.key), accepts=False, wait_s_max=1.0)
        Link.connect(address, key_of(config, pool.key)).close()


def test_certificates_are_looked_at_before_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = under_certificates(tmp_path).runtime
    monkeypatch.setenv("RAY_USE_TLS", "0")
    with pytest.raises(UserError, match="set RAY_USE_TLS=1"):
        check_certificates(config)
    monkeypatch.setenv("RAY_USE_TLS", "1")
    check_certificates(config)
    other = config.model_copy(update={"tls_key": str(tmp_path / "ours.key")})
    with pytest.raises(UserError, match=r"tls_key .* cannot be used .*belong together"):
        check_certificates(other)
    missing = config.model_copy(update={"tls_authority": str(tmp_path / "nothing")})
    with pytest.raises(UserError, match="cannot be used"):
        check_certificates(missing)
    for given in ({"tls_key": "x"}, {"tls_certificate": "x", "tls_key": "x"}):
        with pytest.raises(ValueError, match="or none of them"):
            RuntimeConfig.model_validate({"world": "ray"} | given)
    all_three = {"tls_certificate": "x", "tls_key": "x", "tls_authority": "x"}
    with pytest.raises(ValueError, match="runs on several hosts"):
        RuntimeConfig.model_validate(all_three)
