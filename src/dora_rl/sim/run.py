"""One simulated run and its figures.

Figures are taken over whole steps in the steady state: after the warm-up, and before the end of
the run, where fewer and fewer groups are left to admit.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import MemoryLog
from dora_rl.ports import EventLog
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.fleet import FleetStats, SimInstance
from dora_rl.sim.learner import TrainedStep
from dora_rl.sim.presets import COLOCATED, Preset, world_spec
from dora_rl.sim.world import World
from dora_rl.types import InstanceId, Mode, RequestId, Version

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
        return {n: getattr(self, n) for n in self.__slots__ if n not in ("timeline", "mode")}


@dataclass(frozen=True, slots=True)
class _Mark:
    """Counters of the fleet at a commit."""

    now: float
    busy_s: float
    slot_s: float
    stats: FleetStats


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
        return _Mark(
            now,
            sum(instance.busy_s for instance in fleet.instances.values()),
            sum(instance.slot_s for instance in fleet.instances.values()),
            replace(fleet.stats),
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
    world = World(world_spec(preset, mode, seed, rollout_devices), log=log or MemoryLog(keep=False))
    meter = _Meter(world)
    timeline = Timeline(world.clock)
    if with_timeline:
        world.fleet.on_busy = timeline.see_instance
        world.watchers.append(timeline.see)
    world.start()
    finished = world.run(TIME_MAX_S)
    assert finished, f"{mode} did not finish"
    return _figures(preset, mode, world, meter, timeline)


def _figures(
    preset: Preset, mode: Mode, world: World, meter: _Meter, timeline: Timeline
) -> ModeResult:
    first = preset.warmup_steps
    last = max(first + 1, preset.num_steps - preset.max_staleness)
    begin, end = meter.marks[first], meter.marks[last]
    steps = world.learner.trained[first:last]
    wall = end.now - begin.now
    shared = wall * len(world.spec.instances)
    train_busy = sum(step.busy_s for step in steps) / wall
    decode_busy = (end.busy_s - begin.busy_s) / shared
    colocated = mode in COLOCATED
    slots = sum(spec.slots_max for _, spec, _ in world.spec.instances)
    cost = world.spec.instances[0][2]
    old, new = begin.stats, end.stats
    again = new.prefill_tokens_again - old.prefill_tokens_again
    overheads = {
        "load": (new.load_s - old.load_s) / shared,
        "transfer": (new.move_s - old.move_s) / shared,
        "prefill_again": again / cost.prefill_tokens_per_s() / shared,
    }
    stale = [step.step - version for step in steps for _, version, _ in step.groups]
    return ModeResult(
        mode=mode.value,
        step_s=wall / len(steps),
        rollout_only_share=max(0.0, 1 - train_busy),
        tokens_per_s=sum(step.num_tokens for step in steps) / wall,
        instance_idle_ratio=max(0.0, 1 - decode_busy - (train_busy if colocated else 0.0)),
        slot_idle_ratio=1 - (end.slot_s - begin.slot_s) / (wall * slots),
        trainer_idle_ratio=max(0.0, 1 - train_busy - (decode_busy if colocated else 0.0)),
        staleness_mean=sum(stale) / len(stale),
        staleness_max=max([s.step - v for s in world.learner.trained for _, v, _ in s.groups]),
        mixed_version_frac=_mixed(world, steps),
        discarded_tokens=_discarded(world),
        migrations=new.num_moves - old.num_moves,
        kv_bytes_moved=new.kv_bytes_moved - old.kv_bytes_moved,
        overhead_share=sum(overheads.values()),
        overheads=overheads,
        length_bias=_length_bias(world),
        split={
            "rollout": len(world.spec.instances) * preset.tensor_parallel,
            "train": world.spec.train.num_devices,
        },
        num_events=meter.num_events,
        steps_measured=len(steps),
        timeline=timeline,
    )


def _mixed(world: World, steps: list[TrainedStep]) -> float:
    mixed = [
        len(world.fleet.finished[RequestId(group, sample)].segments) > 1
        for step in steps
        for group, _, samples in step.groups
        for sample in samples
    ]
    return sum(mixed) / len(mixed)


def _discarded(world: World) -> int:
    """Tokens generated for groups that were not trained on."""
    discarded = (act.End.SURPLUS, act.End.FAILED, act.End.LOST)
    groups = {end.group for end in world.keeper.ended if end.end in discarded}
    done = sum(r.total for rid, r in world.fleet.finished.items() if rid.group in groups)
    return int(world.fleet.stats.aborted_tokens + done)


def _length_bias(world: World) -> float:
    """Mean length of what was trained over mean length of what was issued."""
    task, size = world.spec.task, world.spec.params.group_size
    issued = {
        group: sum(task(action.prompt, sample)[1] for sample in range(size))
        for group, action in world.keeper.issued.items()
    }
    trained = [issued[end.group] for end in world.keeper.ended if end.end is act.End.TRAINED]
    return (sum(trained) / len(trained)) / (sum(issued.values()) / len(issued))


# -- who did what when -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bar:
    """`version` None is idle time; `num_requests` is about how many ran."""

    row: str
    begin_s: float
    end_s: float
    version: Version | None
    num_requests: int


@dataclass(slots=True)
class Timeline:
    """Bars per instance, closed whenever its version or, clearly, the size of its batch changes."""

    clock: VirtualClock
    bars: list[Bar] = field(default_factory=list[Bar])
    _open: dict[InstanceId, tuple[float, Version | None, int]] = field(
        default_factory=dict[InstanceId, tuple[float, Version | None, int]]
    )
    _training: tuple[int, float] | None = None
    _fed: int = -1  # the last step that a group was fed to

    def see_instance(self, instance: SimInstance) -> None:
        """The instance's batch changed."""
        busy = {v: n for v, n in instance.held.items() if n} if instance.awake else {}
        version = max(busy, key=lambda v: (busy[v], v)) if busy else None
        num_requests = len(instance.running) if version is not None else 0
        now = self.clock.now()
        begin, before, num_before = self._open.get(instance.name, (now, -1, 0))
        # A draining batch shows as a stair, not as one bar per request.
        alike = 4 * num_requests <= 5 * num_before and 4 * num_before <= 5 * num_requests
        if before == version and alike:
            return
        self._add(instance.name, begin, before, num_before)
        self._open[instance.name] = (now, version, num_requests)

    def _add(self, row: str, begin_s: float, version: Version | None, num_requests: int) -> None:
        """A bar that ends now, if it has a length."""
        now = self.clock.now()
        if now > begin_s:
            self.bars.append(Bar(row, begin_s, now, version, num_requests))

    def see(self, event: ev.Event, actions: list[act.Action]) -> None:
        """Training begins with the first group fed, or with the commit before it if that is later,
        and ends with the commit."""
        now = self.clock.now()
        if isinstance(event, ev.StepCommitted) and self._training is not None:
            self.bars.append(Bar("trainer", self._training[1], now, event.step, 1))
            self._training = (self._fed, now) if self._fed > event.step else None
        for action in actions:
            if isinstance(action, act.Feed):
                self._fed = action.step
                self._training = self._training or (action.step, now)

    def close(self) -> list[Bar]:
        for name, opened in self._open.items():
            self._add(name, *opened)
        self._open.clear()
        return sorted(self.bars, key=lambda bar: (bar.row, bar.begin_s))
