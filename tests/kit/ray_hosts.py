"""A Ray cluster over virtual hosts: one raylet per host, started again when it ends.

A raylet that was cut off long enough to be declared dead ends by itself when the cable is plugged
in again; whatever supervises hosts (here a shell loop, elsewhere systemd or Kubernetes) starts it
anew, and the host is back.
"""

from __future__ import annotations

import os
import secrets
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests.kit.hosts import VirtualHost

RAY = str(Path(sys.executable).with_name("ray"))
STORE = "--object-store-memory={}"
PORT = 6379
# Ray's own view of a dead host, faster than its defaults: three silent seconds in a row.
HEALTH = {
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}


def environment() -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
    } | HEALTH


class RayHosts:
    """The head has room for the learner, each other host for one instance."""

    def __init__(self, hosts: list[VirtualHost], logs: Path, store_bytes: int = 80_000_000) -> None:
        self._store = STORE.format(store_bytes)
        self.hosts, self.environment = hosts, environment()
        self.head = hosts[0]
        self._logs = logs
        self.address = f"{self.head.ip}:{PORT}"

    def start(self) -> None:
        self._raylet(self.head, f"--head --port={PORT} --num-cpus=1 --include-dashboard=false")
        self._wait_for_head()
        for host in self.hosts[1:]:
            self.join(host)

    def join(self, host: VirtualHost) -> None:
        self._raylet(host, f"--address={self.address} --num-cpus=1")

    def _raylet(self, host: VirtualHost, more: str) -> None:
        line = f"{shlex.quote(RAY)} start {more} --node-ip-address={host.ip} {self._store}"
        line += " --disable-usage-stats --block"
        log = self._logs / f"{host.name}.log"
        loop = f"while :; do {line}; sleep 1; done >> {log} 2>&1"
        host.start("sh", "-c", loop, **self.environment)

    def _wait_for_head(self) -> None:
        until = time.monotonic() + 180.0
        check = f"import socket; socket.create_connection(('{self.head.ip}', {PORT}), 1)"
        while time.monotonic() < until:
            process = self.head.start(sys.executable, "-c", check)
            process.communicate()
            if process.returncode == 0:
                return
            time.sleep(0.3)
        log = (self._logs / f"{self.head.name}.log").read_text()[-2000:]
        raise AssertionError(f"the head of the cluster did not start: {log}")

    def wait_for(self, count: int) -> None:
        """Until so many hosts have joined."""
        ask = (
            "import sys, time, ray\n"
            f"ray.init(address='{self.address}', log_to_driver=False, logging_level='ERROR')\n"
            f"while sum(node['Alive'] for node in ray.nodes()) < {count}: time.sleep(0.2)\n"
        )
        self.head.run(sys.executable, "-c", ask, timeout_s=180.0, **self.environment)

    def train(self, *words: str) -> subprocess.Popen[str]:
        """`dora-rl train` on the head's host, as a user starts it."""
        ray = ("runtime.world=ray", f"runtime.address={self.address}")
        command = (sys.executable, "-m", "dora_rl.cli", "train", *words, *ray)
        return self.head.start(*command, **self.environment)
