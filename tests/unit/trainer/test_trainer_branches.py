"""Episodes whose history branched, in the learner: what their rows are worth, how they are weighed,
and credit turn by turn, against plain formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.histories import ROOT
from dora_rl.trainer.documents import (
    Document,
    group_documents,
    per_group_advantages,
    sample_fault,
    whole_batch_advantages,
)
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.losses.functions import by_turn
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.policy.model import load_policy
from dora_rl.trainer.scoring import score
from dora_rl.types import Branch, Group, RequestId, Trajectory, UserError
from tests.kit.trainer_cases import forked, make_groups

# Turns of 2, 1 and 3 tokens: the first goes on to the third, the second is a branch beside them.
FORKED = Trajectory(
    RequestId(0, 1),
    0,
    token_ids=[1, 2, 3, 4, 5, 6, 7, 8, 9],
    logprobs=[-1.0, -2.0, 0.0, -3.0, 0.0, 0.0, -4.0, -5.0, -6.0],
    loss_mask=[1, 1, 0, 1, 0, 0, 1, 1, 1],
    turns=3,
    reward=2.0,
    branches=(ROOT, Branch(2, 0, 0), Branch(4, 0, 2)),
    turn_rewards=(0.5, 0.25, 1.25),
)
PLAIN = Trajectory(RequestId(0, 0), 0, [5, 6], [-1.0, -1.5], [1, 1], reward=0.0)
OTHER = Trajectory(RequestId(0, 2), 0, [7], [-0.5], [1], reward=1.0)
GROUP = Group(0, 0, [10, 11], (PLAIN, FORKED, OTHER))


def documents(advantage: str = "group_mean", **more: Any) -> list[Document]:
    options = AlgorithmConfig(advantage=advantage, **more)
    found = group_documents(GROUP, options)
    given = [sample.turn_rewards for sample in GROUP.samples]
    per_group_advantages(found, resolve(options), given)
    return found


def test_the_rows_of_an_episode_are_documents() -> None:
    plain, main, side, other = documents()
    assert main.token_ids.tolist() == [10, 11, 1, 2, 5, 6, 7, 8, 9]
    assert main.token_ids[main.rows + 1].tolist() == [1, 2, 7, 8, 9]
    assert main.rollout_logprobs.tolist() == [-1.0, -2.0, -4.0, -5.0, -6.0]
    assert side.token_ids.tolist() == [10, 11, 3, 4] and side.rollout_logprobs.tolist() == [-3.0]
    assert [d.is_first for d in (plain, main, side, other)] == [True, True, False, True]
    assert [d.episode_tokens for d in (plain, main, side, other)] == [2, 6, 6, 1]


def test_the_baseline_is_over_episodes_and_not_over_rows() -> None:
    """Mean 1 of the rewards 0, 2 and 1; with the rows it would be 1.25."""
    values = [d.advantages.unique().tolist() for d in documents()]
    assert values == [[-1.0], [1.0], [1.0], [0.0]]


@pytest.mark.parametrize(
    ("branch_reward", "main", "side"),
    [("all", 1.0, 1.0), ("last", 1.0, 0.0), ("turn", 2 / 3, 1 / 3)],
)
def test_what_each_row_is_worth(branch_reward: str, main: float, side: float) -> None:
    found = documents(branch_reward=branch_reward)
    assert [d.advantages[0].item() for d in found[1:3]] == pytest.approx([main, side])
    options = AlgorithmConfig(advantage="batch", branch_reward=branch_reward)
    whole_batch_advantages(found, options)
    returns = torch.cat([torch.full((d.num_trained,), d.reward * d.share) for d in found])
    expected = (returns - returns.mean()) / returns.std(correction=0)
    assert torch.allclose(torch.cat([d.advantages for d in found]), expected, atol=1e-5)


def test_each_turn_has_its_own_advantage() -> None:
    """Returns: 0 | 2, 1.5, 1.25 | 1. Others of the group at the same turn: 0 after their end."""
    plain, main, side, other = documents("turn")
    assert plain.advantages.tolist() == [0 - (2 + 1) / 2] * 2
    assert main.advantages.tolist() == [2 - (0 + 1) / 2] * 2 + [1.25] * 3
    assert side.advantages.tolist() == [1.5] and other.advantages.tolist() == [1 - (0 + 2) / 2]


@settings(max_examples=50, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-3, 3, allow_nan=False), min_size=1, max_size=5), min_size=2, max_size=6
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
)
def test_turn_credit_is_its_formula(rewards: list[list[float]], gamma: float) -> None:
    num, longest = len(rewards), max(map(len, rewards))
    given_ = np.zeros((num, longest))
    for i, one in enumerate(rewards):
        given_[i, : len(one)] = one
    ahead = np.arange(longest)[None, :] - np.arange(longest)[:, None]
    powers = np.where(ahead >= 0, np.power(gamma, np.maximum(ahead, 0)), 0.0)
    returns = given_ @ powers.T
    for i, found in enumerate(by_turn(rewards, gamma)):
        others = (returns.sum(0) - returns[i]) / (num - 1)
        expected = (returns[i] - others)[: len(rewards[i])]
        np.testing.assert_allclose(found, expected, atol=1e-9)


def test_a_lone_response_and_equal_ones_get_nothing() -> None:
    assert by_turn([[1.0, 2.0]], 1.0) == [[0.0, 0.0]]
    assert by_turn([[0.1, 0.2]] * 3, 0.9) == [[0.0, 0.0]] * 3


def test_what_no_turn_was_given_is_the_last_ones() -> None:
    """A reward of functions alone: the same for every turn of the response."""
    group = replace(GROUP, samples=(PLAIN, replace(FORKED, turn_rewards=())))
    options = AlgorithmConfig(advantage="turn")
    found = group_documents(group, options)
    per_group_advantages(found, resolve(options), [s.turn_rewards for s in group.samples])
    assert [d.advantages.unique().tolist() for d in found] == [[-2.0], [2.0], [2.0]]


def test_a_choice_that_would_do_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="branch_reward = 'last' would do nothing"):
        resolve(AlgorithmConfig(advantage="turn", branch_reward="last"))


def test_the_limit_of_tokens_is_that_of_one_history() -> None:
    assert sample_fault(GROUP, FORKED, 9, 23) == ""
    assert sample_fault(GROUP, FORKED, 8, 23) == "too_long"
    flat = replace(FORKED, branches=())
    assert sample_fault(GROUP, flat, 11, 23) == "" and sample_fault(GROUP, flat, 10, 23)


def test_a_token_that_follows_nothing_is_not_trained() -> None:
    """In a pack it would be predicted from the document before its own."""
    for fork, fault in ((-1, ""), (-2, "nothing_to_train")):
        bare = replace(FORKED, loss_mask=[1] * 9, branches=(ROOT, Branch(4, 0, fork)))
        assert sample_fault(GROUP, bare, 99, 23) == fault


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_the_loss_weighs_episodes_and_not_rows(model_dir: Path, aggregation: str) -> None:
    """Against the formula of `Objective`, in float64, from log-probs of each row alone."""
    groups = [forked(group) for group in make_groups(3, 3)]
    options = AlgorithmConfig(
        loss="reinforce", aggregation=aggregation, constant_tokens=7, skip_zero_advantage=False
    )
    learner = Learner(model_dir, options, TrainerConfig(device="cpu", threads=1, pack_tokens=64))
    policy = load_policy(model_dir, TrainerConfig(device="cpu"))
    total = num_tokens = num_episodes = num_rows = 0.0
    for group in groups:
        rewards = [float(sample.reward or 0.0) for sample in group.samples]
        found = group_documents(group, options)
        num_rows += len(found)
        logprobs = score(policy, found, 1.0, 64)
        for place, reward in enumerate(rewards):
            advantage = reward - sum(rewards) / len(rewards)
            pairs = zip(found, logprobs, strict=True)
            own = [float(x) for d, found_T in pairs if d.sample == place for x in found_T]
            weights = {"token_mean": 1, "sequence_mean": 1 / len(own), "constant": 1 / 7}
            total += -advantage * sum(own) * weights[aggregation]
            num_tokens, num_episodes = num_tokens + len(own), num_episodes + 1
    expected = total / (num_tokens if aggregation == "token_mean" else num_episodes)
    learner.begin_step(0)
    learner.feed(groups)
    metrics = learner.finish_step()
    assert num_rows > num_episodes and metrics["train/rows"] == num_rows
    assert metrics["train/tokens_written"] == num_tokens
    assert metrics["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_branch_that_follows_the_very_end_changes_nothing(model_dir: Path) -> None:
    """One row, as without branches: bit for bit."""
    (group,) = make_groups(4, 1)
    chained = [
        replace(sample, branches=(ROOT, Branch(1, 0, 1))) if len(sample.token_ids) > 1 else sample
        for sample in group.samples
    ]
    found = []
    for one in (group, replace(group, samples=tuple(chained))):
        learner = Learner(model_dir, AlgorithmConfig(), TrainerConfig(device="cpu", threads=1))
        learner.begin_step(0)
        learner.feed([one])
        learner.finish_step()
        found.append(torch.cat([p.detach().reshape(-1) for p in learner.policy.parameters()]))
    assert torch.equal(*found)
