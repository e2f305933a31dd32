"""Sessions that wait for their environment: parked, moved, re-versioned, opened, journaled.

Wherever a session between two turns goes, it comes back idle, says so again, and continues with
the tokens it would have had if left alone.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import export_request, move
from dora_rl.types import Finish, RequestId, SamplingParams, Segment
from tests.kit.engines import Saved, finish_all, make_engine, random_prompts

PROMPT = random_prompts((20,))[0]
SAMPLED = SamplingParams(tokens_max=10, ignore_eos=True)
KEY, GIVEN = RequestId(3, 1), (5, 6, 7)


@pytest.fixture
def path(saved: Saved) -> Path:
    return saved("qwen3")[1]


def idle_engine(path: Path, **options: int) -> Engine:
    """An engine whose only request waits behind its first turn."""
    engine = make_engine(path, **options)
    engine.submit(Request(KEY, 0, PROMPT, SAMPLED, seed=4, keep=True))
    finish_all(engine)
    assert engine.stats().idle == 1 and not engine.has_work()
    return engine


@pytest.fixture
def expected(path: Path):
    engine = idle_engine(path)
    engine.extend(KEY, GIVEN)
    return finish_all(engine)[KEY]


def test_a_parked_session_comes_back_idle(path: Path, expected) -> None:
    engine = idle_engine(path)
    engine.park(KEY)
    assert engine.stats().host_blocks and not engine.stats().kv_tokens
    assert not engine.has_work(), "a parked session does not decode"
    engine.unpark(KEY)
    again = finish_all(engine)[KEY]
    assert engine.stats().idle == 1 and again.turns == 1
    assert again.token_ids.tolist() == expected.token_ids[:10].tolist(), (
        "no token was sampled behind the turn"
    )
    engine.extend(KEY, GIVEN)
    assert finish_all(engine)[KEY] == expected


@pytest.mark.parametrize("host_blocks_max", [0, 64])
def test_a_moved_session_is_idle_there(path: Path, expected, host_blocks_max: int) -> None:
    source = idle_engine(path, host_blocks_max=host_blocks_max)
    source.park(KEY)  # with no room on the host its KV is gone and is computed again
    target = make_engine(path)
    move(source, target, KEY)
    assert source.stats().idle == source.stats().parked == source.stats().used_blocks == 0
    again = finish_all(target)[KEY]
    assert target.stats().idle == 1 and again.token_ids.tolist() == expected.token_ids[:10].tolist()
    target.extend(KEY, GIVEN)
    assert finish_all(target)[KEY] == expected


def test_a_cancelled_move_leaves_it_idle(path: Path, expected) -> None:
    engine = idle_engine(path)
    export = export_request(engine, KEY)
    assert not engine.has_work()
    export.cancel()
    assert finish_all(engine)[KEY].turns == 1 and engine.stats().idle == 1
    engine.extend(KEY, GIVEN)
    assert finish_all(engine)[KEY] == expected


def test_a_reversioned_session_stays_idle(saved: Saved) -> None:
    engine = idle_engine(saved("qwen3")[1])
    engine.load(1, saved("qwen3", 1)[1])
    engine.reversion(KEY, 1)
    assert finish_all(engine)[KEY].turns == 1 and engine.stats().idle == 1
    engine.extend(KEY, GIVEN)
    ended = finish_all(engine)[KEY]
    assert ended.segments == (Segment(0, 0), Segment(10, 1))
    assert ended.loss_mask.tolist() == [1] * 10 + [0] * 3 + [1] * 10


def test_a_finished_turn_is_told_again_from_the_journal(
    path: Path, tmp_path: Path, expected
) -> None:
    engine = make_engine(path)
    engine.journal = Journal(tmp_path / "journal", every=1)
    engine.submit(Request(KEY, 0, PROMPT, SAMPLED, seed=4, keep=True))
    finish_all(engine)
    (request,) = read_journal(tmp_path / "journal")
    heir = make_engine(path)
    heir.submit(request)
    assert finish_all(heir)[KEY].token_ids.tolist() == expected.token_ids[:10].tolist()
    heir.extend(KEY, GIVEN)
    assert finish_all(heir)[KEY] == expected


def test_a_session_that_others_open(path: Path, tmp_path: Path) -> None:
    engine = make_engine(path)
    engine.journal = Journal(tmp_path / "journal", every=1)
    engine.submit(Request(KEY, 0, PROMPT, SAMPLED, seed=4, keep=True, turns=0))
    empty = finish_all(engine)[KEY]
    assert empty.finish is Finish.STOP and not len(empty.token_ids) and empty.turns == 0
    assert engine.stats().idle == 1
    (request,) = read_journal(tmp_path / "journal")
    heir = make_engine(path)
    heir.submit(request)
    assert finish_all(heir)[KEY].turns == 0
    for one in (engine, heir):
        one.extend(KEY, GIVEN)
        opened = finish_all(one)[KEY]
        assert tuple(opened.token_ids[:3]) == GIVEN and opened.turns == 1
        assert opened.loss_mask.tolist() == [0] * 3 + [1] * 10
        assert opened.logprobs[:3].tolist() == [0.0, 0.0, 0.0]
    alone = make_engine(path)
    greedy = SamplingParams(tokens_max=4, temperature=0, ignore_eos=True)
    alone.submit(Request(KEY, 0, (*PROMPT, *GIVEN), greedy))
    heir.abort(KEY)
    heir.submit(Request(KEY, 0, PROMPT, greedy, keep=True, turns=0))
    finish_all(heir)
    heir.extend(KEY, GIVEN)
    assert finish_all(heir)[KEY].token_ids[3:].tolist() == finish_all(alone)[KEY].token_ids.tolist()


def test_waiting_sessions_hold_no_decode_slot(path: Path) -> None:
    """Two slots, five sessions: all get their first turn while the earlier ones wait."""
    engine = make_engine(path, seqs_max=2)
    for sample in range(5):
        engine.submit(Request(RequestId(0, sample), 0, PROMPT, SAMPLED, keep=True))
    finish_all(engine)
    assert engine.stats().idle == 5
