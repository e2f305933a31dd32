"""Weights and requests between hosts: two or more relays with their own stores on this machine."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch

from dora_rl.io.connection import Link, Refused, TransportError
from dora_rl.io.proof import RunKey
from dora_rl.ports import Canary
from dora_rl.types import RequestId
from dora_rl.weights.format import TENSORS_FILE
from dora_rl.weights.relay import Fetched, Relay
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.workers.messages import Exported
from dora_rl.workers.moves import Arrivals

KEY = RunKey(b"k" * 32)
WAIT_S = 20.0


def tensors(seed: int, size: int = 5000) -> list[tuple[str, torch.Tensor]]:
    rng = torch.Generator().manual_seed(seed)
    names = ["embed", "layers.10.q", "layers.2.q", "layers.2.k", "norm"]
    return [(name, torch.randn(size, generator=rng)) for name in names]


class Place:
    """A host: a store of its own and a relay."""

    def __init__(self, folder: Path) -> None:
        self.store = SharedMemoryWeightStore(folder / "weights")
        self.relay = Relay(
            SharedMemoryWeightStore(folder / "weights", verify=False),
            folder / "kv",
            KEY,
            "127.0.0.1",
        )
        self.address = f"tcp://127.0.0.1:{self.relay.server.port}"


@pytest.fixture
def hosts(tmp_path: Path):
    places = [Place(tmp_path / str(number)) for number in range(3)]
    yield places
    for place in places:
        place.relay.server.close()


def test_a_version_arrives_as_it_was_sealed(hosts: list[Place]) -> None:
    home, far, _ = hosts
    checksum = home.store.publish(3, tensors(3), Canary((1, 2), (-0.5,)))
    fetch(far, 3, home.address).result(WAIT_S)
    arrived = far.store.open(3)  # hashes every byte
    assert arrived.checksum == checksum and arrived.canary == Canary((1, 2), (-0.5,))
    sent = (home.store.root / "00000003" / TENSORS_FILE).read_bytes()
    assert (far.store.root / "00000003" / TENSORS_FILE).read_bytes() == sent
    assert home.relay.num_bytes_out == far.relay.num_bytes_in == len(sent)
    far.relay.retire([3])
    assert not far.store.versions()


def test_a_relay_waits_for_a_version_that_is_still_being_made(hosts: list[Place]) -> None:
    home, far, _ = hosts
    found = fetch(far, 0, home.address)
    time.sleep(0.2)
    assert not found.done()
    home.store.publish(0, tensors(0))
    found.result(WAIT_S)
    assert far.store.versions() == [0]


class Slow:
    """A wire that passes bytes on one way, up to a limit that can be raised, or is cut."""

    def __init__(self, address: str, num_bytes: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self.limit, self.cut, self.num_passed = num_bytes, False, 0
        host, port = address.removeprefix("tcp://").split(":")
        self._target = (host, int(port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._listener.accept()
        far = socket.create_connection(self._target)
        threading.Thread(target=self._questions, args=(near, far), daemon=True).start()
        while True:
            while self.num_passed >= self.limit and not self.cut:
                time.sleep(0.01)
            data = b"" if self.cut else far.recv(1000)
            if not data:
                near.shutdown(socket.SHUT_RDWR)
                return
            near.sendall(data)
            self.num_passed += len(data)

    def _questions(self, near: socket.socket, far: socket.socket) -> None:
        while data := near.recv(1000):
            far.sendall(data)


def fetch(place: Place, version: int, *sources: str) -> Future[Fetched]:
    found = place.relay.fetch(version, sources)
    assert found is not None
    return found


def stuck(wire: Slow) -> None:
    until = time.monotonic() + WAIT_S
    while wire.num_passed < wire.limit:
        assert time.monotonic() < until
        time.sleep(0.01)


def test_an_arriving_version_is_passed_on_before_it_is_complete(hosts: list[Place]) -> None:
    home, middle, end = hosts
    home.store.publish(1, tensors(1))
    wire = Slow(home.address, 100_000)  # header and two tensors
    first = fetch(middle, 1, wire.address)
    stuck(wire)
    second = fetch(end, 1, middle.address)
    until = time.monotonic() + WAIT_S
    while end.relay.num_bytes_in < 65536 + 20_000:
        assert time.monotonic() < until, "nothing came through the middle"
        time.sleep(0.01)
    assert not first.done() and not second.done()
    assert not end.store.versions(), "half a version is never seen"
    wire.limit = 1 << 40
    first.result(WAIT_S), second.result(WAIT_S)
    assert end.store.open(1).checksum == home.store.checksum(1)
    assert home.relay.num_bytes_out == end.relay.num_bytes_in, "the learner's host sent it once"


def test_a_donor_that_dies_half_way_is_replaced_by_the_next_source(hosts: list[Place]) -> None:
    home, middle, end = hosts
    for place in (home, middle):
        place.store.publish(1, tensors(1))
    wire = Slow(middle.address, 100_000)
    found = fetch(end, 1, wire.address, home.address)
    stuck(wire)
    wire.cut = True
    found.result(WAIT_S)
    assert end.store.open(1).checksum == home.store.checksum(1)
    whole = home.store.open(1).num_bytes
    assert 0 < home.relay.num_bytes_out < whole, "it went on where the donor had stopped"


def test_a_damaged_donor_is_noticed_and_the_version_taken_from_elsewhere(
    hosts: list[Place],
) -> None:
    home, middle, end = hosts
    for place in (home, middle):
        place.store.publish(1, tensors(1))
    path = middle.store.root / "00000001" / TENSORS_FILE
    path.chmod(0o644)
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    fetch(end, 1, middle.address, home.address).result(WAIT_S)
    assert end.store.open(1).checksum == home.store.checksum(1)


def test_a_request_is_read_from_its_host_and_nothing_else_is(hosts: list[Place]) -> None:
    home = hosts[0]
    (home.relay.transfer_root / "7.1.0.kv").write_bytes(b"blocks")
    (home.relay.transfer_root.parent / "secret").write_bytes(b"no")
    link = Link.connect(home.address, KEY)
    answer = link.ask("request", name="7.1.0.kv")
    assert bytes(link.read(answer["num_bytes"], 6)) == b"blocks"
    for name in ("../secret", str(home.relay.transfer_root.parent / "secret"), "8.1.0.kv"):
        with pytest.raises(Refused, match="is not here"):
            link.ask("request", name=name)
    link.close()


def test_strangers_are_refused(hosts: list[Place]) -> None:
    with pytest.raises(TransportError):
        Link.connect(hosts[0].address, RunKey(b"a guess"))
    until = time.monotonic() + WAIT_S
    while hosts[0].relay.server.num_refused == 0 and time.monotonic() < until:
        time.sleep(0.01)
    assert hosts[0].relay.server.num_refused == 1
    Link.connect(hosts[0].address, KEY).close()


def test_a_request_given_up_on_its_way_is_never_there(hosts: list[Place], tmp_path: Path) -> None:
    """Its instance would decode it for nobody, and could not unload its version."""
    (tmp_path / "0" / "kv").mkdir(exist_ok=True)
    arrivals = Arrivals(KEY)
    for sample in (0, 1):
        (tmp_path / "0" / "kv" / f"{sample}.kv").write_bytes(bytes([sample]) * 9)
        who = (RequestId(7, sample), 2, 0, "instance1")
        arrivals.fetch(Exported(*who, 9, f"{sample}.kv", 9, relay=hosts[0].address))
    arrivals.give_up(RequestId(7, 0), epoch=2)
    arrivals.give_up(RequestId(7, 1), epoch=1)  # of an earlier start: not this one
    came: list[tuple[int, bytes]] = []
    until = time.monotonic() + WAIT_S
    while arrivals.open and time.monotonic() < until:
        for export, data in arrivals.take():
            assert not isinstance(data, TransportError), data
            came.append((export.request.sample, bytes(data)))
    assert came == [(1, bytes([1]) * 9)]
