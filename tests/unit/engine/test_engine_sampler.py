"""Draws follow the policy, log-probs are the policy's, and rows do not see each other."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.engine.sequence import mix64, sampling_key
from dora_rl.engine.tensors.sampler import SamplingRows, sample, uniform
from dora_rl.types import RequestId


def make_rows(count: int, **settings_: float) -> SamplingRows:
    get = settings_.get
    return SamplingRows(
        keys=torch.tensor([sampling_key(3, RequestId(i, 0)) for i in range(count)]),
        positions=torch.arange(count) % 7,
        temperature=torch.full((count,), float(get("temperature", 1.0))),
        top_k=torch.full((count,), int(get("top_k", 0))),
        top_p=torch.full((count,), float(get("top_p", 1.0))),
        min_p=torch.full((count,), float(get("min_p", 0.0))),
        forced=torch.full((count,), -1),
        scaled=get("temperature", 1.0) != 1,
        filtered=bool(get("top_k") or get("min_p") or get("top_p", 1.0) < 1),
        raw=True,
        top_n=2,
    )


def test_uniform_is_splitmix64() -> None:
    key, position = sampling_key(5, RequestId(2, 1)), 12
    # mix64 adds the constant once itself, so position p is the state after p more additions.
    state = (key + position * 0x9E3779B97F4A7C15) % (1 << 64)
    expected = (mix64(state) >> 40) * 2.0**-24
    assert uniform(torch.tensor([key]), torch.tensor([position])).item() == expected


def test_uniform_fills_the_unit_interval() -> None:
    keys = torch.tensor([sampling_key(0, RequestId(g, s)) for g in range(200) for s in range(10)])
    u = uniform(keys.repeat_interleave(50), torch.arange(50).repeat(len(keys)))
    assert u.min() >= 0 and u.max() < 1
    counts = torch.histc(u, 20, 0, 1)
    chi2 = ((counts - len(u) / 20) ** 2 / (len(u) / 20)).sum().item()
    assert chi2 < 45  # 19 degrees of freedom; p = 0.0007


def test_frequencies_match_probabilities() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5, -40.0])
    count = 40_000
    drawn = sample(logits.expand(count, -1).contiguous(), make_rows(count, temperature=0.8))
    expected = torch.softmax(logits / 0.8, -1) * count
    counts = torch.bincount(drawn.token_ids, minlength=6).float()
    chi2 = ((counts[:5] - expected[:5]) ** 2 / expected[:5]).sum().item()
    assert chi2 < 20  # 4 degrees of freedom; p = 0.0005
    assert counts[5] == 0
    logprobs = torch.log_softmax(logits / 0.8, -1)[drawn.token_ids]
    assert (drawn.logprobs - logprobs).abs().max() < 1e-5
    raw = torch.log_softmax(logits, -1)[drawn.token_ids]
    assert drawn.raw_logprobs is not None
    assert (drawn.raw_logprobs - raw).abs().max() < 1e-5


def test_filters() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.06, 0.04])).expand(5000, -1).contiguous()
    assert set(sample(logits, make_rows(5000, top_k=2)).token_ids.tolist()) == {0, 1}
    assert set(sample(logits, make_rows(5000, top_p=0.75)).token_ids.tolist()) == {0, 1, 2}
    assert set(sample(logits, make_rows(5000, top_p=0.7)).token_ids.tolist()) == {0, 1}
    assert set(sample(logits, make_rows(5000, min_p=0.45)).token_ids.tolist()) == {0, 1, 2}
    drawn = sample(logits, make_rows(5000, top_k=2))
    expected = torch.log(torch.tensor([4 / 7, 3 / 7]))[drawn.token_ids]
    assert (drawn.logprobs - expected).abs().max() < 1e-5


def test_greedy_and_forced() -> None:
    logits = torch.randn(6, 33, generator=torch.Generator().manual_seed(0))
    rows = make_rows(6, temperature=0)
    assert torch.equal(sample(logits, rows).token_ids, logits.argmax(-1))
    rows.forced[2] = 7
    drawn = sample(logits, rows)
    assert drawn.token_ids[2] == 7
    assert math.isclose(drawn.logprobs[2], torch.log_softmax(logits, -1)[2, 7], abs_tol=1e-5)
    assert drawn.top_ids is not None
    assert torch.equal(drawn.top_ids[:, 0], logits.argmax(-1))


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), vocab=st.integers(2, 200), cut=st.integers(1, 9))
def test_rows_are_independent(seed: int, vocab: int, cut: int) -> None:
    logits = torch.randn(10, vocab, generator=torch.Generator().manual_seed(seed)) * 4
    for kind in ({}, {"top_p": 0.8, "top_k": 5}, {"temperature": 0.3}):
        whole = sample(logits, make_rows(10, **kind))
        part = sample(logits[:cut].clone(), make_rows(cut, **kind))
        assert torch.equal(whole.token_ids[:cut], part.token_ids)
        assert torch.equal(whole.logprobs[:cut], part.logprobs)
        assert (whole.token_ids < vocab).all()
        assert torch.isfinite(whole.logprobs).all()
