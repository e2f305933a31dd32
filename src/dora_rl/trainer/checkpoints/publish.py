"""Making a version of the learner's weights: gathered, cast, with a canary, sealed by the store.

Never publishes weights in motion: the tensors are copied before this returns control of the model.
Invariants: the canary's log-probs were computed from exactly the published values; where the exact
state goes to a store of its own, no version is sealed before its exact state is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait

import torch
from torch import Tensor, nn

from dora_rl.ports import Canary, WeightStore
from dora_rl.trainer.attention.layout import Layout
from dora_rl.trainer.checkpoints.masters import make_buffer, split
from dora_rl.trainer.distributed import back_to_shards, gathered
from dora_rl.trainer.policy.lora import without_dropout
from dora_rl.trainer.policy.model import Policy, exact_names, named_weights
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
    dtype = str(policy.compute_dtype).removeprefix("torch.")
    return Canary(ids, tuple(scores.logprobs_N.float().tolist()), dtype)


class Publisher:
    """Publishes in order, in the background if asked: the next step begins on the live weights."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._last: Future[str] | None = None
        # Copies of weights on a GPU, by name, used again: fresh memory costs more than the copy.
        self._host: dict[str, Tensor] = {}

    def snapshot(
        self, policy: Policy, dtype: torch.dtype, first: bool, exact: bool = False
    ) -> tuple[list[tuple[str, Tensor]], dict[str, Tensor]]:
        """Every tensor of the checkpoint, gathered from all ranks; on the first one cast and
        copied to the CPU. With `exact` also what the cast took from the masters."""
        if self._last is not None:
            wait([self._last])  # its copies are these
        tensors: list[tuple[str, Tensor]] = []
        lost: dict[str, Tensor] = {}
        # Adapters are merged as the policy merges them, so that it computes with what is sealed.
        own_dtype = exact_names(policy)
        for name, tensor in named_weights(policy, gathered, policy.compute_dtype):
            if not first:
                continue
            kind = tensor.dtype if name in own_dtype else dtype
            keep = self._keep if tensor.is_cuda else make_buffer
            if exact:
                copy, parts = split(name, tensor, kind, keep)
                lost |= parts
            else:
                copy = keep(name, tensor.shape, kind).copy_(tensor, non_blocking=True)
            tensors.append((name, copy))
        if self._host:
            torch.cuda.synchronize()  # the copies run behind each other, and are waited for once
        return tensors, lost

    def _keep(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name not in self._host:
            self._host[name] = torch.empty(shape, dtype=dtype, pin_memory=True)
        return self._host[name]

    def publish(
        self,
        store: WeightStore,
        version: Version,
        tensors: list[tuple[str, Tensor]],
        canary: Canary | None,
        background: bool,
        base: str = "",
        exact: tuple[WeightStore, list[tuple[str, Tensor]]] | None = None,
        turn: Callable[[], None] = lambda: None,
    ) -> Future[str]:
        """The checksum, as a future; already there unless `background`. `exact` is the state that
        belongs to the version and where it goes; that of older versions stays. `turn` returns when
        the stores may take the version."""

        def seal() -> str:
            turn()
            if exact is None:
                return store.publish(version, _drain(tensors), canary, base)
            with ThreadPoolExecutor(1, thread_name_prefix="publish-exact") as beside:
                state = beside.submit(exact[0].publish, version, _drain(exact[1]), canary, base)
                return store.publish(version, _after(tensors, state), canary, base)

        if background:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
            self._last = self._pool.submit(seal)
            return self._last
        done: Future[str] = Future()
        done.set_result(seal())
        return done

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None


def _after(tensors: list[tuple[str, Tensor]], state: Future[str]) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a version, which is not complete before its exact state is sealed."""
    yield from _drain(tensors)
    state.result()


def _drain(tensors: list[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Hand the tensors over one by one, so the copy shrinks as the store grows."""
    tensors.reverse()
    while tensors:
        yield tensors.pop()
