"""The core under any order of messages: late, repeated, contradictory, at the worst moment.

No simulated world stands behind these events, so orders occur that no simulator produces. Workers
say which incarnation they are, and whatever was said may be said again at any time. After every
event all counters are recounted, and nothing may be sent to an instance without the weights; at the
end everything is allowed to succeed, the run must come to its end, and the audit must find nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Deadlines
from dora_rl.core.state import GENERATING, Instance, Phase, Request
from dora_rl.types import Mode
from tests.kit.hand_driven import Hand

NUM_EVENTS = 150


class Weights(Hand):
    """Knows which weights are really where: those whose load has really ended."""

    def __init__(self, **params: Any) -> None:
        super().__init__(**params)
        self.there: dict[str, set[int]] = {}

    def tell(self, event: ev.Event, *, after_s: float = 0.0) -> list[act.Action]:
        if isinstance(event, ev.InstanceJoined):
            newest = self.state.incarnations.get(event.instance, -1)
            if event.life > newest:
                self.there[event.instance] = set(event.versions)
        if isinstance(event, ev.Loaded):
            inst = self.state.instances.get(event.instance)
            if inst is not None and inst.loading == event.version and self.is_true(inst, event):
                self.there[event.instance].add(event.version)
        actions = super().tell(event, after_s=after_s)
        for action in actions:
            match action:
                case act.Unload():
                    self.there[action.instance].remove(action.version)
                case act.Dispatch() | act.Unpark() | act.Reversion():
                    assert action.version in self.there[action.instance], f"no weights: {action}"
                case act.Move():
                    assert action.version in self.there[action.dst], f"no weights: {action}"
                case _:
                    pass
        return actions

    def is_true(self, inst: Instance, event: ev.Loaded) -> bool:
        """It answers the last order of the incarnation that is there now."""
        order = (self.state.incarnations[inst.id], inst.num_loads)
        return (event.incarnation, event.attempt) in (order, (-1, -1))


class Chaos:
    """Draws the next message."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"any order {seed}")
        mode = rng.choice([*Mode, Mode.MULTI_VERSION, Mode.MULTI_VERSION])
        self.weight_slots = rng.choice([1, 1, 2, 3])
        self.elastic = rng.choice([0.0, 0.0, 0.5, 1.0])
        self.again_share = rng.choice([0.0, 0.1, 0.3])  # of messages that are said again
        self.hand = Weights(
            mode=mode,
            batch_groups=rng.randint(1, 4),
            group_size=rng.randint(1, 3),
            max_staleness=rng.randint(0, 3),
            num_steps=rng.randint(3, 6),
            inflight_groups=rng.choice([2, 6, 24]),
            ready_max=rng.choice([1, 1_000]),
            samples_min=rng.choice([0, 1]),
            attempts_max=rng.choice([2, 50]),
            failed_min=10**6,
            fill_older_max=rng.choice([0, 2]),
            level_running=rng.random() < 0.5,
            level_slack=0.0,
            repartition=rng.random() < 0.8,
            event_actions_max=rng.choice([1, 3, 10, 2_000, 2_000]),
            losses_max=rng.choice([0, 1, 2]),
            clear_tokens=rng.choice([1, 20]),
            group_failures_max=rng.choice([0, 2]),
            deadlines=Deadlines(progress_s=rng.choice([0.0, 30.0])),
        )

    def join(self) -> None:
        rng = self.rng
        versions = list(self.hand.state.versions)
        held = rng.sample(versions, rng.randint(0, min(self.weight_slots, len(versions))))
        self.hand.join(
            rng.choice("abcd"),
            rng.randint(1, 6),
            resident_max=self.weight_slots,
            kv_tokens_max=rng.choice([0, 1_000]),
            elastic=rng.random() < self.elastic,
            versions=tuple(sorted(held)),
        )

    def some_request(self, *phases: Phase) -> Request | None:
        requests = [r for g in self.hand.state.groups.values() for r in g.requests]
        fitting = [r for r in requests if not phases or r.phase in phases]
        return self.rng.choice(fitting) if fitting else None

    def some_instance(self) -> str:
        return self.rng.choice([*self.hand.state.instances, "a", "nobody"])

    def epoch(self, request: Request) -> int:
        """The right one, mostly."""
        return request.epoch if self.rng.random() < 0.85 else self.rng.randint(0, request.epoch)

    def incarnation(self, name: str) -> int:
        """The one that is known; sometimes unknown, an earlier or a later one."""
        known = self.hand.state.incarnations.get(name, 0)
        return self.rng.choice([known] * 8 + [-1, max(0, known - 1), known + 1])

    def again(self) -> None:
        """What a worker said some time ago is said once more."""
        told: list[ev.Event] = []
        for entry in reversed(self.hand.entries[-60:]):
            if isinstance(entry.event, ev.Resumed | ev.Started):
                break  # nothing that was said to an earlier controller reaches this one
            told.append(entry.event)
        if told and self.rng.random() < self.again_share:
            self.hand.tell(self.rng.choice(told))

    def finish(self) -> None:
        request = self.some_request(Phase.RUNNING, Phase.RUNNING, Phase.MOVING)
        if request is None or (request.epoch == 0 and request.attempts):
            return
        number = self.incarnation(request.instance or "")
        epoch = self.epoch(request)
        self.hand.finish(request.id.group, request.id.sample, epoch=epoch, incarnation=number)

    def finish_parked(self) -> None:
        """It ended just before the order to park reached it."""
        request = self.some_request(Phase.PENDING)
        if request is not None and request.instance is not None:
            self.hand.finish(request.id.group, request.id.sample)

    def fail(self) -> None:
        request = self.some_request(*GENERATING)
        if request is not None and request.instance is not None:
            final = self.rng.random() < 0.1
            where = self.some_instance()
            number = self.incarnation(where)
            event = ev.SampleFailed(
                request.id, self.epoch(request), where, "broken", final, incarnation=number
            )
            self.hand.tell(event)

    def score(self) -> None:
        request = self.some_request(Phase.SCORING)
        if request is None:
            return
        attempt = self.rng.randint(0, request.score_attempts)
        reward = self.rng.choice([0.0, 1.0, 1.0, float("nan")])
        event: ev.Event = ev.Scored(request.id, attempt, reward)
        if self.rng.random() < 0.1:
            event = ev.ScoreFailed(request.id, attempt, "raised")
        self.hand.tell(event)

    def lose(self) -> None:
        name = self.some_instance()
        self.hand.tell(ev.InstanceLost(name, "died", incarnation=self.incarnation(name)))

    def load(self) -> None:
        name = self.some_instance()
        inst = self.hand.state.instances.get(name)
        version = self.rng.choice([*self.hand.state.versions])
        if inst is not None and inst.loading is not None and self.rng.random() < 0.9:
            version = inst.loading
        who: dict[str, int] = {"incarnation": self.incarnation(name), "attempt": 0}
        if inst is not None:
            who["attempt"] = max(0, inst.num_loads - self.rng.choice([0] * 9 + [1]))
        if who["incarnation"] == -1:
            who["attempt"] = -1  # as earlier releases said it
        if self.rng.random() < 0.2:
            self.hand.tell(ev.LoadFailed(name, version, "corrupt", **who))
        else:
            self.hand.tell(ev.Loaded(name, version, **who))

    def move(self) -> None:
        request = self.some_request(Phase.MOVING)
        if request is None:
            return
        src, dst, epoch = request.instance or "", request.dest or "", self.epoch(request)
        if self.rng.random() < 0.1:
            dst = self.some_instance()
        attempt = self.rng.choice([-1, *[request.num_moves] * 8, request.num_moves - 1])
        if self.rng.random() < 0.3:
            kept, number = self.rng.random() < 0.5, self.incarnation(src)
            failed = ev.MoveFailed(request.id, epoch, src, dst, kept, "reset")
            self.hand.tell(replace(failed, attempt=attempt, incarnation=number))
        else:
            moved = ev.Moved(request.id, epoch, src, dst, 5, 5)
            self.hand.tell(replace(moved, attempt=attempt, incarnation=self.incarnation(dst)))

    def report(self) -> None:
        kv = self.rng.choice([0, 0, 100, 960, 999])
        speed = self.rng.choice([1.0, 1.0, 0.2])
        steps, name = len(self.hand.entries), self.some_instance()
        number = self.incarnation(name)
        named = self.some_request(*GENERATING) if self.rng.random() < 0.2 else None
        still = (named.id,) if named is not None else ()
        self.hand.tell(ev.InstanceReport(name, steps, kv, speed, still=still, incarnation=number))

    def go_on(self) -> None:
        """A journal had more, or no more, than the time before."""
        request = self.some_request(*GENERATING)
        if request is not None:
            more = request.kept + self.rng.randint(0, 3)
            self.hand.tell(ev.Continued(request.id, self.epoch(request), more))

    def tick(self) -> None:
        self.hand.tell(ev.Tick(), after_s=self.rng.choice([0.125, 5.0, 40.0]))

    def train(self) -> None:
        """Accepted and committed, each maybe lost, repeated or for another step."""
        state = self.hand.state
        batch = state.batches.get(state.committed)
        if batch is None or not batch.close_sent or not state.learner.alive:
            self.hand.tell(ev.BatchAccepted(max(0, state.committed - 1)))
            return
        number = state.learner.incarnation
        for _ in range(self.rng.randint(1, 2)):
            self.hand.tell(ev.BatchAccepted(batch.step, incarnation=number))
        if self.rng.random() < 0.7:
            for _ in range(self.rng.randint(1, 2)):
                checksum = f"sum{batch.step}"
                self.hand.tell(ev.StepCommitted(batch.step, checksum, incarnation=number))

    def learner(self) -> None:
        state = self.hand.state
        number = state.learner.incarnation
        if self.rng.random() < 0.5:
            self.hand.tell(ev.LearnerLost("died", incarnation=self.rng.choice([number, -1])))
        batch = state.batches.get(state.committed)
        sealed = batch is not None and batch.closed and batch.close_sent
        version = state.committed + (sealed and self.rng.random() < 0.3)
        self.hand.tell(ev.LearnerJoined(version, version, incarnation=number + 1))

    def resume(self) -> None:
        hand, rng = self.hand, self.rng
        params = hand.state.target or hand.state.params
        if rng.random() < 0.5 and params.mode is not Mode.REPLICATION:
            params = replace(
                params, max_staleness=rng.randint(0, 3), batch_groups=rng.randint(1, 4)
            )
        if rng.random() < 0.3:
            params = replace(params, num_steps=params.num_steps + rng.randint(0, 2))
        hand.tell(ev.Resumed(params))
        self.learner()

    def begin(self) -> None:
        self.hand.begin({"a": 4}, resident_max=self.weight_slots)

    def weights(self) -> dict[Callable[[], None], int]:
        """How often each kind of message comes."""
        return {
            self.finish: 10,
            self.score: 12,
            self.load: 16,
            self.move: 6,
            self.report: 10,
            self.train: 8,
            self.tick: 4,
            self.join: 3,
            self.finish_parked: 2,
            self.fail: 2,
            self.go_on: 3,
            self.lose: 3,
            self.learner: 2,
            self.resume: 1,
        }

    def go(self) -> None:
        hand, weights = self.hand, self.weights()
        self.begin()
        for _ in range(NUM_EVENTS):
            if hand.state.stopped is not None:
                break
            (what,) = self.rng.choices(list(weights), list(weights.values()))
            what()
            self.again()
        if hand.state.stopped is None:
            if not hand.state.learner.alive:
                number = hand.state.learner.incarnation + 1
                version = hand.state.committed
                hand.tell(ev.LearnerJoined(version, version, incarnation=number))
            hand.join("e", 8, resident_max=3, versions=tuple(hand.state.versions)[-3:])
            hand.to_the_end()
        hand.audit()


class ElasticCorner(Chaos):
    """Elastic instances with several seats, many versions, moves that take long: a version is given
    up in one place while it retires in another."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"corner {seed}")
        self.weight_slots = rng.choice([2, 2, 3])
        self.elastic = rng.choice([0.5, 0.8])
        self.again_share = rng.choice([0.0, 0.1])
        self.hand = Weights(
            batch_groups=rng.choice([1, 1, 2]),
            group_size=1,
            max_staleness=rng.randint(2, 4),
            num_steps=12,
            inflight_groups=rng.choice([4, 6, 8]),
            attempts_max=50,
            failed_min=10**6,
            level_running=rng.random() < 0.3,
            level_slack=0.0,
            fill_older_max=rng.choice([0, 2]),
            event_actions_max=rng.choice([3, 2_000]),
        )

    def begin(self) -> None:
        self.hand.begin({"a": 4, "b": 4}, resident_max=self.weight_slots)
        for _ in range(2):
            self.join()

    def weights(self) -> dict[Callable[[], None], int]:
        return {
            self.finish: 14,
            self.score: 14,
            self.load: 10,
            self.move: 3,
            self.report: 4,
            self.train: 14,
            self.tick: 2,
            self.join: 1,
            self.lose: 1,
        }


def all_pass(kind: type[Chaos], seeds: range) -> None:
    for seed in seeds:
        try:
            kind(seed).go()
        except (AssertionError, KeyError) as error:
            raise AssertionError(f"{kind.__name__} {seed}: {error}") from error


@pytest.mark.parametrize("block", range(6))
def test_any_order_of_messages_keeps_every_promise(block: int) -> None:
    all_pass(Chaos, range(25 * block, 25 * (block + 1)))


@pytest.mark.parametrize("block", range(6))
def test_any_order_around_elastic_instances_with_several_seats(block: int) -> None:
    all_pass(ElasticCorner, range(25 * block, 25 * (block + 1)))
