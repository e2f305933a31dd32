"""Freshness control over whole simulated runs: as fast as without it, fresher, and soon again so
when learner or instances change their speed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from dora_rl.core import events as ev
from dora_rl.core import freshness
from dora_rl.data.lengths import LogNormal
from dora_rl.observe.eventlog import MemoryLog, replay
from dora_rl.sim.presets import PRESETS, world_spec
from dora_rl.sim.world import World
from dora_rl.types import Mode

PRESET = replace(
    PRESETS["small"],
    report_s=1.0,
    num_steps=40,
    lengths=LogNormal.with_mean(400, 0.8, 4096),
)
CHANGE = 18  # the step after which a speed changes
SEEDS = (1, 2, 3)
Course = list[tuple[float, float]]  # of each step its time and its mean staleness


def learner_at(factor: float) -> Callable[[World], None]:
    def change(world: World) -> None:
        cost = world.learner.cost
        efficiency = replace(cost.efficiency, training=cost.efficiency.training * factor)
        trainer = replace(cost.trainer, update_s=cost.trainer.update_s / factor)
        world.learner.cost = replace(cost, efficiency=efficiency, trainer=trainer)

    return change


def instances_at(factor: float) -> Callable[[World], None]:
    def change(world: World) -> None:
        for instance in world.fleet.instances.values():
            instance.advance(world.clock.now())
            instance.speed = factor

    return change


def course(
    *, fresh: bool, seed: int, change: Callable[[World], None] = lambda world: None
) -> Course:
    spec = world_spec(PRESET, Mode.MULTI_VERSION, seed, 4)
    params = replace(spec.params, freshness=fresh)
    world = World(replace(spec, params=params), log=MemoryLog(keep=False))
    found: Course = []
    began = [0.0]

    def see(event: ev.Event, actions: object) -> None:
        if isinstance(event, ev.StepCommitted):
            stale = [event.step - version for _, version, _ in world.learner.trained[-1].groups]
            now = world.clock.now()
            found.append((now - began[0], sum(stale) / len(stale)))
            began[0] = now
            if event.step == CHANGE:
                change(world)

    world.watchers.append(see)
    world.start()
    assert world.run(1e8)
    return found


def mean(course: Course, first: int, last: int) -> tuple[float, float]:
    """Time of a step, staleness."""
    part = course[first:last]
    took, stale = zip(*part, strict=True)
    return sum(took) / len(part), sum(stale) / len(part)


def compared(
    first: int, last: int, change: Callable[[World], None]
) -> tuple[float, float, float, float]:
    """Time of a step and staleness without freshness control, and with it; over all seeds, because
    single steps of so small batches vary by their longest response."""
    found: list[float] = []
    for fresh in (False, True):
        runs = [mean(course(fresh=fresh, seed=s, change=change), first, last) for s in SEEDS]
        found += [sum(took for took, _ in runs) / len(runs), sum(st for _, st in runs) / len(runs)]
    return found[0], found[1], found[2], found[3]


def test_it_is_fresher_and_as_fast() -> None:
    plain_s, plain, took_s, stale = compared(4, 36, lambda world: None)
    assert plain > 1.9 and stale < 1.4, (plain, stale)
    assert took_s < plain_s / 0.97, (plain_s, took_s)


CHANGES = {
    "learner twice as slow": learner_at(0.5),
    "learner twice as fast": learner_at(2.0),
    "instances twice as slow": instances_at(0.5),
    "instances twice as fast": instances_at(2.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_five_steps_after_a_change_of_speed_it_is_right_again(name: str) -> None:
    plain_s, plain, took_s, stale = compared(CHANGE + 6, 36, CHANGES[name])
    assert took_s < plain_s / 0.95, f"{name}: {took_s / plain_s:.3f} of the time"
    assert stale <= plain, f"{name}: {stale:.2f}, {plain:.2f} without"


def test_a_wrong_sign_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail: one that lowers where it should raise, and the other way round."""
    with monkeypatch.context() as patch:
        patch.setattr(freshness, "GAIN", -freshness.GAIN)
        with pytest.raises(AssertionError):
            test_it_is_fresher_and_as_fast()
    with monkeypatch.context() as patch:
        patch.setattr(freshness, "RAISE_MAX", 0.0)
        with pytest.raises(AssertionError):
            test_five_steps_after_a_change_of_speed_it_is_right_again("learner twice as fast")


def test_a_run_with_it_replays_to_the_same_actions() -> None:
    spec = world_spec(replace(PRESET, num_steps=8), Mode.MULTI_VERSION, 1, 4)
    log = MemoryLog()
    world = World(replace(spec, params=replace(spec.params, freshness=True)), log=log)
    world.start()
    assert world.run(1e8)
    result = replay(log.entries)
    assert result.ok, result.difference
