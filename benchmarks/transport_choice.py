"""What carries bytes best between two hosts: Ray's object store, its tensor transport, or a socket.

    python benchmarks/transport_choice.py --json transport_choice.json     # as root

Two hosts in network namespaces, each with a raylet. A tensor that one actor holds is brought to an
actor on the other host, by each of: Ray's object store (put there, get here), Ray's direct tensor
transport over gloo, and the project's own authenticated stream (`io/connection.py`). All three
are timed alike, from this program's order to its answer: what each call of an actor costs is in all
of them. The last two rows are the round trip of a small message: an actor call, and a question over
the stream.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.io.proof import RunKey

sys.path.append(str(Path(__file__).parents[1]))

STORE_BYTES = 400_000_000
REPEATS = 5
KEY = RunKey(b"k" * 32)


def actors(ray: Any, node_ids: list[str]) -> list[Any]:
    """One actor on each host."""
    import torch
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from dora_rl.io.connection import Link, Server
    from dora_rl.trainer.distributed import interface_of

    class End:
        def __init__(self) -> None:
            self.data = np.zeros(0, dtype=np.uint8)
            self.server: Any = None
            self.link: Any = None

        def bind(self, ip: str) -> None:
            """Gloo would take the host's name, which names the loopback here."""
            os.environ["GLOO_SOCKET_IFNAME"] = interface_of(ip) or ""

        def hold(self, num_bytes: int) -> None:
            self.data = np.random.default_rng(0).integers(0, 255, num_bytes, dtype=np.uint8)

        def serve(self) -> int:
            def answer(question: dict[str, Any], link: Link) -> None:
                size = len(self.data) if question["kind"] == "data" else 0
                link.say({"num_bytes": size})
                link.write(memoryview(self.data)[:size])

            self.server = Server(KEY, answer, "0.0.0.0")
            return self.server.port

        def put(self) -> list[Any]:
            return [ray.put(self.data)]

        def get(self, refs: list[Any]) -> int:
            return ray.get(refs[0]).nbytes

        @ray.method(tensor_transport="gloo")
        def tensor(self) -> Any:
            return torch.from_numpy(self.data)

        def receive(self, tensor: Any) -> int:
            return tensor.numel()

        def pull(self, address: str) -> int:
            self.link = self.link or Link.connect(address, KEY)
            return len(self.link.read(self.link.ask("data")["num_bytes"], 1 << 40))

        def question(self, address: str) -> float:
            self.link = self.link or Link.connect(address, KEY)
            began = time.perf_counter()
            self.link.ask("nothing")
            return time.perf_counter() - began

        def echo(self, body: bytes) -> bytes:
            return body

    remote = ray.remote(num_cpus=0)(End)
    return [
        remote.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            enable_tensor_transport=True,
        ).remote()
        for node in node_ids
    ]


def best(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    return min(measure() for _ in range(repeats))


def measure(address: str, sizes: list[int]) -> list[dict[str, Any]]:
    import ray
    from ray.experimental.collective import create_collective_group

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    here = ray.get_runtime_context().get_node_id()
    nodes = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}
    there = next(node for node in nodes if node != here)
    near, far = actors(ray, [here, there])
    stream = f"tcp://{nodes[there]}:{ray.get(far.serve.remote())}"
    ray.get([near.bind.remote(nodes[here]), far.bind.remote(nodes[there])])
    create_collective_group([near, far], backend="gloo")
    rows: list[dict[str, Any]] = []

    def carried(way: Callable[[], int], size: int) -> float:
        began = time.perf_counter()
        assert way() == size
        return time.perf_counter() - began

    def by_call() -> float:
        began = time.perf_counter()
        ray.get(far.echo.remote(b"x" * 200))
        return time.perf_counter() - began

    for size in sizes:
        ray.get(far.hold.remote(size))
        ways: dict[str, Callable[[], int]] = {
            "object store": lambda: ray.get(near.get.remote(ray.get(far.put.remote()))),
            "tensor transport (gloo)": lambda: ray.get(near.receive.remote(far.tensor.remote())),
            "stream": lambda: ray.get(near.pull.remote(stream)),
        }
        for name, way in ways.items():
            took = best(lambda way=way, size=size: carried(way, size))
            rows.append(
                {"way": name, "bytes": size, "seconds": took, "mb_per_s": size / 1e6 / took}
            )
    rows.append({"way": "actor call", "bytes": 200, "seconds": best(by_call, 200)})
    small = best(lambda: ray.get(near.question.remote(stream)), 200)
    rows.append({"way": "question over the stream", "bytes": 200, "seconds": small})
    ray.shutdown()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--sizes-mb", default="4,64")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    sizes = [int(float(word) * 1e6) for word in args.sizes_mb.split(",")]
    if args.measure:
        print(json.dumps(measure(args.measure, sizes)))
        return
    from tests.kit.hosts import virtual_hosts
    from tests.kit.ray_hosts import RayHosts

    with tempfile.TemporaryDirectory() as logs, virtual_hosts(2) as hosts:
        cluster = RayHosts(hosts, Path(logs), STORE_BYTES)
        cluster.start()
        cluster.wait_for(2)
        words = (str(Path(__file__).resolve()), "--measure", cluster.address)
        more = ("--sizes-mb", args.sizes_mb)
        said = cluster.head.run(
            sys.executable, *words, *more, timeout_s=200.0, **cluster.environment
        )
    rows = json.loads(said.splitlines()[-1])
    print(f"{'way':28} {'MB':>6} {'ms':>9} {'MB/s':>7}")
    for row in rows:
        speed = f"{row['mb_per_s']:7.0f}" if "mb_per_s" in row else ""
        print(f"{row['way']:28} {row['bytes'] / 1e6:6.1f} {row['seconds'] * 1e3:9.2f} {speed}")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
