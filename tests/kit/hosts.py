"""Hosts on one machine: each a namespace for network, processes and mounts, joined by a bridge.

A host has an address of its own, its own /dev/shm and /tmp/ray, and sees nothing of another host's
run directory, so that whatever passes between two of them passes through the network. Needs root.
Everything is taken down at the end, whatever happened.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

NEEDED = ("ip", "unshare", "nsenter", "mount")


def can_make_hosts() -> bool:
    """Root, the programs, and a kernel that lets us: in a container root may not."""
    if os.geteuid() != 0 or not all(shutil.which(name) for name in NEEDED):
        return False
    probe = (
        "mount --make-rprivate / && mount -t tmpfs tmpfs /dev/shm && ip link add probe0 type bridge"
    )
    words = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


@dataclass
class VirtualHost:
    """One namespace."""

    name: str
    ip: str
    link: str  # the bridge's end of its cable
    init: subprocess.Popen[bytes] | None = None
    init_pid: int = 0
    commands: list[subprocess.Popen[str]] = field(default_factory=list[subprocess.Popen[str]])

    def boot(self, hidden: tuple[Path, ...] = ()) -> None:
        """Its first process: when that ends, everything on the host ends."""
        lines = [
            "mount --make-rprivate /",
            "mount -t tmpfs tmpfs /dev/shm",
            "mkdir -p /tmp/ray && mount -t tmpfs tmpfs /tmp/ray",
            *(f"mount -t tmpfs tmpfs {path}" for path in hidden),
            "exec sleep infinity",
        ]
        words = f"ip netns exec {self.name} unshare --mount --pid --fork --kill-child --mount-proc"
        self.init = subprocess.Popen([*words.split(), "sh", "-c", " && ".join(lines)])
        self.init_pid = first_child(self.init.pid)

    def start(self, *words: str, **environment: str) -> subprocess.Popen[str]:
        """Run a command on the host."""
        enter = f"nsenter --target {self.init_pid} --mount --pid --net --wd={os.getcwd()} --"
        process = subprocess.Popen(
            [*enter.split(), *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | environment,
        )
        self.commands.append(process)
        return process

    def run(self, *words: str, timeout_s: float = 60.0, **environment: str) -> str:
        process = self.start(*words, **environment)
        out, _ = process.communicate(timeout=timeout_s)
        assert process.returncode == 0, out
        return out

    def kill(self) -> None:
        """Pull the plug."""
        if self.init is not None:
            for pid in (self.init_pid, self.init.pid):
                with_signal(pid)
            self.init.wait(30.0)
            self.init = None

    def cut_off(self) -> None:
        """Pull the network cable; everything on the host runs on."""
        call("ip", "link", "set", self.link, "down")

    def connect(self) -> None:
        call("ip", "link", "set", self.link, "up")


def with_signal(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def first_child(pid: int) -> int:
    """The process that `unshare` forked, as this side numbers it, once its mounts are done."""
    until = time.monotonic() + 120.0
    while time.monotonic() < until:
        for child in descendants(pid):
            comm = Path(f"/proc/{child}/comm")
            if comm.is_file() and comm.read_text().strip() == "sleep":
                return child
        time.sleep(0.02)
    raise AssertionError("a host did not start")


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children")
    found = [int(word) for word in children.read_text().split()] if children.is_file() else []
    return found + [more for child in found for more in descendants(child)]


@contextmanager
def virtual_hosts(count: int, hidden: tuple[Path, ...] = ()) -> Iterator[list[VirtualHost]]:
    """`count` hosts on one bridge; all but the first see empty directories where `hidden` are."""
    tag = f"d{os.getpid() % 100000}"
    bridge, net = f"{tag}br", os.getpid() % 200 + 20
    hosts = [VirtualHost(f"{tag}h{n}", f"10.{net}.0.{n + 1}", f"{tag}v{n}") for n in range(count)]
    # A test or benchmark that is ended from outside cleans up as well.
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))
    try:
        take_down(hosts, bridge)  # what a killed run of this process id may have left
        call("ip", "link", "add", bridge, "type", "bridge")
        call("ip", "link", "set", bridge, "up")
        for number, host in enumerate(hosts):
            _plug_in(host, bridge)
            host.boot(hidden if number else ())
        yield hosts
    finally:
        signal.signal(signal.SIGTERM, before)
        take_down(hosts, bridge)


def take_down(hosts: list[VirtualHost], bridge: str) -> None:
    for host in hosts:
        host.kill()
        subprocess.run(["ip", "netns", "del", host.name], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", host.link], capture_output=True, check=False)
    subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)


def _plug_in(host: VirtualHost, bridge: str) -> None:
    inside = f"{host.link}p"
    call("ip", "netns", "add", host.name)
    call("ip", "link", "add", host.link, "type", "veth", "peer", "name", inside)
    call("ip", "link", "set", inside, "netns", host.name)
    call("ip", "link", "set", host.link, "master", bridge)
    call("ip", "link", "set", host.link, "up")
    for words in (
        f"addr add {host.ip}/24 dev {inside}",
        f"link set {inside} up",
        "link set lo up",
    ):
        call("ip", "-n", host.name, *words.split())
