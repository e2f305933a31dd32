"""A vLLM engine behind the instance's calls: the native engine's tokens, and the version rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

pytest.importorskip("vllm")

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, continuation, read_journal
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.vllm.engine import VllmEngine, VllmOptions
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.ports import Canary
from dora_rl.types import (
    Finish,
    RequestId,
    SamplingParams,
    Trajectory,
    UserError,
)
from dora_rl.weights.store import SealedFile, SharedMemoryWeightStore
from tests.kit.tiny_models import VOCAB, save_model

GREEDY = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(tokens_max=24, ignore_eos=True)
OPTIONS = {"context_max": 256, "seqs_max": 16, "kv_bytes_max": 1 << 28}


@dataclass
class World:
    """Two sealed versions, the native engine with both, and one vLLM engine."""

    native: Engine
    vllm: VllmEngine
    sealed: Callable[[int], SealedFile]
    journal: Path

    def hold(self, version: int) -> VllmEngine:
        """The vLLM engine, empty, with this version and no other."""
        for seq in list(self.vllm._seqs):
            self.vllm.abort(seq)
        self.vllm.step()
        if self.vllm.versions() != (version,):
            for old in self.vllm.versions():
                self.vllm.retire(old)
            self.vllm.load(version, self.sealed(version))
        return self.vllm


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    torch.set_num_threads(1)
    paths = [tmp_path_factory.mktemp(f"model{seed}") for seed in range(2)]
    store = SharedMemoryWeightStore(tmp_path_factory.mktemp("weights"))
    for seed, path in enumerate(paths):
        save_model("qwen3-tied", path, seed)
    native = Engine(read_spec(paths[0]), EngineOptions(**OPTIONS, versions_max=2))
    ids = tuple((7 + i * 31) % VOCAB for i in range(16))
    for version, path in enumerate(paths):
        native.load(version, path)
        canary = Canary(ids, tuple(native.runner.score(native.residency.slots[version], ids)))
        source = HfDirectory(path)
        store.publish(version, [(n, source.tensor(n)) for n in source.names()], canary)
    journal = tmp_path_factory.mktemp("journal") / "journal.jsonl"
    options = EngineOptions(**OPTIONS, versions_max=1)
    vllm = VllmEngine(VllmOptions(str(paths[0]), ()), options, journal=Journal(journal, every=1))
    yield World(native, vllm, store.open, journal)


def prompts() -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(5)
    lengths = (1, 5, 17, 40, 33)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


def submit(engine: Engine | VllmEngine, version: int, params: SamplingParams) -> None:
    for index, prompt in enumerate(prompts()):
        engine.submit(Request(RequestId(index, 0), version, prompt, params, seed=3))


def finish(engine: Engine | VllmEngine) -> dict[RequestId, Trajectory]:
    done: dict[RequestId, Trajectory] = {}
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                done[output.id] = output.trajectory
    return done


def check_equal(ours: dict[RequestId, Trajectory], theirs: dict[RequestId, Trajectory]) -> None:
    assert ours.keys() == theirs.keys()
    for key, trajectory in ours.items():
        assert trajectory.token_ids.tolist() == theirs[key].token_ids.tolist()
        pairs = zip(trajectory.logprobs, theirs[key].logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-4


def test_greedy_tokens_are_the_native_engines_under_each_version(world: World) -> None:
    answers = []
    for version in (0, 1, 0):
        submit(world.native, version, GREEDY)
        submit(world.hold(version), version, GREEDY)
        answers.append(finish(world.vllm))
        check_equal(answers[-1], finish(world.native))
    assert answers[0] != answers[1]
    assert answers[0] == answers[2]


def test_a_request_draws_by_its_own_seed(world: World) -> None:
    engine = world.hold(0)
    submit(engine, 0, DRAWN)
    together = finish(engine)
    for index, prompt in enumerate(prompts()):
        engine.submit(Request(RequestId(index, 0), 0, prompt, DRAWN, seed=3))
        alone = finish(engine)[RequestId(index, 0)]
        assert alone.token_ids.tolist() == together[RequestId(index, 0)].token_ids.tolist()
    engine.submit(Request(RequestId(4, 0), 0, prompts()[4], DRAWN, seed=4))
    assert (
        finish(engine)[RequestId(4, 0)].token_ids.tolist()
        != together[RequestId(4, 0)].token_ids.tolist()
    )


def test_parked_requests_outlive_a_change_of_version(world: World) -> None:
    engine = world.hold(0)
    submit(engine, 0, GREEDY)
    for _ in range(6):
        engine.step()
    with pytest.raises(UserError, match="requests"):
        engine.retire(0)
    for index in range(5):
        engine.park(RequestId(index, 0))
    engine.retire(0)
    engine.load(1, world.sealed(1))
    engine.submit(Request(RequestId(9, 0), 1, (1, 2, 3), GREEDY))
    with pytest.raises(UserError, match="not resident"):
        engine.unpark(RequestId(0, 0))
    other = finish(engine)
    assert other[RequestId(9, 0)].version == 1
    engine.retire(1)
    engine.load(0, world.sealed(0))
    for index in range(5):
        engine.unpark(RequestId(index, 0))
    submit(world.native, 0, GREEDY)
    check_equal(finish(engine), finish(world.native))


def test_a_killed_instance_continues_from_its_journal(world: World) -> None:
    engine = world.hold(0)
    submit(engine, 0, GREEDY)
    for _ in range(7):
        engine.step()
    saved = {request.id: request for request in read_journal(world.journal)}
    assert all(len(saved[RequestId(index, 0)].resume_ids) >= 6 for index in range(5))
    world.hold(0)
    for request in saved.values():
        engine.submit(request)
    submit(world.native, 0, GREEDY)
    check_equal(finish(engine), finish(world.native))


def test_a_move_prefills_again(world: World) -> None:
    engine = world.hold(0)
    submit(engine, 0, GREEDY)
    for _ in range(5):
        engine.step()
    export = engine.export(RequestId(3, 0))
    assert not export.has_kv
    seq = engine.find(RequestId(3, 0))
    assert seq is not None
    request = continuation(seq)
    export.done()
    world.native.submit(request)  # any instance of the same version continues it
    moved = finish(world.native)
    rest = finish(engine)
    submit(world.native, 0, GREEDY)
    check_equal(moved | rest, finish(world.native))


def test_stops_and_limits(world: World) -> None:
    engine = world.hold(0)
    first = prompts()[2]
    engine.submit(Request(RequestId(0, 0), 0, first, GREEDY))
    whole = finish(engine)[RequestId(0, 0)].token_ids.tolist()
    stop = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True, stop_ids=(whole[5],))
    engine.submit(Request(RequestId(0, 0), 0, first, stop))
    stopped = finish(engine)[RequestId(0, 0)]
    assert stopped.finish is Finish.STOP
    assert stopped.token_ids.tolist() == whole[: whole.index(whole[5]) + 1]
    cases = {(): "empty", (VOCAB,): "vocabulary", (1,) * 250: "context"}
    for prompt, message in cases.items():
        engine.submit(Request(RequestId(1, 0), 0, prompt, GREEDY))
        refused = finish(engine)[RequestId(1, 0)]
        assert refused.finish is Finish.REFUSED
        assert message in refused.error
    engine.submit(Request(RequestId(1, 0), 1, (1, 2), GREEDY))
    assert "not resident" in finish(engine)[RequestId(1, 0)].error


def test_sessions_go_on(world: World) -> None:
    done = []
    for engine in (world.hold(0), world.native):
        params = SamplingParams(tokens_max=5, temperature=0, ignore_eos=True)
        engine.submit(Request(RequestId(0, 0), 0, (3, 4, 5), params, keep=True))
        finish(engine)
        engine.extend(RequestId(0, 0), (7, 8))
        done.append(finish(engine))
        engine.abort(RequestId(0, 0))
    check_equal(*done)
    assert done[0][RequestId(0, 0)].loss_mask.tolist() == [1] * 5 + [0] * 2 + [1] * 5


def test_other_weights_than_published_are_refused(world: World) -> None:
    engine = world.hold(0)
    engine.retire(0)

    class Swapped:
        """The tensors of version 1 under the name and the canary of version 0."""

        version, canary = 0, world.sealed(0).canary
        checksum = world.sealed(1).checksum
        names = staticmethod(world.sealed(1).names)
        tensor = staticmethod(world.sealed(1).tensor)

    with pytest.raises(UserError, match="not the published weights"):
        engine.load(0, Swapped())  # type: ignore[arg-type]
    assert engine.versions() == ()
