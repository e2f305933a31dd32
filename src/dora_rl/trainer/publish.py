"""Making a version of the learner's weights: gathered, cast, with a canary, sealed by the store.

Never publishes weights in motion: the tensors are copied before this returns control of the model.
Invariant: the canary's log-probs were computed from exactly the published values.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

from dora_rl.ports import Canary, WeightStore
from dora_rl.trainer.attention_layout import Layout
from dora_rl.trainer.distributed import back_to_shards, gathered
from dora_rl.trainer.lora import without_dropout
from dora_rl.trainer.model import Policy, named_weights
from dora_rl.types import Version

CANARY_TOKENS = 16


def canary_ids(vocab: int, positions_max: int) -> tuple[int, ...]:
    """A fixed walk over the vocabulary, so that many embedding rows are touched."""
    count = min(CANARY_TOKENS, positions_max)
    return tuple((7 + i * 7919) % vocab for i in range(count))


@torch.no_grad()
def compute_canary(policy: nn.Module, vocab: int, positions_max: int) -> Canary:
    """Float32 log-probs of the fixed ids under the policy as it is, at temperature 1."""
    ids = canary_ids(vocab, positions_max)
    device = next(policy.parameters()).device
    tokens = torch.tensor(ids, device=device)
    rows = torch.arange(len(ids) - 1, device=device)
    with without_dropout(policy):
        scores = policy(tokens, Layout([len(ids)], device), rows, tokens[1:], 1.0)
    back_to_shards(policy)
    return Canary(ids, tuple(scores.logprobs_N.float().tolist()))


class Publisher:
    """Publishes in order, in the background if asked: the next step begins on the live weights."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[str] | None = None
        # Copies of weights on a GPU, by name, used again: fresh memory costs more than the copy.
        self._host: dict[str, Tensor] = {}

    def snapshot(self, policy: Policy, dtype: torch.dtype, first: bool) -> list[tuple[str, Tensor]]:
        """Every tensor of the checkpoint, gathered from all ranks; on the first one cast and
        copied to the CPU."""
        if self._last is not None:
            wait([self._last])  # its copies are these
        # Adapters are merged as the policy merges them, so that it computes with what is sealed.
        weights = named_weights(policy, gathered, policy.compute_dtype)
        return [(name, self._copy(name, tensor, dtype)) for name, tensor in weights if first]

    def _copy(self, name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
        if not tensor.is_cuda:
            return tensor.to(dtype=dtype, device="cpu", copy=True).contiguous()
        if name not in self._host:
            self._host[name] = torch.empty(tensor.shape, dtype=dtype)
        return self._host[name].copy_(tensor)

    def publish(
        self,
        store: WeightStore,
        version: Version,
        tensors: list[tuple[str, Tensor]],
        canary: Canary | None,
        background: bool,
        base: str = "",
    ) -> Future[str]:
        """The checksum, as a future; already there unless `background`."""
        if background:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
            self._last = self._pool.submit(store.publish, version, _drain(tensors), canary, base)
            return self._last
        done: Future[str] = Future()
        done.set_result(store.publish(version, _drain(tensors), canary, base))
        return done

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _drain(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hand the tensors over one by one, so the copy shrinks as the store grows."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
