"""A session that goes back: its branches, what is known of it everywhere, its random streams."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import move
from dora_rl.histories import ROOT, rows_of
from dora_rl.types import Branch, Finish, RequestId, SamplingParams, Segment, Trajectory
from tests.kit.engines import Saved, check_against, make_engine, random_prompts

RID = RequestId(3, 1)
GREEDY = SamplingParams(tokens_max=5, temperature=0.0, ignore_eos=True)
DRAWN = replace(GREEDY, temperature=1.0)


def session(engine: Engine, params: SamplingParams = GREEDY) -> Trajectory:
    """One turn of a session that stays."""
    (prompt,) = random_prompts((20,))
    engine.submit(Request(RID, 0, prompt, params, seed=1, keep=True))
    return turn(engine)


def turn(engine: Engine) -> Trajectory:
    found = None
    while engine.has_work():
        for output in engine.step():
            found = output.trajectory or found
    engine.scheduler.pool.check()
    assert found is not None
    return found


def branched(engine: Engine, params: SamplingParams = GREEDY) -> Trajectory:
    """Four turns: the first, back into the middle of it, on from the first, on from the last."""
    first = session(engine, params)
    engine.branch(RID, Branch(5, 0, 2), (7, 8), params)
    second = turn(engine)
    engine.branch(RID, Branch(12, 0, 5), (9,), params)
    turn(engine)
    engine.extend(RID, (4, 4), params)
    whole = turn(engine)
    assert whole.token_ids[:5].tolist() == first.token_ids.tolist()
    assert whole.token_ids[:12].tolist() == second.token_ids.tolist()
    return whole


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_every_row_is_what_the_model_says(family: str, saved: Saved) -> None:
    """The rows of the second are longer than the window of a layer."""
    model, path = saved(family)
    engine = make_engine(path)
    whole = branched(engine)
    assert whole.branches == (ROOT, Branch(5, 0, 2), Branch(12, 0, 5)) and whole.turns == 4
    assert whole.loss_mask.tolist() == [1] * 5 + [0, 0] + [1] * 5 + [0] + [1] * 5 + [0, 0] + [1] * 5
    assert whole.num_trained == engine.stats().decode_tokens == 20
    assert whole.segments == (Segment(0, 0),)
    long, short = rows_of(whole.prompt_ids, whole.token_ids, whole.loss_mask, whole.branches)
    assert (len(long.token_ids), len(short.token_ids)) == (20 + 5 + 1 + 5 + 2 + 5, 20 + 2 + 2 + 5)
    for row in (long, short):
        own = row.own[whole.loss_mask[row.own] != 0]
        for start in own[::5].tolist():  # each turn for itself, behind all that it follows
            place = int(row.place[row.own == start][0])
            prompt, ids = row.token_ids[:place], row.token_ids[place : place + 5]
            said = whole.logprobs[start : start + 5]
            check_against(model, Trajectory(RID, 0, ids, said, [1] * 5, prompt_ids=prompt))


def test_branches_of_one_history_draw_from_streams_of_their_own(saved: Saved) -> None:
    engine = make_engine(saved("qwen3")[1])
    session(engine, replace(DRAWN, tokens_max=24))
    for number in range(2):
        engine.branch(RID, Branch(24 * (1 + number), 0, 0), (), replace(DRAWN, tokens_max=24))
        whole = turn(engine)
    one, two, three = whole.token_ids.reshape(3, 24).tolist()
    assert one != two and two != three and one != three


def test_a_branch_goes_on_from_the_journal_and_in_another_engine(
    saved: Saved, tmp_path: Path
) -> None:
    """The same tokens as without the interruption, with all that came before the branch."""
    path = saved("qwen3")[1]
    expected = branched(make_engine(path), DRAWN)
    journal = Journal(tmp_path / "journal", every=1)
    one, two = make_engine(path), make_engine(path)
    one.journal = journal
    session(one, DRAWN)
    one.branch(RID, Branch(5, 0, 2), (7, 8), DRAWN)
    turn(one)
    one.branch(RID, Branch(12, 0, 5), (9,), DRAWN)
    for _ in range(3):
        one.step()
    one.drain()
    journal.flush()
    (request,) = read_journal(tmp_path / "journal")
    assert request.past is not None and len(request.past.token_ids) == 13 and request.resume_ids
    three = make_engine(path)
    three.submit(request)
    move(one, two, RID)
    for engine in (two, three):
        turn(engine)
        engine.extend(RID, (4, 4), DRAWN)
        found = turn(engine)
        assert found.branches == expected.branches
        assert np.array_equal(found.token_ids, expected.token_ids)
        assert np.array_equal(found.loss_mask, expected.loss_mask)
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=1e-5)


def test_a_branch_without_room_is_refused_whole(saved: Saved) -> None:
    engine = make_engine(saved("qwen3")[1])
    session(engine)
    engine.branch(RID, Branch(5, 0, 5), (3,) * 300, GREEDY)
    (output,) = engine.step()
    assert output.trajectory is not None and output.trajectory.finish is Finish.REFUSED
    assert "exceed the context" in output.trajectory.error and engine.find(RID) is None


def test_a_branch_begins_where_the_response_ends(saved: Saved) -> None:
    engine = make_engine(saved("qwen3")[1])
    session(engine)
    with pytest.raises(AssertionError, match="where the response ends"):
        engine.branch(RID, Branch(4, 0, 0), (), GREEDY)


def test_a_branch_that_goes_on_under_another_version_says_from_where(saved: Saved) -> None:
    """The `partial` baseline: segments count in the whole response."""
    path = saved("qwen3")[1]
    engine = make_engine(path, versions_max=2)
    engine.load(1, path)
    session(engine)
    engine.branch(RID, Branch(5, 0, 2), (7, 8), GREEDY)
    seq = engine.find(RID)
    assert seq is not None
    while seq.num_response < 2:
        engine.step()
    engine.reversion(RID, 1)
    whole = turn(engine)
    (first, before), (second, after) = whole.segments
    assert (first, before, after) == (0, 0, 1) and 7 < second < len(whole.token_ids) == 12
    engine.branch(RID, Branch(12, 1, 2), (3,), GREEDY)
    assert turn(engine).segments == whole.segments, "it stays on that version"
