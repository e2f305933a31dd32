"""One pack forward and backward: log-probs, loss, corrections, penalties, gradient sums, metrics.

Leaves gradients unnormalised (see `losses.registry.Objective`): whoever owns the update divides
once at its end. Invariant: nothing here depends on how many packs the update will have.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.documents import Pack
from dora_rl.trainer.losses.functions import (
    KL,
    correction_weight,
    distilled_advantages,
    kl_k3,
    value_loss,
)
from dora_rl.trainer.losses.inputs import LossInputs, LossOutput, ratio_of
from dora_rl.trainer.losses.registry import Objective
from dora_rl.trainer.meters import Meters
from dora_rl.trainer.policy.logprobs import Routing, TeacherLogits, TokenScores
from dora_rl.trainer.policy.model import Critic, Policy
from dora_rl.types import StepIndex


def loss_inputs(pack: Pack, scores: TokenScores, step: StepIndex) -> LossInputs:
    """The tensors of a loss. A document without old log-probs was sampled, or its trust region is
    centred, at the weights as they are now: its old log-probs are the current ones."""
    documents, current = pack.documents, scores.logprobs_T
    known = [d.old_logprobs for d in documents]
    if all(old is None for old in known):
        old_T = current.detach()
    else:
        pairs = zip(known, pack.split(current), strict=True)
        old_T = pack.gather([live if old is None else old for old, live in pairs])
    return LossInputs(
        logprobs_T=current,
        old_logprobs_T=old_T,
        rollout_logprobs_T=pack.gather([d.rollout_logprobs for d in documents]),
        advantages_T=pack.gather([d.advantages for d in documents]),
        sequence_T=pack.sequence_T,
        num_sequences=len(documents),
        token_ids_T=pack.target_T,
        entropy_T=scores.entropy_T,
        version_T=pack.gather([d.versions() for d in documents]),
        group_S=pack.gather([torch.tensor([d.group]) for d in documents]),
        step=step,
        ref_logprobs_T=_reference_logprobs(pack),
        teacher_logprobs_T=_teacher_logprobs(pack),
        episode_tokens_S=_episode_tokens(pack),
    )


def _episode_tokens(pack: Pack) -> Tensor | None:
    """None where each document is a whole response."""
    documents = pack.documents
    if all(d.episode_tokens == d.num_trained for d in documents):
        return None
    return pack.gather([torch.tensor([float(d.episode_tokens)]) for d in documents])


def _reference_logprobs(pack: Pack) -> Tensor | None:
    parts = [d.ref_logprobs for d in pack.documents if d.ref_logprobs is not None]
    assert len(parts) in (0, len(pack.documents)), "a reference scores all documents or none"
    return pack.gather(parts) if parts else None


def _teacher_logprobs(pack: Pack) -> Tensor | None:
    """None where samples came without any, of which `admit` leaves none where they are needed."""
    parts = [d.teacher_logprobs for d in pack.documents if d.teacher_logprobs is not None]
    return pack.gather(parts) if len(parts) == len(pack.documents) else None


def policy_pass(
    policy: Policy,
    pack: Pack,
    objective: Objective,
    meters: Meters,
    step: StepIndex,
    teacher: TeacherLogits | None = None,
) -> Tensor:
    """Add the pack's gradient sum to the policy; returns its loss numerator, detached."""
    options = objective.options
    scores: TokenScores = policy(
        pack.token_ids_P,
        pack.layout,
        pack.rows_T,
        pack.target_T,
        options.temperature,
        teacher,
        pack.experts_PLK,
    )
    inputs = loss_inputs(pack, scores, step)
    if objective.distils_in_advantage:
        inputs = replace(inputs, advantages_T=distilled_advantages(inputs, options))
    output = objective.function(inputs, options)
    loss_T, n = output.loss_T, pack.num_trained
    if (weight_T := correction_weight(inputs, options)) is not None:
        loss_T = loss_T * weight_T
        meters.add_sum("correction/weight_mean", weight_T.sum(), n)
        meters.add_sum("correction/masked_frac", (weight_T == 0).float().sum(), n)
    if scores.teacher_kl_T is not None:
        loss_T = loss_T + (options.distill_coef or 0.0) * scores.teacher_kl_T
    if objective.needs_reference:
        loss_T = loss_T + _reference_penalty(inputs, options, meters)
    if options.entropy_coef:
        loss_T = loss_T - options.entropy_coef * inputs.entropy_T
    if scores.routing is not None:
        loss_T = loss_T + _balance(scores.routing, pack, meters)
    total = objective.numerator(loss_T, inputs)
    total.backward()
    _meter(meters, inputs, output, pack)
    _meter_teacher(meters, inputs, scores.teacher_kl_T)
    return total.detach()


def _balance(routing: Routing, pack: Pack, meters: Meters) -> Tensor:
    """What the loss of each token has for the balance of its document's experts."""
    balance_T, n = routing.balance_S[pack.sequence_T], pack.num_trained
    meters.add_sum("moe/balance", balance_T.sum(), n)
    meters.add_sum("moe/load_max", routing.load_max * n, n)
    if (given := pack.experts_PLK) is not None:
        meters.add_sum("moe/mismatch", routing.num_differing, pack.num_replayed)
        # Nobody has computed the newest token of a response.
        choices = (len(given) - len(pack.documents)) * given[0].numel()
        meters.add_sum("moe/replayed", torch.tensor(float(pack.num_replayed)), choices)
    return routing.aux_coef * balance_T


def _reference_penalty(inputs: LossInputs, options: AlgorithmConfig, meters: Meters) -> Tensor:
    """β·KL per token where the loss carries it; the estimate is metered either way."""
    assert inputs.ref_logprobs_T is not None
    estimate = KL[options.kl_estimator](inputs.logprobs_T, inputs.ref_logprobs_T)
    meters.add_sum("kl", estimate.sum(), len(estimate))
    if options.kl_in == "reward" or not options.kl_coef:
        return torch.zeros_like(estimate)
    if options.kl_ratio_weighted:
        estimate = estimate * ratio_of(inputs.logprobs_T, inputs.old_logprobs_T)
    return options.kl_coef * estimate


@torch.no_grad()
def _meter(meters: Meters, inputs: LossInputs, output: LossOutput, pack: Pack) -> None:
    n = pack.num_trained
    meters.add_sum("entropy", inputs.entropy_T.sum(), n)
    # How far the sampling engine and this one are apart on the sampled tokens. Recomputed old
    # log-probs keep learning out of the figure; without them the current ones must do.
    recomputed = any(d.old_logprobs is not d.rollout_logprobs for d in pack.documents)
    train = inputs.old_logprobs_T if recomputed else inputs.logprobs_T
    meters.add_sum("mismatch_kl", kl_k3(inputs.rollout_logprobs_T, train).sum(), n)
    meters.add_sum("mismatch_abs", (inputs.rollout_logprobs_T - train).abs().sum(), n)
    meters.add_sum("ppo_kl", kl_k3(inputs.old_logprobs_T, inputs.logprobs_T).sum(), n)
    for name, mark in (("low", output.clipped_low_T), ("high", output.clipped_high_T)):
        if mark is not None:
            meters.add_sum(f"clip_ratio/{name}", mark.float().sum(), n)


@torch.no_grad()
def _meter_teacher(meters: Meters, inputs: LossInputs, exact_T: Tensor | None) -> None:
    """How far the teacher is: the divergence itself, or the log-ratio of what was sampled, whose
    mean it is."""
    if exact_T is None and inputs.teacher_logprobs_T is not None:
        exact_T = inputs.rollout_logprobs_T - inputs.teacher_logprobs_T
    if exact_T is not None:
        meters.add_sum("distill_kl", exact_T.sum(), len(exact_T))


def critic_pass(critic: Critic, pack: Pack, options: AlgorithmConfig, meters: Meters) -> Tensor:
    """Add the pack's gradient sum to the critic; returns the loss sum, detached."""
    values_T = critic(pack.token_ids_P, pack.layout, pack.rows_T)
    old_T = pack.gather([d.old_values for d in pack.documents])  # type: ignore[misc]
    returns_T = pack.gather([d.returns for d in pack.documents])  # type: ignore[misc]
    loss = value_loss(values_T, old_T, returns_T, options.value_clip).sum()
    (options.value_coef * loss).backward()
    with torch.no_grad():
        sums = {
            "loss": loss,
            "value_mean": values_T.sum(),
            "return_mean": returns_T.sum(),
            "error_square": (values_T - returns_T).square().sum(),
        }
    for name, total in sums.items():
        meters.add_sum(f"critic/{name}", total, pack.num_trained)
    return loss.detach()


def empty_pass(policy: Policy, critic: Critic | None) -> None:
    """Take part in the collectives of a pack that fell to other ranks only."""
    device = next(policy.parameters()).device
    ids = torch.zeros(2, dtype=torch.int64, device=device)
    row, layout = ids[:1], Layout([2], device)
    (policy(ids, layout, row, row).logprobs_T.sum() * 0.0).backward()
    if critic is not None:
        (critic(ids, layout, row).sum() * 0.0).backward()
