"""The core driven by hand: one event at a time, every law checked after each, the log audited.

hand = Hand(batch_groups=2, group_size=1)
hand.begin(instances={"a": 4})
hand.complete(0)                 # group 0 is generated and scored
hand.train()                     # the step in training is accepted and committed
hand.audit()
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.invariants import check_invariants
from dora_rl.core.params import Params
from dora_rl.core.state import GENERATING, Group, GroupPhase, Phase, Request, State
from dora_rl.core.step import initial, step
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import Entry
from dora_rl.types import Finish, RequestId, Segment


class Hand:
    """A run whose world is the test."""

    def __init__(self, **params: Any) -> None:
        params = {"rebalance_min_s": 0.0, "inflight_groups": 1_000} | params
        self.params = Params(**params)
        self.state: State = initial(self.params)
        self.now = 0.0
        self.entries: list[Entry] = []
        self.lives: dict[str, int] = {}

    def tell(self, event: ev.Event, *, after_s: float = 0.0) -> list[act.Action]:
        """One event in, its actions out; the state must be sound afterwards."""
        self.now += after_s
        actions = step(self.state, event, self.now)
        self.entries.append(Entry(len(self.entries), self.now, event, list(actions)))
        check_invariants(self.state)
        return actions

    def audit(self) -> None:
        report = audit(self.entries)
        assert report.ok, [str(finding) for finding in report.findings]

    def begin(self, instances: Mapping[str, int] | None = None, **spec: Any) -> None:
        """Start, with a learner and instances (name -> slots) that hold version 0."""
        self.tell(ev.Started(self.params))
        for name, slots in (instances or {"a": 64}).items():
            self.join(name, slots, **({"versions": (0,)} | spec))
        self.tell(ev.LearnerJoined(0, 0, incarnation=0))

    def join(self, name: str, slots: int = 64, **spec: Any) -> list[act.Action]:
        self.lives[name] = self.lives.get(name, -1) + 1
        return self.tell(ev.InstanceJoined(name, slots, life=self.lives[name], **spec))

    def load_all(self) -> list[act.Action]:
        """Every load that is under way succeeds, and those that follow."""
        done: list[act.Action] = []
        while True:
            loading = [i for i in self.state.instances.values() if i.loading is not None]
            if not loading:
                return done
            for inst in loading:
                if inst.loading is not None:
                    done += self.tell(ev.Loaded(inst.id, inst.loading))

    def settle(self) -> list[act.Action]:
        """Every move and load that is under way succeeds, and those that follow."""
        done: list[act.Action] = []
        while True:
            requests = [r for g in self.state.groups.values() for r in g.requests]
            moving = [r for r in requests if r.phase is Phase.MOVING]
            for request in moving:
                src, dst = request.instance or "", request.dest or ""
                done += self.tell(ev.Moved(request.id, request.epoch, src, dst, 1, 1))
            loaded = self.load_all()
            done += loaded
            if not moving and not loaded:
                return done

    def request(self, group: int, sample: int = 0) -> Request:
        request = self.state.request(RequestId(group, sample))
        assert request is not None
        return request

    def finish(self, group: int, sample: int = 0, **changes: Any) -> list[act.Action]:
        """The sample is generated, as its instance reports it."""
        request = self.request(group, sample)
        version = self.state.groups[group].version
        facts: dict[str, Any] = {
            "request": request.id,
            "epoch": request.epoch,
            "instance": request.instance or "",
            "num_tokens": 10,
            "finish": Finish.STOP,
            "segments": (Segment(0, version),),
        }
        return self.tell(ev.SampleFinished(**(facts | changes)))

    def score(self, group: int, sample: int = 0, reward: float | None = None) -> list[act.Action]:
        attempt = self.request(group, sample).score_attempts
        value = float(sample % 2) if reward is None else reward
        return self.tell(ev.Scored(RequestId(group, sample), attempt, value))

    def complete(self, group: int, reward: float | None = None) -> list[act.Action]:
        """Every sample of the group is generated and scored."""
        done: list[act.Action] = []
        for request in list(self.state.groups[group].requests):
            if request.phase in GENERATING:
                done += self.finish(group, request.id.sample)
            if request.phase is Phase.SCORING:
                done += self.score(group, request.id.sample, reward)
        return done

    def train(self, checksum: str = "sum") -> list[act.Action]:
        """The learner accepts the closed batch and commits its step; then it is durable too."""
        index = self.state.committed
        done = self.tell(ev.BatchAccepted(index))
        behind = self.state.params.durable_behind
        durable = index if behind else -1
        done += self.tell(ev.StepCommitted(index, f"{checksum}{index}", durable=durable))
        return done + (self.tell(ev.VersionDurable(index + 1)) if behind else [])

    def running(self) -> list[Group]:
        """Groups that are neither ready nor taken, oldest first."""
        early = (GroupPhase.ISSUED, GroupPhase.RUNNING, GroupPhase.REWARDING)
        return [g for g in self.state.groups.values() if g.phase in early]

    def to_the_end(self) -> None:
        """Let everything succeed until the run stops."""
        for _ in range(10_000):
            if self.state.stopped is not None:
                return
            self.settle()
            for group in self.running():
                for request in group.requests if group.id in self.state.groups else ():
                    if request.phase is Phase.RUNNING:
                        self.finish(group.id, request.id.sample)
                    if request.phase is Phase.SCORING:
                        self.score(group.id, request.id.sample)
            batch = self.state.batches.get(self.state.committed)
            if batch is not None and batch.close_sent:
                self.train()
            self.tell(ev.Tick(), after_s=1.0)
            for inst in list(self.state.instances):
                self.tell(ev.InstanceReport(inst, 0, 0))
        raise AssertionError("the run does not end")


def only(actions: list[act.Action], kind: type) -> list[Any]:
    """The actions of one kind."""
    return [action for action in actions if isinstance(action, kind)]
