"""The memory plan against peaks measured on one H200, and what it does where memory is short."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.model.directory import read_spec
from dora_rl.model.names import SCALE
from dora_rl.model.random_weights import RandomAdapter
from dora_rl.model.spec import ModelSpec, RopeSpec
from dora_rl.setup.memory import (
    CONTEXT_BYTES,
    GB,
    RESERVE_SHARE,
    Need,
    adapter_params,
    graph_bytes,
    num_params,
    plan_memory,
    state_lines,
    working_bytes,
)
from tests.kit.tiny_models import save_model

BILLION_AND_A_HALF = ModelSpec(
    family="qwen2", vocab=151_936, hidden=1536, intermediate=8960, num_layers=28, num_heads=12,
    num_kv_heads=2, head_dim=128, norm_eps=1e-6, rope=RopeSpec(), tied=True, context_max=32_768,
    qkv_bias=True,
)  # fmt: skip
SIX_HUNDRED_MILLION = ModelSpec(
    family="qwen3", vocab=151_936, hidden=1024, intermediate=3072, num_layers=28, num_heads=16,
    num_kv_heads=8, head_dim=128, norm_eps=1e-6, rope=RopeSpec(), tied=True, context_max=32_768,
    qk_norm=True,
)  # fmt: skip
SPECS = {"1.5b": BILLION_AND_A_HALF, "0.6b": SIX_HUNDRED_MILLION}
CHUNK = (1 << 29) // 151_936

# Model, checkpointing, LoRA rank, tokens of a pack: what torch had reserved at the peak, in GB.
# One H200, torch 2.11, bfloat16, compiled layers, documents of 512 tokens, 2026-11-18.
MEASURED = [
    ("1.5b", "layer", 0, 4_096, 33.95),
    ("1.5b", "layer", 0, 16_384, 35.03),
    ("1.5b", "layer", 0, 32_768, 38.25),
    ("1.5b", "none", 0, 4_096, 45.38),
    ("1.5b", "none", 0, 8_192, 56.12),
    ("1.5b", "none", 0, 16_384, 75.52),
    ("1.5b", "none", 0, 32_768, 114.91),
    ("0.6b", "layer", 0, 4_096, 17.15),
    ("0.6b", "layer", 0, 32_768, 19.30),
    ("0.6b", "none", 0, 4_096, 23.30),
    ("0.6b", "none", 0, 16_384, 41.02),
    ("0.6b", "none", 0, 32_768, 65.35),
    ("1.5b", "layer", 32, 4_096, 14.48),
    ("1.5b", "layer", 32, 16_384, 15.55),
]


@pytest.mark.parametrize(("name", "checkpointing", "rank", "pack", "reserved"), MEASURED)
def test_the_learners_peak_is_foreseen(
    name: str, checkpointing: str, rank: int, pack: int, reserved: float
) -> None:
    # Measured while the frozen base was in float32.
    need = Need(SPECS[name], 3, lora_rank=rank, base_bytes=4, request_tokens_max=512)
    state = sum(line.num_bytes for line in state_lines(need)) - CONTEXT_BYTES
    planned = (state + working_bytes(need, checkpointing, pack, CHUNK)) / GB
    assert planned == pytest.approx(reserved, rel=0.1)


def test_parameters_are_counted() -> None:
    assert num_params(BILLION_AND_A_HALF) == pytest.approx(1_543_714_304, rel=1e-3)
    assert num_params(SIX_HUNDRED_MILLION) == pytest.approx(596_049_920, rel=1e-3)


@pytest.mark.parametrize(("versions", "requests", "grown"), [(3, 512, 3.50), (1, 64, 0.99)])
def test_graphs_and_workspace_of_an_instance(versions: int, requests: int, grown: float) -> None:
    """`grown`: what a run of so many requests took beside weights and KV, in GB, on an H200."""
    need = Need(BILLION_AND_A_HALF, versions, step_tokens_max=8192)
    assert graph_bytes(need, versions, requests) / GB == pytest.approx(grown, rel=0.1)


GSM8K = Need(
    BILLION_AND_A_HALF,
    3,
    evaluator=True,
    num_requests=512,
    request_tokens_max=1280,
    step_tokens_max=8192,
)


def test_a_large_card_keeps_activations_and_a_small_one_does_not() -> None:
    large, middle = plan_memory(GSM8K, 150 * GB), plan_memory(GSM8K, 80 * GB)
    assert large.fits and large.checkpointing == "none" and large.pack_tokens >= 16_384
    assert middle.fits and middle.checkpointing == "layer" and middle.versions_max == 3
    assert large.kv_bytes > 10 * GB and middle.kv_bytes > 8 * GB


def test_what_does_not_fit_says_so_and_lora_may() -> None:
    small = plan_memory(GSM8K, 24 * GB)
    assert not small.fits and small.planned_bytes > 24 * GB
    assert plan_memory(replace(GSM8K, lora_rank=32), 24 * GB).fits


def test_what_the_user_said_stays() -> None:
    fixed = replace(
        GSM8K, pack_tokens=6000, checkpointing="layer", kv_bytes=5 * GB, chunk_tokens=512
    )
    plan = plan_memory(fixed, 150 * GB)
    found = (plan.pack_tokens, plan.checkpointing, plan.kv_bytes, plan.chunk_tokens)
    assert found == (6000, "layer", 5 * GB, 512)


def test_the_table_has_every_part_and_what_is_left() -> None:
    rows = plan_memory(GSM8K, 150 * GB).table()
    for word in ("masters", "moments", "KV cache", "evaluator", "graphs", "left"):
        assert any(word in row for row in rows)


@settings(max_examples=60, deadline=None)
@given(
    total=st.integers(8, 160),
    instances=st.integers(0, 3),
    rank=st.sampled_from([0, 16]),
    requests=st.integers(1, 1024),
    tokens=st.integers(64, 32_768),
    evaluator=st.booleans(),
    spec=st.sampled_from(sorted(SPECS)),
)
def test_a_plan_that_fits_adds_up(
    total: int, instances: int, rank: int, requests: int, tokens: int, evaluator: bool, spec: str
) -> None:
    need = Need(
        SPECS[spec],
        3,
        num_instances=instances,
        lora_rank=rank,
        evaluator=evaluator,
        num_requests=requests,
        request_tokens_max=tokens,
    )
    plan = plan_memory(need, total * GB)
    assert plan.fits == (plan.planned_bytes <= int(total * GB * (1 - RESERVE_SHARE)))
    # More memory never makes it worse.
    if plan.fits:
        assert plan_memory(need, (total + 20) * GB).fits


@pytest.mark.parametrize("family", ["llama", "olmo2", "phi3", "glm4"])
def test_adapters_are_counted_as_they_are(family: str, tmp_path: Path) -> None:
    """A layer that a family has in one piece has one adapter."""
    save_model(family, tmp_path)
    spec = read_spec(tmp_path)
    adapter = RandomAdapter(spec, 0, 3)
    counted = sum(adapter.tensor(name).numel() for name in adapter.names() if name != SCALE)
    assert adapter_params(spec, 3) == counted
