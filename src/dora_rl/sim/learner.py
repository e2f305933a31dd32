"""The simulated learner and reward pool behind their ports.

The learner works through what it was fed as a stream; as soon as it has the groups of an update,
the wait for the fullest data-parallel rank and the update follow. A closed batch ends with the
sealing of the next version, then the event that becomes the log record. The disk has the version
`durable_s` later, and no other is sealed before. What is sealed survives the learner; with its host
only what is durable does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.ports import LearnerAction
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.faults import Faults
from dora_rl.sim.hardware import TrainCost
from dora_rl.types import GroupId, RequestId, StepIndex, Version

Post = Callable[[ev.Event], None]


@dataclass(frozen=True, slots=True)
class TrainedStep:
    """What a step really consumed: the ground truth for the checkers."""

    step: StepIndex
    committed_s: float
    busy_s: float
    groups: tuple[tuple[GroupId, Version, tuple[int, ...]], ...]
    num_tokens: int


@dataclass(slots=True)
class _Step:
    index: StepIndex
    fed: dict[GroupId, act.Feed] = field(default_factory=dict[GroupId, act.Feed])
    num_tokens: int = 0
    free_s: float = 0.0  # when the work fed so far will be done
    busy_s: float = 0.0
    update: list[list[int]] = field(default_factory=list[list[int]])  # lengths, by group

    def work(self, seconds: float, now: float) -> None:
        self.busy_s += seconds
        self.free_s = max(self.free_s, now) + seconds


@dataclass(eq=False)
class SimLearner:
    """Trains what it is fed. `lengths_of` says how many tokens each of the given samples has.

    `durable_s` None: a version is on disk before it is told, as in older logs.
    """

    clock: VirtualClock
    post: Post
    cost: TrainCost
    lengths_of: Callable[[GroupId, tuple[int, ...]], list[int]]
    update_groups: int = 1  # groups of an optimizer update
    colocated_s: float = 0.0  # switching shared devices over to training
    durable_s: float | None = None
    sealed: Version = 0  # the newest that is there for the next life
    durable: Version = 0  # and for a life on another host
    trained: list[TrainedStep] = field(default_factory=list[TrainedStep])  # one per sealed version
    alive: bool = False
    life: int = 0  # raised by every start and end
    incarnation: int = 0  # the life of the last start
    _durable_at_s: float = 0.0
    _ended_s: float = 0.0  # when it began to wait for the groups of this step
    _step: _Step | None = None
    # Of the next step: looked at when this one is sealed.
    _ahead: list[act.Feed] = field(default_factory=list[act.Feed])

    def join(self) -> None:
        self.die()
        self.alive, self.incarnation = True, self.life
        self._ended_s = self.clock.now()
        self.durable = self.sealed  # whoever begins writes first what the one before had not
        on_disk = -1 if self.durable_s is None else self.durable
        self.post(ev.LearnerJoined(self.sealed, self.sealed, self.incarnation, on_disk))

    def die(self) -> None:
        self.alive = False
        self.life += 1
        self._step, self._ahead = None, []

    def lose_host(self) -> None:
        """What was sealed and not durable is gone."""
        self.sealed = self.durable
        del self.trained[self.durable :]

    def do(self, action: LearnerAction) -> None:
        if isinstance(action, act.RestartLearner):
            self.die()
            self.clock.after(5.0, self.rejoin)
        elif self.alive and isinstance(action, act.Feed):
            self._feed(action)
        elif self.alive and isinstance(action, act.CloseStep):
            self._close(action)

    def rejoin(self) -> None:
        if not self.alive:
            self.join()

    def _current(self, index: StepIndex) -> _Step:
        if self._step is None or self._step.index != index:
            self._step = _Step(index, free_s=self.clock.now())
        return self._step

    def _feed(self, action: act.Feed) -> None:
        if action.step == self.sealed + 1:
            self._ahead.append(action)
        if action.step != self.sealed:
            return  # or from before a restart
        step = self._current(action.step)
        if action.group in step.fed:
            return
        step.fed[action.group] = action
        lengths = self.lengths_of(action.group, action.samples)
        step.num_tokens += sum(lengths)
        step.work(self.cost.samples_s(lengths), self.clock.now())
        step.update.append(lengths)
        if len(step.update) >= self.update_groups:
            self._update(step)

    def _update(self, step: _Step) -> None:
        """All samples of an update are there and begun; the fullest rank ends last."""
        lengths = [n for group in step.update for n in group]
        step.work(self.cost.imbalance_s(lengths) + self.cost.update_s(), self.clock.now())
        step.update = []

    def _close(self, action: act.CloseStep) -> None:
        if action.step != self.sealed:
            return
        step = self._current(action.step)
        self.post(ev.BatchAccepted(action.step, incarnation=self.incarnation))
        if step.update:  # the batch is no multiple of an update
            self._update(step)
        step.work(self.cost.publish_s() + self.colocated_s, self.clock.now())
        life = self.life
        self.clock.at(step.free_s, lambda: self._commit(step, life))

    def _commit(self, step: _Step, life: int) -> None:
        if life != self.life or step.index != self.sealed:
            return
        if self.durable < self.sealed:  # the disk is slower than the step was
            self.clock.at(self._durable_at_s, lambda: self._commit(step, life))
            return
        groups = tuple((f.group, f.version, f.samples) for f in step.fed.values())
        now = self.clock.now()
        self.trained.append(TrainedStep(step.index, now, step.busy_s, groups, step.num_tokens))
        self.sealed = step.index + 1
        self._step = None
        checksum, on_disk = f"sum{self.sealed}", -1
        if self.durable_s is None:
            self.durable = self.sealed
        else:
            on_disk, version = self.durable, self.sealed
            self._durable_at_s = now + self.durable_s
            self.clock.at(self._durable_at_s, lambda: self._become_durable(version, life))
        self.post(
            ev.StepCommitted(
                step.index,
                checksum,
                incarnation=self.incarnation,
                durable=on_disk,
                waited_s=max(0.0, now - self._ended_s - step.busy_s),
            )
        )
        self._ended_s = now
        ahead, self._ahead = self._ahead, []
        for action in ahead:
            self._feed(action)

    def _become_durable(self, version: Version, life: int) -> None:
        if life == self.life:
            self.durable = version
            self.post(ev.VersionDurable(version, incarnation=self.incarnation))


@dataclass(eq=False)
class SimRewards:
    """Scores after a latency; may hang, fail or answer nonsense."""

    clock: VirtualClock
    post: Post
    reward_of: Callable[[RequestId, int], float]
    latency_of: Callable[[RequestId, int], float]
    faults: Faults
    scored: set[RequestId] = field(default_factory=set[RequestId])  # really got a reward

    def do(self, action: act.Score) -> None:
        outcome = self.faults.poison(action.prompt)
        outcome = outcome or self.faults.score(action.request, action.attempt)
        if outcome == "hang":
            return
        event: ev.Event = ev.Scored(action.request, action.attempt, float("nan"))
        if outcome is None:
            reward = self.reward_of(action.request, action.prompt)
            event = ev.Scored(action.request, action.attempt, reward)
            self.scored.add(action.request)
        elif outcome != "nan":
            event = ev.ScoreFailed(action.request, action.attempt, outcome)
        self.clock.after(self.latency_of(action.request, action.prompt), lambda: self.post(event))
