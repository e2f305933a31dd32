"""Short stories on the simulator: what a user would notice, in virtual time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import State
from dora_rl.io.codec import decode, encode
from dora_rl.observe.audit import AuditFigures, audit
from dora_rl.sim.world import World
from dora_rl.types import Mode
from tests.kit.simulated_logs import entries_of, small_world

Lengths = Callable[[int, int], tuple[int, int]]


def even(prompt: int, sample: int) -> tuple[int, int]:
    return 16, 400 + 10 * ((prompt * 7 + sample) % 5)


def one_giant(prompt: int, sample: int) -> tuple[int, int]:
    """The first prompt's first sample takes longer than many steps of the others."""
    return (16, 60_000) if (prompt, sample) == (0, 0) else even(prompt, sample)


def told(
    mode: Mode, lengths: Lengths = even, change: Callable[[Any], Any] | None = None, **params: Any
) -> World:
    """A small world with these response lengths, started."""
    world = small_world(mode, **params)
    spec = replace(world.spec, task=lengths)
    if change is not None:
        spec = replace(spec, instances=tuple(change(spec.instances)))
    world = World(spec)
    world.start()
    return world


def to_the_end(world: World) -> AuditFigures:
    assert world.run(1e6), "the run does not end"
    report = audit(entries_of(world))
    assert report.ok, [str(finding) for finding in report.findings]
    assert report.figures.finished
    return report.figures


def actions_of(world: World, kind: type) -> list[Any]:
    return [a for entry in entries_of(world) for a in entry.actions if isinstance(a, kind)]


def trained_prompts(world: World) -> list[set[int]]:
    """The prompts of each step's batch."""
    prompts = {a.group: a.prompt for a in actions_of(world, act.IssueGroup)}
    closed = {a.step: a.groups for a in actions_of(world, act.CloseStep)}
    return [{prompts[group] for group in closed[step]} for step in sorted(closed)]


def test_the_tail_is_waited_for_and_never_discarded() -> None:
    world = told(Mode.MULTI_VERSION, one_giant)
    figures = to_the_end(world)
    waits = actions_of(world, act.WaitFor)
    assert [(w.step, w.groups) for w in waits] == [(2, (0,))], "at its deadline, for the giant"
    (end,) = [e for e in actions_of(world, act.EndGroup) if e.group == 0]
    assert (end.end, end.step, end.version) == (act.End.TRAINED, 2, 0)
    assert figures.groups_discarded == 0 and figures.staleness_max == 2


def test_the_steps_before_the_deadline_do_not_wait_for_the_tail() -> None:
    """Synchronous training pays the giant in its first step, we pay it once and later."""
    sync, ours = told(Mode.SYNC, one_giant), told(Mode.MULTI_VERSION, one_giant)
    to_the_end(sync)
    to_the_end(ours)
    first = {w: w.learner.trained[0].committed_s for w in (sync, ours)}
    assert first[ours] < 0.2 * first[sync]
    assert ours.clock.now() < sync.clock.now()


def test_replication_learns_from_shorter_responses_than_it_asked_for() -> None:
    replication, ours = told(Mode.REPLICATION, one_giant), told(Mode.MULTI_VERSION, one_giant)
    dropped, kept = to_the_end(replication), to_the_end(ours)
    assert dropped.groups_surplus > 0 and 0 not in set().union(*trained_prompts(replication))
    assert kept.groups_discarded == 0 and 0 in set().union(*trained_prompts(ours))
    assert kept.tokens_trained > dropped.tokens_trained


def test_k_0_is_synchronous_training() -> None:
    sync, zero = told(Mode.SYNC), told(Mode.MULTI_VERSION, max_staleness=0)
    assert to_the_end(sync).staleness_max == to_the_end(zero).staleness_max == 0
    assert trained_prompts(sync) == trained_prompts(zero)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.MULTI_VERSION])
def test_an_instance_that_dies_in_the_middle_of_a_step_costs_time_and_nothing_else(
    mode: Mode,
) -> None:
    undisturbed = told(mode)
    to_the_end(undisturbed)
    world = told(mode)
    instances = world.fleet.instances
    assert world.clock.run(lambda: any(i.running for i in instances.values()), 100.0)
    name = next(name for name, inst in instances.items() if inst.running)
    orphans = set(world.fleet.instances[name].running)
    world.fleet.die(name)
    world.post(ev.InstanceLost(name, "killed by the story"))
    figures = to_the_end(world)
    assert figures.groups_failed == 0
    again = actions_of(world, act.Dispatch)
    resumed = {(d.group, s) for d in again if d.resume for s in d.samples}
    assert orphans and resumed == {tuple(rid) for rid in orphans}
    everything = set().union(*trained_prompts(undisturbed))
    assert set().union(*trained_prompts(world)) == everything


def test_elastic_instances_generate_and_train_in_turns() -> None:
    def colocated(instances: Any) -> Any:
        return ((name, replace(spec, elastic=True), cost) for name, spec, cost in instances)

    world = told(Mode.MULTI_VERSION, one_giant, colocated)
    figures = to_the_end(world)
    assert figures.groups_discarded == 0
    asleep: set[str] = set()
    for entry in entries_of(world):
        for action in entry.actions:
            if isinstance(action, act.Sleep):
                asleep.add(action.instance)
            elif isinstance(action, act.Wake):
                asleep.remove(action.instance)
            elif isinstance(action, (act.Dispatch, act.Unpark)):
                assert action.instance not in asleep
    parked, unparked = actions_of(world, act.Park), actions_of(world, act.Unpark)
    assert parked and {p.request for p in parked} == {u.request for u in unparked}
    assert len(actions_of(world, act.Sleep)) >= 2 * len(world.spec.instances)


def test_more_versions_than_instances_still_come_to_an_end() -> None:
    """One instance with one seat and K = 3: the newest version waits for the old ones."""
    world = told(Mode.MULTI_VERSION, one_giant, lambda i: i[:1], max_staleness=3)
    figures = to_the_end(world)
    assert figures.groups_outstanding == 0 and figures.live_versions_max > 1


def test_a_killed_run_goes_on_with_the_same_groups() -> None:
    undisturbed = told(Mode.MULTI_VERSION, one_giant)
    before = to_the_end(undisturbed)
    world = told(Mode.MULTI_VERSION, one_giant)
    assert not world.run(4.0)
    assert world.loop is not None
    alive = dict(world.loop.state.groups)
    written = encode(State, world.loop.state)
    world.kill_controller()
    world.resume_controller(decode(State, written))
    figures = to_the_end(world)
    assert figures.num_resumes == 1 and figures.groups_discarded == 0
    assert figures.tokens_trained == before.tokens_trained
    ended = {e.group: e.end for e in actions_of(world, act.EndGroup)}
    assert alive and all(ended[group] is act.End.TRAINED for group in alive)
