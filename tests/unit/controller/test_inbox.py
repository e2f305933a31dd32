"""What workers say, and what becomes of it: notes, last words, moves; without any worker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora_rl.controller.inbox import Inbox
from dora_rl.controller.loop import Control
from dora_rl.controller.ports import FromInstances
from dora_rl.core import events as ev
from dora_rl.core.step import initial
from dora_rl.types import RequestId
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import Envelope, Worker
from dora_rl.worlds.local import SameHost
from tests.kit.fakes import Console, FakeWorkers, config_of, files_of

RID = RequestId(3, 1)


class Listening(Control):
    def __init__(self, params: Any) -> None:
        super().__init__(initial(params))
        self.events: list[ev.Event] = []

    def handle(self, event: ev.Event) -> None:
        self.events.append(event)


class Desk:
    """An inbox over two instances that are not there."""

    def __init__(self, folder: Path) -> None:
        self.console, self.workers = Console(), FakeWorkers()
        self.files = files_of(config_of(folder), self.console)
        self.control = Listening(self.files.params)
        self.lost: list[str] = []
        recovery = SimpleNamespace(
            lost=lambda worker: self.lost.append(worker.name),
            joined=lambda worker: None,
            fatal=lambda worker, said: self.lost.append(said.reason),
        )
        nobody = cast(Any, None)
        parts = (self.control, self.files, self.workers, SameHost(), nobody, nobody)
        self.instances = FromInstances(*parts, self.console)
        self.inbox = Inbox(
            self.workers,
            cast(Any, recovery),
            self.files,
            self.console,
            {"instance": self.instances.hear},
            {},
        )
        for name in ("instance0", "instance1"):
            self.workers.start("instance", name, {})

    def says(self, name: str, message: msg.Message | None, incarnation: int = 0) -> None:
        self.workers.said.append(Envelope(name, "instance", incarnation, message))
        self.inbox.read_next(0.0)

    def worker(self, name: str) -> Worker:
        return self.workers.workers[name]


@pytest.fixture
def desk(tmp_path: Path):
    desk = Desk(tmp_path)
    yield desk
    desk.files.close()
    desk.files.lock.release()


def test_an_old_incarnation_is_not_heard_and_an_end_is(desk: Desk) -> None:
    desk.says("instance0", msg.Note("old"), incarnation=7)
    assert not desk.console.lines
    desk.says("instance0", msg.Note("now"))
    assert desk.console.lines == ["now"]
    desk.says("instance0", msg.Fault("out of memory"))
    assert desk.worker("instance0").last_words == "out of memory" and not desk.lost
    desk.says("instance0", msg.Fatal("no room", ends_run=True))
    desk.says("instance0", None)
    assert desk.lost == ["no room", "instance0"]


def test_what_a_worker_uses_and_what_users_code_raises_is_counted(desk: Desk) -> None:
    desk.says("instance0", msg.Usage(2.0, 3.0, 40, 30))
    assert desk.files.records.totals.busy_s == {"instance0": 2.0}
    totals = desk.files.records.totals
    assert (totals.drafted_tokens, totals.accepted_tokens) == (40, 30)
    desk.says("instance0", msg.UserRaised("reward f", "f.py:1", "KeyError", "Traceback"))
    assert desk.files.records.totals.num_user_errors == 1
    assert "Traceback" in desk.files.user_errors.path.read_text()


def test_a_move_that_the_core_has_given_up_is_cleaned_away(desk: Desk, tmp_path: Path) -> None:
    path = tmp_path / "3.1.0.instance0.kv"
    path.touch()
    desk.says("instance0", msg.Exported(RID, 0, 0, "instance1", 9, str(path)))
    assert not path.exists() and not desk.workers.sent


def test_the_source_forgets_a_request_when_it_has_arrived(desk: Desk) -> None:
    export = msg.Exported(RID, 0, 2, "instance1", 9, "", num_bytes=64, src="instance0")
    desk.says("instance1", msg.Imported(export))
    assert desk.workers.sent == [("instance0", msg.MoveEnded(RID, done=True))]
    (moved,) = desk.control.events
    assert isinstance(moved, ev.Moved) and moved.num_bytes == 64 and moved.attempt == 2
    assert desk.files.records.totals.migrations == 1


def test_the_source_goes_on_where_the_destination_could_not_take_it(desk: Desk) -> None:
    export = msg.Exported(RID, 0, 2, "instance1", 9, "", src="instance0")
    desk.says("instance1", msg.Imported(export, "no room"))
    assert desk.workers.sent == [("instance0", msg.MoveEnded(RID, done=False))]
    (failed,) = desk.control.events
    assert isinstance(failed, ev.MoveFailed) and failed.reason == "no room"


def test_a_version_that_cannot_be_loaded_is_looked_at(desk: Desk) -> None:
    event = ev.LoadFailed("instance0", 0, "damaged")
    desk.says("instance0", msg.Told(event))
    assert desk.control.events == [event], "not on disk yet: it is tried again"
