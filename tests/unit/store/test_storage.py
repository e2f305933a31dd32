"""The sample table of a cluster: payload in shards, metadata with the controller."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora_rl.config import ModelConfig, RunConfig
from dora_rl.controller.loop import Control
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import Phase
from dora_rl.io.connection import TransportError
from dora_rl.io.proof import RunKey
from dora_rl.rewards.base import ScoreItem
from dora_rl.store.samples import SampleIndex
from dora_rl.store.storage import Storage, StorageReader, StorageStream
from dora_rl.types import Finish, Prompt, RequestId, Segment, Trajectory, UserError
from dora_rl.workers import messages as msg
from dora_rl.workers.learner import read_group
from dora_rl.workers.reward import read_items
from dora_rl.workers.worker import Setup
from dora_rl.worlds.hosts import Host
from dora_rl.worlds.services import Shards
from tests.kit.channels import pair
from tests.kit.fakes import Console, FakeWorkers, config_of, files_of
from tests.kit.places import MODEL

KEY = RunKey(b"k" * 32)
PROMPT = Prompt(3, (1, 2), "p")


def stored(event: ev.SampleFinished, ids: list[int]) -> msg.Stored:
    return msg.Stored(event, -0.5 * len(ids), len(ids), ((0, len(ids), 1),), None)


class Shard:
    """A storage shard with the controller's end of its channel in our hands."""

    def __init__(self, run_dir: Path) -> None:
        config = RunConfig(model=ModelConfig(path=str(MODEL)))
        self.controller, far = pair()
        key, extra = KEY.secret.hex(), {"shard": 0, "ip": "127.0.0.1"}
        setup = Setup("storage", "storage0", 0, "", key, str(run_dir), config, extra)
        self.storage = Storage(setup, far.send)
        self.address = f"tcp://127.0.0.1:{self.storage.server.port}"

    def said(self) -> Any:
        assert self.controller.poll(20.0), "the shard said nothing"
        return self.controller.receive()

    def close(self) -> None:
        self.storage.server.close()
        self.storage.samples.close()


@pytest.fixture
def shard(tmp_path: Path):
    shard = Shard(tmp_path)
    yield shard
    shard.close()


def finished(group: int, sample: int, ids: list[int]) -> tuple[ev.SampleFinished, bytes]:
    rid, segments = RequestId(group, sample), (Segment(0, 5),)
    event = ev.SampleFinished(rid, 0, "instance0", len(ids), Finish.STOP, segments)
    sample = Trajectory(rid, 5, ids, [-0.5] * len(ids), [1] * len(ids), segments=segments)
    return event, msg.pack(msg.Finished(event, (sample,)))


def stream(*addresses: str) -> StorageStream:
    return StorageStream(KEY, "instance0", 3, addresses)


def until(what: str, ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20.0
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def test_a_row_is_kept_told_and_read_back(shard: Shard, tmp_path: Path) -> None:
    out = stream(shard.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    out.put(4, finished(4, 1, [8, 9])[1])
    told = [shard.said(), shard.said()]
    event, _ = finished(4, 0, [5, 6, 7])
    assert told[0] == stored(event, [5, 6, 7]), "the controller gets no tokens"
    assert isinstance(told[1], msg.Stored)
    reader = StorageReader(KEY)
    where = msg.Where(shard.address, 4, (1, 0))
    rows = reader.rows(where)
    assert [row.request.sample for row in rows] == [1, 0]
    assert [row.token_ids.tolist() for row in rows] == [[8, 9], [5, 6, 7]]
    assert all(row.text and row.segments == (Segment(0, 5),) for row in rows)
    with pytest.raises(TransportError, match="not all here"):
        reader.rows(replace(where, samples=(0, 3)), wait_s_max=0.1)


def test_learner_and_rewards_read_the_samples_where_they_are(shard: Shard) -> None:
    out = stream(shard.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    out.put(4, finished(4, 1, [8, 9])[1])
    shard.said(), shard.said()
    reader = StorageReader(KEY)
    where = msg.Where(shard.address, 4, (0, 1))
    feed = act.Feed(6, 0, 4, 5, (0, 1))
    fed = msg.Fed(feed, 1, 1, msg.ints([1, 2]), where=where, rewards=(0.5, -1.0))
    group = read_group(fed, reader)
    assert (group.id, group.version, group.prompt_ids.tolist()) == (4, 5, [1, 2])
    assert [(s.token_ids.tolist(), s.reward) for s in group.samples] == [
        ([5, 6, 7], 0.5),
        ([8, 9], -1.0),
    ]
    item = msg.Scorable(ScoreItem("p", "p", ""), 0, replace(where, samples=(1,)))
    (scored,) = read_items(msg.Score(0, (item,), msg.ints()), reader)
    assert scored.completion_ids == (8, 9) and scored.completion


def test_what_a_dead_shard_had_or_missed_is_there_after_its_restart(tmp_path: Path) -> None:
    first = Shard(tmp_path)
    out = stream(first.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    first.said()
    first.close()
    out.put(4, finished(4, 1, [8, 9])[1])  # nobody takes it
    second = Shard(tmp_path)
    assert second.storage.samples.groups() == [4]
    out.move_to([second.address])
    assert second.said().event, "sent again until somebody had it"
    where = msg.Where(second.address, 4, (0, 1))
    rows = StorageReader(KEY).rows(where)
    assert [row.token_ids.tolist() for row in rows] == [[5, 6, 7], [8, 9]]
    second.close()


def test_rollout_lines_are_written_once(tmp_path: Path) -> None:
    first = Shard(tmp_path)
    out = stream(first.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    first.said()
    message = msg.Trained(2, 4, 1, (0,), (0.25,), ({"exact": 0.25},), (3, (1, 2), "p", ""))
    for _ in range(2):
        first.storage.hear(message)
        assert first.said() == msg.Wrote(2, 4)
    first.close()
    second = Shard(tmp_path)
    second.storage.hear(message)
    assert second.said() == msg.Wrote(2, 4)
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 1
    found = lines[0]
    assert found["step"] == 2 and found["version"] == 1 and found["reward"] == 0.25
    assert found["token_ids"] == [5, 6, 7] and found["prompt"] == "p"
    second.storage.hear(msg.Forget(4))
    assert not second.storage.samples.groups()
    second.close()


def test_journals_come_home(shard: Shard, tmp_path: Path) -> None:
    out = stream(shard.address)
    out.append(b"one\n")
    out.append(b"two\n")
    path = tmp_path / "journal" / "instance0.3.jsonl"
    until("lines", lambda: path.is_file() and path.read_bytes() == b"one\ntwo\n")
    out.replace(b"three\n")
    until("new lines", lambda: path.read_bytes() == b"three\n")
    out.close()


def test_the_controller_keeps_what_it_decides_by(tmp_path: Path) -> None:
    index = SampleIndex(tmp_path / "table.log", num_shards=2)
    dropped: list[int] = []
    index.on_drop = dropped.append
    index.addresses = ["tcp://a:1", "tcp://b:2"]
    for sample, ids in enumerate(([5, 6, 7], [8, 9])):
        event, _ = finished(7, sample, ids)
        index.add_stored(stored(event, ids), 3)
        index.add_stored(stored(event, ids), 3)  # told twice
        index.reward(event.request, float(sample))
    fed = index.feed(act.Feed(4, 0, 7, 3, (0, 1)), (1, 2))
    assert fed.where == msg.Where("tcp://b:2", 7, (0, 1))
    assert fed.rewards == (0.0, 1.0) and not fed.samples and fed.prompt_ids.tolist() == [1, 2]
    assert index.num_tokens(7) == 5
    trained = index.trained(7, (0, 1), PROMPT)
    assert [(t.num_tokens, t.version, t.logprob_sum) for t in trained] == [
        (3, 3, -1.5),
        (2, 3, -1.0),
    ]
    due = index.lines_due(4, 7, 3, (0, 1), PROMPT)
    assert (due.step, due.group, due.rewards) == (4, 7, (0.0, 1.0))
    index.drop(7)
    assert dropped == [7]
    index.close()


class Train:
    def prompt(self, place: int) -> Prompt:
        del place
        return PROMPT


def test_a_shard_that_comes_back_is_told_what_it_missed(tmp_path: Path) -> None:
    """Groups 0 and 1 of a batch, in two shards; the second one was away when the step closed."""
    config, console, workers = config_of(tmp_path / "run"), Console(), FakeWorkers()
    files, control = files_of(config, console), Listening()
    index = SampleIndex(tmp_path / "index.log", num_shards=2)
    head = Host("a", "127.0.0.1", {})
    shards = Shards(control, files, index, workers, head, cast(Any, Train()), console)
    shards.start()
    workers.start("instance", "instance0", {})
    one, two = (workers.workers[f"storage{number}"] for number in range(2))
    shards.hear(one, msg.Serving(1, ()))
    assert not shards.is_ready and not workers.take(msg.Shards)
    shards.hear(two, msg.Serving(2, ()))
    addresses = ("tcp://127.0.0.1:1", "tcp://127.0.0.1:2")
    assert workers.take(msg.Shards) == [("instance0", msg.Shards(addresses))]
    event, _ = finished(1, 0, [5])
    shards.hear(two, stored(event, [5]))
    assert control.events == [event] and index.num_tokens(1) == 1
    shards.hear(two, stored(finished(9, 0, [5])[0], [5]))
    assert control.events == [event], "of a request that nobody generates"
    index.reward(event.request, 0.5)
    shards.write_rollouts(0)
    assert [(name, due.group) for name, due in workers.take(msg.Trained)] == [("storage1", 1)]
    assert [name for name, _ in workers.take(msg.Sync)] == ["storage0", "storage1"]
    shards.lost("storage1")
    assert workers.started[-1] == "storage1" and not shards.is_ready
    shards.hear(two, msg.Serving(3, (1, 7)))
    assert [due.group for _, due in workers.take(msg.Trained)] == [1], "again"
    assert workers.take(msg.Forget) == [("storage1", msg.Forget(7))], "it ended meanwhile"
    shards.hear(two, msg.Wrote(0, 1))
    shards.hear(two, msg.Serving(4, (1,)))
    assert not workers.take(msg.Trained) and not workers.take(msg.Forget)
    shards.fatal(replace(two, joined=True), "no room")
    assert console.lines == ["storage1: no room"]
    with pytest.raises(UserError, match="storage0: no room"):
        shards.fatal(one, "no room")
    files.lock.release()


class Listening(Control):
    """A core with group 1 in the batch of step 0, that only listens."""

    def __init__(self) -> None:
        requests = [SimpleNamespace(id=RequestId(1, 0), phase=Phase.SCORED)]
        groups = {1: SimpleNamespace(version=3, prompt=0, requests=requests)}
        batches = {0: SimpleNamespace(groups=[1])}
        super().__init__(cast(Any, SimpleNamespace(groups=groups, batches=batches)))
        self.events: list[ev.Event] = []

    def is_generating(self, request: RequestId, epoch: int) -> bool:
        del epoch
        return request.group in self.state.groups

    def handle(self, event: ev.Event) -> None:
        self.events.append(event)
