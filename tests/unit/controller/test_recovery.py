"""Which ends of a worker stop a run, and which cost it a worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora_rl.config import RunConfig
from dora_rl.controller.loop import Control
from dora_rl.controller.recovery import RESTARTS_MAX, STARTS_MAX, Recovery
from dora_rl.controller.scoring import EnvRelay, ScoringPool
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.core.step import initial
from dora_rl.store.journals import Journals
from dora_rl.workers.messages import Fatal, Scored
from tests.kit.fakes import Console, FakeWorkers


class Told(Control):
    """A core that only listens, and stops when it is told to."""

    def __init__(self) -> None:
        super().__init__(initial(Params(attempts_max=4)))
        self.events: list[ev.Event] = []
        self.stops_at_once = False

    def handle(self, event: ev.Event) -> None:
        self.events.append(event)
        if self.stops_at_once:
            self.stop = act.Stop("enough", done=False)


class FakeRanks:
    def __init__(self, workers: FakeWorkers) -> None:
        self._workers = workers

    def start(self) -> None:
        self._workers.restart("learner")


class Run:
    """What recovery sees of a run: its workers, and what becomes of it."""

    def __init__(self, folder: Path) -> None:
        self.workers, self.control, self.console = FakeWorkers(), Told(), Console()
        for role, name in (
            ("instance", "instance0"),
            ("instance", "instance1"),
            ("learner", "learner"),
            ("reward", "reward0"),
            ("reward", "reward1"),
        ):
            self.workers.start(role, name, {}).joined = True
        self.started, self.events = self.workers.started, self.control.events
        self.started.clear()
        self.scoring = ScoringPool(self.workers, 2, 60.0, {})
        config = RunConfig.model_validate({"model": {"path": "x"}})
        self.recovery = Recovery(
            self.control,
            self.workers,
            Journals(folder / "journal"),
            cast(Any, FakeRanks(self.workers)),
            self.scoring,
            EnvRelay(self.workers, config, lambda rid, epoch: None),
            self.console,
        )
        self.lines = self.console.lines

    def end(self, name: str, times: int = 1, status: int = 1) -> None:
        for _ in range(times):
            worker = self.workers.workers[name]
            cast(Any, worker.process).status = status
            self.recovery.lost(worker)

    def end_joined(self, name: str) -> None:
        self.recovery.joined(self.workers.workers[name])
        self.end(name)

    def stops(self) -> list[str]:
        return [e.reason for e in self.events if isinstance(e, ev.StopRequested)]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_reward_workers_that_only_end_stop_the_run(run: Run) -> None:
    for turn in range(11):
        run.end_joined(run.scoring.names[turn % 2])
    assert not run.stops() and len(run.started) == 11
    run.end_joined("reward1")
    (reason,) = run.stops()
    assert "ended 12 times with no score in between" in reason and "no GPU" in reason
    assert "\n" not in reason


def test_reward_workers_that_end_now_and_then_are_replaced(run: Run) -> None:
    for turn in range(100):
        run.end_joined("reward0")
        if turn % 10 == 9:
            run.scoring.hear(run.workers.workers["reward1"], Scored(0, ()))
    assert not run.stops() and len(run.started) == 100


def test_an_instance_that_ends_is_replaced(run: Run) -> None:
    run.end("instance1")
    assert run.events == [ev.InstanceLost("instance1", "its process ended", incarnation=0)]
    assert run.started == ["instance1"] and not run.lines
    run.end("instance1")
    assert run.events[1:] == [ev.InstanceLost("instance1", "its process ended", incarnation=1)]


def test_why_a_learner_ended_is_in_the_log_and_on_the_console(run: Run) -> None:
    run.workers.workers["learner"].last_words = "out of memory on the GPU: 2 GiB more were wanted"
    run.end("learner")
    reason = "out of memory on the GPU: 2 GiB more were wanted"
    assert run.events == [ev.LearnerLost(reason, incarnation=0)]
    assert run.lines == [
        "the learner ended and begins again at the newest version: "
        "out of memory on the GPU: 2 GiB more were wanted"
    ]


def test_before_the_first_step_an_instance_that_cannot_start_stops_the_run(run: Run) -> None:
    run.end("instance1", STARTS_MAX)
    assert run.stops() == ["instance1 keeps ending: its process ended; its log ends: no GPU"]


def test_later_it_is_left_out_and_tried_again_after_a_step(run: Run) -> None:
    run.recovery.committed()
    run.end("instance1", STARTS_MAX)
    assert not run.stops() and run.started == ["instance1"] * (STARTS_MAX - 1)
    why = "its process ended; its log ends: no GPU"
    assert run.lines == [f"instance1 keeps ending and is left out for this step: {why}"]
    lost = [e for e in run.events if isinstance(e, ev.InstanceLost)]
    assert len(lost) == STARTS_MAX, "its requests go on elsewhere each time"
    run.recovery.committed()
    assert run.started == ["instance1"] * STARTS_MAX
    run.recovery.committed()
    assert run.started == ["instance1"] * STARTS_MAX, "it is tried once a step"


def test_nobody_is_left_out_who_is_the_last(run: Run) -> None:
    run.recovery.committed()
    run.workers.kill("instance0")
    run.end("instance1", STARTS_MAX)
    assert run.stops() == ["instance1 keeps ending: its process ended; its log ends: no GPU"]


def test_a_learner_is_never_left_out(run: Run) -> None:
    run.recovery.committed()
    run.end("learner", STARTS_MAX)
    assert run.stops() == ["learner keeps ending: its process ended; its log ends: no GPU"]


def test_of_ends_at_work_the_core_keeps_count_and_is_told_the_last_words(run: Run) -> None:
    """Instances that live for a minute may end any number of times in a long step."""
    for _ in range(2 * RESTARTS_MAX):
        run.end("instance1")
        run.recovery.joined(run.workers.workers["instance1"])
    assert not run.stops() and len(run.started) == 2 * RESTARTS_MAX
    assert {type(e) for e in run.events} == {ev.InstanceLost}


def test_a_process_that_was_ended_by_a_signal_says_so(run: Run) -> None:
    run.end("learner", status=-9)
    (lost,) = run.events
    assert isinstance(lost, ev.LearnerLost)
    assert lost.reason.startswith("its process ended by SIGKILL")


@pytest.mark.parametrize("name", ["learner", "evaluator"])
def test_whoever_is_killed_again_and_again_is_said_to_be(run: Run, name: str) -> None:
    """A killed process says nothing and leaves an empty log; the system knows what ended it."""

    run.workers.log = ""
    run.workers.start(name, name, {})
    restart = SimpleNamespace(lost=lambda why: run.workers.restart(name), give_up=lambda: None)
    run.recovery.evaluations = cast(Any, restart)
    run.end(name, STARTS_MAX, status=-9)
    said = run.stops() if name == "learner" else run.lines
    killed = "its process ended by SIGKILL, as the system does when memory runs out"
    assert said[-1].endswith(f"{name} keeps ending: {killed}")


def test_nobody_is_started_again_in_a_run_that_the_core_has_stopped(run: Run) -> None:
    run.control.stops_at_once = True
    run.end("instance1")
    assert run.events and not run.started


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("ends_run", [False, True])
def test_what_is_fatal_at_a_start(run: Run, committed: bool, ends_run: bool) -> None:
    """Wrong everywhere: always. Wrong with this one: only before the run has worked."""
    if committed:
        run.recovery.committed()
    run.workers.restart("instance1")
    worker = run.workers.workers["instance1"]
    run.recovery.fatal(worker, Fatal("out of memory", ends_run))
    stops = ["instance1: out of memory"] if ends_run or not committed else []
    assert run.stops() == stops
