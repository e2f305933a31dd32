"""Code execution: the program in the completion, run in the sandbox against the row's tests.

Never runs anything in this process. A program that fails, hangs or attacks scores nothing; only
tests that cannot be read, or a machine that cannot run programs, are errors of the sample.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dora_rl.rewards.base import CallLimits, ScoreError, ScoreItem
from dora_rl.rewards.problem_tests import (
    BadTests,
    Exchange,
    Statement,
    Test,
    problem_tests,
    same_output,
)
from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.door import SandboxLost
from dora_rl.rewards.sandbox.limits import End, Limits

FENCE = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
MEBIBYTE = 1 << 20


def program_in(completion: str) -> str:
    """The last fenced block; without any fence, all of it."""
    blocks = FENCE.findall(completion)
    return blocks[-1] if blocks else completion


class CodeReward:
    """1 if all tests pass, otherwise 0; with `partial`, the share that passes.

    `timeout_s` of the section bounds all tests of a sample together: what has not run by then
    has not passed. `preamble` stands before every program (imports that a dataset takes as given).
    """

    many = False

    def __init__(
        self,
        limits: CallLimits,
        *,
        tests: str = "",
        partial: bool = False,
        tests_max: int = 64,
        tolerance: float = 0.0,
        preamble: str = "",
        wall_s: float = 10.0,
        cpu_s: float = 10.0,
        memory_mib: int = 512,
        processes_max: int = 32,
        import_paths: Sequence[str] = (),
        preload: Sequence[str] = (),
        allow_unsandboxed: bool = False,
    ) -> None:
        self.name = "code"
        self._timeout_s = limits.timeout_s
        self._column = tests
        self._partial = partial
        self._tests_max = tests_max
        self._tolerance = tolerance
        self._preamble = f"{preamble}\n" if preamble else ""
        self._limits: dict[str, Any] = {
            "cpu_s": cpu_s,
            "memory_bytes_max": memory_mib * MEBIBYTE,
            "memory_total_bytes_max": 2 * memory_mib * MEBIBYTE,
            "processes_max": processes_max,
        }
        self._wall_s = wall_s
        self._num_threads = min(limits.concurrent_max, os.cpu_count() or 1)
        self.sandbox = Sandbox(
            allow_unsandboxed=allow_unsandboxed, import_paths=import_paths, preload=preload
        )

    def missing(self, columns: Collection[str]) -> list[str]:
        return [self._column] if self._column and self._column not in columns else []

    def close(self) -> None:
        self.sandbox.close()

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        if len(items) == 1:
            return [self._one(items[0])]
        with ThreadPoolExecutor(self._num_threads) as pool:
            return list(pool.map(self._one, items))

    def _one(self, item: ScoreItem) -> float | ScoreError:
        try:
            tests = problem_tests(item, self._column)[: self._tests_max]
            num_passed = self._num_passed(self._preamble + program_in(item.completion), tests)
        except BadTests as error:
            return ScoreError(str(error))
        except (SandboxLost, OSError) as error:
            return ScoreError(f"could not run the program ({error})")
        return num_passed / len(tests) if self._partial else float(num_passed == len(tests))

    def _num_passed(self, program: str, tests: Sequence[Test]) -> int:
        end_s = time.monotonic() + self._timeout_s
        statements = [test.code for test in tests if isinstance(test, Statement)]
        num_passed = 0
        if statements:
            run = self.sandbox.run(program, tests=statements, limits=self._until(end_s))
            num_passed = sum(run.passed)
        failed = num_passed < len(statements)
        for test in tests:
            if time.monotonic() >= end_s or (failed and not self._partial):
                break
            if isinstance(test, Exchange):
                passes = self._passes(program, test, end_s)
                num_passed += passes
                failed = failed or not passes
        return num_passed

    def _passes(self, program: str, test: Exchange, end_s: float) -> bool:
        run = self.sandbox.run(program, stdin=test.stdin, limits=self._until(end_s))
        return run.end is End.OK and same_output(run.stdout, test.stdout, self._tolerance)

    def _until(self, end_s: float) -> Limits:
        wall_s = max(0.1, min(self._wall_s, end_s - time.monotonic()))
        return Limits(wall_s=wall_s, **self._limits)
