"""What a learner and the workers that serve the others say, and what becomes of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora_rl.controller.evaluation import KeptVersions
from dora_rl.controller.inbox import FromLearner, Inbox
from dora_rl.controller.loop import Control
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.types import RequestId
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import Envelope, Worker
from dora_rl.worlds.local import OneHost
from tests.kit.fakes import Console, FakeWorkers, config_of, files_of


class Listening(Control):
    def __init__(self, state: Any) -> None:
        super().__init__(state)
        self.events: list[ev.Event] = []

    def handle(self, event: ev.Event) -> None:
        self.events.append(event)


class Depot:
    """Workers that serve the others. Implements `Service`."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def hear(self, worker: Worker, message: msg.Message) -> None:
        self.calls.append(("hear", type(message).__name__))

    def lost(self, name: str) -> None:
        self.calls.append(("lost", name))

    def fatal(self, worker: Worker, reason: str) -> None:
        self.calls.append(("fatal", reason))


class Desk:
    """An inbox over a learner and a relay that are not there, in a run with three versions."""

    def __init__(self, folder: Path) -> None:
        self.console, self.workers, self.depot = Console(), FakeWorkers(), Depot()
        config = config_of(folder)
        self.files = files_of(config, self.console)
        self.control = Listening(self.files.state)
        self.control.state.committed, self.control.state.on_disk = 3, 3
        self.joined: list[str] = []
        recovery = cast(Any, SimpleNamespace(joined=lambda worker: self.joined.append(worker.name)))
        world, nobody = OneHost(), cast(Any, None)
        kept = KeptVersions(config, self.files, world.carrier, self.workers, self.console)
        parts = (self.control, self.files, nobody, world, recovery, kept, self.console)
        self.inbox = Inbox(
            self.workers, recovery, self.files, self.console,
            {"learner": FromLearner(*parts).hear}, {"relay": self.depot},
        )  # fmt: skip
        self.workers.start("learner", "learner", {})
        self.workers.start("relay", "relay", {})

    def says(self, name: str, message: msg.Message | None) -> None:
        self.inbox.read(Envelope(name, name, 0, message))


@pytest.fixture
def desk(tmp_path: Path):
    desk = Desk(tmp_path)
    yield desk
    desk.files.close()
    desk.files.lock.release()


def recomputed(gap: float) -> msg.Told:
    return msg.Told(ev.Recomputed(RequestId(4, 1), 2, 9, gap, gap, 1e-4))


@pytest.mark.parametrize(("durable", "reason"), [(3, "restore it"), (2, "goes back to version 2")])
def test_a_learner_that_comes_back_older_than_the_log_stops_the_run(
    desk: Desk, durable: int, reason: str
) -> None:
    """Somebody took its versions away; the learner's own word never reaches the core."""
    desk.control.state.on_disk = durable
    desk.says("learner", msg.Told(ev.LearnerJoined(2, 2)))
    (stop,) = desk.control.events
    assert isinstance(stop, ev.StopRequested) and reason in stop.reason


def test_a_learner_that_is_where_the_log_is_only_joins(desk: Desk) -> None:
    event = ev.LearnerJoined(3, 3)
    desk.says("learner", msg.Told(event))
    desk.says("learner", msg.Ready())
    assert desk.control.events == [event] and desk.joined == ["learner", "learner"]


def test_samples_that_are_not_their_versions_are_told_of_now_and_then(desk: Desk) -> None:
    desk.says("learner", recomputed(1e-6))
    assert not desk.console.lines and not desk.files.records.totals.samples_mismatched
    for _ in range(12):
        desk.says("learner", recomputed(0.5))
    assert [line.rpartition("(")[2] for line in desk.console.lines] == ["1 so far)", "10 so far)"]
    assert desk.files.records.totals.samples_mismatched == 12 and len(desk.control.events) == 13


def test_what_comes_after_the_stop_is_used_and_not_recorded(desk: Desk) -> None:
    desk.control.stop = act.Stop("enough", done=False)
    event = ev.StepCommitted(3, "checksum")
    desk.says("learner", msg.Committed(event, {}, msg.Usage(2.0, 3.0)))
    assert not desk.control.events and not desk.console.steps
    assert desk.files.records.totals.busy_s == {"learner": 2.0}
    desk.says("learner", recomputed(0.5))
    assert not desk.files.records.totals.samples_mismatched


def test_a_step_that_the_log_has_already_is_not_written_again(desk: Desk) -> None:
    event = ev.StepCommitted(1, "checksum")
    desk.says("learner", msg.Committed(event, {"loss": 1.0}, msg.Usage(2.0, 3.0)))
    assert desk.control.events == [event] and not desk.console.steps


def test_what_a_learner_never_says_is_a_mistake(desk: Desk) -> None:
    with pytest.raises(AssertionError, match="a learner does not say"):
        desk.says("learner", msg.Forget(3))


def test_workers_that_serve_the_others_are_no_business_of_the_core(desk: Desk) -> None:
    relay = desk.workers.workers["relay"]
    desk.says("relay", msg.Fatal("no route", ends_run=True))
    assert not relay.joined
    desk.says("relay", msg.Alive())
    assert relay.joined
    desk.says("relay", msg.Fault("killed"))
    desk.says("relay", None)
    calls = [("fatal", "no route"), ("hear", "Alive"), ("fatal", "killed"), ("lost", "relay")]
    assert desk.depot.calls == calls and not desk.control.events and not desk.joined
