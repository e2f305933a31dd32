"""Distillation in the learner: losses and gradients against plain torch over all logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.documents import Document, group_documents, per_group_advantages
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.policy.logprobs import Output, TeacherLogits, teacher_divergence
from dora_rl.trainer.policy.model import Policy, load_policy
from dora_rl.types import Group, Segment, UserError
from tests.kit.trainer_cases import (
    SMOOTH_EPS,
    VOCAB,
    changed,
    flat,
    forked,
    make_groups,
    write_tiny_model,
)

OPTIONS = TrainerConfig(lr=1e-3, device="cpu", threads=1, pack_tokens=64, eps=SMOOTH_EPS)
CLIP, COEF = 1.5, 0.5


@pytest.fixture(scope="module")
def teacher_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wider than the policy, of another family, and its vocabulary is padded further."""
    shape = {"hidden_size": 48, "num_hidden_layers": 1, "vocab_size": VOCAB + 9}
    return write_tiny_model(tmp_path_factory.mktemp("teacher") / "llama", "llama", 5, **shape)


@pytest.fixture
def trainer(teacher_dir: Path) -> TrainerConfig:
    return changed(OPTIONS, teacher_model=str(teacher_dir))


# -- the divergence of two distributions ----------------------------------------------------------


def plain_divergence(log_p: Tensor, log_q: Tensor, top_k: int) -> Tensor:
    """With `top_k` the most likely tokens of p, and all others as one."""
    if top_k:
        first = log_p.topk(top_k, -1).indices
        tables: list[Tensor] = []
        for table in (log_p, log_q):
            rest = table.exp().scatter(-1, first, 0.0).sum(-1, keepdim=True)
            tables.append(torch.cat([table.gather(-1, first), rest.log()], -1))
        log_p, log_q = tables
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@pytest.mark.parametrize("chunk", [29, 4])
@pytest.mark.parametrize("top_k", [0, 1, 7, 49, 50])
def test_the_divergence_is_the_formula(top_k: int, chunk: int) -> None:
    g = torch.Generator().manual_seed(0)
    states, weight = (torch.randn(s, 16, generator=g) / 3 for s in (29, 50))
    bias, outer = torch.randn(50, generator=g), torch.randn(29, generator=g)
    other = torch.randn(29, 12, generator=g), torch.randn(53, 12, generator=g)
    found: list[list[Tensor]] = []
    for plain in (False, True):
        s, w, b = (x.clone().requires_grad_() for x in (states, weight, bias))
        if plain:
            log_p = ((s @ w.t() + b).tanh() * 3 / 0.7).log_softmax(-1)
            log_q = (other[0] @ other[1].t() / 0.7).log_softmax(-1)[:, :50]
            kl_T = plain_divergence(log_p, log_q, top_k % 50)
        else:
            output = Output(w, b, lambda raw: raw.tanh() * 3)
            teacher = TeacherLogits(other[0], Output(other[1]), top_k)
            kl_T = teacher_divergence(s, output, teacher, 0.7, chunk)
        (kl_T * outer).sum().backward()
        found.append([kl_T.detach(), *(x.grad for x in (s, w, b) if x.grad is not None)])
    assert len(found[0]) == 4
    for a, b in zip(*found, strict=True):
        assert torch.allclose(a, b, atol=2e-5, rtol=1e-4)


# -- the learner's gradient -----------------------------------------------------------------------


def table_of(policy: Policy, document: Document, temperature: float) -> Tensor:
    """Log-softmax of every trained row of one document, all logits at once."""
    ids = document.token_ids
    states = policy.states(ids, Layout([len(ids)], ids.device))[document.rows]
    weight = policy.output().weight_VH.to(states.dtype)
    return ((states @ weight.t()).float() / temperature).log_softmax(-1)


def plain_loss(
    policy: Policy, teacher: Policy, groups: list[Group], options: AlgorithmConfig
) -> Tensor:
    """The numerator of token_mean or sequence_mean, as the formulas of the documentation say."""
    total = torch.zeros(())
    for group in groups:
        documents = group_documents(group, options)
        per_group_advantages(documents, resolve(options))
        for d in documents:
            target = d.token_ids[d.rows + 1]
            log_p = table_of(policy, d, options.temperature)
            with torch.no_grad():
                log_q = table_of(teacher, d, options.temperature)[:, :VOCAB]
            logprob = log_p.gather(-1, target[:, None])[:, 0]
            advantage, more = d.advantages, torch.zeros_like(logprob)
            if options.distill_in == "advantage":
                gap = d.rollout_logprobs - log_q.gather(-1, target[:, None])[:, 0]
                advantage = advantage - COEF * gap.clamp(-CLIP, CLIP)
            else:
                more = COEF * plain_divergence(log_p, log_q, options.distill_top_k)
            ratio = (logprob - d.rollout_logprobs).exp()
            bounded = ratio.clamp(1 - (options.clip_low or 0), 1 + (options.clip_high or 0))
            loss = -torch.minimum(ratio * advantage, bounded * advantage)
            cap = -(options.dual_clip or 0) * advantage
            loss = torch.where(advantage < 0, torch.minimum(loss, cap), loss) + more
            weight = 1 / d.episode_tokens if options.aggregation == "sequence_mean" else 1.0
            total = total + weight * loss.sum()
    return total


def groups_of(kind: str) -> list[Group]:
    """Random ones have masks with holes already."""
    groups = make_groups(3, 4)
    if kind == "branches":
        return [forked(group) for group in groups]
    if kind == "versions":  # one group is older, and one of its samples of several versions
        old, *rest = make_groups(4, 4, version=1)
        mixed = replace(old.samples[0], segments=(Segment(0, 0), Segment(1, 1)))
        return [replace(old, version=0, samples=(mixed, *old.samples[1:])), *rest]
    return groups


CASES: dict[str, dict[str, Any]] = {
    "alone": {"loss": "distill"},
    "beside a reward": {"loss": "grpo", "distill_coef": COEF},
    "in the loss": {"loss": "distill", "distill_in": "loss"},
    "in the loss, top 4": {"loss": "distill", "distill_in": "loss", "distill_top_k": 4},
    "in the loss, beside a reward": {"loss": "grpo", "distill_coef": COEF, "distill_in": "loss"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["masks", "branches", "versions"])
@pytest.mark.parametrize("name", CASES)
def test_the_gradient_is_that_of_plain_torch(
    name: str, kind: str, dtype: str, model_dir: Path, trainer: TrainerConfig
) -> None:
    algorithm = AlgorithmConfig(
        **({"distill_coef": COEF} | CASES[name]), distill_clip=CLIP, temperature=0.8
    )
    learner = Learner(model_dir, algorithm, changed(trainer, compute_dtype=dtype))
    groups, options = groups_of(kind), learner.objective.options
    learner.begin_step(1 if kind == "versions" else 0)
    learner.feed(groups)
    learner.run_packs(flush=True)
    got = [p.grad for p in learner.policy.parameters()]
    plain = load_policy(model_dir, changed(OPTIONS, compute_dtype=dtype))
    assert learner.teacher is not None
    want_loss = plain_loss(plain, learner.teacher.policy, groups, options)
    want_loss.backward()
    close = 1e-4 if dtype == "float32" else 3e-2
    assert float(learner._update.loss) == pytest.approx(float(want_loss.detach()), rel=close)
    for mine, parameter in zip(got, plain.parameters(), strict=True):
        assert mine is not None and parameter.grad is not None
        assert (mine - parameter.grad).norm() <= close * parameter.grad.norm() + 1e-6


def test_the_divergence_is_measured_and_falls(model_dir: Path, trainer: TrainerConfig) -> None:
    """What is learned from samples of the policy alone: each step draws its own."""
    learner = Learner(
        model_dir, AlgorithmConfig(loss="distill", distill_in="loss"), changed(trainer, eps=1e-8)
    )
    found: list[float] = []
    for step in range(8):
        learner.begin_step(step)
        learner.feed(make_groups(7, 4, version=step))
        found.append(learner.finish_step()["distill_kl"])
    assert found[-1] < 0.8 * found[0] and found == sorted(found, reverse=True)


# -- what a sample brings along -------------------------------------------------------------------


def with_teacher(groups: list[Group], learner: Learner) -> list[Group]:
    """As a served teacher fills the column in: NaN where the policy wrote nothing."""
    assert learner.teacher is not None
    out: list[Group] = []
    for group in groups:
        samples = list(group.samples)
        documents = group_documents(group, learner.objective.options)
        learner.teacher.fill_logprobs(documents)
        for d in documents:
            sample = samples[d.sample]
            given = np.full(len(sample.token_ids), np.nan, np.float32)
            assert d.teacher_logprobs is not None
            given[sample.loss_mask != 0] = d.teacher_logprobs.numpy()
            samples[d.sample] = replace(sample, teacher_logprobs=given)
        out.append(replace(group, samples=tuple(samples)))
    return out


def test_a_column_of_the_sample_is_as_good_as_a_held_teacher(
    model_dir: Path, trainer: TrainerConfig
) -> None:
    algorithm = AlgorithmConfig(loss="distill")
    held, served = Learner(model_dir, algorithm, trainer), Learner(model_dir, algorithm, OPTIONS)
    groups = make_groups(5, 3)
    found: list[dict[str, float]] = []
    for learner, fed in ((held, groups), (served, with_teacher(groups, held))):
        learner.begin_step(0)
        learner.feed(fed)
        found.append(learner.finish_step())
    assert found[0]["distill_kl"] == pytest.approx(found[1]["distill_kl"], rel=1e-6)
    assert (flat(held) - flat(served)).abs().max() < 1e-6


def test_what_no_teacher_has_seen_is_left_out_and_counted(
    model_dir: Path, trainer: TrainerConfig
) -> None:
    algorithm = AlgorithmConfig(loss="distill")
    (group,) = with_teacher(make_groups(5, 1), Learner(model_dir, algorithm, trainer))
    first, second, *rest = group.samples
    assert second.teacher_logprobs is not None
    broken = second.teacher_logprobs.copy()
    broken[np.flatnonzero(second.loss_mask)[-1]] = -np.inf
    samples = (replace(first, teacher_logprobs=None), replace(second, teacher_logprobs=broken))
    learner = Learner(model_dir, algorithm, OPTIONS)
    learner.begin_step(0)
    learner.feed([replace(group, samples=(*samples, *rest))])
    metrics = learner.finish_step()
    assert metrics["dropped/no_teacher_logprobs"] == 1
    assert metrics["dropped/non_finite_teacher_logprob"] == 1
    assert metrics["train/rows"] == len(rest)


def test_groups_of_equal_rewards_teach_too(model_dir: Path, trainer: TrainerConfig) -> None:
    equal = [
        replace(g, samples=tuple(replace(s, reward=1.0) for s in g.samples))
        for g in make_groups(1, 2)
    ]
    learner = Learner(model_dir, AlgorithmConfig(distill_coef=0.1), trainer)
    before = flat(learner)
    learner.begin_step(0)
    learner.feed(equal)
    assert "train/tokens_skipped" not in learner.finish_step()
    assert not torch.equal(before, flat(learner))


@pytest.mark.parametrize("where", ["advantage", "loss"])
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_a_resumed_run_goes_on_as_it_was(
    lora_rank: int, where: str, model_dir: Path, trainer: TrainerConfig, tmp_path: Path
) -> None:
    algorithm = AlgorithmConfig(loss="grpo", distill_coef=0.3, distill_in=where)
    trainer = changed(trainer, lora_rank=lora_rank)
    first = Learner(model_dir, algorithm, trainer, batch_groups=3)

    def step(learner: Learner, number: int) -> dict[str, float]:
        learner.begin_step(number)
        learner.feed(make_groups(number, 3, version=number))
        return learner.finish_step()

    step(first, 0)
    first.save(tmp_path / "saved")
    second = Learner.resume(tmp_path / "saved", algorithm, trainer, batch_groups=3)
    assert step(first, 1) == step(second, 1)
    assert torch.equal(flat(first), flat(second))


def test_a_teacher_may_know_more_tokens_and_not_fewer(
    model_dir: Path, tmp_path: Path, trainer: TrainerConfig
) -> None:
    Learner(model_dir, AlgorithmConfig(), trainer)
    small = write_tiny_model(tmp_path / "small", "llama", vocab_size=VOCAB - 1)
    with pytest.raises(UserError, match=rf"has {VOCAB - 1} tokens, the model has {VOCAB}"):
        Learner(model_dir, AlgorithmConfig(), changed(trainer, teacher_model=str(small)))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"advantage": "none"}, "nothing would be learned"),
        ({"loss": "distill", "distill_coef": 0.0}, "nothing would be learned"),
        ({"loss": "distill", "distill_top_k": 3}, "distill_top_k = 3 would do nothing"),
    ],
)
def test_what_would_do_nothing_is_refused(options: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        resolve(AlgorithmConfig(**options))
