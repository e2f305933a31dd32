"""One simulated run and its figures.

Figures are taken over whole steps in the steady state: after the warm-up, and before the end of
the run, where fewer and fewer groups are left to admit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import MemoryLog
from dora_rl.ports import EventLog
from dora_rl.sim.learner import TrainedStep
from dora_rl.sim.presets import COLOCATED, Preset, rollout_devices_of, world_spec
from dora_rl.sim.timeline import Timeline
from dora_rl.sim.world import World
from dora_rl.types import Mode, RequestId

TIME_MAX_S = 1e8


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What `dora-rl sim` reports for one mode. Shares are of the measured time."""

    mode: str
    step_s: float
    rollout_only_share: float
    tokens_per_s: float
    instance_idle_ratio: float
    slot_idle_ratio: float
    trainer_idle_ratio: float
    staleness_mean: float
    staleness_max: int
    mixed_version_frac: float
    discarded_tokens: int
    migrations: int
    kv_bytes_moved: float
    overhead_share: float
    overheads: dict[str, float]
    length_bias: float
    split: dict[str, int]
    num_events: int
    steps_measured: int
    timeline: Timeline = field(repr=False, compare=False)

    def as_json(self) -> dict[str, Any]:
        names = [name for name in self.__slots__ if name not in ("timeline", "mode")]
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters of the fleet at a commit."""

    now: float
    busy_s: float
    slot_s: float
    load_s: float
    move_s: float
    prefill_again: float
    num_moves: int
    kv_bytes: float


class _Meter:
    """Watches a world and marks every commit."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.marks: list[_Mark] = [self._mark()]
        self.num_events = 0
        world.watchers.append(self.see)

    def see(self, event: ev.Event, actions: list[act.Action]) -> None:
        self.num_events += 1
        if isinstance(event, ev.StepCommitted) and len(self.marks) == event.step + 1:
            self.marks.append(self._mark())

    def _mark(self) -> _Mark:
        now, fleet = self.world.clock.now(), self.world.fleet
        for instance in fleet.instances.values():
            instance.advance(now)
        stats = fleet.stats
        return _Mark(
            now,
            sum(i.busy_s for i in fleet.instances.values()),
            sum(i.slot_s for i in fleet.instances.values()),
            stats.load_s,
            stats.move_s,
            stats.prefill_tokens_again,
            stats.num_moves,
            stats.kv_bytes_moved,
        )


def run_mode(
    preset: Preset,
    mode: Mode,
    seed: int,
    rollout_devices: int | None = None,
    *,
    with_timeline: bool = False,
    log: EventLog | None = None,
) -> ModeResult:
    """Simulate one mode on a preset."""
    spec = world_spec(preset, mode, seed, rollout_devices)
    world = World(spec, log=log or MemoryLog(keep=False))
    meter = _Meter(world)
    timeline = Timeline(world.clock)
    if with_timeline:
        world.fleet.on_busy = timeline.see_instance
        world.watchers.append(timeline.see)
    world.start()
    finished = world.run(TIME_MAX_S)
    assert finished, f"{mode} did not finish"
    generating = rollout_devices_of(preset, mode, rollout_devices)
    return _figures(preset, mode, world, meter, timeline, generating)


def _figures(
    preset: Preset, mode: Mode, world: World, meter: _Meter, timeline: Timeline, generating: int
) -> ModeResult:
    first = preset.warmup_steps
    last = max(first + 1, preset.num_steps - preset.max_staleness)
    begin, end = meter.marks[first], meter.marks[last]
    steps = world.learner.trained[first:last]
    wall = end.now - begin.now
    num_instances = len(world.spec.instances)
    train_busy = sum(step.busy_s for step in steps) / wall
    decode_busy = (end.busy_s - begin.busy_s) / (wall * num_instances)
    colocated = mode in COLOCATED
    slots = sum(spec.slots_max for _, spec, _ in world.spec.instances)
    cost = world.spec.instances[0][2]
    shared = wall * num_instances
    overheads = {
        "load": (end.load_s - begin.load_s) / shared,
        "transfer": (end.move_s - begin.move_s) / shared,
        "prefill_again": (end.prefill_again - begin.prefill_again)
        / cost.prefill_tokens_per_s()
        / shared,
    }
    stale = [step.step - version for step in steps for _, version, _ in step.groups]
    all_stale = [s.step - v for s in world.learner.trained for _, v, _ in s.groups]
    training = preset.num_devices if colocated else preset.num_devices - generating
    return ModeResult(
        mode=mode.value,
        step_s=wall / len(steps),
        rollout_only_share=max(0.0, 1 - train_busy),
        tokens_per_s=sum(step.num_tokens for step in steps) / wall,
        instance_idle_ratio=max(0.0, 1 - decode_busy - (train_busy if colocated else 0.0)),
        slot_idle_ratio=1 - (end.slot_s - begin.slot_s) / (wall * slots),
        trainer_idle_ratio=max(0.0, 1 - train_busy - (decode_busy if colocated else 0.0)),
        staleness_mean=sum(stale) / len(stale),
        staleness_max=max(all_stale),
        mixed_version_frac=_mixed(world, steps),
        discarded_tokens=_discarded(world),
        migrations=end.num_moves - begin.num_moves,
        kv_bytes_moved=end.kv_bytes - begin.kv_bytes,
        overhead_share=sum(overheads.values()),
        overheads=overheads,
        length_bias=_length_bias(world),
        split={"rollout": generating, "train": training},
        num_events=meter.num_events,
        steps_measured=len(steps),
        timeline=timeline,
    )


def _mixed(world: World, steps: list[TrainedStep]) -> float:
    mixed = total = 0
    for step in steps:
        for group, _, samples in step.groups:
            for sample in samples:
                total += 1
                mixed += len(world.fleet.finished[RequestId(group, sample)].segments) > 1
    return mixed / total


def _discarded(world: World) -> int:
    """Tokens generated for groups that were not trained on."""
    finished = world.fleet.finished
    tokens = world.fleet.stats.aborted_tokens
    size = world.spec.params.group_size
    for end in world.keeper.ended:
        if end.end in (act.End.SURPLUS, act.End.FAILED, act.End.LOST):
            for sample in range(size):
                request = finished.get(RequestId(end.group, sample))
                tokens += request.total if request is not None else 0
    return int(tokens)


def _length_bias(world: World) -> float:
    """Mean length of what was trained over mean length of what was issued."""
    task, size = world.spec.task, world.spec.params.group_size
    issued = {
        group: sum(task(action.prompt, sample)[1] for sample in range(size))
        for group, action in world.keeper.issued.items()
    }
    trained = [issued[end.group] for end in world.keeper.ended if end.end is act.End.TRAINED]
    return (sum(trained) / len(trained)) / (sum(issued.values()) / len(issued))
