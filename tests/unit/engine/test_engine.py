"""Requests, versions, sessions and bad input, as a caller of the engine sees them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import begin_import, chunk_from_bytes, export_request, move
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.types import Finish, RequestId, SamplingParams, Segment, UserError
from tests.kit.engines import Saved, check_against, finish_all, make_engine, random_prompts

PROMPT = random_prompts((20,))[0]
GREEDY = SamplingParams(tokens_max=12, temperature=0, ignore_eos=True)
KEY = RequestId(0, 0)


@pytest.fixture
def path(saved: Saved) -> Path:
    return saved("qwen3")[1]


@pytest.fixture
def engine(path: Path) -> Engine:
    return make_engine(path)


def run(engine: Engine, request: Request):
    engine.submit(request)
    return finish_all(engine)[request.id]


# -------------------------------------------------------------------- requests


def test_stop_ids_and_eos(engine: Engine) -> None:
    free = run(engine, Request(KEY, 0, PROMPT, GREEDY))
    stop = int(free.token_ids[4])
    first = free.token_ids.tolist().index(stop)
    params = SamplingParams(tokens_max=12, temperature=0, stop_ids=(stop,))
    stopped = run(engine, Request(KEY, 0, PROMPT, params))
    assert stopped.finish is Finish.STOP
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()


def test_stop_string(path: Path) -> None:
    engine = Engine(
        read_spec(path),
        EngineOptions(block_tokens=16, num_blocks=16, context_max=64, seqs_max=2),
        decode=lambda ids: "".join(chr(33 + i) for i in ids),
    )
    engine.load(0, path)
    free = run(engine, Request(KEY, 0, PROMPT, GREEDY))
    text = "".join(chr(33 + i) for i in free.token_ids[5:8])
    params = SamplingParams(tokens_max=12, temperature=0, ignore_eos=True, stop_strings=(text,))
    stopped = run(engine, Request(KEY, 0, PROMPT, params))
    assert stopped.finish is Finish.STOP
    assert stopped.token_ids.tolist() == free.token_ids[:8].tolist()


def test_forced_tokens_are_scored(engine: Engine, saved: Saved) -> None:
    model, _ = saved("qwen3")
    forced = random_prompts((30,), seed=4)[0]
    params = SamplingParams(tokens_max=30, forced_ids=forced)
    scored = run(engine, Request(KEY, 0, PROMPT, params))
    assert tuple(scored.token_ids) == forced
    with torch.no_grad():
        logits = model(torch.tensor([[*PROMPT, *forced]])).logits[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits, -1).gather(1, torch.tensor(forced)[:, None])[:, 0]
    assert (expected - torch.tensor(scored.logprobs)).abs().max() < 1e-4


def test_forced_tokens_then_free_ones(engine: Engine) -> None:
    free = run(engine, Request(KEY, 0, PROMPT, GREEDY))
    params = SamplingParams(
        tokens_max=12, temperature=0, ignore_eos=True, forced_ids=tuple(free.token_ids[:5].tolist())
    )
    mixed = run(engine, Request(KEY, 0, PROMPT, params))
    assert mixed == free


def test_top_logprobs(engine: Engine) -> None:
    params = SamplingParams(tokens_max=3, temperature=0, ignore_eos=True, logprobs_top_n=4)
    engine.submit(Request(KEY, 0, PROMPT, params))
    outputs = [output for _ in range(4) for output in engine.step()]
    for output in outputs:
        (top,) = output.top_logprobs
        assert len(top) == 4
        assert top[0] == (output.token_ids[0], pytest.approx(output.logprobs[0], abs=1e-6))


@pytest.mark.parametrize(
    ("prompt", "params", "word"),
    [
        ((1, 2, 97), GREEDY, "token id 97"),
        ((1, -1), GREEDY, "token id -1"),
        ((), GREEDY, "empty"),
        ((1,) * 250, GREEDY, "context"),
        ((1, 2), SamplingParams(tokens_max=10_000), "context"),
    ],
)
def test_refusals(
    engine: Engine, prompt: tuple[int, ...], params: SamplingParams, word: str
) -> None:
    good = RequestId(1, 0)
    engine.submit(Request(good, 0, PROMPT, GREEDY))
    engine.submit(Request(KEY, 0, prompt, params))
    done = finish_all(engine)
    assert done[KEY].finish is Finish.REFUSED
    assert word in done[KEY].error
    assert done[good].finish is Finish.LENGTH


def test_a_prompt_that_can_never_fit_is_refused(path: Path) -> None:
    engine = make_engine(path, num_blocks=4)
    engine.submit(Request(KEY, 0, PROMPT, SamplingParams(tokens_max=60)))
    assert "can never fit in 4 KV blocks" in finish_all(engine)[KEY].error


def test_abort(engine: Engine) -> None:
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    engine.step()
    assert engine.abort(KEY)
    assert not engine.abort(KEY)
    assert not engine.has_work()
    assert engine.stats().used_blocks == 0


# -------------------------------------------------------------------- versions


def test_versions_decode_side_by_side(saved: Saved) -> None:
    models = [saved("qwen3", seed) for seed in range(3)]
    for one_pass in (True, False):
        engine = make_engine(models[0][1], one_pass=one_pass)
        engine.load(1, models[1][1])
        engine.load(2, models[2][1])
        for version in range(3):
            for index, prompt in enumerate(random_prompts((4, 30))):
                engine.submit(Request(RequestId(version, index), version, prompt, GREEDY))
        for key, trajectory in finish_all(engine).items():
            assert trajectory.version == key.group
            assert trajectory.segments == (Segment(0, key.group),)
            check_against(models[key.group][0], trajectory)


def test_one_pass_equals_one_pass_per_version(saved: Saved) -> None:
    results = []
    for one_pass in (True, False):
        engine = make_engine(saved("llama", 0)[1], one_pass=one_pass)
        engine.load(1, saved("llama", 1)[1])
        for group, prompt in enumerate(random_prompts((4, 30, 9, 18))):
            params = SamplingParams(tokens_max=20, ignore_eos=True)
            engine.submit(Request(RequestId(group, 0), group % 2, prompt, params))
        results.append(finish_all(engine))
    assert results[0] == results[1]


def test_residency_limits(engine: Engine, path: Path) -> None:
    engine.load(1, path)
    engine.load(2, path)
    with pytest.raises(UserError, match="retire one"):
        engine.load(3, path)
    with pytest.raises(UserError, match="already resident"):
        engine.load(2, path)
    engine.submit(Request(KEY, 1, PROMPT, GREEDY))
    with pytest.raises(UserError, match="version 1 has 1 requests"):
        engine.retire(1)
    finish_all(engine)
    engine.retire(1)
    assert engine.versions() == (0, 2)
    engine.submit(Request(KEY, 1, PROMPT, GREEDY))
    assert finish_all(engine)[KEY].finish is Finish.REFUSED


def test_loading_leaves_others_decoding(engine: Engine, saved: Saved) -> None:
    model, path = saved("qwen3", 1)
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    tokens = 0
    for _ in engine.load_layers(1, path):
        assert engine.versions() == (0,)
        tokens += sum(len(output.token_ids) for output in engine.step())
    assert tokens > 0
    assert engine.versions() == (0, 1)
    finish_all(engine)
    check_against(model, run(engine, Request(KEY, 1, PROMPT, GREEDY)))


def test_reversion_records_segments(engine: Engine, saved: Saved) -> None:
    engine.load(1, saved("qwen3", 1)[1])
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    outputs = [output for _ in range(5) for output in engine.step()]
    num_old = len(outputs)
    engine.reversion(KEY, 1)
    trajectory = finish_all(engine)[KEY]
    assert trajectory.segments == (Segment(0, 0), Segment(num_old, 1))
    alone = make_engine(saved("qwen3", 1)[1])
    grown = (*PROMPT, *trajectory.token_ids[:num_old].tolist())
    params = SamplingParams(tokens_max=12 - num_old, temperature=0, ignore_eos=True)
    assert (
        run(alone, Request(KEY, 0, grown, params)).token_ids.tolist()
        == trajectory.token_ids[num_old:].tolist()
    )


# -------------------------------------------------------------------- sessions


def test_a_parked_request_whose_move_failed_stays_parked(engine: Engine, saved: Saved) -> None:
    free = run(engine, Request(KEY, 0, PROMPT, GREEDY))
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    engine.step()
    engine.park(KEY)
    engine.retire(0)
    export_request(engine, KEY).cancel()  # its version is not even here
    assert engine.is_parked(KEY)
    engine.load(0, saved("qwen3")[1])
    engine.unpark(KEY)
    assert finish_all(engine)[KEY] == free


def test_a_parked_request_needs_no_version(engine: Engine, saved: Saved) -> None:
    alone = run(engine, Request(KEY, 0, PROMPT, GREEDY))
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    engine.step()
    with pytest.raises(UserError, match="has 1 requests"):
        engine.retire(0)
    engine.park(KEY)
    engine.retire(0)
    with pytest.raises(UserError, match="version 0 is not resident"):
        engine.unpark(KEY)
    engine.load(0, saved("qwen3")[1])
    engine.unpark(KEY)
    assert finish_all(engine)[KEY].token_ids.tolist() == alone.token_ids.tolist()


def test_a_session_continues_without_recomputing(engine: Engine, saved: Saved) -> None:
    model, _ = saved("qwen3")
    first = run(engine, Request(KEY, 0, PROMPT, GREEDY, keep=True))
    assert engine.stats().idle == 1
    before = engine.stats().prefill_tokens
    given = (5, 6, 7)
    engine.extend(KEY, given)
    second = finish_all(engine)[KEY]
    assert engine.stats().prefill_tokens - before == len(given) + 1
    assert second.token_ids[:12].tolist() == first.token_ids.tolist()
    assert tuple(second.token_ids[12:15]) == given
    assert second.loss_mask.tolist() == [1] * 12 + [0] * 3 + [1] * 12
    assert second.turns == 2
    grown = (*PROMPT, *second.token_ids[:15].tolist())
    alone = run(make_engine(saved("qwen3")[1]), Request(KEY, 0, grown, GREEDY))
    assert alone.token_ids.tolist() == second.token_ids[15:].tolist()
    check_against(model, alone)
    assert engine.abort(KEY)
    assert engine.stats().used_blocks == 0


def test_an_idle_session_gives_up_its_blocks(path: Path) -> None:
    engine = make_engine(path, num_blocks=5)
    first = run(engine, Request(KEY, 0, PROMPT, GREEDY, keep=True))
    other = RequestId(1, 0)
    params = SamplingParams(tokens_max=40, temperature=0, ignore_eos=True)
    run(engine, Request(other, 0, random_prompts((20,), 3)[0], params))
    assert engine.stats().host_blocks > 0
    engine.extend(KEY, (5, 6, 7))
    second = finish_all(engine)[KEY]
    roomy = make_engine(path)
    run(roomy, Request(KEY, 0, PROMPT, GREEDY, keep=True))
    roomy.extend(KEY, (5, 6, 7))
    assert finish_all(roomy)[KEY] == second
    assert second.token_ids[:12].tolist() == first.token_ids.tolist()


# ------------------------------------------------------------------- migration


def test_migration_moves_kv_and_prefills_nothing(path: Path, engine: Engine) -> None:
    expected = run(make_engine(path), Request(KEY, 0, PROMPT, GREEDY))
    target = make_engine(path)
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    for _ in range(5):
        engine.step()
    num_bytes = move(engine, target, KEY)
    assert num_bytes == 2 * engine.runner.cache.block_bytes
    assert not engine.has_work()
    assert finish_all(target)[KEY] == expected
    assert target.stats().prefill_tokens == 0


def test_migration_refuses_another_version(path: Path, engine: Engine) -> None:
    target = Engine(engine.spec, engine.options)
    target.load(7, path)
    expected = run(make_engine(path), Request(KEY, 0, PROMPT, GREEDY))
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    engine.step()
    with pytest.raises(UserError, match="is on version 0"):
        move(engine, target, KEY)
    assert finish_all(engine)[KEY] == expected


def test_migration_refuses_another_shape(path: Path, engine: Engine) -> None:
    target = make_engine(path, block_tokens=32)
    engine.submit(Request(KEY, 0, PROMPT, GREEDY))
    engine.step()
    export = export_request(engine, KEY)
    with pytest.raises(UserError, match="do not fit"):
        begin_import(target, export.meta)
    with pytest.raises(UserError, match="bytes"):
        chunk_from_bytes(target, b"123")


# ------------------------------------------------------------------- bad input


class Spoiled:
    """A good source with one tensor changed."""

    def __init__(self, path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
        self._good, self._name, self._change = HfDirectory(path), name, change

    def names(self) -> Sequence[str]:
        return self._good.names()

    def tensor(self, name: str) -> Tensor:
        data = self._good.tensor(name)
        return self._change(data) if name == self._name else data


def test_nan_ends_only_the_requests_that_meet_it(engine: Engine, path: Path, saved: Saved) -> None:
    model, _ = saved("qwen3")
    bad_norm = Spoiled(path, "model.norm.weight", lambda data: data * float("nan"))
    bad_keys = Spoiled(
        path, "model.layers.0.self_attn.k_proj.weight", lambda data: data * float("nan")
    )
    engine.load(1, bad_norm)
    engine.load(2, bad_keys)
    for group, version in enumerate((0, 1, 2, 0)):
        engine.submit(Request(RequestId(group, 0), version, PROMPT, GREEDY))
    done = finish_all(engine)
    assert [done[RequestId(g, 0)].finish for g in (1, 2)] == [Finish.ERROR] * 2
    assert "(1, 0): non-finite" in done[RequestId(1, 0)].error
    for group in (0, 3):
        check_against(model, done[RequestId(group, 0)])
    # What the NaN left in the cache does not reach those who use its blocks later.
    for group in range(10, 18):
        engine.submit(Request(RequestId(group, 0), 0, random_prompts((30,), group)[0], GREEDY))
    for trajectory in finish_all(engine).values():
        check_against(model, trajectory)


def test_wrong_shape_and_missing_tensor(engine: Engine, path: Path) -> None:
    with pytest.raises(UserError, match=r"model.norm.weight has shape \(63,\)"):
        engine.load(1, Spoiled(path, "model.norm.weight", lambda data: data[1:]))
    assert engine.versions() == (0,)
    short = HfDirectory(path)
    short.file_of.pop("model.norm.weight")
    with pytest.raises(UserError, match=r"1 tensors are missing, the first is model\.norm\.weight"):
        engine.load(1, short)
    engine.load(1, path)
    assert engine.versions() == (0, 1)
