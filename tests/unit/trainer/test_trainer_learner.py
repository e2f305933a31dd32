"""The learner from outside: streams, updates, old log-probs, resume, publication, bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.model import load_policy
from dora_rl.types import REWARD_MAX, Group, Segment, UserError
from tests.kit.trainer_cases import SMOOTH_EPS, VOCAB, changed, flat, make_groups, sample
from tests.kit.trainer_store import MemoryStore

TRAINER = TrainerConfig(lr=1e-3, device="cpu", pack_tokens=64, eps=SMOOTH_EPS)
GRPO = AlgorithmConfig()


def run_step(
    learner: Learner, step: int, groups: list[Group], at_once: int = 1
) -> dict[str, float]:
    learner.begin_step(step)
    for i in range(0, len(groups), at_once):
        learner.feed(groups[i : i + at_once])
    return learner.finish_step()


def after_one_step(
    model_dir: Path,
    groups: list[Group],
    algorithm: AlgorithmConfig = GRPO,
    trainer: TrainerConfig = TRAINER,
    at_once: int = 1,
) -> tuple[torch.Tensor, dict[str, float]]:
    learner = Learner(model_dir, algorithm, trainer, batch_groups=len(groups))
    metrics = run_step(learner, 0, groups, at_once)
    return flat(learner), metrics


OBJECTIVES = [
    AlgorithmConfig(loss="grpo"),
    AlgorithmConfig(loss="dapo"),
    AlgorithmConfig(loss="dr_grpo", constant_tokens=20),
    AlgorithmConfig(loss="rloo"),
    AlgorithmConfig(loss="gspo", clip_low=0.2, clip_high=0.2),
    AlgorithmConfig(loss="cispo", entropy_coef=0.01),
    AlgorithmConfig(loss="reinforce++"),
    AlgorithmConfig(loss="ppo"),
]


@pytest.mark.parametrize("algorithm", OBJECTIVES, ids=lambda o: o.loss)
def test_a_stream_gives_the_gradient_of_one_big_batch(
    model_dir: Path, algorithm: AlgorithmConfig
) -> None:
    # Clipping hides a wrong scale, so the norm before it is compared as well.
    groups = make_groups(3, 6)
    big = changed(TRAINER, pack_tokens=100_000, streaming=False)
    want, want_metrics = after_one_step(model_dir, groups, algorithm, big, at_once=6)
    for pack_tokens, at_once in ((16, 1), (70, 2)):
        small = changed(TRAINER, pack_tokens=pack_tokens)
        got, metrics = after_one_step(model_dir, groups, algorithm, small, at_once)
        assert metrics["train/packs"] > want_metrics["train/packs"]
        assert metrics["grad_norm"] == pytest.approx(want_metrics["grad_norm"], rel=1e-4)
        assert metrics["loss"] == pytest.approx(want_metrics["loss"], rel=1e-4, abs=1e-6)
        assert (got - want).abs().max() < 1e-6


def test_updates_take_the_groups_in_turn(model_dir: Path) -> None:
    groups = make_groups(5, 6)
    two = Learner(model_dir, GRPO, changed(TRAINER, updates_per_step=2), batch_groups=6)
    run_step(two, 0, groups, at_once=4)
    one = Learner(model_dir, GRPO, TRAINER)
    one.begin_step(0)
    for half in (groups[:3], groups[3:]):
        one.feed(half)
        one.finish_update()
    one.finish_step()
    assert two.num_updates == one.num_updates == 2
    assert torch.equal(flat(two), flat(one))
    with pytest.raises(UserError, match="does not divide"):
        Learner(model_dir, GRPO, changed(TRAINER, updates_per_step=4), batch_groups=6)


def test_canonical_order_forgets_the_arrival(model_dir: Path) -> None:
    groups = make_groups(6, 5)
    canonical = changed(TRAINER, canonical_order=True, updates_per_step=2)
    results = []
    for order in (groups, groups[::-1], groups[2:] + groups[:2]):
        learner = Learner(model_dir, GRPO, canonical)
        run_step(learner, 0, order)
        results.append(flat(learner))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_skipping_groups_without_signal_is_exact(model_dir: Path) -> None:
    groups = make_groups(7, 4)
    same = [replace(s, reward=1.0) for s in groups[1].samples]
    groups[1] = replace(groups[1], samples=tuple(same))
    for loss in ("grpo", "dapo", "cispo"):
        skip, metrics = after_one_step(model_dir, groups, AlgorithmConfig(loss=loss))
        full, _ = after_one_step(
            model_dir, groups, AlgorithmConfig(loss=loss, skip_zero_advantage=False)
        )
        assert metrics["train/tokens_skipped"] > 0
        assert (skip - full).abs().max() < 1e-6
    # With an entropy bonus such groups carry a gradient, so nothing may be skipped.
    _, metrics = after_one_step(model_dir, groups, AlgorithmConfig(entropy_coef=0.1))
    assert "train/tokens_skipped" not in metrics


def true_logprobs(model_dir: Path, groups: list[Group]) -> list[Group]:
    """The same groups with the model's own log-probs, as a perfect engine would report."""
    policy = load_policy(model_dir, TrainerConfig(device="cpu"))
    out = []
    for g in groups:
        samples = []
        for s in g.samples:
            ids = torch.tensor([*g.prompt_ids, *s.token_ids])
            start = len(g.prompt_ids)
            rows = torch.arange(start - 1, len(ids) - 1)
            with torch.no_grad():
                lp = policy(ids, Layout([len(ids)], torch.device("cpu")), rows, ids[start:])
            samples.append(replace(s, logprobs=lp.logprobs_T.tolist()))
        out.append(replace(g, samples=tuple(samples)))
    return out


def test_old_logprobs_come_from_sealed_versions(model_dir: Path) -> None:
    """With a perfect engine, recomputing under the behaviour version changes nothing, whatever
    the live weights have become."""
    store = MemoryStore()
    first, exact = (true_logprobs(model_dir, make_groups(seed, 4)) for seed in (9, 8))
    results = []
    for old in ("rollout", "behaviour"):
        learner = Learner(model_dir, AlgorithmConfig(old_logprobs=old), TRAINER, store=store)
        if 0 not in store.sealed:
            learner.publish(store, 0)
        run_step(learner, 0, first)
        metrics = run_step(learner, 1, exact)  # one version old by now
        assert metrics["ppo_kl"] > 1e-7
        results.append((flat(learner), metrics))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-6
    assert results[1][1]["mismatch_kl"] < 1e-9  # engine gap alone: learning is kept out
    assert 0 in store.opened


def test_proximal_logprobs_stay_at_the_steps_start(model_dir: Path) -> None:
    """Decoupled PPO with two updates: the second one's trust region is still version s."""
    store = MemoryStore()
    algorithm = AlgorithmConfig(loss="decoupled_ppo")
    trainer = changed(TRAINER, updates_per_step=2)
    learner = Learner(model_dir, algorithm, trainer, batch_groups=4, store=store)
    learner.publish(store, 0)
    groups = make_groups(10, 4)
    learner.begin_step(0)
    learner.feed(groups[:2])
    assert store.opened == []  # at rest: the live weights are version 0
    learner.feed(groups[2:])
    metrics = learner.finish_step()
    assert store.opened == [0]
    assert metrics["ppo_kl"] > 1e-7
    without = Learner(model_dir, algorithm, trainer, batch_groups=4)
    without.begin_step(0)
    with pytest.raises(UserError, match="weight store"):
        without.feed(groups)


@pytest.mark.parametrize(
    "algorithm",
    [
        AlgorithmConfig(),
        AlgorithmConfig(loss="ppo", critic_lr=1e-3),
        AlgorithmConfig(kl_coef=0.1),
        AlgorithmConfig(kl_coef=0.1, kl_in="reward", kl_estimator="k1"),
    ],
    ids=["grpo", "ppo", "kl", "kl in reward"],
)
@pytest.mark.parametrize("lora_rank", [0, 2])
def test_resume_continues_the_same_curve(
    model_dir: Path, tmp_path: Path, algorithm: AlgorithmConfig, lora_rank: int
) -> None:
    trainer = changed(TRAINER, lora_rank=lora_rank, schedule="cosine", num_updates=5)
    first = Learner(model_dir, algorithm, trainer, batch_groups=4)
    for step in range(2):
        run_step(first, step, make_groups(step, 4, version=step))
    first.save(tmp_path / "ckpt")
    second = Learner.resume(tmp_path / "ckpt", algorithm, trainer, batch_groups=4)
    assert second.next_step == 2
    for step in range(2, 4):
        groups = make_groups(step, 4, version=step)
        a, b = run_step(first, step, groups), run_step(second, step, groups)
        assert a == b
    assert torch.equal(flat(first), flat(second))


def test_kl_pulls_back_to_the_start(model_dir: Path) -> None:
    """The first step has no KL (nothing moved); later ones do, and a large weight keeps it low."""
    kls = []
    for coef in (0.001, 10.0):
        learner = Learner(model_dir, AlgorithmConfig(kl_coef=coef), TRAINER)
        history = [run_step(learner, s, make_groups(s, 4, version=s))["kl"] for s in range(6)]
        assert history[0] < 1e-9
        kls.append(history[-1])
    assert kls[1] < 0.5 * kls[0]


def test_critic_learns_the_rewards(model_dir: Path) -> None:
    algorithm = AlgorithmConfig(loss="ppo", critic_lr=3e-3, value_clip=None)
    learner = Learner(model_dir, algorithm, changed(TRAINER, lr=1e-6, eps=1e-8))
    groups = [
        replace(g, samples=tuple(replace(s, reward=1.0) for s in g.samples))
        for g in make_groups(11, 4)
    ]
    errors = [run_step(learner, s, groups)["critic/error_square"] for s in range(8)]
    assert errors[0] == pytest.approx(1.0)  # values start at zero
    assert errors[-1] < 0.2


def test_publication_is_what_the_canary_says(model_dir: Path) -> None:
    store = MemoryStore()
    learner = Learner(model_dir, GRPO, TRAINER)
    run_step(learner, 0, make_groups(0, 2))
    checksum = learner.publish(store, 1, background=True)
    before = flat(learner)
    run_step(learner, 1, make_groups(1, 2))  # the next step does not touch what was published
    sealed = store.sealed[1] if checksum.result(10) else None
    assert sealed is not None and sealed.checksum == checksum.result()
    twin = Learner(model_dir, GRPO, TRAINER)
    for name, p in twin.policy.named_parameters():
        p.data.copy_(sealed.tensors[name])
    assert torch.equal(flat(twin), before)
    assert sealed.canary is not None
    ids = torch.tensor(sealed.canary.token_ids)
    layout = Layout([len(ids)], torch.device("cpu"))
    scores = twin.policy(ids, layout, torch.arange(len(ids) - 1), ids[1:])
    assert scores.logprobs_T.tolist() == pytest.approx(sealed.canary.logprobs, abs=1e-6)
    learner.publisher.close()


def test_bfloat16_is_computed_from_float32_masters(model_dir: Path, tmp_path: Path) -> None:
    """Updates far below bfloat16's resolution accumulate, in training and through a resume."""
    trainer = changed(TRAINER, compute_dtype="bfloat16", lr=1e-6)
    learner = Learner(model_dir, GRPO, trainer)
    store = MemoryStore()
    before = flat(learner)
    # Some virtual machines announce matrix instructions for bfloat16 that they then refuse.
    with torch.backends.mkldnn.flags(enabled=False):
        run_step(learner, 0, make_groups(0, 2))
        learner.publish(store, 1)
    assert all(p.dtype == torch.float32 for p in learner.policy.parameters())
    moved = flat(learner) != before
    assert moved.float().mean() > 0.5
    assert {t.dtype for t in store.sealed[1].tensors.values()} == {torch.bfloat16}
    learner.save(tmp_path / "ckpt")
    again = Learner.resume(tmp_path / "ckpt", GRPO, trainer)
    assert torch.equal(flat(learner), flat(again))


def test_non_finite_gradient_is_skipped_and_counted(model_dir: Path) -> None:
    learner = Learner(model_dir, AlgorithmConfig(loss="reinforce"), TRAINER)
    before = flat(learner)
    groups = make_groups(0, 2)
    # A reward as large as it may be, not divided by a deviation: the gradient's norm overflows.
    broken = replace(groups[0].samples[0], reward=REWARD_MAX)
    groups[0] = replace(groups[0], samples=(broken, *groups[0].samples[1:]))
    metrics = run_step(learner, 0, groups)
    assert metrics["update/skipped_non_finite"] == 1
    assert torch.equal(before, flat(learner))
    metrics = run_step(learner, 1, make_groups(1, 2))
    assert math.isfinite(metrics["loss"]) and not torch.equal(before, flat(learner))


def test_an_update_whose_gradient_is_zero_is_counted_apart(model_dir: Path) -> None:
    learner = Learner(model_dir, GRPO, TRAINER)
    groups = [
        replace(g, samples=tuple(replace(s, reward=1.0) for s in g.samples))
        for g in make_groups(0, 2)
    ]
    metrics = run_step(learner, 0, groups)
    assert metrics["update/without_gradient"] == 1 and metrics["grad_norm"] == 0.0
    assert "update/applied" not in metrics
    metrics = run_step(learner, 1, make_groups(1, 2))
    assert metrics["update/applied"] == 1 and "update/without_gradient" not in metrics


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("loss", ["grpo", "dapo", "gspo", "decoupled_ppo", "ppo"])
def test_one_token_far_off_does_not_cost_the_update(model_dir: Path, loss: str, dtype: str) -> None:
    """The engine reported a log-prob 50 below the learner's, of a response that is punished."""
    trainer = changed(TRAINER, compute_dtype=dtype)
    algorithm = AlgorithmConfig(loss=loss, kl_coef=0.01)
    groups = make_groups(0, 2)
    first, *rest = groups[0].samples
    far = replace(first, logprobs=[p - 50.0 for p in first.logprobs], reward=-1.0)
    groups[0] = replace(groups[0], samples=(far, *rest))
    learner = Learner(model_dir, algorithm, trainer, batch_groups=2)
    before = flat(learner)
    metrics = run_step(learner, 0, groups)
    assert "update/skipped_non_finite" not in metrics and not torch.equal(before, flat(learner))
    # The one token weighs no more than its cap, so the clipping of the norm leaves the rest theirs.
    assert metrics["grad_norm"] < 100


def test_bad_samples_are_counted_by_reason(model_dir: Path) -> None:
    good = make_groups(0, 1)[0]
    s = good.samples[0]
    n = len(s.token_ids)
    bad = {
        "no_reward": replace(s, reward=None),
        "non_finite_reward": replace(s, reward=math.nan),
        "nothing_to_train": replace(s, loss_mask=[0] * n),
        "too_long": sample([1] * 300, [-1.0] * 300, [1] * 300, 1.0),
        "token_out_of_range": replace(s, token_ids=[VOCAB] * n),
        "non_finite_logprob": replace(s, logprobs=[math.inf] * n),
    }
    mixed = replace(good, samples=(*good.samples, *bad.values()))
    empty = Group(9, 0, good.prompt_ids, (bad["no_reward"],))
    nothing = Group(10, 0, good.prompt_ids, ())
    learner = Learner(model_dir, GRPO, TRAINER, batch_groups=3)
    metrics = run_step(learner, 0, [mixed, empty, nothing])
    for reason in bad:
        assert metrics[f"dropped/{reason}"] == (2 if reason == "no_reward" else 1)
    assert metrics["dropped/empty_group"] == 2
    want, _ = after_one_step(model_dir, [good])
    assert torch.equal(flat(learner), want)


def test_a_step_of_nothing_changes_nothing(model_dir: Path) -> None:
    learner = Learner(model_dir, GRPO, TRAINER, batch_groups=1)
    before = flat(learner)
    metrics = run_step(learner, 0, [Group(0, 0, (1,), ())])
    assert metrics["update/empty"] == 1 and torch.equal(before, flat(learner))
    learner = Learner(model_dir, AlgorithmConfig(loss="reinforce++"), TRAINER)
    assert run_step(learner, 0, [])["update/empty"] == 1


def test_metrics_describe_the_batch(model_dir: Path) -> None:
    groups = make_groups(0, 3)
    groups[2] = replace(groups[2], version=0)
    learner = Learner(model_dir, AlgorithmConfig(kl_coef=0.01), TRAINER)
    metrics = run_step(learner, 2, [replace(groups[0], version=2), *groups[1:]])
    rewards = [s.reward for g in groups for s in g.samples]
    assert metrics["reward/mean"] == pytest.approx(sum(r or 0 for r in rewards) / len(rewards))
    assert metrics["staleness/max"] == 2 and metrics["staleness/mean"] == pytest.approx(4 / 3)
    lengths = [len(s.token_ids) for g in groups for s in g.samples]
    assert metrics["response_length/max"] == max(lengths)
    assert 0 < metrics["entropy"] <= math.log(VOCAB)
    for name in ("kl", "clip_ratio/low", "clip_ratio/high", "grad_norm", "mismatch_kl", "lr"):
        assert math.isfinite(metrics[name])


def test_sections_drive_a_learner(model_dir: Path) -> None:
    section = AlgorithmConfig(
        loss="dapo", corrections=("token_tis",), old_logprobs="behaviour", token_ratio_max=1e6
    )
    learner = Learner(model_dir, section, TrainerConfig(lr=1e-3, device="cpu"))
    assert learner.objective.options.clip_high == 0.28
    metrics = run_step(learner, 0, make_groups(0, 2))
    assert metrics["correction/weight_mean"] != pytest.approx(1.0)
    with pytest.raises(UserError, match="did you mean 'grpo'"):
        Learner(model_dir, AlgorithmConfig(loss="grop"))


def test_adopting_sealed_weights(model_dir: Path) -> None:
    """A resume whose checkpoint is older than the newest published version."""
    store = MemoryStore()
    first = Learner(model_dir, GRPO, TRAINER)
    run_step(first, 0, make_groups(0, 2))
    first.publish(store, 1)
    second = Learner(model_dir, GRPO, TRAINER)
    second.adopt(store, 1)
    assert second.next_step == 1 and torch.equal(flat(first), flat(second))


def test_mixed_trajectories_keep_the_engines_logprobs(model_dir: Path) -> None:
    """No single version gave them their tokens, so recomputing under one would be wrong."""
    groups = make_groups(0, 1, version=0)
    segments = (Segment(0, 0), Segment(1, 1))
    mixed = tuple(replace(s, segments=segments) for s in groups[0].samples)
    learner = Learner(model_dir, AlgorithmConfig(old_logprobs="behaviour"), TRAINER)
    metrics = run_step(learner, 1, [replace(groups[0], samples=mixed)])  # needs no store
    assert metrics["mixed_version_frac"] == 1.0


def test_more_groups_than_the_batch_is_our_own_mistake(model_dir: Path) -> None:
    learner = Learner(model_dir, GRPO, TRAINER, batch_groups=2)
    learner.begin_step(0)
    learner.feed(make_groups(0, 2))
    with pytest.raises(AssertionError, match="all its groups"):
        learner.feed(make_groups(1, 1))


@pytest.mark.parametrize(("compute", "published"), [("float32", "bfloat16"), ("auto", "float16")])
def test_versions_that_would_be_rounded_are_refused(
    model_dir: Path, compute: str, published: str
) -> None:
    """Every canary would fail: instances would run other weights than the learner trains."""
    options = TrainerConfig(device="cpu", compute_dtype=compute, publish_dtype=published)
    with pytest.raises(UserError, match=rf"^trainer.publish_dtype = {published}: the learner"):
        Learner(model_dir, None, options)
    Learner(
        model_dir,
        None,
        TrainerConfig(device="cpu", compute_dtype="bfloat16", publish_dtype="float32"),
    )
