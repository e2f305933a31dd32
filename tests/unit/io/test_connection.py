"""One connection for all: both sides prove themselves in time, frames and raw bytes arrive."""

from __future__ import annotations

import socket
import threading
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection as Raw
from multiprocessing.connection import Listener, Pipe
from pathlib import Path

import pytest

from dora_rl.io.connection import Connection, greet, host_and_port

KEY = b"k" * 32


def served(address: str, family: str, key: bytes, found: list[Raw | str]) -> threading.Thread:
    """Accepts one connection and greets it; what came of it is in `found`."""
    place = address if family == "AF_UNIX" else host_and_port(address)
    listener = Listener(place, family=family)

    def accept() -> None:
        raw = listener.accept()
        try:
            greet(raw, key)
            found.append(raw)
        except (AuthenticationError, EOFError, OSError) as error:
            found.append(type(error).__name__)
            raw.close()
        listener.close()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    return thread


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def addresses(folder: Path) -> list[tuple[str, str]]:
    return [(str(folder / "s"), "AF_UNIX"), (f"tcp://127.0.0.1:{free_port()}", "AF_INET")]


def test_frames_and_raw_bytes_here_and_across_hosts(tmp_path: Path) -> None:
    for address, family in addresses(tmp_path):
        found: list[Raw | str] = []
        thread = served(address, family, KEY, found)
        near = Connection.connect(address, KEY)
        thread.join(10)
        (raw,) = found
        assert isinstance(raw, Raw)
        far = Connection(raw)
        near.send_frame(b"frame")
        near.write(bytearray(b"bulk"))
        assert far.poll(10) and far.receive_frame() == b"frame"
        room = bytearray(4)
        far.read_into(memoryview(room))
        assert room == b"bulk"
        # What was allowed for the proof alone does not end a long silence later.
        for end in (near, far):
            with socket.socket(fileno=end._raw.fileno()) as link:
                assert not any(link.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16))
                link.detach()
        near.close()
        with pytest.raises(EOFError):
            far.read_into(memoryview(room))
        far.close()


def test_another_key_is_refused_by_both(tmp_path: Path) -> None:
    for address, family in addresses(tmp_path):
        found: list[Raw | str] = []
        thread = served(address, family, b"other", found)
        with pytest.raises(AuthenticationError):
            Connection.connect(address, KEY)
        thread.join(10)
        assert found == ["AuthenticationError"]


def test_who_connects_and_says_nothing_is_given_up() -> None:
    near, far = Pipe()
    with pytest.raises(TimeoutError, match=r"silent for 0\.2 s"):
        greet(near, KEY, wait_s_max=0.2)
    near.close()
    far.close()
