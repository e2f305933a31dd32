"""The sample table of a cluster: payload in shards, metadata with the controller."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_rl.config import ModelConfig, RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.io.transport import TransportError
from dora_rl.io.wire import Channel, Message, encode_event, pack
from dora_rl.store.sample_index import SampleIndex
from dora_rl.store.storage import Storage
from dora_rl.store.storage_client import StorageReader, StorageStream
from dora_rl.store.trajectories import to_message
from dora_rl.types import Finish, Prompt, RequestId, Segment, Trajectory
from dora_rl.workers.learner import read_group
from dora_rl.workers.reward import read_items
from dora_rl.workers.worker import Setup

MODEL = Path(__file__).parents[3] / "recipes" / "models" / "tiny"
KEY = b"k" * 32
PROMPT = Prompt(3, (1, 2), "p")


def meta(ids: list[int]) -> dict[str, Any]:
    return {"logprob_sum": -0.5 * len(ids), "turns": [[0, len(ids), 1]], "reward": None}


class Shard:
    """A storage shard with the controller's end of its channel in our hands."""

    def __init__(self, run_dir: Path) -> None:
        config = RunConfig(model=ModelConfig(path=str(MODEL)))
        far, near = Pipe()
        self.controller = Channel(near)
        setup = Setup("storage", "storage0", 0, "", KEY.hex(), str(run_dir), config, {"shard": 0})
        self.storage = Storage(setup, Channel(far))
        self.address = f"tcp://127.0.0.1:{self.storage.server.port}"

    def said(self) -> Message:
        assert self.controller.poll(20.0), "the shard said nothing"
        return self.controller.receive()

    def close(self) -> None:
        self.storage.server.close()
        self.storage._samples.close()


@pytest.fixture
def shard(tmp_path: Path):
    shard = Shard(tmp_path)
    yield shard
    shard.close()


def finished(group: int, sample: int, ids: list[int]) -> tuple[ev.SampleFinished, bytes]:
    rid, segments = RequestId(group, sample), (Segment(0, 5),)
    event = ev.SampleFinished(rid, 0, "instance0", len(ids), Finish.STOP, segments)
    sample = Trajectory(rid, 5, ids, [-0.5] * len(ids), [1] * len(ids), segments=segments)
    entries, arrays = to_message([sample])
    return event, pack("finished", {"event": encode_event(event), "samples": entries}, arrays)


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
    assert [message.kind for message in told] == ["stored", "stored"]
    assert told[0].body["meta"] == meta([5, 6, 7]) | {"num_generated": 3}
    assert not told[0].arrays, "the controller gets no tokens"
    reader = StorageReader(KEY)
    where = {"address": shard.address, "group": 4, "samples": [1, 0]}
    rows = reader.rows(where)
    assert [row.request.sample for row in rows] == [1, 0]
    assert [row.token_ids.tolist() for row in rows] == [[8, 9], [5, 6, 7]]
    assert all(row.text and row.segments == (Segment(0, 5),) for row in rows)
    with pytest.raises(TransportError, match="not all here"):
        reader.rows(where | {"samples": [0, 3]}, wait_s_max=0.1)


def test_learner_and_rewards_read_the_samples_where_they_are(shard: Shard) -> None:
    out = stream(shard.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    out.put(4, finished(4, 1, [8, 9])[1])
    shard.said(), shard.said()
    reader = StorageReader(KEY)
    where = {"address": shard.address, "group": 4, "samples": [0, 1]}
    prompt_ids = {"prompt_ids": np.array([1, 2], dtype=np.int32)}
    message = Message("order", {"rows": where, "rewards": [0.5, -1.0]}, prompt_ids)
    group = read_group(act.Feed(6, 0, 4, 5, (0, 1)), message, reader)
    assert (group.id, group.version, group.prompt_ids.tolist()) == (4, 5, [1, 2])
    assert [(s.token_ids.tolist(), s.reward) for s in group.samples] == [
        ([5, 6, 7], 0.5),
        ([8, 9], -1.0),
    ]
    item = {"prompt": "p", "prompt_text": "p", "completion": "", "answer": None, "columns": {}}
    item |= {"finish": "stop", "num_tokens": 0, "rows": where | {"samples": [1]}}
    (scored,) = read_items([item], np.zeros(0, dtype=np.int32), reader)
    assert scored.completion_ids == (8, 9) and scored.completion


def test_what_a_dead_shard_had_or_missed_is_there_after_its_restart(tmp_path: Path) -> None:
    first = Shard(tmp_path)
    out = stream(first.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    first.said()
    first.close()
    out.put(4, finished(4, 1, [8, 9])[1])  # nobody takes it
    second = Shard(tmp_path)
    assert second.storage.groups() == [4]
    out.move_to([second.address])
    assert second.said().body["event"], "sent again until somebody had it"
    where = {"address": second.address, "group": 4, "samples": [0, 1]}
    rows = StorageReader(KEY).rows(where)
    assert [row.token_ids.tolist() for row in rows] == [[5, 6, 7], [8, 9]]
    second.close()


def test_rollout_lines_are_written_once(tmp_path: Path) -> None:
    first = Shard(tmp_path)
    out = stream(first.address)
    out.put(4, finished(4, 0, [5, 6, 7])[1])
    first.said()
    body = {"step": 2, "group": 4, "version": 1, "samples": [0], "rewards": [0.25]}
    body |= {"parts": [{"exact": 0.25}]}
    message = Message("trained", body | {"prompt": [3, [1, 2], "p", ""]})
    for _ in range(2):
        first.storage.hear(message)
        assert first.said().body == {"step": 2, "group": 4}
    first.close()
    second = Shard(tmp_path)
    second.storage.hear(message)
    assert second.said().kind == "wrote"
    lines = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
    assert len(lines) == 1
    found = lines[0]
    assert found["step"] == 2 and found["version"] == 1 and found["reward"] == 0.25
    assert found["token_ids"] == [5, 6, 7] and found["prompt"] == "p"
    second.storage.hear(Message("drop", {"group": 4}))
    assert not second.storage.groups()
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


class Mailbox:
    """What the index says to shards. Stands for the pool."""

    closing = False

    def __init__(self) -> None:
        self.sent: list[tuple[str, str, dict[str, Any]]] = []
        self.workers: dict[str, Any] = {}

    def start(self, role: str, name: str, extra: dict[str, Any]) -> None:
        del role, name, extra

    def send(self, name: str, kind: str, body: Mapping[str, Any], arrays: object = None) -> None:
        del arrays
        self.sent.append((name, kind, dict(body)))


def test_the_controller_keeps_what_it_decides_by(tmp_path: Path) -> None:
    mail = Mailbox()
    index = SampleIndex(tmp_path / "table.log", num_shards=2)
    index.start(mail)  # type: ignore[arg-type]
    index.addresses = ["tcp://a:1", "tcp://b:2"]
    for sample, ids in enumerate(([5, 6, 7], [8, 9])):
        event, _ = finished(7, sample, ids)
        index.put_meta(event, 3, meta(ids))
        index.put_meta(event, 3, meta(ids))  # told twice
        index.reward(event.request, float(sample))
    body, arrays = index.feed(act.Feed(4, 0, 7, 3, (0, 1)), (1, 2))
    assert body["rows"] == {"address": "tcp://b:2", "group": 7, "samples": [0, 1]}
    assert body["rewards"] == [0.0, 1.0]
    assert list(arrays) == ["prompt_ids"]
    assert index.num_tokens(7) == 5
    trained = index.trained(7, (0, 1), PROMPT)
    assert [(t.num_tokens, t.version, t.logprob_sum) for t in trained] == [
        (3, 3, -1.5),
        (2, 3, -1.0),
    ]
    index.closing(4, 7, 3, (0, 1), PROMPT)
    index.drop(7)
    assert [(name, kind) for name, kind, _ in mail.sent] == [
        ("storage1", "trained"),
        ("storage1", "drop"),
    ]
    mail.sent.clear()
    index.ready("storage1", "tcp://b:3", has=[7, 9], alive={9})
    assert [(kind, body["group"]) for _, kind, body in mail.sent] == [("trained", 7), ("drop", 7)]
    index.wrote(4, 7)
    mail.sent.clear()
    index.ready("storage1", "tcp://b:4", has=[9], alive={9})
    assert not mail.sent
    index.close()
