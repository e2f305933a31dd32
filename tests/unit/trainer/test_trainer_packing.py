"""Packs and advantages: pure arithmetic, checked over random lengths and rewards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.trainer.documents import (
    collate,
    document_cost,
    documents_of,
    pack_balanced,
    pack_stream,
    quadratic_tokens,
)
from dora_rl.trainer.losses import functions as adv
from dora_rl.types import Group, Trajectory
from tests.kit.trainer_cases import sample

lengths = st.lists(st.integers(1, 300), max_size=60)


@given(lengths=lengths, limit=st.integers(1, 400))
def test_stream_packs_every_document_once_within_the_limit(lengths: list[int], limit: int) -> None:
    packs, rest = pack_stream(lengths, limit)
    assert [i for p in [*packs, rest] for i in p] == list(range(len(lengths)))
    for pack in [*packs, rest]:
        assert sum(lengths[i] for i in pack) <= limit or len(pack) == 1
    assert sum(lengths[i] for i in rest) < limit


@given(lengths=lengths, cut=st.integers(0, 60), limit=st.integers(1, 400))
def test_a_stream_cut_anywhere_gives_the_same_packs(
    lengths: list[int], cut: int, limit: int
) -> None:
    whole, _ = pack_stream(lengths, limit)
    first, rest = pack_stream(lengths[:cut], limit)
    left = [*rest, *range(min(cut, len(lengths)), len(lengths))]
    second, _ = pack_stream([lengths[i] for i in left], limit)
    assert [*first, *[[left[i] for i in p] for p in second]] == whole


@settings(max_examples=60)
@given(lengths=lengths, limit=st.integers(1, 400), ranks=st.integers(1, 4))
def test_balanced_packs_fill_every_rank(lengths: list[int], limit: int, ranks: int) -> None:
    packs = pack_balanced(lengths, limit, ranks, 200.0)
    assert len(packs) % ranks == 0
    assert sorted(i for p in packs for i in p) == list(range(len(lengths)))
    for pack in packs:
        assert sum(lengths[i] for i in pack) <= limit or len(pack) == 1
    assert sum(1 for p in packs if not p) < ranks or not lengths


def test_balancing_counts_attention() -> None:
    # One long document costs as much as many short ones of the same total length and more.
    lengths = [1000] + [10] * 300
    packs = pack_balanced(lengths, 10_000, 2, quadratic_tokens(128, 128 * 500))
    cost = [sum(document_cost(lengths[i], 500.0) for i in p) for p in packs]
    assert max(cost) < 1.1 * min(cost)
    tokens = [sum(lengths[i] for i in p) for p in packs]
    assert tokens[0] != tokens[1]


@st.composite
def samples(draw: st.DrawFn) -> list[tuple[list[int], Trajectory]]:
    """Responses with holes in their masks, each after its own prompt."""
    out = []
    for _ in range(draw(st.integers(1, 5))):
        prompt = draw(st.lists(st.integers(0, 9), min_size=1, max_size=4))
        ids = draw(st.lists(st.integers(0, 9), min_size=1, max_size=9))
        mask = [draw(st.integers(0, 1)) for _ in ids]
        mask[draw(st.integers(0, len(ids) - 1))] = 1
        logprobs = [-0.5 * (i + 1) for i in range(len(ids))]
        out.append((prompt, sample(ids, logprobs, mask, 1.0)))
    return out


@given(rows=samples())
def test_a_pack_holds_exactly_the_trained_tokens(rows: list[tuple[list[int], Trajectory]]) -> None:
    documents = [d for p, s in rows for d in documents_of(Group(0, 0, p, (s,)), s, 1.0)]
    pack = collate(documents, torch.device("cpu"))
    want, start = [], 0
    for i, (prompt, s) in enumerate(rows):
        full = [*prompt, *s.token_ids]
        for t, m in enumerate(s.loss_mask):
            if m:
                row = start + len(prompt) + t - 1
                want.append((row, s.token_ids[t], i, s.logprobs[t]))
        assert pack.token_ids_P[start : start + len(full)].tolist() == full
        start += len(full)
    rollout = pack.gather([d.rollout_logprobs for d in documents])
    columns = (pack.rows_T, pack.target_T, pack.sequence_T, rollout)
    assert list(zip(*(c.tolist() for c in columns), strict=True)) == want
    assert [d.num_trained for d in documents] == [s.num_trained for _, s in rows]


rewards = st.lists(st.floats(-5, 5, allow_nan=False), min_size=1, max_size=8)


@given(rewards=rewards)
def test_group_advantages(rewards: list[float]) -> None:
    mean = sum(rewards) / len(rewards)
    equal = all(r == rewards[0] for r in rewards)
    assert adv.all_equal(rewards) == equal
    for name, function in adv.PER_GROUP.items():
        got = function(adv.GroupScores(rewards, [1] * len(rewards), [False] * len(rewards)))
        if equal:
            assert got == [0.0] * len(rewards)
            continue
        n = len(rewards)
        std = math.sqrt(sum((r - mean) ** 2 for r in rewards) / (n - 1))
        want = {
            "group_mean": [r - mean for r in rewards],
            "group": [(r - mean) / (std + 1e-4) for r in rewards],
            "leave_one_out": [r - (sum(rewards) - r) / (n - 1) for r in rewards],
            "none": [0.0] * n,
        }[name]
        assert got == pytest.approx(want, abs=1e-9)
        assert sum(got) == pytest.approx(0.0, abs=1e-6 * (1 + max(map(abs, got))))


values = st.lists(
    st.tuples(st.floats(-2, 2, allow_nan=False), st.floats(-2, 2, allow_nan=False)),
    min_size=1,
    max_size=10,
)


@given(pairs=values, gamma=st.floats(0.5, 1), lam=st.floats(0, 1))
def test_gae_equals_its_sum(pairs: list[tuple[float, float]], gamma: float, lam: float) -> None:
    reward, value = zip(*pairs, strict=True)
    n = len(pairs)
    following = [*value[1:], 0.0]
    delta = [reward[t] + gamma * following[t] - value[t] for t in range(n)]
    want = [sum((gamma * lam) ** (u - t) * delta[u] for u in range(t, n)) for t in range(n)]
    to = torch.float64
    got, returns = adv.gae(
        torch.tensor(reward, dtype=to), torch.tensor(value, dtype=to), gamma, lam
    )
    assert got.tolist() == pytest.approx(want, abs=1e-9)
    assert returns.tolist() == pytest.approx(
        [a + v for a, v in zip(want, value, strict=True)], abs=1e-9
    )


def test_whitening() -> None:
    x = torch.tensor([1.0, 2.0, 6.0])
    out = adv.whiten(x)
    assert out.mean().item() == pytest.approx(0.0, abs=1e-6)
    assert out.square().mean().item() == pytest.approx(1.0, abs=1e-5)
    assert adv.whiten(torch.full((4,), 3.3)).tolist() == [0.0] * 4


@pytest.mark.parametrize(
    ("tokens", "penalty"), [(80, 0.0), (90, -0.5), (100, -1.0), (120, -1.0), (1, 0.0)]
)
def test_overlong_shaping(tokens: int, penalty: float) -> None:
    assert adv.overlong_penalty(tokens, 100, 20, 1.0) == pytest.approx(penalty)


def test_overlong_without_a_buffer_is_a_step() -> None:
    assert adv.overlong_penalty(100, 100, 0, 2.0) == 0.0
    assert adv.overlong_penalty(101, 100, 0, 2.0) == -2.0
    assert adv.overlong_penalty(10**6, 0, 0, 2.0) == 0.0
