"""Rows/s and MB/s of the sample store, next to PyPI's TransferQueue in one run.

    python benchmarks/table.py --json table.json [--peer-python /path/to/venv/bin/python]

TransferQueue 0.1.11 (polling mode, its default storage) runs in the interpreter given by
`--peer-python`, since it brings Ray. dora-rl's table is measured two ways: in the process that owns
it, and from another process over a pipe, which is what TransferQueue does over ZeroMQ. The rows of
a call are one group. A get reads them and ends them: TransferQueue marks them as consumed, the
table drops their group, which the ledger would name.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

PEER = "TransferQueue==0.1.11"
CONSUMER = "trainer"
COLUMNS = ("prompt_ids", "token_ids", "logprobs", "reward")
REPEATS = 3


@dataclass(frozen=True, slots=True)
class Load:
    """`num_calls` calls, each of `num_rows` rows with a response of `num_tokens` tokens."""

    name: str
    num_calls: int
    num_rows: int
    num_tokens: int

    @property
    def num_bytes(self) -> int:
        return self.num_calls * self.num_rows * (4 * 16 + 8 * self.num_tokens + 4)


@dataclass(frozen=True, slots=True)
class Result:
    system: str
    load: str
    put_s: float
    get_s: float
    num_rows: int
    num_bytes: int


LOADS = (
    Load("small rows, one a call", 400, 1, 64),
    Load("small rows, 64 a call", 40, 64, 64),
    Load("long rows, 39 MiB a call", 3, 64, 80_000),
)


def columns_of(load: Load, number: int) -> dict[str, Any]:
    return {
        "prompt_ids": np.full(16, number, np.int32),
        "token_ids": np.full(load.num_tokens, number, np.int32),
        "logprobs": np.full(load.num_tokens, -0.5, np.float32),
        "reward": np.full(1, float(number), np.float32),
    }


def timed(calls: Sequence[Callable[[], object]]) -> float:
    start = time.perf_counter()
    for call in calls:
        call()
    return time.perf_counter() - start


# dora-rl


def measure_own(system: str, load: Load, path: Path, remote: bool) -> Result:
    from dora_rl.store.table import Row, Table
    from dora_rl.types import RequestId

    num_total = load.num_calls * load.num_rows
    batches = [
        [
            Row(RequestId(group, i), 0, columns_of(load, group * load.num_rows + i))
            for i in range(load.num_rows)
        ]
        for group in range(load.num_calls)
    ]
    seen: list[int] = []

    def check(rows: Sequence[Any]) -> None:
        assert len(rows) == load.num_rows
        seen.extend(int(row.columns["reward"][0]) for row in rows)

    if remote:
        put_s, get_s = measure_remote(load, path, batches, seen)
    else:
        table = Table(path)
        put_s = timed([lambda batch=batch: table.put(batch) for batch in batches])
        get_s = timed([lambda g=g: check(taken(table, g)) for g in range(load.num_calls)])
        table.close()
    assert sorted(seen) == list(range(num_total)), "rows were lost or given twice"
    return Result(system, load.name, put_s, get_s, num_total, load.num_bytes)


def taken(table: Any, group: int) -> list[Any]:
    """Read a group and end it."""
    rows = table.read(group)
    table.drop(group)
    return rows


def measure_remote(
    load: Load, path: Path, batches: Sequence[Any], seen: list[int]
) -> tuple[float, float]:
    """The table in a process of its own; requests and rows travel as bytes, not pickled."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    server = context.Process(target=serve, args=(theirs, str(path)))
    server.start()
    ours.recv_bytes()

    def put(batch: Sequence[Any]) -> None:
        send(ours, [(row.request.group, row.columns) for row in batch])
        ours.recv_bytes()

    def get(group: int) -> None:
        send(ours, [(group, {})])
        seen.extend(int(columns["reward"][0]) for _, columns in receive(ours))

    times = (
        timed([lambda batch=batch: put(batch) for batch in batches]),
        timed([lambda g=g: get(g) for g in range(load.num_calls)]),
    )
    ours.close()
    server.join(30)
    return times


def serve(connection: Connection, path: str) -> None:
    from dora_rl.store.table import Row, Table
    from dora_rl.types import RequestId

    table = Table(Path(path))
    connection.send_bytes(b"ready")
    while True:
        try:
            rows = receive(connection)
        except EOFError:
            table.close()
            return
        if rows[0][1]:
            numbered = enumerate(rows)
            table.put([Row(RequestId(group, i), 0, columns) for i, (group, columns) in numbered])
            connection.send_bytes(b"done")
        else:
            found = taken(table, rows[0][0])
            send(connection, [(row.number, row.columns) for row in found])


def send(connection: Connection, rows: Sequence[tuple[int, dict[str, Any]]]) -> None:
    from dora_rl.store.table import describe_columns, encode

    blobs: list[Any] = []
    header = {"rows": [[number, describe_columns(columns, blobs)] for number, columns in rows]}
    connection.send_bytes(b"".join(encode(header, blobs)))


def receive(connection: Connection) -> list[tuple[int, dict[str, Any]]]:
    from dora_rl.store.table import decode, read_columns

    body = memoryview(connection.recv_bytes())
    header, place = decode(body)
    rows = []
    for number, entries in header["rows"]:
        columns, place = read_columns(entries, body, place)
        rows.append((number, columns))
    return rows


# TransferQueue


def measure_peer() -> Iterator[Result]:
    """Runs in the interpreter that has TransferQueue."""
    import ray  # pyright: ignore[reportMissingImports]
    import torch
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    # Its actors each ask for a core, though they mostly wait; give them all a place.
    ray.init(num_cpus=8, namespace="benchmark", logging_level="ERROR", include_dashboard=False)
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    client = tq.get_client()
    for run in range(REPEATS):
        for load in LOADS:
            # A quarter of the calls is enough for a steady figure where one takes milliseconds.
            load = Load(load.name, max(load.num_calls // 4, 2), load.num_rows, load.num_tokens)
            num_total = load.num_calls * load.num_rows
            partition = f"{load.name}/{run}"
            batches = []
            for n in range(0, num_total, load.num_rows):
                rows = [columns_of(load, i) for i in range(n, n + load.num_rows)]
                stacked = {c: torch.from_numpy(np.stack([r[c] for r in rows])) for c in COLUMNS}
                batches.append(TensorDict(stacked, batch_size=load.num_rows))
            seen: list[int] = []

            def get(load: Load = load, partition: str = partition, seen: list[int] = seen) -> None:
                meta = client.get_meta(
                    data_fields=list(COLUMNS),
                    batch_size=load.num_rows,
                    partition_id=partition,
                    mode="fetch",
                    task_name=CONSUMER,
                )
                data = client.get_data(meta)
                seen.extend(int(reward.reshape(-1)[0]) for reward in data["reward"].unbind())

            put_s = timed(
                [lambda b=b, p=partition: client.put(data=b, partition_id=p) for b in batches]
            )
            get_s = timed([get] * len(batches))
            assert sorted(seen) == list(range(num_total)), "rows were lost or given twice"
            yield Result(PEER, load.name, put_s, get_s, num_total, load.num_bytes)
            client.clear_partition(partition)
    tq.close()
    ray.shutdown()


def run_peer(python: str) -> list[Result]:
    """In a child process, which Ray may do with as it likes."""
    command = [python, __file__, "--only-peer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"system"')]
    if done.returncode or not lines:
        tail = "\n".join(done.stderr.splitlines()[-8:])
        print(f"{PEER} did not run in {python}:\n{tail}", file=sys.stderr)
        return []
    return [Result(**json.loads(line)) for line in lines]


def has_peer(python: str) -> bool:
    command = [python, "-c", "import transfer_queue"]
    return subprocess.run(command, capture_output=True).returncode == 0


# Report


def best(results: Sequence[Result]) -> list[Result]:
    """The fastest put and the fastest get of the repeats, for every system and load."""
    chosen: dict[tuple[str, str], Result] = {}
    for r in results:
        old = chosen.get((r.system, r.load), r)
        put_s, get_s = min(old.put_s, r.put_s), min(old.get_s, r.get_s)
        chosen[r.system, r.load] = Result(r.system, r.load, put_s, get_s, r.num_rows, r.num_bytes)
    return list(chosen.values())


def report(results: Sequence[Result]) -> list[dict[str, Any]]:
    peers = {r.load: r for r in results if r.system == PEER}
    table = []
    for r in sorted(results, key=lambda r: [load.name for load in LOADS].index(r.load)):
        row: dict[str, Any] = {
            "load": r.load,
            "system": r.system,
            "put_rows_per_s": r.num_rows / r.put_s,
            "get_rows_per_s": r.num_rows / r.get_s,
            "put_mb_per_s": r.num_bytes / r.put_s / 1e6,
            "get_mb_per_s": r.num_bytes / r.get_s / 1e6,
        }
        peer = peers.get(r.load)
        if peer is not None:
            row["put_ratio"] = row["put_rows_per_s"] * peer.put_s / peer.num_rows
            row["get_ratio"] = row["get_rows_per_s"] * peer.get_s / peer.num_rows
        table.append(row)
    return table


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    head = ("load", "system", "put rows/s", "get rows/s", "put MB/s", "get MB/s", "× put", "× get")
    print("{:26} {:24} {:>11} {:>11} {:>9} {:>9} {:>7} {:>7}".format(*head))
    for r in rows:
        ratios = [f"{r[k]:.1f}" if k in r else "-" for k in ("put_ratio", "get_ratio")]
        print(
            f"{r['load']:26} {r['system']:24} {r['put_rows_per_s']:11,.0f} "
            f"{r['get_rows_per_s']:11,.0f} {r['put_mb_per_s']:9,.1f} {r['get_mb_per_s']:9,.1f} "
            f"{ratios[0]:>7} {ratios[1]:>7}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--peer-python", default=sys.executable, help=f"one that has {PEER}")
    parser.add_argument("--only-peer", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_peer:
        for result in measure_peer():
            print(json.dumps(asdict(result)), flush=True)
        return
    if importlib.util.find_spec("dora_rl") is None:
        sys.exit("dora_rl is not installed here; run `make setup` and use .venv/bin/python")
    results = []
    for _ in range(REPEATS):
        for load in LOADS:
            for system, remote in (("dora-rl", False), ("dora-rl over a pipe", True)):
                with tempfile.TemporaryDirectory() as directory:
                    path = Path(directory) / "table"
                    results.append(measure_own(system, load, path, remote))
    if has_peer(arguments.peer_python):
        results += run_peer(arguments.peer_python)
    else:
        print(
            f"{PEER} is not installed in {arguments.peer_python}. To compare: "
            f"python -m venv peer && peer/bin/pip install {PEER}, then --peer-python "
            f"peer/bin/python",
            file=sys.stderr,
        )
    rows = report(best(results))
    print_table(rows)
    if arguments.json:
        machine = f"{platform.machine()}, {os.cpu_count()} cores"
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
