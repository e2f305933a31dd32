"""From groups as they are fed to packs that a pass can run: checked, described, compared, packed.

    group --admit--> trainable samples --> documents --> advantages --> packs

Works on plain values and CPU tensors; only a pack is on the device. Invariants: every sample is
either admitted and in the means, or in a `dropped/*` counter. What is admitted has a finite reward
and finite log-probs, at least one trained token and no more tokens than the limit. Advantages
depend on rewards (and, where the options say so, on reference log-probs or old values) only, never
on the order groups came in. Every document is in exactly one pack, and nothing is padded.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig
from dora_rl.histories import TrainingRow, longest_history, rows_of, turn_starts
from dora_rl.trainer.attention import Layout, send
from dora_rl.trainer.losses.functions import (
    KL,
    GroupScores,
    by_turn,
    gae,
    overlong_penalty,
    returns_to_go,
    whiten,
)
from dora_rl.trainer.losses.registry import Objective
from dora_rl.trainer.meters import Meters
from dora_rl.types import REWARD_MAX, Group, GroupId, StepIndex, Trajectory, Version

if TYPE_CHECKING:
    from dora_rl.types import Ints


@dataclass(slots=True)
class Document:
    """One response with its prompt, or one row of an episode whose history branched, ready to be
    packed. `rows[i]` is the position whose output predicts the i-th trained token, and every
    per-token tensor has one entry per trained token, in order. Mutable on purpose: scores of other
    policies are filled in when they become known."""

    token_ids: Tensor  # of prompt and response
    rows: Tensor  # positions that predict a trained token
    rollout_logprobs: Tensor
    reward: float
    version: Version
    advantages: Tensor = field(default_factory=lambda: torch.empty(0))
    old_logprobs: Tensor | None = None
    ref_logprobs: Tensor | None = None
    teacher_logprobs: Tensor | None = None
    old_values: Tensor | None = None
    returns: Tensor | None = None
    group: GroupId = 0
    truncated: bool = False  # it was cut off at the limit of tokens
    # Of each trained token of a response that was decoded under several versions (the `partial`
    # baseline); None: `version` throughout.
    mixed_versions: Tensor | None = None
    # The response: its place in the group, its trained tokens in all of its documents, of which
    # exactly one is the first, and the document's share of its advantage.
    sample: int = 0
    episode_tokens: int = 0
    is_first: bool = True
    share: float = 1.0
    turn_T: Tensor | None = None  # the turn of each trained token, from 0; None: there is one
    # Of a mixture of experts: which experts each token went to when it was sampled, as
    # [token, sparse layer, choice]; see `Trajectory.expert_ids`. None: not recorded.
    expert_ids: Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_trained(self) -> int:
        return self.rows.shape[0]

    def versions(self) -> Tensor:
        """The version that sampled each trained token."""
        if self.mixed_versions is not None:
            return self.mixed_versions
        return torch.full((self.num_trained,), self.version, dtype=torch.int64)


def whole_row(prompt_ids: Ints, sample: Trajectory) -> TrainingRow:
    """Of a response that is one history."""
    own = np.arange(len(sample.token_ids), dtype=np.int32)
    ids = np.concatenate([prompt_ids, sample.token_ids])
    place = np.arange(len(prompt_ids), len(ids), dtype=np.int32)
    return TrainingRow(ids, place, own, last=True)


def documents_of(
    group: Group, sample: Trajectory, reward: float, branch_reward: str = "all", place: int = 0
) -> list[Document]:
    """The documents of one admitted sample, which is the `place`-th of its group."""
    found, starts = [whole_row(group.prompt_ids, sample)], np.zeros(1, np.int32)
    if sample.branches:
        found = rows_of(group.prompt_ids, sample.token_ids, sample.loss_mask, sample.branches)
    if sample.turns > 1:
        starts = turn_starts(sample.loss_mask, sample.branches)
    documents: list[Document] = []
    routing = routing_of_rows(group, sample)
    for row in found:
        trained = sample.loss_mask[row.own] != 0
        own = row.own[trained]
        turns = np.searchsorted(starts, own, side="right") - 1
        share = {"all": 1.0, "last": float(row.last), "turn": len({*turns}) / len(starts)}
        document = Document(
            token_ids=torch.from_numpy(row.token_ids.astype(np.int64)),
            rows=torch.from_numpy(row.place[trained].astype(np.int64) - 1),
            rollout_logprobs=torch.from_numpy(sample.logprobs[own]),
            reward=reward,
            version=group.version,
            group=group.id,
            truncated=sample.truncated,
            sample=place,
            episode_tokens=sample.num_trained,
            is_first=not documents,
            share=share[branch_reward],
            turn_T=torch.from_numpy(turns) if len(starts) > 1 else None,
        )
        if sample.teacher_logprobs is not None:
            document.teacher_logprobs = torch.from_numpy(sample.teacher_logprobs[own])
        if routing is not None:
            document.expert_ids = routing[len(documents)]
        if sample.mixed:
            begins, versions = np.array(sample.segments, np.int64).T
            at = np.searchsorted(begins, own, side="right") - 1
            document.mixed_versions = torch.from_numpy(versions[at])
        documents.append(document)
    return documents


def routing_of_rows(group: Group, sample: Trajectory) -> list[Tensor] | None:
    """Which experts the tokens of each document of a sample went to; None: not recorded."""
    found, first = sample.expert_ids, len(group.prompt_ids)
    length = first + len(sample.token_ids)
    if found is None or len(found) != length:
        return None
    places = np.arange(length, dtype=np.int32)  # in prompt and response, instead of the tokens
    rows = [places]
    if sample.branches:
        of_places = rows_of(places[:first], places[first:], sample.loss_mask, sample.branches)
        rows = [row.token_ids for row in of_places]
    return [torch.from_numpy(found[row]) for row in rows]


@dataclass(frozen=True, slots=True)
class Pack:
    """Documents side by side: all their tokens, and of the trained ones the row that predicts each,
    itself, and its document. `experts_PLK`: where the tokens went in a mixture of
    experts, for whoever replays it, and how many of these choices are known."""

    documents: tuple[Document, ...]
    token_ids_P: Tensor
    layout: Layout
    rows_T: Tensor
    target_T: Tensor
    sequence_T: Tensor
    experts_PLK: Tensor | None = None
    num_replayed: int = 0

    @property
    def num_trained(self) -> int:
        return self.rows_T.shape[0]

    def gather(self, parts: Sequence[Tensor]) -> Tensor:
        """One tensor per document, side by side on the pack's device. Parts may be there already:
        bringing them back to the host first would make it wait for the device."""
        device = self.token_ids_P.device
        if all(p.device.type == "cpu" for p in parts):
            return send(torch.cat(list(parts)), device)
        return torch.cat([p if p.device == device else send(p, device) for p in parts])

    def split(self, values_T: Tensor) -> list[Tensor]:
        """Back to one tensor per document, where the values are."""
        return list(values_T.detach().split([d.num_trained for d in self.documents]))


def collate(documents: Sequence[Document], device: torch.device) -> Pack:
    """Put documents side by side; nothing is padded."""
    layout = Layout([d.num_tokens for d in documents], device)
    routing = _routing(documents)
    token_ids = torch.cat([d.token_ids for d in documents])
    counts = torch.tensor([d.num_trained for d in documents])
    starts = torch.tensor(layout.starts).repeat_interleave(counts)
    rows = torch.cat([d.rows for d in documents]) + starts
    return Pack(
        documents=tuple(documents),
        token_ids_P=send(token_ids, device),
        layout=layout,
        rows_T=send(rows, device),
        target_T=send(token_ids[rows + 1], device),
        sequence_T=send(torch.repeat_interleave(counts), device),
        experts_PLK=None if routing is None else send(routing, device),
        num_replayed=0 if routing is None else int((routing != _unrecorded(routing)).sum()),
    )


def _unrecorded(routing: Tensor) -> int:
    return torch.iinfo(routing.dtype).max


def _routing(documents: Sequence[Document]) -> Tensor | None:
    """None where it is known of no document; else "not recorded" for those it is not known of."""
    known = next((d.expert_ids for d in documents if d.expert_ids is not None), None)
    if known is None:
        return None
    shape, none = known.shape[1:], _unrecorded(known)
    return torch.cat(
        [
            known.new_full((d.num_tokens, *shape), none) if d.expert_ids is None else d.expert_ids
            for d in documents
        ]
    )


# -- what may be trained ---------------------------------------------------------------------------


def admit(
    group: Group,
    step: StepIndex,
    tokens_max: int,
    vocab: int,
    meters: Meters,
    teacher: bool = False,
) -> Group | None:
    """The group with its trainable samples only, or None if there are none; metrics either way.
    With `teacher` each needs the log-probs of one."""
    faults = [
        sample_fault(group, sample, tokens_max, vocab) or (teacher and teacher_fault(sample))
        for sample in group.samples
    ]
    for fault in filter(None, faults):
        meters.count(f"dropped/{fault}")
    kept = tuple(s for s, fault in zip(group.samples, faults, strict=True) if not fault)
    if not kept:
        meters.count("dropped/empty_group")
        return None
    assert group.version <= step, "a trajectory from the future"
    meters.observe("staleness", step - group.version)
    for sample in kept:
        assert sample.reward is not None
        meters.observe("reward", sample.reward)
        meters.observe("response_length", len(sample.token_ids))
        meters.add_sum("mixed_version_frac", torch.tensor(float(sample.mixed)), 1)
        meters.add_sum("truncated_frac", torch.tensor(float(sample.truncated)), 1)
    return replace(group, samples=kept)


def sample_fault(group: Group, sample: Trajectory, tokens_max: int, vocab: int) -> str:
    """Why the sample cannot be trained on, or '' if it can."""
    prompt, ids, mask = group.prompt_ids, sample.token_ids, sample.loss_mask
    assert len(ids) == len(sample.logprobs) == len(mask)
    reward = math.nan if sample.reward is None else sample.reward
    # In this order: what stands further down relies on what stands above.
    faults: dict[str, Callable[[], object]] = {
        "no_reward": lambda: sample.reward is None,
        "non_finite_reward": lambda: not math.isfinite(reward),
        "reward_out_of_range": lambda: abs(reward) > REWARD_MAX,
        "nothing_to_train": lambda: (
            not len(prompt) or not mask.any() or _begins_bare(len(prompt), sample)
        ),
        "too_long": lambda: longest_history(len(prompt), len(ids), sample.branches) > tokens_max,
        "token_out_of_range": lambda: any(p.min() < 0 or p.max() >= vocab for p in (prompt, ids)),
        # Tokens that are not trained on may have any log-prob.
        "non_finite_logprob": lambda: not np.isfinite(sample.logprobs[mask != 0]).all(),
    }
    return next((fault for fault, is_so in faults.items() if is_so()), "")


def _begins_bare(num_prompt: int, sample: Trajectory) -> bool:
    """Whether the policy's tokens begin a history that has nothing before them."""
    mask = sample.loss_mask
    bare = [branch.start for branch in sample.branches if num_prompt + branch.fork <= 0]
    return any(start < len(mask) and mask[start] for start in bare)


def teacher_fault(sample: Trajectory) -> str:
    """Why the sample teaches nothing of a teacher that nobody here holds."""
    given, mask = sample.teacher_logprobs, sample.loss_mask
    if given is None or given.shape != mask.shape:
        return "no_teacher_logprobs"
    return "" if np.isfinite(given[mask != 0]).all() else "non_finite_teacher_logprob"


# -- advantages ------------------------------------------------------------------------------------


def group_documents(group: Group, options: AlgorithmConfig) -> list[Document]:
    """The group's documents, their rewards shaped by the overlong penalty, no advantages yet."""
    out: list[Document] = []
    for place, sample in enumerate(group.samples):
        assert sample.reward is not None
        shaped = sample.reward + overlong_penalty(
            len(sample.token_ids),
            options.overlong_tokens_max,
            options.overlong_buffer_tokens,
            options.overlong_penalty,
        )
        out += documents_of(group, sample, shaped, options.branch_reward or "all", place)
    return out


def _penalty(document: Document, options: AlgorithmConfig) -> Tensor | None:
    """What is taken off the reward, token by token."""
    if options.kl_in != "reward" or options.kl_coef == 0.0:
        return None
    assert document.ref_logprobs is not None
    return options.kl_coef * KL[options.kl_estimator](
        document.rollout_logprobs, document.ref_logprobs
    )


def per_group_advantages(
    documents: Sequence[Document],
    objective: Objective,
    turn_rewards: Sequence[Sequence[float]] = (),
) -> None:
    """Fill in advantages that need the group alone, whose unit is the response, however many
    documents it has: one number for all of its tokens, or one for each turn."""
    options = objective.options
    responses = [
        [d for d in documents if d.sample == sample]
        for sample in dict.fromkeys(d.sample for d in documents)
    ]
    rewards = [_reward(rows, options) for rows in responses]
    if objective.by_turn:
        given = [turn_rewards[rows[0].sample] for rows in responses]
        counts = [1 + max(int(_turns(d).max()) for d in rows) for rows in responses]
        each = zip(rewards, given, counts, strict=True)
        of_turns = by_turn([turn_credits(*one) for one in each], options.gamma)
        for rows, found in zip(responses, of_turns, strict=True):
            for d in rows:
                d.advantages = torch.tensor(found, dtype=torch.float32)[_turns(d)]
        return
    assert objective.group_advantage is not None
    scores = GroupScores(
        rewards=rewards,
        lengths=[rows[0].episode_tokens for rows in responses],
        truncated=[rows[0].truncated for rows in responses],
    )
    for rows, a in zip(responses, objective.group_advantage(scores), strict=True):
        for d in rows:
            d.advantages = torch.full((d.num_trained,), a * d.share, dtype=torch.float32)


def _reward(rows: Sequence[Document], options: AlgorithmConfig) -> float:
    """Of one response, less what the reference takes off it."""
    penalties = [penalty for d in rows if (penalty := _penalty(d, options)) is not None]
    return rows[0].reward - sum(float(penalty.sum()) for penalty in penalties)


def _turns(document: Document) -> Tensor:
    """The turn of each trained token."""
    if document.turn_T is not None:
        return document.turn_T
    return torch.zeros(document.num_trained, dtype=torch.int64)


def turn_credits(reward: float, given: Sequence[float], num_turns: int) -> list[float]:
    """What each turn was given; what no turn was given is the last one's.

    >>> turn_credits(1.0, [0.25, 0.0], 2), turn_credits(1.0, [], 2)
    ([0.25, 0.75], [0.0, 1.0])
    """
    credits = [*given[:num_turns], *[0.0] * (num_turns - len(given))]
    credits[-1] += reward - sum(credits)
    return credits


def whole_batch_advantages(documents: Sequence[Document], options: AlgorithmConfig) -> None:
    """Fill in advantages that need every response of the step.

    batch: returns to go of (reward at the last token − KL), whitened over all tokens.
    gae: from the critic's old values; whitened if the options say so.
    """
    for d in documents:
        rewards = torch.zeros(d.num_trained)
        rewards[-1] = d.reward * d.share
        if (penalty := _penalty(d, options)) is not None:
            rewards = rewards - penalty
        if options.advantage == "batch":
            d.advantages = returns_to_go(rewards, options.gamma)
        else:
            assert d.old_values is not None
            gamma, lam = options.gamma, options.gae_lambda
            d.advantages, d.returns = gae(rewards, d.old_values, gamma, lam)
    if documents and (options.advantage == "batch" or options.whiten_advantages):
        whole = whiten(torch.cat([d.advantages for d in documents]))
        for d, a in zip(documents, whole.split([d.num_trained for d in documents]), strict=True):
            d.advantages = a


# -- which documents share a pack ------------------------------------------------------------------
#
# By token count, balanced by attention cost. Pure integers, no tensors. A pack holds more than
# `pack_tokens` tokens only if it is one document that is longer by itself.
#
# A document's cost is linear in its tokens (matrix products) plus quadratic (attention). The ratio
# is a property of the model: attention over n tokens costs as much as the linear part of
# `n² / quadratic_tokens` tokens.


def document_cost(num_tokens: int, quadratic_tokens: float) -> float:
    """Cost in units of one token's linear work."""
    return num_tokens + num_tokens * num_tokens / quadratic_tokens


def quadratic_tokens(attention_width: int, num_params_layer: int) -> float:
    """The document length at which causal attention costs as much as the layer's matrices.

    Per token and layer: 2 for each parameter of the matrices; for causal attention over n tokens
    2·n·width (scores and values, halved by causality).
    """
    return max(1.0, num_params_layer / attention_width)


def pack_stream(lengths: Sequence[int], pack_tokens: int) -> tuple[list[list[int]], list[int]]:
    """First come, first packed: (full packs, documents left over), as indices in arrival order.

    A pack is closed when the next document would not fit, so what is left over is always less
    than one pack and a stream of unknown length can be cut as it arrives.
    """
    packs: list[list[int]] = []
    open_pack: list[int] = []
    used = 0
    for index, length in enumerate(lengths):
        if open_pack and used + length > pack_tokens:
            packs.append(open_pack)
            open_pack, used = [], 0
        open_pack.append(index)
        used += length
    return ([*packs, open_pack], []) if used >= pack_tokens else (packs, open_pack)


def pack_balanced(
    lengths: Sequence[int], pack_tokens: int, ranks: int, quadratic: float
) -> list[list[int]]:
    """Packs whose number is a multiple of `ranks` (some may be empty), costs as equal as can be.

    Longest first into the cheapest pack with room; the number of packs grows until all fit. The
    packs come back most expensive first, so that packs i·ranks .. i·ranks+ranks-1, which run side
    by side, cost about the same; no round of packs is empty unless there is nothing to pack.
    """
    assert ranks >= 1
    if not lengths:
        return [[] for _ in range(ranks)]
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    num_packs = -(-max(1, -(-sum(lengths) // pack_tokens)) // ranks) * ranks
    while (packs := _fill(lengths, order, pack_tokens, num_packs, quadratic)) is None:
        num_packs += ranks
    cost = [sum(document_cost(lengths[i], quadratic) for i in pack) for pack in packs]
    ranked = sorted(range(num_packs), key=lambda p: (-cost[p], p))
    # A document longer than a pack is counted as several packs and fills one.
    num_filled = -(-sum(1 for pack in packs if pack) // ranks) * ranks
    return [sorted(packs[p]) for p in ranked[:num_filled]]


def _fill(
    lengths: Sequence[int], order: list[int], pack_tokens: int, num_packs: int, quadratic: float
) -> list[list[int]] | None:
    packs: list[list[int]] = [[] for _ in range(num_packs)]
    tokens = [0] * num_packs
    heap = [(0.0, p) for p in range(num_packs)]
    for index in order:
        skipped: list[tuple[float, int]] = []
        while heap:
            cost, p = heapq.heappop(heap)
            if not packs[p] or tokens[p] + lengths[index] <= pack_tokens:
                break
            skipped.append((cost, p))
        else:
            return None
        packs[p].append(index)
        tokens[p] += lengths[index]
        heapq.heappush(heap, (cost + document_cost(lengths[index], quadratic), p))
        for item in skipped:
            heapq.heappush(heap, item)
    return packs
