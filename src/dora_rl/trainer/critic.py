"""The value model of PPO: a decoder of its own with one number per state.

It starts from the policy's weights with a head of zeros, so its first values are zero. Invariant:
old values are those of the critic at the beginning of the step, before any of its updates.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dora_rl.config import AlgorithmConfig
from dora_rl.trainer.attention.layout import Layout
from dora_rl.trainer.distributed import back_to_shards
from dora_rl.trainer.documents import Document, Pack
from dora_rl.trainer.losses.penalties import value_loss
from dora_rl.trainer.memory import Room
from dora_rl.trainer.meters import Meters
from dora_rl.trainer.policy.casting import cast_parameters
from dora_rl.trainer.policy.model import Policy, copy_weights
from dora_rl.trainer.scoring import Tell, in_packs


class Critic(nn.Module):
    """V(s) at the rows that predict trained tokens."""

    def __init__(self, body: Policy, hidden: int) -> None:
        super().__init__()
        self.body = body
        self.head = nn.Parameter(torch.zeros(1, hidden, device=next(body.parameters()).device))

    def forward(self, token_ids_T: Tensor, layout: Layout, rows_N: Tensor) -> Tensor:
        states = self.body.states(token_ids_T, layout).index_select(0, rows_N)
        # Rounded like every other weight: a sharded critic sees its head in the compute dtype only.
        head = self.head.to(states.dtype).float()
        return F.linear(states.float(), head).squeeze(-1)


def make_critic(twin: Policy, policy: Policy) -> Critic:
    """A critic on a twin of the policy that starts with the policy's weights, in float32."""
    cast_parameters(twin, torch.float32)
    twin.requires_grad_(True)
    copy_weights(twin, policy)
    return Critic(twin, policy.hidden)


@torch.no_grad()
def fill_old_values(
    critic: Critic,
    documents: Sequence[Document],
    pack_tokens: int | Room,
    tell: Tell = lambda line: None,
) -> None:
    """Values of every document under the critic as it is now."""
    room = Room(pack_tokens) if isinstance(pack_tokens, int) else pack_tokens

    def run(pack: Pack) -> Tensor:
        return critic(pack.token_ids_T, pack.layout, pack.rows_N)

    found = in_packs(documents, room, critic.head.device, run, tell)
    for d, values in zip(documents, found, strict=True):
        d.old_values = values
    back_to_shards(critic)


def critic_pass(critic: Critic, pack: Pack, options: AlgorithmConfig, meters: Meters) -> Tensor:
    """Add the pack's gradient sum to the critic; returns the loss sum, detached."""
    values = critic(pack.token_ids_T, pack.layout, pack.rows_N)
    old = pack.gather([d.old_values for d in pack.documents])  # type: ignore[misc]
    returns = pack.gather([d.returns for d in pack.documents])  # type: ignore[misc]
    loss = value_loss(values, old, returns, options.value_clip).sum()
    (options.value_coef * loss).backward()
    with torch.no_grad():
        n = pack.num_trained
        meters.add_sum("critic/loss", loss, n)
        meters.add_sum("critic/value_mean", values.sum(), n)
        meters.add_sum("critic/return_mean", returns.sum(), n)
        meters.add_sum("critic/error_square", (values - returns).square().sum(), n)
    return loss.detach()
