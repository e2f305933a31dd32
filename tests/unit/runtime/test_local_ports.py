"""The ports of a local run, with everything behind them replaced: what the core gets to hear."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora_rl.controller.ports import FleetPort, KeeperPort, RewardPort
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Deadlines, Params
from dora_rl.core.state import Phase
from dora_rl.core.step import initial, step
from dora_rl.types import Finish, RequestId, Segment, Trajectory

RID = RequestId(0, 0)


class Run:
    """A core that works on two samples, and ports that only note what they are told."""

    def __init__(self) -> None:
        self.params = Params(
            batch_groups=1, group_size=2, num_steps=2, losses_max=2, group_failures_max=4,
            deadlines=Deadlines(score_s=10.0),
        )  # fmt: skip
        self.state, self.now = initial(self.params), 0.0
        self.later: deque[ev.Event] = deque()
        self.events: list[ev.Event] = []
        self.answers: list[Any] = []
        self.lines: list[str] = []
        self.on_wait = self.lines.extend
        self.rewards: list[float] = []
        prompt = SimpleNamespace(token_ids=(1, 2))
        self.train = SimpleNamespace(prompt=lambda place: prompt)
        self.config = SimpleNamespace(reward=SimpleNamespace(functions=("f",)))
        self.samples = SimpleNamespace(
            get=lambda rid: Trajectory(rid, 0, [5], [-0.5], [1], text="text"),
            where_to_read=lambda rid: {},
            reward=lambda rid, reward, parts: self.rewards.append(reward),
        )
        self.scoring = SimpleNamespace(
            submit=lambda *args: self.answers.append(args[4]),
            failures=SimpleNamespace(add=lambda why: []),
        )
        self.journals = SimpleNamespace(look_up=self.look_up)
        self.records = SimpleNamespace(work_begins=lambda: None, continued=lambda *args: None)
        self.keeper = SimpleNamespace(note_continued=lambda *args: None)
        self.envs = SimpleNamespace(dispatch=lambda prompt: None)
        self.sent: list[str] = []
        self.pool = SimpleNamespace(send=lambda name, *args: self.sent.append(name))
        self.handle(ev.Started(self.params))
        self.handle(ev.InstanceJoined("a", 8, versions=(0,)))
        self.handle(ev.TrainerJoined(0, 0))

    def look_up(self, rid: RequestId) -> dict[str, Any] | None:
        return {"resume_ids": [7, 8, 9]} if rid == RID else None

    def handle(self, event: ev.Event) -> list[act.Action]:
        self.events.append(event)
        return step(self.state, event, self.now)

    def finish(self) -> list[act.Action]:
        return self.handle(
            ev.SampleFinished(RID, 0, "a", 3, Finish.STOP, (Segment(0, 0),)),
        )

    @property
    def phase(self) -> Phase:
        return self.state.groups[0].requests[0].phase


@pytest.fixture
def run() -> Run:
    return Run()


def asked_twice(run: Run) -> None:
    """The first question is not answered in time, so a second one is asked."""
    port = RewardPort(cast(Any, run))
    (first,) = [a for a in run.finish() if isinstance(a, act.Score)]
    port.do(first)
    run.now = 11.0
    (second,) = [a for a in run.handle(ev.Tick()) if isinstance(a, act.Score)]
    assert (first.attempt, second.attempt) == (0, 1)
    port.do(second)


def test_the_late_answer_of_the_first_question_counts(run: Run) -> None:
    asked_twice(run)
    early, late = run.answers
    early(0.5, "")
    assert run.phase is Phase.SCORED and run.rewards == [0.5]
    late(0.7, "")
    assert run.rewards == [0.5], "one score is enough"


def test_the_late_failure_of_the_first_question_does_not(run: Run) -> None:
    asked_twice(run)
    early, late = run.answers
    early(None, "killed")
    assert run.phase is Phase.SCORING and not isinstance(run.events[-1], ev.ScoreFailed)
    late(0.7, "")
    assert run.rewards == [0.7]


def test_a_request_that_goes_on_from_its_journal_says_from_where(run: Run) -> None:
    orders = run.handle(ev.InstanceLost("a", "died"))
    orders += run.handle(ev.InstanceJoined("a", 8, versions=(0,), life=1))
    port = FleetPort(cast(Any, run))
    for order in orders:
        if isinstance(order, act.Dispatch):
            port.do(order)
    assert list(run.later) == [ev.Continued(RID, 1, 3)], "the other one has no journal"


def test_a_prompt_that_is_set_aside_is_told_at_once_and_the_stop_keeps_its_reason(
    run: Run,
) -> None:
    keeper = KeeperPort(cast(Any, run))
    ended = SimpleNamespace(drop=lambda group: None, num_tokens=lambda group: 0)
    run.samples, run.envs = ended, SimpleNamespace(forget=lambda group: None)
    run.journals = cast(Any, SimpleNamespace(forget=lambda group, size: None))
    run.__dict__["dropped"] = {"failed": 0}
    run.__dict__["records"] = SimpleNamespace(
        totals=SimpleNamespace(discarded_tokens=0), keep=lambda: None
    )
    keeper.do(act.EndGroup(0, 0, act.End.FAILED, None, "raised KeyError"))
    keeper.do(act.SetAside(4, 0, 4, False, "raised KeyError"))
    assert run.lines == ["prompt 4 is set aside: raised KeyError"]
    keeper.do(act.Stop("too many", done=False))
    assert run.__dict__["stop"].reason == "too many; the last group failed: raised KeyError"
