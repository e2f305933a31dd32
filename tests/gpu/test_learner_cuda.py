"""The learner on a GPU: flash and compiled paths against the plain ones, exactness within rounding.

pytest tests/gpu/test_learner_cuda.py -m gpu
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.model.random_weights import RandomWeights
from dora_rl.model.spec import ModelSpec, MoeSpec, RopeSpec
from dora_rl.trainer.attention import Layout, attend_flex, attend_loop, attend_varlen
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.model import build_decoder, load_weights
from dora_rl.types import Group, RequestId, Trajectory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VOCAB = 512
DENSE = ModelSpec(
    family="qwen3",
    vocab=VOCAB,
    hidden=256,
    intermediate=512,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    norm_eps=1e-6,
    tied=True,
    context_max=4096,
    rope=RopeSpec(10000.0),
    qk_norm=True,
)
SPARSE = replace(
    DENSE,
    family="qwen3_moe",
    moe=MoeSpec(num_experts=8, top_k=2, intermediate=128, normalise=True, sparse_layers=(0, 1, 2)),
)
LENGTHS = [700, 3, 64, 129, 1, 350]


def policy_of(arch: ModelSpec, **options: object):
    trainer = TrainerConfig(device="cuda", **options)  # type: ignore[arg-type]
    decoder = build_decoder(arch, trainer)
    load_weights(decoder, RandomWeights(arch, 0, 0.05, "cuda").tensor)
    return decoder


def scores_and_gradient(decoder, lengths: list[int] = LENGTHS):
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sum(lengths),), generator=g).cuda()
    target = torch.randint(VOCAB, (sum(lengths),), generator=g).cuda()
    rows = torch.arange(len(ids), device="cuda")
    out = decoder(ids, Layout(lengths, ids.device), rows, target)
    out.logprobs_T.mean().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in decoder.parameters()])
    return out.logprobs_T.detach(), out.entropy_T.detach(), flat


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> None:
    assert torch.isfinite(a).all() and torch.isfinite(b).all()
    assert (a - b).norm() <= tolerance * b.norm()


@pytest.mark.parametrize("attend", [attend_varlen, attend_flex], ids=["varlen", "flex"])
def test_packed_attention_equals_one_document_at_a_time(attend) -> None:
    g = torch.Generator(device="cuda").manual_seed(0)
    total = sum(LENGTHS)
    layout = Layout(LENGTHS, torch.device("cuda"))
    shapes = [(total, h, 64) for h in (4, 2, 2)]
    inputs = [torch.randn(s, generator=g, device="cuda", dtype=torch.bfloat16) for s in shapes]
    results = []
    for run in (attend, attend_loop):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = run(q, k, v, layout, 0.125)
        out.float().square().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for a, b in zip(*results, strict=True):
        close(a.float(), b.float(), 2e-2)


@pytest.mark.parametrize("arch", [DENSE, SPARSE], ids=["dense", "sparse"])
def test_bfloat16_is_near_float32(arch: ModelSpec) -> None:
    exact = scores_and_gradient(policy_of(arch, compute_dtype="float32", compile="off"))
    half = scores_and_gradient(policy_of(arch, compute_dtype="bfloat16", compile="off"))
    # A router's near-tie may choose another expert in half precision, which moves a token by more.
    limit = 0.05 if arch is SPARSE else 0.02
    assert (exact[0] - half[0]).abs().mean() < limit
    assert (exact[1] - half[1]).abs().mean() < 0.02
    if arch is DENSE:  # rounding may route a token elsewhere, so a sparse gradient may jump
        close(half[2], exact[2], 0.05)


def test_compiling_changes_only_rounding() -> None:
    plain = scores_and_gradient(policy_of(DENSE, compile="off"))
    fused = scores_and_gradient(policy_of(DENSE, compile="on"))
    assert (plain[0] - fused[0]).abs().mean() < 0.01
    close(fused[2], plain[2], 0.03)


def test_checkpointing_changes_nothing() -> None:
    plain = scores_and_gradient(policy_of(DENSE))
    again = scores_and_gradient(policy_of(DENSE, activation_checkpointing="layer"))
    close(again[2], plain[2], 1e-2)


def test_logits_in_chunks_change_nothing() -> None:
    whole = scores_and_gradient(policy_of(DENSE, compute_dtype="float32"))
    parts = scores_and_gradient(policy_of(DENSE, compute_dtype="float32", logits_chunk_tokens=100))
    assert (whole[0] - parts[0]).abs().max() < 1e-4
    close(parts[2], whole[2], 1e-4)


def groups(seed: int) -> list[Group]:
    rng = random.Random(seed)
    out = []
    for g in range(6):
        samples = []
        for i in range(4):
            n = rng.randint(5, 300)
            ids = [rng.randrange(VOCAB) for _ in range(n)]
            rid, reward = RequestId(g, i), float(i % 2)
            samples.append(Trajectory(rid, 0, ids, [-6.2] * n, [1] * n, reward=reward))
        out.append(Group(g, 0, [rng.randrange(VOCAB) for _ in range(9)], tuple(samples)))
    return out


def test_a_stream_gives_the_gradient_of_one_big_batch() -> None:
    norms = []
    for pack_tokens in (512, 100_000):
        trainer = TrainerConfig(device="cuda", pack_tokens=pack_tokens, lr=1e-4)
        learner = Learner(policy_of(DENSE, pack_tokens=pack_tokens), AlgorithmConfig(), trainer)
        learner.begin_step(0)
        for group in groups(0):
            learner.feed([group])
        norms.append(learner.finish_step()["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=0.02)


def test_a_learner_learns() -> None:
    """Prefer one token over another; the log-probs must follow."""
    trainer = TrainerConfig(device="cuda", lr=3e-4)
    learner = Learner(policy_of(DENSE), AlgorithmConfig(loss="reinforce"), trainer)

    def batch(step: int) -> list[Group]:
        rng = random.Random(step)
        prompt = [rng.randrange(VOCAB) for _ in range(8)]
        pair = [
            Trajectory(RequestId(step, 0), step, [token] * 8, [-6.2] * 8, [1] * 8, reward=reward)
            for token, reward in ((5, 1.0), (6, 0.0))
        ]
        return [Group(step, step, prompt, tuple(pair))]

    losses = []
    for step in range(30):
        learner.begin_step(step)
        learner.feed(batch(step))
        losses.append(learner.finish_step()["loss"])
    assert losses[-1] < losses[0] - 1.0


@pytest.mark.parametrize("rank", [0, 8])
def test_no_pack_waits_for_the_device(rank: int) -> None:
    """Once everything is compiled the host only queues: forward, backward, sums of metrics."""
    trainer = TrainerConfig(device="cuda", lr=1e-4, pack_tokens=256, lora_rank=rank)
    learner = Learner(policy_of(DENSE), AlgorithmConfig(kl_coef=0.1), trainer)
    assert learner.policy.compiled
    rng = random.Random(0)

    def group(index: int) -> Group:
        samples: list[Trajectory] = []
        for place, n in enumerate((40, 41, 80, 81)):
            ids, rid = [rng.randrange(VOCAB) for _ in range(n)], RequestId(index, place)
            samples.append(Trajectory(rid, 0, ids, [-6.0] * n, [1] * n, reward=float(n % 2)))
        return Group(index, 0, [1, 2, 3], tuple(samples))

    for step in range(3):
        learner.begin_step(step)
        groups = [group(i) for i in range(8)]
        torch.cuda.set_sync_debug_mode("error" if step == 2 else "default")
        try:
            learner.feed(groups)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert learner.finish_step()["train/packs"] > 4
