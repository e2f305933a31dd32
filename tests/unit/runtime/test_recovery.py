"""Which ends of a worker stop a run, and which cost it a worker."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora_rl.controller.recovery import RESTARTS_MAX, STARTS_MAX, Recovery
from dora_rl.controller.scoring import ScoringPool
from dora_rl.core import events as ev
from dora_rl.workers.last_words import why_ended


class Worker:
    def __init__(self, name: str, life: int = 0) -> None:
        self.incarnation = life
        self.name, self.role = name, name.rstrip("0123456789")
        self.joined = True
        self.process = self
        self.ended = False
        self.last_words = ""

    def poll(self) -> int | None:
        return 1 if self.ended else None


class Run:
    """What recovery sees of a run: its workers, and what becomes of it."""

    def __init__(self) -> None:
        names = ("instance0", "instance1", "learner")
        self.workers = {name: Worker(name) for name in names}
        self.started: list[str] = []
        self.log = "no GPU"
        self.pool = SimpleNamespace(
            workers=self.workers,
            closing=False,
            restart=self.restart,
            log_tail=lambda _: self.log,
            why_ended=lambda name: why_ended(
                self.workers[name].last_words, self.workers[name].poll()
            ),
        )
        self.journals = SimpleNamespace(collect=lambda *args, **kwargs: None)
        self.state = SimpleNamespace(groups={})
        self.stop = None
        self.events: list[ev.Event] = []
        self.handle = self.events.append
        self.lines: list[str] = []
        self.on_wait = self.lines.extend
        self.recovery = Recovery(cast(Any, self))

    def restart(self, name: str) -> None:
        self.workers[name] = Worker(name, self.workers[name].incarnation + 1)
        self.workers[name].joined = False
        self.started.append(name)

    def end(self, name: str, times: int = 1) -> None:
        for _ in range(times):
            self.workers[name].ended = True
            self.recovery.lost(name)

    def stops(self) -> list[str]:
        return [e.reason for e in self.events if isinstance(e, ev.StopRequested)]


@pytest.fixture
def run() -> Run:
    return Run()


def scorers(run: Run) -> ScoringPool:
    """Two reward workers that start well, beside the others."""
    pool = ScoringPool(cast(Any, run.pool), 2, 60.0, {})
    for name in pool.names:
        run.workers[name] = Worker(name)
    run.scoring, run.params = pool, SimpleNamespace(attempts_max=4)  # type: ignore[attr-defined]
    return pool


def end_scorer(run: Run, name: str) -> None:
    run.recovery.joined(name)
    run.end(name)


def test_rewards_that_only_end_stop_the_run(run: Run) -> None:
    pool = scorers(run)
    for turn in range(11):
        end_scorer(run, pool.names[turn % 2])
    assert not run.stops() and len(run.started) == 11
    end_scorer(run, "reward1")
    (reason,) = run.stops()
    assert "ended 12 times with no score in between" in reason and "no GPU" in reason
    assert "\n" not in reason


def test_rewards_that_end_now_and_then_are_replaced(run: Run) -> None:
    pool = scorers(run)
    for turn in range(100):
        end_scorer(run, "reward0")
        if turn % 10 == 9:
            pool.scored("reward1", {"id": 0, "results": []})
    assert not run.stops() and len(run.started) == 100


def test_an_instance_that_ends_is_replaced(run: Run) -> None:
    run.end("instance1")
    assert run.events == [ev.InstanceLost("instance1", "its process ended", incarnation=0)]
    assert run.started == ["instance1"] and not run.lines
    run.end("instance1")
    assert run.events[1:] == [ev.InstanceLost("instance1", "its process ended", incarnation=1)]


def test_why_a_learner_ended_is_in_the_log_and_on_the_console(run: Run) -> None:
    run.start_learner = lambda: run.restart("learner")  # type: ignore[attr-defined]
    run.workers["learner"].last_words = "out of memory on the GPU: 2 GiB more were wanted"
    run.end("learner")
    reason = "out of memory on the GPU: 2 GiB more were wanted"
    assert run.events == [ev.TrainerLost(reason, incarnation=0)]
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
    run.workers["instance0"].ended = True
    run.end("instance1", STARTS_MAX)
    assert run.stops() == ["instance1 keeps ending: its process ended; its log ends: no GPU"]


def test_a_learner_is_never_left_out(run: Run) -> None:
    run.recovery.committed()
    run.start_learner = lambda: run.restart("learner")  # type: ignore[attr-defined]
    run.end("learner", STARTS_MAX)
    assert run.stops() == ["learner keeps ending: its process ended; its log ends: no GPU"]


def test_of_ends_at_work_the_core_keeps_count_and_is_told_the_last_words(run: Run) -> None:
    """Instances that live for a minute may end any number of times in a long step."""
    for _ in range(2 * RESTARTS_MAX):
        run.end("instance1")
        run.recovery.joined("instance1")
    assert not run.stops() and len(run.started) == 2 * RESTARTS_MAX
    assert {type(e) for e in run.events} == {ev.InstanceLost}


def test_a_process_that_was_ended_by_a_signal_says_so(run: Run) -> None:
    run.start_learner = lambda: run.restart("learner")  # type: ignore[attr-defined]
    run.workers["learner"].poll = lambda: -9  # type: ignore[method-assign]
    run.end("learner")
    (lost,) = run.events
    assert isinstance(lost, ev.TrainerLost)
    assert lost.reason.startswith("its process ended by SIGKILL")


@pytest.mark.parametrize("name", ["learner", "evaluator"])
def test_whoever_is_killed_again_and_again_is_said_to_be(run: Run, name: str) -> None:
    """A killed process says nothing and leaves an empty log; the system knows what ended it."""

    def starts(why: str = "") -> None:
        run.restart(name)
        run.workers[name].poll = lambda: -9  # type: ignore[method-assign]

    run.log, run.start_learner = "", starts  # type: ignore[attr-defined]
    run.evaluations = SimpleNamespace(lost=starts, give_up=lambda: None)  # type: ignore[attr-defined]
    run.workers[name] = Worker(name)
    starts()
    run.end(name, STARTS_MAX)
    said = run.stops() if name == "learner" else run.lines
    killed = "its process ended by SIGKILL, as the system does when memory runs out"
    assert said[-1].endswith(f"{name} keeps ending: {killed}")


def test_nobody_is_started_again_in_a_run_that_the_core_has_stopped(run: Run) -> None:
    def stops(event: ev.Event) -> None:
        run.events.append(event)
        run.stop = cast(Any, SimpleNamespace(done=False))

    run.handle = stops
    run.end("instance1")
    assert run.events and not run.started


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("ends_run", [False, True])
def test_what_is_fatal_at_a_start(run: Run, committed: bool, ends_run: bool) -> None:
    """Wrong everywhere: always. Wrong with this one: only before the run has worked."""
    if committed:
        run.recovery.committed()
    run.restart("instance1")
    run.recovery.fatal("instance1", {"ends_run": ends_run, "reason": "out of memory"})
    stops = ["instance1: out of memory"] if ends_run or not committed else []
    assert run.stops() == stops
