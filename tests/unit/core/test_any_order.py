"""The core under any order of messages: late, repeated, contradictory, at the worst moment.

No simulated world stands behind these events, so orders occur that no simulator produces. After
every event all counters are recounted; at the end everything is allowed to succeed, the run must
come to its end, and the audit must find nothing.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hand_driven import Hand

from dora_rl.core import events as ev
from dora_rl.core.params import Deadlines
from dora_rl.core.state import GENERATING, Phase, Request
from dora_rl.types import Mode

NUM_EVENTS = 150


class Chaos:
    """Draws the next message."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(f"any order {seed}")
        mode = rng.choice([*Mode, Mode.MULTI_VERSION, Mode.MULTI_VERSION])
        self.seats = rng.choice([1, 1, 2, 3])
        self.elastic = rng.choice([0.0, 0.0, 0.5, 1.0])
        self.hand = Hand(
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
            losses_max=rng.choice([0, 1, 2]),
            clear_tokens=rng.choice([1, 20]),
            group_failures_max=rng.choice([0, 2]),
            deadlines=Deadlines(progress_s=rng.choice([0.0, 30.0])),
        )

    def join(self) -> None:
        rng = self.rng
        versions = list(self.hand.state.versions)
        held = rng.sample(versions, rng.randint(0, min(self.seats, len(versions))))
        self.hand.join(
            rng.choice("abcd"),
            rng.randint(1, 6),
            resident_max=self.seats,
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

    def finish(self) -> None:
        request = self.some_request(Phase.RUNNING, Phase.RUNNING, Phase.MOVING)
        if request is None or (request.epoch == 0 and request.attempts):
            return
        self.hand.finish(request.id.group, request.id.sample, epoch=self.epoch(request))

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
            event = ev.SampleFailed(request.id, self.epoch(request), where, "broken", final)
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
        self.hand.tell(ev.InstanceLost(self.some_instance(), "died"))

    def load(self) -> None:
        name = self.some_instance()
        inst = self.hand.state.instances.get(name)
        version = self.rng.choice([*self.hand.state.versions])
        if inst is not None and inst.loading is not None and self.rng.random() < 0.9:
            version = inst.loading
        failed = self.rng.random() < 0.2
        self.hand.tell(
            ev.LoadFailed(name, version, "corrupt") if failed else ev.Loaded(name, version)
        )

    def move(self) -> None:
        request = self.some_request(Phase.MOVING)
        if request is None:
            return
        src, dst, epoch = request.instance or "", request.dest or "", self.epoch(request)
        if self.rng.random() < 0.1:
            dst = self.some_instance()
        if self.rng.random() < 0.3:
            kept = self.rng.random() < 0.5
            self.hand.tell(ev.MoveFailed(request.id, epoch, src, dst, kept, "reset"))
        else:
            self.hand.tell(ev.Moved(request.id, epoch, src, dst, 5, 5))

    def report(self) -> None:
        kv = self.rng.choice([0, 0, 100, 960, 999])
        speed = self.rng.choice([1.0, 1.0, 0.2])
        steps = len(self.hand.entries)
        named = self.some_request(*GENERATING) if self.rng.random() < 0.2 else None
        still = (named.id,) if named is not None else ()
        report = ev.InstanceReport(self.some_instance(), steps, kv, speed, still=still)
        self.hand.tell(report)

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
        if batch is None or not batch.close_sent or not state.trainer.alive:
            self.hand.tell(ev.BatchAccepted(max(0, state.committed - 1)))
            return
        for _ in range(self.rng.randint(1, 2)):
            self.hand.tell(ev.BatchAccepted(batch.step))
        if self.rng.random() < 0.7:
            for _ in range(self.rng.randint(1, 2)):
                self.hand.tell(ev.StepCommitted(batch.step, f"sum{batch.step}"))

    def learner(self) -> None:
        state = self.hand.state
        if self.rng.random() < 0.5:
            self.hand.tell(ev.TrainerLost("died"))
        batch = state.batches.get(state.committed)
        sealed = batch is not None and batch.closed and batch.close_sent
        version = state.committed + (sealed and self.rng.random() < 0.3)
        self.hand.tell(ev.TrainerJoined(version, version))

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

    def go(self) -> None:
        hand = self.hand
        hand.begin({"a": 4}, resident_max=self.seats)
        weights: dict[Callable[[], None], int] = {
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
        for _ in range(NUM_EVENTS):
            if hand.state.stopped is not None:
                break
            (what,) = self.rng.choices(list(weights), list(weights.values()))
            what()
        if hand.state.stopped is None:
            if not hand.state.trainer.alive:
                hand.tell(ev.TrainerJoined(hand.state.committed, hand.state.committed))
            hand.join("e", 8, resident_max=3, versions=tuple(hand.state.versions)[-3:])
            hand.to_the_end()
        hand.audit()


@pytest.mark.parametrize("block", range(6))
def test_any_order_of_messages_keeps_every_promise(block: int) -> None:
    for seed in range(25 * block, 25 * (block + 1)):
        try:
            Chaos(seed).go()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error
