"""Weights to several hosts, and a request's KV to another host: time and bytes.

    python benchmarks/transport.py --json transport.json               # as root: real namespaces
    python benchmarks/transport.py --rate 4gbit --hosts 1,2,4          # every cable limited to that
    python benchmarks/transport.py --model tiny --contexts 128         # a quick look
    python benchmarks/transport.py --part tags                         # what the tags cost

Hosts are network namespaces joined by a bridge (without root: processes on loopback addresses).
`publish to loaded` runs from the order to seal a version in the learner's memory (`seal`, its
copy and digests, is a part of it) to the moment when every host has the version sealed, proven by
digests, and read once, as an engine does. `learner only`: each host pulls from the learner's;
`peers`: each from the one before it, while that one still receives.
KV: from the export on one host to the request decoding on the other, against prefilling it there.
Whoever gives the orders (here: this program) sees the bytes counted as `controller`.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1]))
from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import continuation
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import begin_import, chunk_from_bytes, export_request
from dora_rl.io.connection import Connection, Link, Listener
from dora_rl.io.proof import Proven, RunKey
from dora_rl.model.random_weights import RandomWeights
from dora_rl.types import RequestId, SamplingParams
from dora_rl.weights.relay import Relay
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.workers.moves import write_export
from engine import SHAPES
from tests.kit.hosts import VirtualHost, call, can_make_hosts, virtual_hosts

KEY = RunKey(b"k" * 32)
RID = RequestId(0, 0)
STREAM_BYTES = 256 << 20
FRAMES, FRAME_BYTES, ROUNDS = 5000, 200, 5


# -- one host -------------------------------------------------------------------------------------


class Station:
    """The relay and, for the KV part, the engine of a host; told what to do line by line."""

    def __init__(self, folder: Path) -> None:
        self.store = SharedMemoryWeightStore(folder / "weights")
        unverified = SharedMemoryWeightStore(folder / "weights", verify=False)
        self.relay = Relay(unverified, folder / "kv", KEY, "0.0.0.0")
        self.tensors: list[tuple[str, torch.Tensor]] = []
        self.engine: Engine | None = None

    def start(self) -> dict[str, Any]:
        return {"port": self.relay.server.port}

    def make(self, model: str) -> dict[str, Any]:
        weights = RandomWeights(SHAPES[model])
        self.tensors = [(n, weights.tensor(n).to(torch.bfloat16)) for n in weights.names()]
        return {"num_bytes": sum(t.numel() * t.element_size() for _, t in self.tensors)}

    def publish(self, version: int) -> dict[str, Any]:
        return {"checksum": self.store.publish(version, self.tensors)}

    def fetch(self, version: int, sources: list[str]) -> dict[str, Any]:
        found = self.relay.fetch(version, sources)
        assert found is not None
        num_bytes, seconds = found.result(600)
        sealed = SharedMemoryWeightStore(self.store.root, verify=False).open(version)
        for name in sealed.names():
            sealed.tensor(name).clone()
        return {"num_bytes": num_bytes, "fetch_s": seconds, "checksum": sealed.checksum}

    def counts(self) -> dict[str, Any]:
        return {"in": self.relay.num_bytes_in, "out": self.relay.num_bytes_out}

    def retire(self, version: int) -> dict[str, Any]:
        self.store.retire(version)
        return {}

    def load(self, model: str, context: int, block_tokens: int) -> dict[str, Any]:
        spec = dataclasses.replace(SHAPES[model], dtype="float32")
        options = EngineOptions(
            device="cpu",
            dtype="float32",
            block_tokens=block_tokens,
            num_blocks=-(-(context + 64) // block_tokens) + 2,
            seqs_max=2,
            step_tokens_max=2048,
            context_max=context + 64,
            versions_max=1,
            prefix_cache=False,
        )
        self.engine = Engine(spec, options)
        self.engine.load(0, RandomWeights(spec))
        return {}

    def prefill(self, context: int) -> dict[str, Any]:
        """A request that has decoded its first token here; the time it took."""
        assert self.engine is not None
        prompt = torch.randint(0, self.engine.spec.vocab, (context,)).tolist()
        params = SamplingParams(tokens_max=32, ignore_eos=True)
        self.engine.submit(Request(RID, 0, tuple(prompt), params))
        return {"seconds": self._until_token()}

    def _until_token(self) -> float:
        assert self.engine is not None
        began, tokens = time.perf_counter(), 0
        while not tokens:
            tokens = sum(len(output.token_ids) for output in self.engine.step())
        self.engine.drain()
        return time.perf_counter() - began

    def export(self) -> dict[str, Any]:
        assert self.engine is not None
        path = self.relay.transfer_root / "0.0.0.kv"
        began = time.perf_counter()
        export = export_request(self.engine, RID)
        write_export(export, path)
        took = time.perf_counter() - began
        return {"seconds": took, "name": path.name, "num_bytes": path.stat().st_size}

    def take_over(self, relay: str, name: str) -> dict[str, Any]:
        """Fetch, import, decode the next token; then the same request again by prefilling."""
        assert self.engine is not None
        began = time.perf_counter()
        with contextlib.closing(Link.connect(relay, KEY)) as link:
            data = memoryview(link.read(int(link.ask("request", name=name)["num_bytes"]), 1 << 40))
        length = int.from_bytes(data[:4], "little")
        arrival = begin_import(self.engine, bytes(data[4 : 4 + length]))
        size = self.engine.runner.cache.block_bytes
        for at in range(4 + length, len(data), size):
            arrival.write(chunk_from_bytes(self.engine, data[at : at + size]))
        arrival.commit()
        self._until_token()
        moved_s = time.perf_counter() - began
        assert self.engine.stats().prefill_tokens == 0, "a moved request was prefilled"
        seq = self.engine.scheduler.find(RID)
        assert seq is not None
        request = continuation(seq)
        self.engine.abort(RID)
        self.engine.submit(request)
        return {"move_s": moved_s, "prefill_s": self._until_token()}


def serve(folder: Path) -> None:
    torch.set_num_threads(1)
    station = Station(folder)
    for line in sys.stdin:
        order = json.loads(line)
        print(json.dumps(getattr(station, order.pop("do"))(**order)), flush=True)


# -- all hosts ------------------------------------------------------------------------------------


class Remote:
    """A station as this program sees it, with the bytes that pass between them."""

    def __init__(self, process: subprocess.Popen[str], ip: str) -> None:
        self._process, self.ip = process, ip
        self.num_bytes = 0
        self.address = f"tcp://{ip}:{self.ask('start')['port']}"

    def tell(self, do: str, **body: Any) -> None:
        line = json.dumps({"do": do, **body}) + "\n"
        self.num_bytes += len(line)
        assert self._process.stdin is not None
        self._process.stdin.write(line)
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.num_bytes += len(line)
        return json.loads(line)

    def ask(self, do: str, **body: Any) -> dict[str, Any]:
        self.tell(do, **body)
        return self.hear()


@contextlib.contextmanager
def stations(count: int, rate: str) -> Iterator[list[Remote]]:
    words = [sys.executable, str(Path(__file__).resolve()), "--station"]
    if not can_make_hosts():
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            programs = [_program([*words, f"{folder}/{n}"]) for n in range(count)]
            yield [Remote(p, f"127.0.0.{n + 1}") for n, p in enumerate(programs)]
            for program in programs:
                program.kill()
        return
    with virtual_hosts(count) as hosts:
        for host in hosts if rate else ():
            _limit(host, rate)
        # Each host has a /dev/shm of its own.
        yield [Remote(_program([*_enter(h), *words, "/dev/shm/station"]), h.ip) for h in hosts]


def _enter(host: VirtualHost) -> list[str]:
    return f"nsenter --target {host.init_pid} --mount --pid --net --".split()


def _program(words: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _limit(host: VirtualHost, rate: str) -> None:
    shape = f"tc qdisc add dev {host.link}p root tbf rate {rate} burst 4mb latency 100ms"
    call("ip", "netns", "exec", host.name, *shape.split())


def spread(hosts: list[Remote], version: int, peers: bool) -> dict[str, Any]:
    """Publish on the first host and bring the version to all others."""
    home, others = hosts[0], hosts[1:]
    before = [host.ask("counts") for host in hosts]
    talked = sum(host.num_bytes for host in hosts)
    began = time.perf_counter()
    sealed = home.ask("publish", version=version)
    sealed_s = time.perf_counter() - began
    for number, host in enumerate(others):
        chain = [others[number - 1].address] if peers and number else []
        host.tell("fetch", version=version, sources=[*chain, home.address])
    answers = [host.hear() for host in others]
    took = time.perf_counter() - began
    talked = sum(host.num_bytes for host in hosts) - talked
    assert {answer["checksum"] for answer in answers} == {sealed["checksum"]}
    after = [host.ask("counts") for host in hosts]
    for host in hosts:
        host.ask("retire", version=version)
    out = [b["out"] - a["out"] for a, b in zip(before, after, strict=True)]
    return {
        "hosts": len(others),
        "from": "peers" if peers else "learner only",
        "seal_s": sealed_s,
        "publish_to_loaded_s": took,
        "bytes_learner": out[0],
        "bytes_peers": sum(out[1:]),
        "bytes_controller": talked,
    }


def weights_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    with stations(max(args.hosts) + 1, args.rate) as hosts:
        size = hosts[0].ask("make", model=args.model)["num_bytes"]
        print(f"{args.model}: {size / 1e6:.0f} MB in bfloat16, cables {args.rate or 'unlimited'}")
        print("hosts  from          seal s  publish to loaded s  MB learner  MB peers  controller")
        for version, (count, peers) in enumerate(
            (count, peers) for count in args.hosts for peers in (False, True)
        ):
            row = spread(hosts[: count + 1], version, peers)
            rows.append(row)
            print(
                f"{count:5}  {row['from']:12} {row['seal_s']:7.2f} "
                f"{row['publish_to_loaded_s']:20.2f} {row['bytes_learner'] / 1e6:11.0f} "
                f"{row['bytes_peers'] / 1e6:9.0f} {row['bytes_controller']:7} B",
                flush=True,
            )
    return rows


def kv_part(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    print("context  KV MB  export s  move s  re-prefill s")
    with stations(2, args.rate) as hosts:
        for context in args.contexts:
            for host in hosts:
                host.ask("load", model=args.model, context=context, block_tokens=64)
            source, target = hosts
            source.ask("prefill", context=context)
            laid = source.ask("export")
            row = target.ask("take_over", relay=source.address, name=laid["name"])
            row |= {"context": context, "export_s": laid["seconds"], "bytes": laid["num_bytes"]}
            rows.append(row)
            print(
                f"{context:7} {row['bytes'] / 1e6:6.1f} {row['export_s']:9.3f} "
                f"{row['export_s'] + row['move_s']:7.3f} {row['prefill_s']:13.3f}",
                flush=True,
            )
    return rows


# -- what the proof of every piece costs -----------------------------------------------------------


def tags_part() -> dict[str, float]:
    """Between two processes over loopback, bare and with tags in turn: MB/s of the best of
    `ROUNDS`, microseconds for a frame of 200 bytes, and the receiver's CPU."""
    door, ends = Listener("tcp://127.0.0.1:0"), SimpleQueue[Proven]()
    arguments = (KEY, ends.put, lambda: None)
    threading.Thread(target=door.accept_each, args=arguments, daemon=True).start()
    words = [sys.executable, str(Path(__file__).resolve()), "--sender", door.address]
    program = subprocess.Popen(words)
    proven = ends.get()
    far, room = Connection(proven), memoryview(bytearray(STREAM_BYTES))

    def frames(bare: bool) -> None:
        for _ in range(FRAMES):
            _ = proven.wire.read(FRAME_BYTES) if bare else far.receive_frame()

    works: dict[str, Callable[[], None]] = {
        "bare": lambda: proven.wire.read_into(room),
        "tagged": lambda: far.read_into(room),
        "bare frames": lambda: frames(True),
        "tagged frames": lambda: frames(False),
    }
    took = {what: list[tuple[float, float]]() for what in works}
    for _ in range(ROUNDS):
        for what, work in works.items():
            far.send_frame(what.encode())
            took[what].append(timed(work))
    far.close()
    program.wait()
    row = dict[str, float]()
    print("what           MB/s or us   CPU of the receiver: ms per MB, or us")
    for what, times in took.items():
        wall_s, cpu_s = (min(each) for each in zip(*times, strict=True))
        if what.endswith("frames"):
            wall, cpu = wall_s / FRAMES * 1e6, cpu_s / FRAMES * 1e6
        else:
            wall, cpu = STREAM_BYTES / wall_s / 1e6, cpu_s / STREAM_BYTES * 1e9
        row |= {what: wall, f"{what} cpu": cpu}
        print(f"{what:14} {wall:10.1f} {cpu:10.2f}", flush=True)
    return row


def send(address: str) -> None:
    """The other process: sends what it is asked for."""
    near, data = Connection.connect(address, KEY), bytes(STREAM_BYTES)
    with contextlib.suppress(EOFError):
        while True:
            what = near.receive_frame().decode()
            if what == "bare":
                near._wire.write(data)
            elif what == "tagged":
                near.write(data)
            for _ in range(FRAMES if what.endswith("frames") else 0):
                if what.startswith("bare"):
                    near._wire.write(bytes(FRAME_BYTES))
                else:
                    near.send_frame(bytes(FRAME_BYTES))


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Seconds on the clock and of this process's CPU."""
    began, cpu_began = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu_began


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--station", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--sender", help=argparse.SUPPRESS)
    parser.add_argument("--model", choices=sorted(SHAPES), default="qwen3-0.6b")
    parser.add_argument("--hosts", type=numbers, default=[1, 2, 4])
    parser.add_argument("--contexts", type=numbers, default=[128, 512])
    parser.add_argument("--rate", default="", help="of every cable, as `tc` writes it: 4gbit")
    parser.add_argument("--part", choices=("all", "weights", "kv", "tags"), default="all")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if args.station:
        serve(args.station)
        return
    if args.sender:
        send(args.sender)
        return
    body: dict[str, Any] = {"model": args.model, "rate": args.rate}
    if args.part in ("all", "weights"):
        body["weights"] = weights_part(args)
    if args.part in ("all", "kv"):
        body["kv"] = kv_part(args)
    if args.part in ("all", "tags"):
        body["tags"] = tags_part()
    if args.json:
        args.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
