"""Runs per second of trivial programs in the code sandbox.

    python benchmarks/sandbox.py [--seconds 5] [--json sandbox.json]

Every run has namespaces, a file system and limits of its own. `alone` is one caller that waits for
each run; `together` has as many callers as cores. The same programs with `python -I -c`, without
any isolation, stand beside them. The load average says how busy the machine was with other things.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.limits import End

PROGRAMS = {  # code, its input and what it prints
    "hello": ("print('hello')", "", "hello"),
    "sum of input": ("print(sum(map(int, input().split())))", "1 2 3 4", "10"),
    "sieve to 10,000": (
        "n = 10000\ns = bytearray([1]) * n\n"
        "for i in range(2, 100):\n    if s[i]:\n        s[i*i::i] = bytes(len(s[i*i::i]))\n"
        "print(sum(s) - 2)",
        "",
        "1229",
    ),
}


@dataclass(frozen=True, slots=True)
class Result:
    program: str
    how: str
    num_callers: int
    runs_per_s: float
    wall_ms_median: float
    wall_ms_p99: float


def measure(
    program: str, how: str, num_callers: int, seconds: float, run: Callable[[], None]
) -> Result:
    run()
    walls: list[float] = []
    end_s = time.perf_counter() + seconds

    def caller() -> None:
        while time.perf_counter() < end_s:
            begin_s = time.perf_counter()
            run()
            walls.append(time.perf_counter() - begin_s)

    begin_s = time.perf_counter()
    threads = [threading.Thread(target=caller) for _ in range(num_callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rate = len(walls) / (time.perf_counter() - begin_s)
    p99 = sorted(walls)[int(0.99 * len(walls))]
    return Result(program, how, num_callers, rate, 1e3 * statistics.median(walls), 1e3 * p99)


def sandboxed(box: Sandbox, code: str, stdin: str, said: str) -> Callable[[], None]:
    def run() -> None:
        done = box.run(code, stdin=stdin)
        assert done.end is End.OK and done.stdout == f"{said}\n", done

    return run


def bare(code: str, stdin: str, said: str) -> Callable[[], None]:
    def run() -> None:
        command = [sys.executable, "-I", "-c", code]
        done = subprocess.run(command, input=stdin, text=True, capture_output=True, check=True)
        assert done.stdout == f"{said}\n", done

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of each measurement")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cores = len(os.sched_getaffinity(0))
    machine = platform.processor() or platform.machine()
    print(f"{machine}, {cores} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'program':16} {'how':12} {'callers':>7} {'runs/s':>8} {'median ms':>10} {'p99 ms':>8}")
    results: list[Result] = []
    box = Sandbox()
    for name, program in PROGRAMS.items():
        plans = [("alone", 1, sandboxed(box, *program))]
        plans += [("together", cores, sandboxed(box, *program))]
        plans += [("bare python", cores, bare(*program))]
        for how, num_callers, run in plans:
            result = measure(name, how, num_callers, options.seconds, run)
            results.append(result)
            print(
                f"{name:16} {how:12} {num_callers:7} {result.runs_per_s:8.1f} "
                f"{result.wall_ms_median:10.1f} {result.wall_ms_p99:8.1f}"
            )
    box.close()
    if options.json:
        figures = {"cores": cores, "load": os.getloadavg(), "results": list(map(asdict, results))}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
