"""Both ends of a connection between a worker and its controller, in this process."""

from __future__ import annotations

import socket
import threading
from pathlib import Path
from queue import SimpleQueue

from dora_rl.io.connection import Listener
from dora_rl.io.proof import Proven, RunKey, Tags, Wire
from dora_rl.workers.messages import Channel


def pair() -> tuple[Channel, Channel]:
    """Two ends that have proved themselves to each other."""
    ends = socket.socketpair()
    keys = (b"there", b"back")
    near, far = (
        Proven(Wire(end), Tags(sent), Tags(received))
        for end, sent, received in zip(ends, keys, keys[::-1], strict=True)
    )
    return Channel(near), Channel(far)


class Door:
    """Waits at a path for one worker."""

    def __init__(self, path: Path, key: RunKey) -> None:
        self._came: SimpleQueue[Proven] = SimpleQueue()
        self._listener = Listener(str(path))
        arguments = (key, self._came.put, lambda: None)
        threading.Thread(target=self._listener.accept_each, args=arguments, daemon=True).start()

    def channel(self) -> Channel:
        channel = Channel(self._came.get(timeout=60))
        self._listener.close()
        return channel
