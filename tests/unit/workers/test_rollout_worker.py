"""A rollout instance and a relay as objects, without a process: orders in, what they say out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.engine.sequence import Status
from dora_rl.envs.host import Answer
from dora_rl.model.directory import HfDirectory
from dora_rl.setup.layout import plan_layout
from dora_rl.types import RequestId
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.workers import messages as msg
from dora_rl.workers.relay import RelayWorker
from dora_rl.workers.rollout import RolloutWorker
from dora_rl.workers.worker import Role, Setup
from tests.kit.places import MODEL

KEY = "6b" * 32
LONG = {"forced_length_median": 40.0, "forced_length_sigma": 0.01}
T = TypeVar("T")


def publish(root: Path, *versions: int) -> SharedMemoryWeightStore:
    store, model = SharedMemoryWeightStore(root), HfDirectory(MODEL)
    for version in versions:
        store.publish(version, [(name, model.tensor(name)) for name in model.names()])
    return store


def config_of(folder: Path, **rollout: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"path": str(MODEL)},
            "rollout": {"kv_bytes_max": 1 << 22, "num_instances": 2, "tokens_max": 64, **rollout},
            "weights": {"root": str(folder / "store")},
            "runtime": {"device": "cpu", "run_dir": str(folder / "run")},
        }
    )


class Instances:
    """Some of one host, and a controller that passes on what one says to another."""

    def __init__(self, folder: Path, names: Sequence[str], **rollout: Any) -> None:
        config = config_of(folder, **rollout)
        layout = plan_layout(config, "cpu")
        layout.transfer_root.mkdir(parents=True, exist_ok=True)
        publish(layout.weights_root, 0, 1)
        self.said: list[tuple[str, msg.Message]] = []
        self.workers: dict[str, RolloutWorker] = {}
        for name in names:
            extra = layout.instance_extra(name) | {"resident_max": 2}
            setup = Setup("instance", name, 0, "", KEY, str(folder / "run"), config, extra)
            self.workers[name] = RolloutWorker(setup, self.hears(name))
            self.workers[name].join()
            self.workers[name].hear(msg.LoadSealed(act.Load(name, 0, None, attempt=3)))
        for name in names:
            assert self.event(name, ev.Loaded).attempt == 3

    def hears(self, name: str) -> msg.Send:
        return lambda message: self.said.append((name, message))

    def until(self, found: Callable[[], T | None], turns: int = 4000) -> T:
        """Everybody takes turns until it is found."""
        for _ in range(turns):
            if (there := found()) is not None:
                return there
            for worker in self.workers.values():
                worker.turn()
        raise AssertionError(f"nothing of it was said: {self.said}")

    def take(self, name: str, kind: type[T]) -> T | None:
        for place, (who, message) in enumerate(self.said):
            if who == name and isinstance(message, kind):
                del self.said[place]
                return message
        return None

    def event(self, name: str, kind: type[T]) -> T:
        def look() -> T | None:
            for who, message in self.said:
                event = message.event if isinstance(message, msg.Told) else None
                if who == name and isinstance(event, kind):
                    self.said.remove((who, message))
                    return event
            return None

        return self.until(look)

    def message(self, name: str, kind: type[T]) -> T:
        return self.until(lambda: self.take(name, kind))

    def dispatch(self, name: str, *samples: int, opens: bool | None = None) -> None:
        epochs = tuple(0 for _ in samples)
        action = act.Dispatch(name, 7, 0, 0, samples, epochs, resume=False)
        self.workers[name].hear(msg.Dispatched(action, msg.ints([1, 4, 5]), opens=opens))


def test_what_it_generates_is_said_once_with_its_digest(tmp_path: Path) -> None:
    one = Instances(tmp_path, ["a"])
    joined = one.event("a", ev.InstanceJoined)
    assert joined.slots_max > 0 and joined.resident_max == 2
    one.dispatch("a", 0, 1)
    finished = [one.message("a", msg.Finished) for _ in range(2)]
    assert {said.event.request for said in finished} == {RequestId(7, 0), RequestId(7, 1)}
    for said in finished:
        (sample,) = said.samples
        assert said.event.num_tokens == len(sample.token_ids) and said.event.digest
    assert not one.workers["a"].turn() and one.take("a", msg.Finished) is None
    one.workers["a"].close()


@pytest.mark.parametrize("how", list(act.How))
def test_a_request_moves_with_its_cache_or_its_tokens(tmp_path: Path, how: act.How) -> None:
    """The whole way: the source keeps it until the destination has it, and it ends there."""
    pair, rid = Instances(tmp_path, ["a", "b"], **LONG), RequestId(7, 0)
    source, destination = pair.workers["a"], pair.workers["b"]
    pair.dispatch("a", 0)
    for _ in range(8):
        source.turn()
    source.hear(act.Move(rid, 0, 0, "a", "b", how, attempt=2))
    export = pair.message("a", msg.Exported)
    assert export.dst == "b" and export.attempt == 2 and rid in source.moves.leaving
    assert (export.num_bytes > 0 and Path(export.path).exists()) == (how is act.How.KV)
    destination.hear(export)
    assert pair.message("b", msg.Imported).error == ""
    source.hear(msg.MoveEnded(rid, done=True))
    assert rid not in source.moves.leaving and source.engine.find(rid) is None
    assert not Path(export.path).exists()
    assert pair.message("b", msg.Finished).event.request == rid
    assert pair.take("a", msg.Finished) is None


def test_a_request_whose_cache_is_gone_stays_where_it_was(tmp_path: Path) -> None:
    pair, rid = Instances(tmp_path, ["a", "b"], **LONG), RequestId(7, 0)
    source = pair.workers["a"]
    pair.dispatch("a", 0)
    for _ in range(8):
        source.turn()
    source.hear(act.Move(rid, 0, 0, "a", "b", act.How.KV))
    export = pair.message("a", msg.Exported)
    Path(export.path).unlink()
    pair.workers["b"].hear(export)
    assert "No such file" in pair.message("b", msg.Imported).error
    source.hear(msg.MoveEnded(rid, done=False))
    assert pair.message("a", msg.Finished).event.request == rid


def test_one_that_was_aborted_on_its_way_leaves_nothing(tmp_path: Path) -> None:
    pair, rid = Instances(tmp_path, ["a"], **LONG), RequestId(7, 0)
    source = pair.workers["a"]
    pair.dispatch("a", 0)
    for _ in range(8):
        source.turn()
    source.hear(act.Move(rid, 0, 0, "a", "b", act.How.KV))
    export = pair.message("a", msg.Exported)
    source.hear(act.Abort("a", rid, 0))
    assert not Path(export.path).exists() and source.engine.find(rid) is None
    source.hear(act.Move(rid, 0, 0, "a", "b", act.How.KV))
    assert pair.take("a", msg.Exported) is None, "it is not there any more"


def test_parked_asleep_and_under_another_version_it_ends_all_the_same(tmp_path: Path) -> None:
    one, rid = Instances(tmp_path, ["a"], **LONG), RequestId(7, 0)
    worker = one.workers["a"]
    one.dispatch("a", 0)
    for _ in range(4):
        worker.turn()
    worker.hear(act.Park("a", rid, 0))
    assert worker.engine.is_parked(rid)
    worker.hear(act.Unpark("a", rid, 0, 0))
    assert not worker.engine.is_parked(rid)
    worker.hear(msg.LoadSealed(act.Load("a", 1, None)))
    one.event("a", ev.Loaded)
    worker.hear(act.Reversion("a", rid, 0, 1))
    worker.hear(act.Sleep("a"))
    before = worker.engine.stats().steps
    for _ in range(20):
        worker.turn()
    assert worker.engine.stats().steps == before, "it sleeps"
    worker.hear(act.Wake("a"))
    segments = one.message("a", msg.Finished).event.segments
    assert [segment.version for segment in segments] == [0, 1]
    worker.hear(act.Unload("a", 0))
    assert worker.engine.versions() == (1,)


def test_a_version_that_is_not_there_is_waited_for_and_a_damaged_one_is_told(
    tmp_path: Path,
) -> None:
    one = Instances(tmp_path, ["a"])
    worker, store = one.workers["a"], SharedMemoryWeightStore(tmp_path / "store")
    worker.hear(msg.LoadSealed(act.Load("a", 5, None)))
    worker.turn()
    assert worker.loads.awaited == [5] and worker.idle_s < 0.1
    publish(store.root, 5)
    (file,) = (store.root / "00000005").glob("*.safetensors")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    failed = one.event("a", ev.LoadFailed)
    assert failed.version == 5 and failed.reason
    assert 5 not in worker.engine.versions()


def test_a_turn_is_asked_about_and_its_answer_ends_or_goes_on(tmp_path: Path) -> None:
    one, rid = Instances(tmp_path, ["a"], tokens_max=12), RequestId(7, 0)
    worker = one.workers["a"]
    one.dispatch("a", 0, opens=False)
    asked = one.message("a", msg.TurnEnded)
    (so_far,) = asked.samples
    assert so_far.request == rid and so_far.turns == 1
    worker.hear(msg.Observed(rid, 0, 9, Answer((4,))))
    seq = worker.engine.find(rid)
    assert seq is not None and seq.status is Status.IDLE, "an answer to another turn"
    worker.hear(msg.Observed(rid, 0, 1, Answer((4, 5))))
    again = one.message("a", msg.TurnEnded)
    (so_far,) = again.samples
    assert so_far.turns == 2 and (so_far.loss_mask == 0).sum() == 2
    worker.hear(msg.Observed(rid, 0, 2, Answer(done=True, reward=0.5)))
    (sample,) = one.message("a", msg.Finished).samples
    assert sample.reward == 0.5 and len(sample.token_ids) == len(so_far.token_ids)


def test_an_environment_that_fails_fails_the_sample(tmp_path: Path) -> None:
    one, rid = Instances(tmp_path, ["a"], tokens_max=12), RequestId(7, 0)
    one.dispatch("a", 0, opens=False)
    one.message("a", msg.TurnEnded)
    one.workers["a"].hear(msg.Observed(rid, 0, 1, Answer(error="boom")))
    failed = one.event("a", ev.SampleFailed)
    assert failed.request == rid and failed.reason == "boom"
    assert one.workers["a"].engine.find(rid) is None


def test_what_is_no_order_is_a_mistake(tmp_path: Path) -> None:
    one = Instances(tmp_path, ["a"])
    with pytest.raises(AssertionError, match="does not hear"):
        one.workers["a"].hear(msg.Ready())


class Relay:
    """A relay's worker, on the controller's host or on another one."""

    def __init__(self, folder: Path, *, at_head: bool) -> None:
        self.said: list[msg.Message] = []
        root, transfer = folder / "weights", folder / "kv"
        transfer.mkdir(parents=True)
        where = {
            "weights_root": str(root),
            "transfer_root": str(transfer),
            "at_head": at_head,
            "ip": "127.0.0.1",
        }
        setup = Setup("relay", "relay", 0, "", KEY, str(folder), config_of(folder), where)
        self.root, self.transfer = root, transfer
        self.role: Role = RelayWorker(setup, self.said.append)
        self.role.join()
        (serving,) = [one for one in self.said if isinstance(one, msg.Serving)]
        self.holds, self.address = serving.holds, f"tcp://127.0.0.1:{serving.port}"


def test_a_relay_fetches_lets_go_and_takes_its_cache_with_it(tmp_path: Path) -> None:
    publish(tmp_path / "head" / "weights", 2)
    head, far = Relay(tmp_path / "head", at_head=True), Relay(tmp_path / "far", at_head=False)
    assert head.holds == (2,) and far.holds == ()
    far.role.hear(msg.Fetch(2, (head.address,)))
    until = time.monotonic() + 60.0
    while not any(isinstance(one, msg.Fetched) for one in far.said):
        assert time.monotonic() < until, "it never came"
        time.sleep(0.01)
    (fetched,) = [one for one in far.said if isinstance(one, msg.Fetched)]
    assert fetched.version == 2 and fetched.num_bytes > 0
    assert SharedMemoryWeightStore(far.root).versions() == [2]
    far.role.hear(msg.Retire((2,)))
    assert not SharedMemoryWeightStore(far.root).versions()
    with pytest.raises(AssertionError, match="does not hear"):
        far.role.hear(msg.Ready())
    head.role.drop()
    far.role.drop()
    assert not far.root.exists() and not far.transfer.exists()
    assert SharedMemoryWeightStore(head.root).versions() == [2], "that one is the learner's"
