"""Every objective against a plain, slow reference written from its formula, in float64.

The references below work on one scalar at a time and share no code with the package.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.losses import recipes
from dora_rl.trainer.losses.functions import (
    CORRECTIONS,
    KL,
    PER_GROUP,
    correction_weight,
    value_loss,
)
from dora_rl.trainer.losses.inputs import LossInputs
from dora_rl.trainer.losses.recipes import RECIPES
from dora_rl.trainer.losses.registry import FUNCTIONS, resolve
from dora_rl.types import UserError

CONSTANT = 7


@dataclass
class Token:
    """One trained token: log-probs under the policies, and its advantage."""

    theta: float
    old: float
    rollout: float
    advantage: float


Response = list[Token]
near = st.floats(-0.8, 0.8, allow_nan=False)


@st.composite
def batches(draw: st.DrawFn) -> list[Response]:
    """One to four groups of one to four responses of one to six trained tokens, in any order."""
    out: list[Response] = []
    for _ in range(draw(st.integers(1, 4))):
        for _ in range(draw(st.integers(1, 4))):
            advantage = draw(st.sampled_from([-1.7, -0.5, 0.0, 0.3, 2.1]))
            per_token = draw(st.booleans())
            response = []
            for _ in range(draw(st.integers(1, 6))):
                theta = draw(st.floats(-6, -0.05, allow_nan=False))
                a = advantage * draw(st.sampled_from([0.5, 1.0])) if per_token else advantage
                response.append(Token(theta, theta + draw(near), theta + draw(near), a))
            out.append(response)
    return out


def flatten(batch: list[Response]) -> LossInputs:
    tokens = [t for r in batch for t in r]

    def column(name: str) -> torch.Tensor:
        return torch.tensor([getattr(t, name) for t in tokens], dtype=torch.float64)

    sequence = torch.tensor([i for i, r in enumerate(batch) for _ in r])
    theta = column("theta").requires_grad_()
    return LossInputs(
        theta,
        column("old"),
        column("rollout"),
        column("advantage"),
        sequence,
        len(batch),
        token_ids_T=torch.zeros_like(sequence),
        entropy_T=torch.ones_like(theta),
        version_T=torch.zeros_like(sequence),
        group_S=torch.arange(len(batch)),
        step=0,
    )


def clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


# -- loss of one token and its derivative with respect to log π_θ, by hand -------------------------


def surrogate(ratio: float, a: float, o: AlgorithmConfig) -> tuple[float, float]:
    """−min(rA, clip(r)A) and its derivative with respect to log r."""
    inside = ratio * a
    outside = clip(ratio, 1 - o.clip_low, 1 + o.clip_high) * a
    loss = -min(inside, outside)
    slope = -inside if inside <= outside else 0.0
    if o.dual_clip is not None and a < 0 and loss > -o.dual_clip * a:
        return -o.dual_clip * a, 0.0
    return loss, slope


def ref_clipped(response: Response, o: AlgorithmConfig) -> list[tuple[float, float]]:
    return [surrogate(math.exp(t.theta - t.old), t.advantage, o) for t in response]


def ref_decoupled(response: Response, o: AlgorithmConfig) -> list[tuple[float, float]]:
    out = []
    for t, (loss, slope) in zip(response, ref_clipped(response, o), strict=True):
        w = math.exp(t.old - t.rollout)
        if o.behaviour_ratio_max is not None:
            w = min(w, o.behaviour_ratio_max)
        out.append((w * loss, w * slope))
    return out


def ref_triplet(response: Response, o: AlgorithmConfig) -> list[tuple[float, float]]:
    out = []
    for t in response:
        r = math.exp(t.theta - t.old)
        low, high = (1 - o.clip_low, o.dual_clip) if t.advantage < 0 else (0.0, 1 + o.clip_high)
        bounded = clip(r, low, high)
        out.append((-bounded * t.advantage, -r * t.advantage if low <= r <= high else 0.0))
    return out


def ref_reinforce(response: Response, o: AlgorithmConfig) -> list[tuple[float, float]]:
    return [(-t.advantage * t.theta, -t.advantage) for t in response]


def ref_cispo(response: Response, o: AlgorithmConfig) -> list[tuple[float, float]]:
    out = []
    for t in response:
        w = clip(math.exp(t.theta - t.old), 1 - o.clip_low, 1 + o.clip_high)
        out.append((-w * t.advantage * t.theta, -w * t.advantage))
    return out


REFERENCE: dict[str, Callable[[Response, AlgorithmConfig], list[tuple[float, float]]]] = {
    "grpo": ref_clipped,
    "dr_grpo": ref_clipped,
    "dapo": ref_clipped,
    "ppo": ref_clipped,
    "reinforce++": ref_clipped,
    "rloo": ref_reinforce,
    "reinforce": ref_reinforce,
    "cispo": ref_cispo,
    "distill": ref_clipped,
    "decoupled_ppo": ref_decoupled,
    "longcat": ref_triplet,
}


def token_weight(batch: list[Response], i: int, o: AlgorithmConfig) -> float:
    """What each token of response i is multiplied by in the aggregated loss."""
    if o.aggregation == "token_mean":
        return 1.0 / sum(len(r) for r in batch)
    if o.aggregation == "sequence_mean":
        return 1.0 / (len(batch) * len(batch[i]))
    return 1.0 / (len(batch) * o.constant_tokens)


def reference(batch: list[Response], name: str, o: AlgorithmConfig) -> tuple[float, list[float]]:
    """Aggregated loss and gradient."""
    loss, gradient = 0.0, []
    for i, response in enumerate(batch):
        w = token_weight(batch, i, o)
        if name == "gspo":
            mean = sum(t.theta - t.old for t in response) / len(response)
            pairs = [surrogate(math.exp(mean), t.advantage, o) for t in response]
            # Every token's loss depends on the mean, so each log-prob collects all slopes / |y|.
            shared = sum(slope for _, slope in pairs) / len(response)
            pairs = [(value, shared) for value, _ in pairs]
        else:
            pairs = REFERENCE[name](response, o)
        loss += w * sum(value for value, _ in pairs)
        gradient += [w * slope for _, slope in pairs]
    return loss, gradient


OPTIONS = [
    (name, extra)
    for name in RECIPES
    for extra in (
        [{}, {"dual_clip": 1.4}]
        if name in ("grpo", "ppo")
        else [{"behaviour_ratio_max": 1.2}, {}]
        if name == "decoupled_ppo"
        else [{"dual_clip": 1.5}]
        if name == "longcat"
        else [{"clip_low": 0.1, "clip_high": 0.15}]
        if name == "gspo"
        else [{}]
    )
]


@pytest.mark.parametrize(("name", "extra"), OPTIONS)
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_loss_and_gradient_equal_the_formula(
    name: str, extra: dict[str, float], batch: list[Response]
) -> None:
    base = AlgorithmConfig(loss=name, constant_tokens=CONSTANT, **extra)
    for aggregation in (None, "token_mean", "sequence_mean", "constant"):
        objective = resolve(base.model_copy(update={"aggregation": aggregation}))
        o = objective.options
        inputs = flatten(batch)
        loss_T = objective.function(inputs, o).loss_T
        total = objective.numerator(loss_T, inputs)
        total = total / objective.denominator(loss_T.numel(), inputs.num_sequences)
        (gradient,) = torch.autograd.grad(total, inputs.logprobs_T)
        want, want_gradient = reference(batch, name, o)
        assert total.item() == pytest.approx(want, rel=1e-9, abs=1e-9)
        assert gradient.tolist() == pytest.approx(want_gradient, rel=1e-9, abs=1e-9)


def ref_correction(name: str, response: Response, o: AlgorithmConfig) -> list[float]:
    """The factor of each token, from the definitions."""
    rho = [math.exp(t.old - t.rollout) for t in response]
    product = math.prod(rho)
    geometric = product ** (1 / len(rho))
    token_inside = [float(o.token_ratio_min <= r <= o.token_ratio_max) for r in rho]
    inside = o.geometric_ratio_min <= geometric <= o.geometric_ratio_max
    fixed = {
        "sequence_tis": min(product, o.sequence_ratio_max),
        "sequence_mask": float(o.sequence_ratio_min <= product <= o.sequence_ratio_max),
        "sequence_mis": product if product <= o.sequence_ratio_max else 0.0,
        "geometric_mask": float(inside),
    }
    if name in fixed:
        return [fixed[name]] * len(rho)
    return {
        "token_tis": [min(r, o.token_ratio_max) for r in rho],
        "token_mask": token_inside,
        "token_mis": [r if r <= o.token_ratio_max else 0.0 for r in rho],
        "hierarchical": [x * inside for x in token_inside],
    }[name]


@pytest.mark.parametrize("names", [*[(n,) for n in CORRECTIONS], ("token_tis", "sequence_mask")])
@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_corrections_equal_their_definitions(names: tuple[str, ...], batch: list[Response]) -> None:
    o = AlgorithmConfig(
        corrections=names,
        token_ratio_max=1.3,
        token_ratio_min=0.7,
        sequence_ratio_max=1.5,
        sequence_ratio_min=0.6,
        geometric_ratio_max=1.2,
        geometric_ratio_min=0.8,
    )
    weight = correction_weight(flatten(batch), o)
    assert weight is not None and not weight.requires_grad
    want: list[float] = []
    for response in batch:
        columns = [ref_correction(n, response, o) for n in names]
        want += [math.prod(c) for c in zip(*columns, strict=True)]
    assert weight.tolist() == pytest.approx(want, rel=1e-9)


@settings(max_examples=20, deadline=None)
@given(batch=batches())
def test_corrections_are_one_where_the_policies_agree(batch: list[Response]) -> None:
    agreed = [[replace(t, rollout=t.old) for t in r] for r in batch]
    for name in CORRECTIONS:
        weight = correction_weight(flatten(agreed), AlgorithmConfig(corrections=(name,)))
        assert weight is not None and weight.tolist() == [1.0] * weight.numel()


def test_current_numerator_uses_the_trained_policy() -> None:
    inputs = flatten([[Token(-1.0, -2.0, -1.5, 1.0)]])
    o = AlgorithmConfig(corrections=("token_tis",), correction_numerator="current")
    weight = correction_weight(inputs, o)
    assert weight is not None and weight.item() == pytest.approx(math.exp(0.5))


@given(theta=st.floats(-5, -0.1), ref=st.floats(-5, -0.1))
def test_kl_estimators(theta: float, ref: float) -> None:
    x = torch.tensor([theta], dtype=torch.float64, requires_grad=True)
    r = torch.tensor([ref], dtype=torch.float64)
    d = theta - ref
    want = {
        "k1": (d, 1.0),
        "k2": (d * d / 2, d),
        "k3": (math.exp(-d) + d - 1, 1 - math.exp(-d)),
    }
    for name, (value, slope) in want.items():
        out = KL[name](x, r)
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert out.item() == pytest.approx(value, abs=1e-9)
        assert gradient.item() == pytest.approx(slope, abs=1e-9)
    assert KL["k3"](x, r).item() >= -1e-12


number = st.floats(-2, 2, allow_nan=False)


@given(v=number, old=number, target=number, c=st.one_of(st.none(), st.floats(0.05, 1)))
def test_value_loss(v: float, old: float, target: float, c: float | None) -> None:
    x = torch.tensor([v], dtype=torch.float64)
    out = value_loss(
        x, torch.tensor([old], dtype=torch.float64), torch.tensor([target], dtype=torch.float64), c
    )
    want = 0.5 * (v - target) ** 2
    if c is not None:
        want = max(want, 0.5 * (old + clip(v - old, -c, c) - target) ** 2)
    assert out.item() == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "gprpo"}, "did you mean 'grpo'"),
        ({"aggregation": "token-mean"}, "did you mean 'token_mean'"),
        ({"advantage": "groups"}, "did you mean 'group'"),
        ({"corrections": ("tis",)}, "corrections"),
        ({"kl_estimator": "k4"}, "k3"),
        ({"loss": "dr_grpo"}, "constant_tokens"),
        ({"temperature": -1.0}, "algorithm.temperature = -1.0: must be at least 0"),
        # Corrections that cannot act: old / rollout is 1 where old is the rollout.
        ({"corrections": ("token_tis",)}, "would do nothing: .* 'rollout'"),
        ({"loss": "reinforce", "corrections": ("token_tis",)}, "would do nothing"),
        ({"loss": "longcat", "old_logprobs": "rollout", "constant_tokens": 9}, "nothing"),
        ({"loss": "decoupled_ppo", "old_logprobs": "rollout"}, "not be decoupled"),
        ({"behaviour_ratio_max": 2.0}, "behaviour_ratio_max would do nothing"),
        ({"loss": "longcat", "constant_tokens": 9, "dual_clip": 0.0}, "needs its cap"),
        ({"overlong_buffer_tokens": 8}, r"at most .*overlong_tokens_max \(0\)"),
        ({"loss_args": {"c": 2}}, "loss_args is for a function of your own; 'grpo'"),
        ({"advantage_args": {"c": 2}}, "advantage_args is for a function of your own"),
    ],
)
def test_wrong_options_are_one_clear_error(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve(AlgorithmConfig(**options))


@pytest.mark.parametrize(
    "options",
    [
        AlgorithmConfig(corrections=("token_tis",), correction_numerator="current"),
        AlgorithmConfig(corrections=("token_tis",), old_logprobs="behaviour"),
        AlgorithmConfig(corrections=("token_tis",), old_logprobs="proximal"),
        AlgorithmConfig(corrections=()),
        AlgorithmConfig(loss="decoupled_ppo", old_logprobs="behaviour", behaviour_ratio_max=2.0),
        AlgorithmConfig(dual_clip=0.0),
    ],
)
def test_what_can_act_is_accepted(options: AlgorithmConfig) -> None:
    resolve(options)


# -- log-ratios that would overflow ----------------------------------------------------------------

FAR = (50.0, 1e4, -50.0, -1e4)


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize("advantage", [-1.7, 2.1])
def test_one_token_far_off_leaves_the_others_their_gradients(
    name: str, far: float, advantage: float
) -> None:
    """In float32, as in training, with the recipe's own bounds."""
    objective = resolve(AlgorithmConfig(loss=name, constant_tokens=CONSTANT))
    near = [Token(-1.0, -1.05, -1.02, advantage), Token(-2.0, -2.1, -1.9, advantage)]
    lone = [Token(-3.0, -3.0 - far, -3.0 - far, advantage)]

    def gradient(batch: list[Response]) -> list[float]:
        exact = flatten(batch)
        theta = exact.logprobs_T.detach().float().requires_grad_()
        inputs = replace(
            exact,
            logprobs_T=theta,
            old_logprobs_T=exact.old_logprobs_T.float(),
            rollout_logprobs_T=exact.rollout_logprobs_T.float(),
            advantages_T=exact.advantages_T.float(),
        )
        loss_T = objective.function(inputs, objective.options).loss_T
        assert bool(torch.isfinite(loss_T).all())
        (found,) = torch.autograd.grad(loss_T.sum(), theta)
        return found.tolist()

    whole_batch = gradient([near, lone])
    assert whole_batch[:2] == gradient([near])
    # The ratio is bounded on both sides, so the token's own gradient is no larger than the cap
    # times its advantage; where it is a weight (cispo, decoupled) that is at most 5.
    assert abs(whole_batch[2]) <= 5.0 * abs(advantage)


@pytest.mark.parametrize("far", FAR)
def test_penalties_and_corrections_of_a_token_far_off_are_finite(far: float) -> None:
    theta = torch.tensor([-3.0], requires_grad=True)
    for estimate in KL.values():
        value = estimate(theta, torch.tensor([-3.0 + far]))
        (gradient,) = torch.autograd.grad(value.sum(), theta)
        assert bool(torch.isfinite(value).all() and torch.isfinite(gradient * gradient).all())
    inputs = flatten([[Token(-3.0, -3.0 + far, -3.0, 1.0)]])
    for name in CORRECTIONS:
        weight = correction_weight(inputs, AlgorithmConfig(corrections=(name,)))
        assert weight is not None and 0 <= weight.item() <= 2.0


def test_the_dual_clip_caps_negative_samples_alone_and_is_counted() -> None:
    for name, recipe in RECIPES.items():
        ratio_is_bounded = recipe.function in ("reinforce", "cispo") or recipe.dual_clip
        assert ratio_is_bounded, f"{name}: nothing bounds the ratio of a negative sample"
    batch = [[Token(-1.0, -1.0 - math.log(4.0), -1.0, a)] for a in (-1.0, 1.0)]
    objective = resolve(AlgorithmConfig(loss="dapo"))
    out = objective.function(flatten(batch), objective.options)
    assert out.loss_T.tolist() == pytest.approx([3.0, -1.28])
    assert out.clipped_high_T is not None and out.clipped_high_T.tolist() == [True, True]
    off = resolve(AlgorithmConfig(loss="dapo", dual_clip=0.0))
    out = off.function(flatten(batch), off.options)
    assert out.loss_T.tolist() == pytest.approx([4.0, -1.28])
    assert out.clipped_high_T is not None and out.clipped_high_T.tolist() == [False, True]


def test_the_names_that_are_checked_early_are_those_there_are() -> None:
    assert set(recipes.CORRECTIONS) == set(CORRECTIONS)
    assert set(recipes.KL_ESTIMATORS) == set(KL)
    assert {*PER_GROUP, "turn", "batch", "gae"} == set(recipes.ADVANTAGES)
    assert {recipe.function for recipe in RECIPES.values()} == set(FUNCTIONS)
