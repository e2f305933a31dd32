"""The ports of a local run, with everything behind them replaced: what the core gets to hear."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_rl.controller.evaluation import KeptVersions
from dora_rl.controller.loop import Control
from dora_rl.controller.ports import FleetPort, KeeperPort, RewardPort
from dora_rl.controller.scoring import EnvRelay, ScoringPool
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Deadlines, Params
from dora_rl.core.state import Phase
from dora_rl.core.step import initial, step
from dora_rl.engine.journal import Journal
from dora_rl.engine.sequence import Request, Sequence
from dora_rl.types import Finish, Prompt, RequestId, SamplingParams, Segment, Trajectory
from dora_rl.workers.messages import Dispatched, Ready, Reward, Score, Scored
from dora_rl.worlds.local import SameHost
from tests.kit.fakes import Console, FakeWorkers, config_of, files_of

RID = RequestId(0, 0)


class Train:
    def prompt(self, place: int) -> Prompt:
        return Prompt(place, (1, 2), "1+1")


class Core(Control):
    """The core itself, whose actions nobody performs."""

    def __init__(self, params: Params) -> None:
        super().__init__(initial(params))
        self.time_s = 0.0
        self.events: list[ev.Event] = []
        self.later_on: list[ev.Event] = []
        self.actions: list[act.Action] = []

    def handle(self, event: ev.Event) -> None:
        self.events.append(event)
        self.actions = step(self.state, event, self.time_s)

    def later(self, event: ev.Event) -> None:
        self.later_on.append(event)

    def decide(self, event: ev.Event) -> list[act.Action]:
        self.handle(event)
        return self.actions


class Run:
    """A core that works on two samples, real files, and workers that are not there."""

    def __init__(self, folder: Path) -> None:
        params = Params(
            batch_groups=1, group_size=2, num_steps=2, losses_max=2, group_failures_max=4,
            deadlines=Deadlines(score_s=10.0),
        )  # fmt: skip
        self.core, self.console, self.workers = Core(params), Console(), FakeWorkers()
        config, train = config_of(folder), Train()
        self.files = files_of(config, self.console)
        self.scoring = ScoringPool(self.workers, 2, 60.0, {})
        self.scoring.start()
        envs = EnvRelay(self.workers, config, lambda rid, epoch: None)
        carrier = SameHost()
        kept = KeptVersions(config, self.files, carrier, self.workers, self.console)
        parts: Any = (self.core, self.files, train)
        self.rewards = RewardPort(*parts, self.scoring, self.console)
        self.fleet = FleetPort(*parts, self.workers, carrier, envs)
        self.keeper = KeeperPort(self.core, self.files, kept, envs, self.console)
        self.core.handle(ev.Started(params))
        self.core.handle(ev.InstanceJoined("a", 8, versions=(0,)))
        self.core.handle(ev.LearnerJoined(0, 0))
        self.files.samples.add(Trajectory(RID, 0, [5], [-0.5], [1], text="text"))

    def finish(self) -> list[act.Action]:
        return self.core.decide(ev.SampleFinished(RID, 0, "a", 3, Finish.STOP, (Segment(0, 0),)))

    def answer(self, worker: str, reward: Reward) -> None:
        """Of a reward worker, to the question that it has."""
        asked = [m for name, m in self.workers.sent if name == worker and isinstance(m, Score)]
        scored = Scored(asked[-1].id, (reward,))
        self.scoring.hear(self.workers.workers[worker], scored)

    @property
    def phase(self) -> Phase:
        return self.core.state.groups[0].requests[0].phase

    @property
    def reward(self) -> float | None:
        sample = self.files.samples.get(RID)
        assert sample is not None
        return sample.reward


@pytest.fixture
def run(tmp_path: Path):
    run = Run(tmp_path)
    yield run
    run.files.close()
    run.files.lock.release()


def asked_twice(run: Run) -> None:
    """The first question is not answered in time, so a second one is asked."""
    for name in ("reward1", "reward0"):
        run.scoring.hear(run.workers.workers[name], Ready())
    (first,) = [a for a in run.finish() if isinstance(a, act.Score)]
    run.rewards.do(first)
    run.core.time_s = 11.0
    (second,) = [a for a in run.core.decide(ev.Tick()) if isinstance(a, act.Score)]
    assert (first.attempt, second.attempt) == (0, 1)
    run.rewards.do(second)
    assert [name for name, _ in run.workers.sent] == ["reward0", "reward1"]


def test_the_late_answer_of_the_first_question_counts(run: Run) -> None:
    asked_twice(run)
    run.answer("reward0", Reward(0.5, parts={"f": 0.5}))
    assert run.phase is Phase.SCORED and run.reward == 0.5
    run.answer("reward1", Reward(0.7))
    assert run.reward == 0.5, "one score is enough"


def test_the_late_failure_of_the_first_question_does_not(run: Run) -> None:
    asked_twice(run)
    run.answer("reward0", Reward(error="killed"))
    assert run.phase is Phase.SCORING and not isinstance(run.core.events[-1], ev.ScoreFailed)
    run.answer("reward1", Reward(0.7))
    assert run.reward == 0.7


@pytest.mark.parametrize("reward", [Reward(error="raised KeyError"), Reward(float("inf"))])
def test_a_reward_that_is_none_fails_its_sample_and_is_told(run: Run, reward: Reward) -> None:
    run.scoring.hear(run.workers.workers["reward0"], Ready())
    (score,) = [a for a in run.finish() if isinstance(a, act.Score)]
    run.rewards.do(score)
    run.answer("reward0", reward)
    failed = run.core.events[-1]
    assert isinstance(failed, ev.ScoreFailed) and run.reward is None
    assert run.console.lines == [f"a reward failed: {failed.reason}"]


def test_a_sample_that_was_scored_before_a_crash_is_not_scored_again(run: Run) -> None:
    run.files.samples.reward(RID, 0.25)
    (score,) = [a for a in run.finish() if isinstance(a, act.Score)]
    run.rewards.do(score)
    assert run.core.later_on == [ev.Scored(RID, 0, 0.25)] and not run.workers.sent
    run.files.samples.drop(0)
    run.rewards.do(score)
    assert run.core.later_on[1:] == [ev.ScoreFailed(RID, 0, "its row is not in the table")]


def test_a_request_that_goes_on_from_its_journal_says_from_where(run: Run) -> None:
    orders = run.core.decide(ev.InstanceLost("a", "died"))
    orders = orders + run.core.decide(ev.InstanceJoined("a", 8, versions=(0,), life=1))
    journal = Journal(run.files.run_dir / "journal" / "a.0.jsonl")
    request = Request(RID, 0, (1, 2), SamplingParams())
    made = {"logprobs": [-1.0] * 3, "loss_mask": [1] * 3, "segments": [Segment(0, 0)]}
    journal.state(Sequence(request, 0, 0, [1, 2, 7, 8, 9], 2, 0, **made))
    journal.close()
    run.files.journals.collect("a", alive={0})
    for order in orders:
        if isinstance(order, act.Dispatch):
            run.fleet.do(order)
    assert run.core.later_on == [ev.Continued(RID, 1, 3)], "the other one has no journal"
    sent = [message for name, message in run.workers.take(Dispatched) if name == "a"]
    assert [sample for message in sent for sample in message.saved] == [0]
    assert sent[0].prompt_ids.tolist() == [1, 2]
    (line,) = (run.files.run_dir / "continued.jsonl").read_text().splitlines()
    assert json.loads(line)["token_ids"] == [7, 8, 9]


def test_a_prompt_that_is_set_aside_is_told_at_once_and_the_stop_keeps_its_reason(
    run: Run,
) -> None:
    run.keeper.do(act.EndGroup(0, 0, act.End.FAILED, None, "raised KeyError"))
    assert run.files.samples.get(RID) is None and run.files.dropped == {"failed": 1}
    assert run.files.records.totals.discarded_tokens == 1
    run.keeper.do(act.SetAside(4, 0, 4, False, "raised KeyError"))
    assert run.console.lines == ["prompt 4 is set aside: raised KeyError"]
    run.keeper.do(act.Stop("too many", done=False))
    assert run.core.stop is not None
    assert run.core.stop.reason == "too many; the last group failed: raised KeyError"
