"""Event logs of small simulated runs, for the tests of everything that reads a log."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dora_rl.core.state import State
from dora_rl.data.lengths import Pareto
from dora_rl.io.codec import decode, encode
from dora_rl.observe.eventlog import Entry, MemoryLog
from dora_rl.sim.presets import PRESETS, world_spec
from dora_rl.sim.world import World
from dora_rl.types import Mode

SMALL = replace(
    PRESETS["small"],
    batch_groups=4,
    group_size=2,
    num_steps=6,
    num_devices=8,
    updates_per_step=2,
    inflight_share=3.0,
    lengths=Pareto(0.8, 64, 60_000),
)
SLOTS_MAX = 4  # so few that versions compete for instances


def small_world(mode: Mode, seed: int = 0, log: Any = None, **params: Any) -> World:
    """Six steps of four groups with a long tail, on a few small instances. Not started yet."""
    spec = world_spec(SMALL, mode, seed)
    rebalance = {"rebalance_min_s": 0.5, "rebalance_period_s": 3.0}
    instances = tuple((n, replace(i, slots_max=SLOTS_MAX), c) for n, i, c in spec.instances)
    spec = replace(
        spec, params=replace(spec.params, **(rebalance | params)), instances=instances, tick_s=1.0
    )
    return World(spec, log=log or MemoryLog())


def entries_of(world: World) -> list[Entry]:
    assert isinstance(world.log, MemoryLog)
    return world.log.entries


def whole_run(mode: Mode, seed: int = 0, **params: Any) -> list[Entry]:
    """The log of a run that came to its end."""
    world = small_world(mode, seed, **params)
    world.start()
    assert world.run(1e6)
    return entries_of(world)


def resumed_run(mode: Mode, seed: int = 0, kill_s: float = 9.0, **changes: int) -> list[Entry]:
    """A run whose controller and workers die after `kill_s` and come back from the state."""
    world = small_world(mode, seed)
    world.start()
    assert not world.run(kill_s)
    assert world.loop is not None
    written = encode(State, world.loop.state)
    world.kill_controller()
    world.resume_controller(decode(State, written), **changes)
    assert world.run(1e6)
    return entries_of(world)
