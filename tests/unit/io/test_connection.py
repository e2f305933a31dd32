"""One connection for all: both sides prove themselves in time, what they send arrives unchanged."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from dora_rl.io import proof
from dora_rl.io.connection import (
    HEADER,
    PIECE_BYTES,
    STRANGERS_MAX,
    Connection,
    Link,
    Listener,
    Server,
    TransportError,
)
from dora_rl.io.proof import (
    TAG_BYTES,
    AuthenticationError,
    Damaged,
    Proven,
    RunKey,
    Tags,
    Wire,
    prove,
)
from tests.kit.certificates import authority, signed

KEY = RunKey(b"k" * 32)
WAIT_S = 30.0


class Host:
    """Accepts connections; what came of each is in `found`."""

    def __init__(self, address: str, key: RunKey = KEY) -> None:
        self.found: SimpleQueue[Proven | None] = SimpleQueue()
        self.listener = Listener(address)
        self.address = self.listener.address
        arguments = (key, self.found.put, lambda: self.found.put(None))
        threading.Thread(target=self.listener.accept_each, args=arguments, daemon=True).start()

    def far(self) -> Connection:
        proven = self.found.get(timeout=WAIT_S)
        assert proven is not None, "it was refused"
        return Connection(proven)

    def refused(self) -> bool:
        return self.found.get(timeout=WAIT_S) is None

    def plain(self) -> socket.socket:
        """Somebody who connects and does as they like."""
        name, _, port = self.address.removeprefix("tcp://").rpartition(":")
        return socket.create_connection((name, int(port)), WAIT_S)


def places(folder: Path) -> list[str]:
    return [str(folder / "s"), "tcp://127.0.0.1:0", "tcp://[::1]:0"]


@pytest.fixture
def host() -> Iterator[Host]:
    host = Host("tcp://127.0.0.1:0")
    yield host
    host.listener.close()


def test_frames_and_raw_bytes_here_and_across_hosts(tmp_path: Path) -> None:
    bulk = bytes(range(256)) * (PIECE_BYTES // 100)  # several pieces, the last one not whole
    for place in places(tmp_path):
        host = Host(place)
        near = Connection.connect(host.address, KEY)
        far = host.far()
        near.send_frame(b"frame")
        near.send_frame(b"")
        writer = threading.Thread(target=near.write, args=(bulk,))
        writer.start()
        assert far.poll(WAIT_S) and far.receive_frame() == b"frame" and far.receive_frame() == b""
        room = bytearray(len(bulk))
        far.read_into(memoryview(room))
        assert room == bulk
        writer.join()
        near.close()
        with pytest.raises(EOFError):
            far.receive_frame()
        far.close()
        host.listener.close()


def test_another_key_is_refused_by_both(tmp_path: Path) -> None:
    for place in places(tmp_path):
        host = Host(place, RunKey(b"other"))
        with pytest.raises(AuthenticationError, match="another key"):
            Connection.connect(host.address, KEY)
        assert host.refused()
        host.listener.close()


def test_a_host_that_does_not_know_the_key_is_not_believed() -> None:
    """It accepts every proof, and gives one that anybody can: the connector's own."""
    near, far = socket.socketpair()

    def pretend() -> None:
        far.sendall(proof.GREETING + bytes(32))
        far.sendall(far.recv(1000)[-32:])

    threading.Thread(target=pretend, daemon=True).start()
    with pytest.raises(AuthenticationError, match="does not know"):
        prove(Wire(near), KEY, accepts=False)


def test_the_proof_is_hmac_sha256_over_both_challenges(host: Host) -> None:
    link = host.plain()
    greeting = link.recv(1000)
    both = greeting[-32:] + b"c" * 32
    link.sendall(b"c" * 32 + hmac.digest(KEY.secret, b"connector\0" + both, "sha256"))
    assert link.recv(32) == hmac.digest(KEY.secret, b"acceptor\0" + both, "sha256")


def test_what_a_host_says_to_one_stranger_is_no_proof_for_another(host: Host) -> None:
    """Whoever gives the challenge of one connection as its own on another learns nothing."""
    one, other = host.plain(), host.plain()
    challenges = [link.recv(1000)[-32:] for link in (one, other)]
    one.sendall(challenges[1] + bytes(32))
    answer = one.recv(1000)
    other.sendall(challenges[0] + answer)
    assert answer == other.recv(1000) == proof.REFUSAL
    assert host.refused() and host.refused()


def test_who_drips_its_proof_byte_by_byte_is_given_up() -> None:
    """Each byte comes in time; the whole does not."""
    near, far = socket.socketpair()

    def drip() -> None:
        while True:
            try:
                far.send(b"x")
            except OSError:
                return
            time.sleep(0.01)

    threading.Thread(target=drip, daemon=True).start()
    with pytest.raises(TimeoutError):
        prove(Wire(near), KEY, accepts=True, wait_s_max=0.2)
    near, far = socket.socketpair()
    with pytest.raises(TimeoutError):
        prove(Wire(near), KEY, accepts=False, wait_s_max=0.2)


def test_a_proof_that_came_in_time_leaves_no_deadline_behind() -> None:
    ends = socket.socketpair()
    found: SimpleQueue[Proven] = SimpleQueue()

    def accept() -> None:
        found.put(prove(Wire(ends[0]), KEY, accepts=True, wait_s_max=WAIT_S))

    threading.Thread(target=accept, daemon=True).start()
    near = Connection(prove(Wire(ends[1]), KEY, accepts=False, wait_s_max=WAIT_S))
    far = Connection(found.get(timeout=WAIT_S))
    assert near._wire.until_s is None and far._wire.until_s is None
    far.within(0.1)
    with pytest.raises(TimeoutError, match=r"silent for 0\.1 s"):
        far.receive_frame()


def test_strangers_who_say_nothing_do_not_keep_others_out(host: Host) -> None:
    silent = [host.plain() for _ in range(STRANGERS_MAX // 2)]
    near = Connection.connect(host.address, KEY)
    near.send_frame(b"here")
    assert host.far().receive_frame() == b"here"
    for link in silent:
        link.close()


class Between:
    """Passes bytes on both ways, and may do what it likes with those that go there."""

    def __init__(self, address: str) -> None:
        self._door = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._door.getsockname()[1]}"
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self.held: SimpleQueue[bytes] = SimpleQueue()
        self.holds = False
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        near, _ = self._door.accept()
        self.far = socket.create_connection(self._target)
        threading.Thread(target=self._pass, args=(self.far, near), daemon=True).start()
        with contextlib.suppress(OSError):
            while data := near.recv(1 << 20):
                if self.holds:
                    self.held.put(data)
                else:
                    self.far.sendall(data)

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):  # either side may be gone at any time
            while data := source.recv(1 << 20):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize(
    "change",
    [
        lambda first, second: flipped(first, -1),  # its bytes
        lambda first, second: flipped(first, HEADER.size),  # its tag
        lambda first, second: flipped(first, HEADER.size - 1) + b"x",  # its length
        lambda first, second: second + first,  # another order
        lambda first, second: second,  # one is left out
    ],
)
def test_what_was_changed_on_its_way_ends_the_connection(host: Host, change) -> None:
    between = Between(host.address)
    near = Connection.connect(between.address, KEY)
    far = host.far()
    between.holds = True
    near.send_frame(b"first")
    first = between.held.get(timeout=WAIT_S)
    near.send_frame(b"second")
    between.far.sendall(change(first, between.held.get(timeout=WAIT_S)))
    with pytest.raises(Damaged):
        far.receive_frame()


def test_what_is_sent_again_is_not_heard_again(host: Host) -> None:
    between = Between(host.address)
    near = Connection.connect(between.address, KEY)
    far = host.far()
    between.holds = True
    near.send_frame(b"pay")
    frame = between.held.get(timeout=WAIT_S)
    between.far.sendall(frame + frame)
    assert far.receive_frame() == b"pay"
    with pytest.raises(Damaged):
        far.receive_frame()
    # Nor by another connection of the same run, whose challenges were others.
    second = Between(host.address)
    Connection.connect(second.address, KEY)
    other = host.far()
    second.far.sendall(frame)
    with pytest.raises(Damaged):
        other.receive_frame()


def test_raw_bytes_are_proven_too(host: Host) -> None:
    between = Between(host.address)
    near = Connection.connect(between.address, KEY)
    far = host.far()
    between.holds = True
    near.write(b"weights")
    data = b""
    while len(data) < TAG_BYTES + len(b"weights"):
        data += between.held.get(timeout=WAIT_S)
    between.far.sendall(flipped(data, -1))
    with pytest.raises(Damaged):
        far.read_into(memoryview(bytearray(7)))


def test_a_frame_is_not_taken_for_raw_bytes() -> None:
    sent, received = Tags(b"key"), Tags(b"key")
    tag = sent.next(proof.FRAME, b"data")
    with pytest.raises(Damaged):
        received.check(proof.BULK, bytearray(b"data"), tag)


def test_a_length_that_is_too_large_is_refused_before_there_is_room_for_it(host: Host) -> None:
    near = Connection.connect(host.address, KEY)
    far = host.far()
    near._wire.write(HEADER.pack(1 << 60) + bytes(TAG_BYTES))
    with pytest.raises(Damaged, match="are the most"):
        far.receive_frame()
    server = Server(KEY, lambda question, link: link.say({"num_bytes": 1 << 60}), "127.0.0.1")
    link = Link.connect(f"tcp://127.0.0.1:{server.port}", KEY)
    with pytest.raises(TransportError, match="100 are the most"):
        link.read(link.ask("weights")["num_bytes"], 100)
    server.close()


def test_a_server_listens_at_the_address_that_it_was_given() -> None:
    server = Server(KEY, lambda question, link: None, "127.0.0.2")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", server.port), 1.0)
    Link.connect(f"tcp://127.0.0.2:{server.port}", KEY).close()
    server.close()
    with pytest.raises(TransportError):
        Link.connect(f"tcp://127.0.0.2:{server.port}", KEY)


# -- certificates ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def signers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    for name in ("ours", "theirs"):
        authority(folder, name)
    return folder


def test_under_certificates_nothing_can_be_read_on_the_way(signers: Path) -> None:
    here, there = (RunKey(b"k" * 32, signed(signers, name, "ours")) for name in ("here", "there"))
    host = Host("tcp://127.0.0.1:0", there)
    between = Between(host.address)
    near = Connection.connect(between.address, here)
    far = host.far()
    between.holds = True
    near.send_frame(b"very secret")
    passed = between.held.get(timeout=WAIT_S)
    assert b"very secret" not in passed
    between.holds = False
    between.far.sendall(passed)
    assert far.receive_frame() == b"very secret"
    assert not far.poll(0.0), "nothing is to be read where nothing was said"
    # Both directions at once, more than the buffers hold.
    bulk = bytes(8 << 20)
    writers = [threading.Thread(target=end.write, args=(bulk,)) for end in (near, far)]
    rooms = [bytearray(b"x" * len(bulk)) for _ in writers]
    readers = [
        threading.Thread(target=end.read_into, args=(memoryview(room),))
        for end, room in zip((near, far), rooms, strict=True)
    ]
    for thread in [*writers, *readers]:
        thread.start()
    for thread in [*writers, *readers]:
        thread.join(WAIT_S)
    assert rooms == [bulk, bulk]
    far.close()
    with pytest.raises(EOFError):
        near.receive_frame()
    host.listener.close()


@pytest.mark.parametrize("case", ["another authority", "none", "the key alone is wrong"])
def test_who_lacks_one_of_both_is_refused(signers: Path, case: str) -> None:
    ours = signed(signers, "host", "ours")
    host = Host("tcp://127.0.0.1:0", RunKey(b"k" * 32, ours))
    theirs = signed(signers, "stranger", "theirs")
    key = {
        "another authority": RunKey(b"k" * 32, theirs),
        "none": KEY,
        "the key alone is wrong": RunKey(b"guess", ours),
    }[case]
    # Without a certificate it waits for a greeting, and the host for TLS: until one gives up.
    wait_s_max = 0.5 if case == "none" else WAIT_S
    with pytest.raises((AuthenticationError, OSError, EOFError)):
        prove(Wire(host.plain()), key, accepts=False, wait_s_max=wait_s_max)
    assert host.refused()
    host.listener.close()


def test_a_certificate_of_our_authority_is_not_enough_to_stand_between(signers: Path) -> None:
    """Somebody whom the same authority has signed ends TLS on both sides and passes bytes on."""
    key = RunKey(b"k" * 32, signed(signers, "host", "ours"))
    middle = signed(signers, "middle", "ours")
    host = Host("tcp://127.0.0.1:0", key)
    door = socket.create_server(("127.0.0.1", 0))

    def stand() -> None:
        near, far = Wire(door.accept()[0]), Wire(host.plain())
        near.secure(middle.for_acceptor, accepts=True)
        far.secure(middle.for_connector, accepts=False)
        near.write(far.read(len(proof.GREETING) + proof.CHALLENGE_BYTES))
        far.write(near.read(proof.CHALLENGE_BYTES + proof.PROOF_BYTES))
        near.write(far.read(proof.PROOF_BYTES))

    thread = threading.Thread(target=stand, daemon=True)
    thread.start()
    with pytest.raises(AuthenticationError):
        Connection.connect(f"tcp://127.0.0.1:{door.getsockname()[1]}", key)
    assert host.refused()
    host.listener.close()


def test_the_tag_names_number_kind_and_length() -> None:
    tags, head = Tags(b"key"), (0).to_bytes(8, "big") + b"\0" + (4).to_bytes(8, "big")
    want = hashlib.blake2b(head + b"data", key=b"key", digest_size=TAG_BYTES).digest()
    assert tags.next(proof.FRAME, b"data") == want
    assert tags.next(proof.FRAME, b"data") != want
