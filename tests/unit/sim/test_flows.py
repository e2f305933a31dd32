"""Runs in other processes: what comes back, and what is left behind."""

from __future__ import annotations

import multiprocessing
from collections.abc import Generator
from dataclasses import replace

from dora_rl.sim.compare import Job, conduct
from dora_rl.sim.presets import preset_named
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode


def two_runs() -> Generator[list[Job], list[ModeResult], list[str]]:
    preset = replace(preset_named("small"), num_steps=3, warmup_steps=1, batch_groups=2)
    found = yield [Job(preset, Mode.SYNC, seed) for seed in (0, 1)]
    return [result.mode for result in found]


def test_the_pool_is_gone_when_its_results_are_there() -> None:
    """One that is still closing its pipes when the interpreter ends prints a traceback."""
    told: list[str] = []
    found = conduct({"one": two_runs()}, 2, lambda name, job, result: told.append(name))
    assert found == {"one": ["sync", "sync"]} and told == ["one", "one"]
    assert not multiprocessing.active_children()
