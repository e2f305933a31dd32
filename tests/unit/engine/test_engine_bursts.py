"""Several decode steps in one call, read late: the same answers as one step at a time.

And versions that are loaded by a thread beside them: given up, refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Timer

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.runner import make_runner
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import move
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.types import Finish, RequestId, SamplingParams, UserError
from tests.kit.engines import Saved, finish_all, random_prompts
from tests.unit.engine.ahead_runner import AheadRunner

OPTIONS = EngineOptions(block_tokens=16, num_blocks=32, context_max=64, seqs_max=5)
PROMPTS = random_prompts((9, 20, 31, 40))
GREEDY = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True)


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def make(path: Path, burst: int, journal: Journal | None = None, **changes: int) -> Engine:
    """One step at a time, or in bursts."""
    spec, options = read_spec(path), OPTIONS.model_copy(update=changes)
    runner = make_runner(spec, options)
    ahead = AheadRunner(runner, burst) if burst > 1 else runner
    engine = Engine(spec, options, decode=text_of, journal=journal, runner=ahead)
    engine.load(0, path)
    return engine


@pytest.fixture
def path(saved: Saved) -> Path:
    return saved("qwen3")[1]


def finish(engine: Engine, params: SamplingParams):
    for group, prompt in enumerate(PROMPTS):
        engine.submit(Request(RequestId(group, 0), 0, prompt, params))
    return finish_all(engine)


def test_a_stop_string_ends_a_response_inside_a_burst(path: Path) -> None:
    free = finish(make(path, 1), GREEDY)
    strings = tuple(
        text_of(free[RequestId(g, 0)].token_ids[g + 5 : g + 7].tolist()) for g in range(4)
    )
    params = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True, stop_strings=strings)
    engine = make(path, 6)
    found = finish(engine, params)
    assert found == finish(make(path, 1), params)
    assert all(t.finish is Finish.STOP for t in found.values())
    assert engine.runner.num_bursts > 1


def test_a_burst_runs_past_no_context(path: Path) -> None:
    """One request could go on for long; another is near the end of the context."""
    engine = make(path, 50)
    launch, ends = engine.runner.launch, []

    def watch(plan, slots):
        ends.extend(span.start + plan.repeat for span in plan.spans if plan.repeat > 1)
        return launch(plan, slots)

    engine.runner.launch = watch
    engine.submit(Request(RequestId(9, 0), 0, PROMPTS[0], replace(GREEDY, tokens_max=50)))
    done = finish(engine, GREEDY)
    del done[RequestId(9, 0)]
    assert done == finish(make(path, 1), GREEDY)
    assert max(ends) == 64


def test_steps_of_a_burst_are_counted_and_journalled(path: Path, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", every=6, durable=False)
    engine = make(path, 6, journal)
    engine.submit(Request(RequestId(0, 0), 0, PROMPTS[0], GREEDY))
    for _ in range(4):  # the prompt, then bursts, each read one call later
        engine.step()
    assert engine.stats().steps == 1 + 3 * 6
    (saved,) = read_journal(tmp_path / "j")
    assert len(saved.resume_ids) == 1 + 2 * 6


def test_a_session_that_ended_inside_a_burst_moves_to_a_full_engine(path: Path) -> None:
    """It comes with blocks of rows beyond its end, which nobody makes room for."""
    key, short = RequestId(0, 0), replace(GREEDY, tokens_max=8)
    free = finish(make(path, 1), GREEDY)[key].token_ids.tolist()
    params = replace(GREEDY, tokens_max=50, stop_ids=(free[2],))
    source, target = make(path, 40), make(path, 40, num_blocks=5)
    expected = make(path, 1)
    for engine in (expected, source):
        engine.submit(Request(key, 0, PROMPTS[0], params, keep=True))
        assert finish_all(engine)[key].finish is Finish.STOP
    seq = source.find(key)
    assert seq is not None and len(seq.blocks) == 4 and seq.num_tokens < 16
    target.submit(Request(RequestId(1, 0), 0, PROMPTS[1], replace(GREEDY, tokens_max=40)))
    target.step()
    move(source, target, key)
    assert target.stats().host_blocks == 4
    for engine in (expected, target):
        engine.extend(key, (5, 6), short)
    assert finish_all(target)[key] == finish_all(expected)[key]
    target.abort(key)
    assert target.stats().host_blocks == target.stats().used_blocks == 0


def test_other_weights_from_the_end_of_a_burst_on(path: Path, saved: Saved) -> None:
    key, results = RequestId(0, 0), []
    num_before = 0
    for burst in (6, 1):
        engine = make(path, burst)
        engine.load(1, saved("qwen3", 1)[1])
        engine.submit(Request(key, 0, PROMPTS[0], GREEDY))
        seq = engine.find(key)
        assert seq is not None
        while seq.num_response < (num_before or 5):
            engine.step()
        engine.reversion(key, 1)
        num_before = seq.num_response  # the next burst was in flight
        results.append(finish_all(engine)[key])
        assert results[-1].segments[1].start == num_before
    assert results[0] == results[1]
    assert num_before == 1 + 2 * 6


def test_nan_inside_a_burst_ends_one_request_once(path: Path) -> None:
    expected = finish(make(path, 1), GREEDY)
    engine = make(path, 6)
    collect = engine.runner.collect

    def spoil(launched):
        for result in (results := collect(launched)):
            if result.span.seq.id.group == 2 and len(result.logprobs) > 3:
                result.logprobs[3] = float("nan")
        return results

    engine.runner.collect = spoil
    found = finish(engine, GREEDY)
    assert found[RequestId(2, 0)].finish is Finish.ERROR
    del found[RequestId(2, 0)], expected[RequestId(2, 0)]
    assert found == expected
    assert engine.stats().used_blocks == 0 and not engine.scheduler.pool.to_scrub


class Slow:
    """Weights that are not there before somebody lets them pass, and then perhaps damaged."""

    def __init__(self, path: Path, damaged: str = "") -> None:
        self._good, self._damaged = HfDirectory(path), damaged
        self.passed = Event()

    def names(self) -> Sequence[str]:
        return self._good.names()

    def tensor(self, name: str):
        self.passed.wait()
        data = self._good.tensor(name)
        return data[1:] if name == self._damaged else data


def test_requests_decode_beside_a_load_that_fails(path: Path) -> None:
    engine = make(path, 6)
    source = Slow(path, "model.norm.weight")
    layers = engine.load_layers(1, source)
    next(layers)
    assert finish(engine, GREEDY) == finish(make(path, 1), GREEDY)
    source.passed.set()
    with pytest.raises(UserError, match=r"model\.norm\.weight has shape"):
        list(layers)
    assert engine.versions() == (0,)
    engine.load(1, path)
    assert engine.versions() == (0, 1)


def test_a_load_that_is_given_up_ends_before_its_slot_is_free(path: Path) -> None:
    engine = make(path, 6, versions_max=2)
    source = Slow(path)
    layers = engine.load_layers(1, source)
    next(layers)
    with pytest.raises(UserError, match="already resident or being loaded"):
        next(engine.load_layers(1, path))
    with pytest.raises(UserError, match="not resident"):
        engine.retire(1)
    Timer(0.05, source.passed.set).start()
    layers.close()
    assert source.passed.is_set(), "nobody writes to the slot any more"
    engine.load(2, path)
    assert engine.versions() == (0, 2)
