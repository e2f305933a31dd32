"""A worker that takes two GPUs of a host sees those two; nobody else sees them.

Ray believes the number of GPUs that a host is started with, so none is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.kit.ray_hosts import RAY, environment

pytestmark = pytest.mark.cluster

SEEN = """
import os
from dora_rl.workers.messages import Note

def say(setup, channel):
    channel.send(Note(os.environ.get("CUDA_VISIBLE_DEVICES", "all")))
    channel.receive()
"""
SCRIPT = """
import json, sys
from pathlib import Path
from dora_rl.config import RunConfig
from dora_rl.workers.pool import WorkerPool
from dora_rl.worlds.hosts import HostProcesses, demand_of
from dora_rl.setup.layout import plan_layout
from dora_rl.worlds.ray import RayCluster

config = RunConfig.model_validate({
    "model": {"path": "unused"}, "rollout": {"backend": "vllm", "num_instances": 2},
    "resources": {"devices_per_instance": 2}, "runtime": {"world": "ray"},
})
layout = plan_layout(config, "cuda")
cluster = RayCluster(sys.argv[2], 0)
demand = lambda role, name: demand_of(config, layout, "instance", name)
folder = Path(sys.argv[1])
hosts = HostProcesses(folder, cluster, demand, lambda host: {})
pool = WorkerPool(config, folder, hosts)
for name in layout.instances:
    pool.start("gpus_seen:say", name, layout.instance_extra(name))
said = {}
while len(said) < 2:
    envelope = pool.inbox.get(timeout=120)
    assert envelope.message is not None, "a worker ended"
    said[envelope.name] = envelope.message.line
print("SAID", json.dumps(said))
pool.end(10.0)
cluster.close()
"""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def wait_for_head(port: int, head: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 120.0
    while time.monotonic() < until and head.poll() is None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        time.sleep(0.2)
    raise AssertionError("the head of the cluster did not start")


def test_an_instance_sees_the_gpus_of_its_placement_group(tmp_path: Path) -> None:
    (tmp_path / "gpus_seen.py").write_text(SEEN)
    path = os.pathsep.join((str(tmp_path), os.environ.get("PYTHONPATH", "")))
    env = os.environ | environment() | {"PYTHONPATH": path}
    port, home = free_port(), tempfile.mkdtemp(prefix="ray", dir="/tmp")  # Ray's sockets: short
    start = f"start --head --port={port} --node-ip-address=127.0.0.1 --num-cpus=2 --num-gpus=4"
    more = f"--include-dashboard=false --disable-usage-stats --temp-dir={home} --block"
    store = "--object-store-memory=80000000"
    head = subprocess.Popen([RAY, *start.split(), *more.split(), store], env=env)
    try:
        wait_for_head(port, head)
        words = [sys.executable, "-c", SCRIPT, str(tmp_path), f"127.0.0.1:{port}"]
        result = subprocess.run(
            words, env=env, text=True, capture_output=True, timeout=240, check=False
        )
    finally:
        head.terminate()
        head.wait(60)
        shutil.rmtree(home, ignore_errors=True)
    lines = [line for line in result.stdout.splitlines() if line.startswith("SAID ")]
    assert lines, result.stderr[-3000:]
    seen = [set(gpus.split(",")) for gpus in json.loads(lines[0][5:]).values()]
    assert [len(gpus) for gpus in seen] == [2, 2]
    assert seen[0] | seen[1] == {"0", "1", "2", "3"}
