"""A step that runs out of memory: its requests go on, smaller steps follow, and it is told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan
from dora_rl.engine.runner import Runner, make_runner
from dora_rl.engine.scheduler import rows_of
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.types import Finish, RequestId, SamplingParams, Trajectory, UserError, Version
from tests.kit.engines import Saved, finish_all, random_prompts
from tests.unit.engine.ahead_runner import AheadRunner

OPTIONS = EngineOptions(
    block_tokens=16, num_blocks=40, context_max=96, seqs_max=6, step_tokens_max=64
)
PROMPTS = random_prompts((9, 20, 31, 40, 17, 33))
SAMPLED = SamplingParams(tokens_max=24, temperature=1.0, ignore_eos=True)
WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB."


class SmallMemory:
    """Stands for a device: a launch of more rows than fit raises, as do the launches named. The
    cache operations of such a step may have been performed by then, or not."""

    def __init__(self, inner: Runner, rows_max: int = 1 << 20, at: tuple[int, ...] = ()) -> None:
        self.inner, self._rows_max, self._at = inner, rows_max, at
        self.num_launches = self.num_failures = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Any:
        self.num_launches += 1
        if rows_of(plan) > self._rows_max or self.num_launches in self._at:
            self.num_failures += 1
            if self.num_failures % 2:
                self.inner.cache.perform(plan)
            raise torch.OutOfMemoryError(WORDS)
        return self.inner.launch(plan, slots)


def make(
    path: Path,
    wrap: Callable[[Runner], Any] = lambda runner: runner,
    journal: Journal | None = None,
    burst: int = 1,
    **changes: Any,
) -> Engine:
    spec, options = read_spec(path), OPTIONS.model_copy(update=changes)
    runner: Any = make_runner(spec, options)
    runner = wrap(AheadRunner(runner, burst) if burst > 1 else runner)
    engine = Engine(spec, options, journal=journal, runner=runner)
    engine.load(0, path)
    return engine


def finish(engine: Engine, samples: int = 2) -> dict[RequestId, Trajectory]:
    for group, prompt in enumerate(PROMPTS):
        for sample in range(samples):
            engine.submit(Request(RequestId(group, sample), 0, prompt, SAMPLED, seed=3))
    done = finish_all(engine)
    engine.scheduler.pool.check()
    counts = engine.scheduler.pool.counts()
    assert counts.used == 0 and not engine.scheduler.num_host_blocks
    return done


def tokens_of(done: dict[RequestId, Trajectory]) -> dict[tuple[int, int], list[int]]:
    return {(rid.group, rid.sample): t.token_ids.tolist() for rid, t in done.items()}


@pytest.fixture
def path(saved: Saved) -> Path:
    return saved("qwen3")[1]


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("blocks", [40, 16], ids=["roomy", "spilling"])
def test_the_same_responses_come_out(path: Path, burst: int, blocks: int) -> None:
    """Token for token, wherever it fails: no response is lost, doubled or told apart."""
    calm = finish(make(path, num_blocks=blocks))
    for at in [(1, 2, 3), (2, 4), (5,), (12,), (20, 31)]:
        engine = make(path, lambda r, at=at: SmallMemory(r, at=at), burst=burst, num_blocks=blocks)
        found = finish(engine)
        assert engine.runner.num_failures == len(engine.notes) == len(at)
        assert tokens_of(found) == tokens_of(calm)
        assert all(t.finish is Finish.LENGTH for t in found.values())
        for rid, t in found.items():
            assert t.logprobs == pytest.approx(calm[rid].logprobs, abs=1e-4)


def test_steps_become_small_enough_and_stay_so(path: Path) -> None:
    engine = make(path, lambda r: SmallMemory(r, rows_max=20))
    assert len(finish(engine)) == 12
    assert engine.runner.num_failures == len(engine.notes) == 2  # 64, 32, 16
    assert engine.scheduler.step_tokens_max == 16
    assert "a step of 64 rows" in engine.notes[0] and WORDS in engine.notes[0]
    assert "\n" not in engine.notes[0]
    before = engine.runner.num_failures
    for group, prompt in enumerate(PROMPTS):
        engine.submit(Request(RequestId(100 + group, 0), 0, prompt, SAMPLED))
    finish_all(engine)
    assert engine.runner.num_failures == before


def test_blocks_of_a_step_that_failed_are_not_shared(path: Path) -> None:
    """The second step of a long prompt fails while the first is in flight: what it would have
    computed must not be found by the next request with the same prompt."""
    prompt = random_prompts((80,))[0]
    calm = make(path, prefix_cache=False)
    calm.submit(Request(RequestId(0, 0), 0, prompt, replace(SAMPLED, tokens_max=8)))
    want = finish_all(calm)[RequestId(0, 0)]
    engine = make(path, lambda r: SmallMemory(r, at=(2,)), burst=2, step_tokens_max=32)
    for sample in range(3):
        params = replace(SAMPLED, tokens_max=8)
        request = Request(RequestId(0, sample), 0, prompt, params, stream=RequestId(0, 0))
        engine.submit(request)
    found = finish_all(engine)
    assert all(tokens_of(found)[0, s] == want.token_ids.tolist() for s in range(3))


def test_a_session_goes_on(path: Path) -> None:
    """An idle session whose cache was on its way to the host when memory ran out."""

    def talk(engine: Engine) -> Trajectory:
        rid, params = RequestId(7, 0), replace(SAMPLED, tokens_max=6)
        engine.submit(Request(rid, 0, PROMPTS[0], params, keep=True))
        while engine.has_work():
            engine.step()
        finish_all_others(engine)
        engine.extend(rid, [5, 6, 7])
        outputs = []
        while engine.has_work():
            outputs += [o for o in engine.step() if o.trajectory is not None]
        engine.abort(rid)
        return outputs[-1].trajectory

    def finish_all_others(engine: Engine) -> None:
        for group, prompt in enumerate(PROMPTS):
            engine.submit(Request(RequestId(group, 9), 0, prompt, SAMPLED))
        while engine.has_work():
            engine.step()

    calm = talk(make(path, num_blocks=12))
    for number in range(7, 40, 3):
        engine = make(path, lambda r, n=number: SmallMemory(r, at=(n,)), num_blocks=12)
        assert talk(engine).token_ids.tolist() == calm.token_ids.tolist()
        engine.scheduler.pool.check()


def test_one_row_that_does_not_fit_ends_with_a_line(path: Path) -> None:
    engine = make(path, lambda r: SmallMemory(r, rows_max=0))
    with pytest.raises(UserError, match="out of memory in a step of 1 rows") as told:
        finish(engine)
    assert "\n" not in str(told.value) and engine.runner.num_failures < 10


def test_other_errors_are_not_memory(path: Path) -> None:
    class Broken(SmallMemory):
        def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Any:
            raise RuntimeError("an illegal memory access was encountered")

    with pytest.raises(RuntimeError, match="illegal"):
        finish(make(path, Broken))


def test_the_journal_is_whole(path: Path, tmp_path: Path) -> None:
    """What a later incarnation continues from has every token once."""
    journal = Journal(tmp_path / "journal", 1)
    engine = make(path, lambda r: SmallMemory(r, at=(6,)), journal)
    for group, prompt in enumerate(PROMPTS):
        engine.submit(Request(RequestId(group, 0), 0, prompt, SAMPLED, seed=3))
    for _ in range(12):
        engine.step()
    assert engine.notes
    known = {seq.id: tuple(seq.tokens[seq.num_prompt :]) for seq in engine.scheduler.sequences()}
    journal.close()
    kept = {request.id: request.resume_ids for request in read_journal(tmp_path / "journal")}
    assert kept == known and any(known.values())
