"""Which experts each token went to: what the engine records is what the model's routers say, and it
goes wherever keys and values go."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, continuation, read_journal
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import begin_import, chunk_bytes, chunk_from_bytes, move
from dora_rl.histories import rows_of
from dora_rl.types import Branch, RequestId, SamplingParams, Trajectory, UserError
from tests.kit.engines import Saved, finish_all, make_engine, random_prompts

MOE = "qwen3-moe"
RID = RequestId(3, 1)
PARAMS = SamplingParams(tokens_max=20, temperature=1.0, ignore_eos=True)
NONE = 255


@torch.no_grad()
def routed(model: PreTrainedModel, token_ids: list[int]) -> NDArray[np.uint8]:
    """The experts that transformers' model chooses, [token, layer, choice]."""
    logits = model(torch.tensor([token_ids]), output_router_logits=True).router_logits
    chosen = [layer.softmax(-1).topk(model.config.num_experts_per_tok).indices for layer in logits]
    return torch.stack(chosen, 1).to(torch.uint8).numpy()


def check_routing(model: PreTrainedModel, found: Trajectory) -> None:
    """Of all tokens but the newest, which nobody has computed."""
    ids = [*found.prompt_ids.tolist(), *found.token_ids.tolist()]
    assert found.expert_ids is not None and found.expert_ids.dtype == np.uint8
    assert len(found.expert_ids) == len(ids)
    np.testing.assert_array_equal(found.expert_ids[:-1], routed(model, ids)[:-1])
    assert (found.expert_ids[-1] == NONE).all()


def submit(engine: Engine, length: int = 40, sample: int = 1, keep: bool = False) -> None:
    (prompt,) = random_prompts((length,))
    engine.submit(Request(RequestId(3, sample), 0, prompt, PARAMS, seed=1, keep=keep))


def recording(path: Path, **options: int) -> Engine:
    return make_engine(path, record_routing=True, speculation="off", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("family", [MOE, "qwen3-moe-mixed"])
def test_it_is_what_the_models_routers_choose(saved: Saved, family: str) -> None:
    model, path = saved(family)
    engine = recording(path, step_tokens_max=13, seqs_max=3)
    for sample, length in enumerate((1, 16, 17, 40)):
        submit(engine, length, sample)
    for found in finish_all(engine).values():
        check_routing(model, found)


def test_nothing_is_recorded_where_nobody_asks_and_the_tokens_are_the_same(saved: Saved) -> None:
    _, path = saved(MOE)
    plain, asked = make_engine(path), recording(path)
    for engine in (plain, asked):
        submit(engine)
    (without,), (found,) = (finish_all(engine).values() for engine in (plain, asked))
    assert without.expert_ids is None and plain.runner.cache.routing is None
    assert replace(found, expert_ids=None) == without
    extra = asked.runner.cache.block_bytes - plain.runner.cache.block_bytes
    assert extra == 16 * 2 * 2  # tokens, layers, choices

    _, dense = saved("qwen3")
    assert recording(dense).runner.cache.routing is None


def test_shared_prompt_blocks_give_the_routing_of_the_prompt(saved: Saved) -> None:
    model, path = saved(MOE)
    engine = recording(path)
    for sample in range(3):
        submit(engine, 40, sample)
        if not sample:
            finish_all(engine)  # its blocks are cached when the others come
    for found in finish_all(engine).values():
        check_routing(model, found)
    assert engine.stats().prefix_tokens > 2 * 32, "the test wants shared blocks"


def test_the_record_is_that_of_the_block_and_not_another_ones(saved: Saved) -> None:
    """A record that is off by one token is noticed by the checks above."""
    model, path = saved(MOE)
    engine = recording(path)
    submit(engine)
    (found,) = finish_all(engine).values()
    assert found.expert_ids is not None
    shifted = replace(found, expert_ids=np.roll(found.expert_ids, 1, 0))
    with pytest.raises(AssertionError):
        check_routing(model, shifted)


@pytest.mark.parametrize("parked", [False, True])
def test_it_moves_with_the_keys_and_values(saved: Saved, parked: bool) -> None:
    model, path = saved(MOE)
    source, target = recording(path, num_blocks=12), recording(path)
    submit(source)
    for _ in range(9):
        source.step()
    if parked:
        source.park(RID)
    export = source.export(RID)
    arrival = begin_import(target, export.meta)
    for chunk in export.chunks():
        data = chunk_bytes(chunk)
        assert len(data) == target.runner.cache.block_bytes
        arrival.write(chunk_from_bytes(target, bytes(data)))
    arrival.commit()
    export.done()
    (found,) = finish_all(target).values()
    assert target.stats().prefill_tokens == 0
    check_routing(model, found)


def test_blocks_that_have_no_record_are_not_taken(saved: Saved) -> None:
    _, path = saved(MOE)
    source, target = recording(path), make_engine(path)
    submit(source)
    source.step()
    with pytest.raises(UserError, match="do not fit an engine"):
        move(source, target, RID)
    assert finish_all(source)


def test_it_is_spilled_and_comes_back(saved: Saved) -> None:
    """A pool so small that requests are pre-empted; one host has room, the other has not."""
    model, path = saved(MOE)
    for host_blocks in (64, 0):
        engine = recording(path, num_blocks=9, host_blocks_max=host_blocks, context_max=80)
        for sample in range(4):
            submit(engine, 17 + sample, sample)
        for found in finish_all(engine).values():
            check_routing(model, found)
        assert engine.stats().preemptions


def test_after_a_crash_it_is_that_of_the_tokens_that_were_prefilled_again(
    saved: Saved, tmp_path: Path
) -> None:
    model, path = saved(MOE)
    engine = recording(path)
    engine.journal = Journal(tmp_path / "journal", every=1, durable=False)
    submit(engine)
    for _ in range(9):
        engine.step()
    (request,) = read_journal(tmp_path / "journal")
    assert request.resume_ids
    heir = recording(path)
    heir.submit(request)
    (found,) = finish_all(heir).values()
    check_routing(model, found)


def test_on_other_weights_it_is_that_of_the_version_that_goes_on(saved: Saved) -> None:
    """The `partial` baseline: everything so far is prefilled again."""
    (_, old), (model, new) = saved(MOE), saved(MOE, 1)
    engine = recording(old)
    engine.load(1, new)
    submit(engine)
    for _ in range(9):
        engine.step()
    engine.reversion(RID, 1)
    (found,) = finish_all(engine).values()
    assert len(found.segments) == 2
    check_routing(model, found)


def test_two_versions_in_one_pass_each_have_their_own(saved: Saved) -> None:
    models = [saved(MOE, seed) for seed in range(2)]
    engine = recording(models[0][1])
    engine.load(1, models[1][1])
    (prompt,) = random_prompts((30,))
    for version in range(2):
        engine.submit(Request(RequestId(version, 0), version, prompt, PARAMS, seed=1))
    for rid, found in finish_all(engine).items():
        check_routing(models[rid.group][0], found)


def turn(engine: Engine) -> Trajectory:
    found = [out.trajectory for _ in range(60) for out in engine.step() if out.trajectory]
    return found[-1]


def branched(engine: Engine, other: Engine | None = None) -> Trajectory:
    """Back into the middle of the first turn, on from its end, on from the last; perhaps moved, or
    spilled, in between."""
    submit(engine, 20, keep=True)
    turn(engine)
    engine.branch(RID, Branch(20, 0, 7), (7, 8), PARAMS)
    turn(engine)
    if other is not None:
        move(engine, other, RID)
        engine = other
        turn(engine)  # it is idle again, and says so again
    engine.branch(RID, Branch(42, 0, 20), (9,), PARAMS)
    turn(engine)
    engine.extend(RID, (4, 4), PARAMS)
    return turn(engine)


@pytest.mark.parametrize("moved", [False, True])
def test_each_row_of_a_session_that_went_back_has_its_routing(saved: Saved, moved: bool) -> None:
    model, path = saved(MOE)
    found = branched(recording(path), recording(path) if moved else None)
    assert found.expert_ids is not None
    num_prompt, places = len(found.prompt_ids), np.arange(len(found.expert_ids), dtype=np.int32)
    rows, where = (
        rows_of(prompt, ids, found.loss_mask, found.branches)
        for prompt, ids in (
            (found.prompt_ids, found.token_ids),
            (places[:num_prompt], places[num_prompt:]),
        )
    )
    assert len(rows) == 2
    for row, place in zip(rows, where, strict=True):
        expected = routed(model, row.token_ids.tolist())[:-1]
        np.testing.assert_array_equal(found.expert_ids[place.token_ids[:-1]], expected)


def test_a_session_that_is_continued_from_its_journal_keeps_what_other_branches_had(
    saved: Saved,
) -> None:
    model, path = saved(MOE)
    engine, heir = recording(path), recording(path)
    submit(engine, 20, keep=True)
    turn(engine)
    engine.branch(RID, Branch(20, 0, 7), (7, 8), PARAMS)
    for _ in range(5):
        engine.step()
    seq = engine.find(RID)
    assert seq is not None
    heir.submit(continuation(seq))
    found, before = turn(heir), [*random_prompts((20,))[0]]
    assert found.expert_ids is not None and len(found.expert_ids) == 20 + 20 + 2 + 20
    first = [*before, *found.token_ids[:20].tolist()]
    np.testing.assert_array_equal(found.expert_ids[:39], routed(model, first)[:39])
    second = [*first[:27], *found.token_ids[20:].tolist()]
    np.testing.assert_array_equal(found.expert_ids[40:-1], routed(model, second)[27:-1])
