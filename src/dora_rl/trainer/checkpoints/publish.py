"""Making a version of the learner's weights: gathered, cast, with a canary, sealed by the store.

The tensors go straight into the memory of the store, without a copy in between. Never publishes
weights in motion: they are copied before this returns control of the model. Where the device has
room for it they are copied there, and from there to the host while training goes on.
Invariants: the canary's log-probs were computed from exactly the published values; where the exact
state goes to a store of its own, no version is sealed before its exact state is.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from dora_rl.ports import Canary, Draft, WeightStore
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.checkpoints.finite import Ranges
from dora_rl.trainer.checkpoints.masters import Aside, Splits
from dora_rl.trainer.distributed import back_to_shards, gathered, world
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.lora import without_dropout
from dora_rl.trainer.policy.model import Policy, exact_names, named_weights
from dora_rl.types import Version

CANARY_TOKENS = 16


class Handover(Protocol):
    """Device memory that versions are handed to other processes in."""

    def begin(self, version: Version) -> None: ...
    def room(self, name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor: ...
    def aside(self, shape: torch.Size, dtype: torch.dtype) -> Tensor: ...
    def offer(self) -> None: ...


def canary_ids(vocab: int, positions_max: int) -> tuple[int, ...]:
    """A fixed walk over the vocabulary, so that many embedding rows are touched."""
    count = min(CANARY_TOKENS, positions_max)
    return tuple((7 + i * 7919) % vocab for i in range(count))


@torch.no_grad()
def compute_canary(policy: nn.Module, vocab: int, positions_max: int) -> Canary:
    """Float32 log-probs of the fixed ids under the policy as it is, at temperature 1. Never by
    compiled layers: instances wait for the first version while they would be compiled for it, and
    later it would be a size of its own."""
    ids = canary_ids(vocab, positions_max)
    device = next(policy.parameters()).device
    tokens = torch.tensor(ids, device=device)
    rows = torch.arange(len(ids) - 1, device=device)
    with without_dropout(policy), torch.compiler.set_stance("force_eager"):
        scores = policy(tokens, Layout([len(ids)], device), rows, tokens[1:], 1.0)
    back_to_shards(policy)
    dtype = str(policy.compute_dtype).removeprefix("torch.")
    return Canary(ids, tuple(scores.logprobs_T.float().tolist()), dtype)


def pin(memory: Any) -> Callable[[], None]:
    """Make an array of the host known to the GPU, which then copies to it at full speed and beside
    other work. Where it refuses, copies are slower; returns what undoes it."""
    runtime = cast(Any, torch.cuda.cudart())
    address = int(memory.ctypes.data)
    if int(runtime.cudaHostRegister(address, memory.nbytes, 0)):
        with contextlib.suppress(AttributeError):
            ctypes.CDLL(None).cudaGetLastError()  # or the next launch would report it
        return lambda: None
    return lambda: runtime.cudaHostUnregister(address)


def fill(draft: Draft, tensors: Iterable[tuple[str, Tensor]], version: Version) -> None:
    ranges = Ranges()
    for name, tensor in ranges.passing(tensors):
        draft.room(name, tensor.shape, tensor.dtype).copy_(tensor)
    ranges.check(f"version {version}")


def copy_all(pairs: list[tuple[Tensor, Tensor]], meanwhile: Callable[[], None]) -> None:
    """From the device to the host, beside whatever else the device does; done when this returns."""
    on_gpu = any(source.is_cuda for _, source in pairs)
    stream = torch.cuda.Stream(pairs[0][1].device) if on_gpu else None
    with torch.cuda.stream(stream):
        for host, source in pairs:
            host.copy_(source, non_blocking=on_gpu)
    meanwhile()
    if stream is not None:
        stream.synchronize()


class Drafts(NamedTuple):
    """A version and what makes it exact, on their way into their stores."""

    version: Draft
    exact: Draft | None

    def alone(self) -> Drafts:
        """The version without its exact state."""
        return Drafts(self.version, None)

    def discard(self) -> None:
        for draft in (self.version, self.exact):
            if draft is not None:
                draft.discard()


def _make_room(
    version: Version,
    store: WeightStore,
    exact: WeightStore | None,
    num_bytes: tuple[int, int] = (0, 0),
    pin: Callable[[Any], Callable[[], None]] | None = None,
) -> Drafts:
    """Of both, or of none where one cannot be had."""
    with contextlib.ExitStack() as undo:
        first = store.draft(version, num_bytes[0], pin)
        undo.callback(first.discard)
        made = Drafts(first, None if exact is None else exact.draft(version, num_bytes[1], pin))
        undo.pop_all()
        return made


class Publisher:
    """Publishes in order, in the background if asked: the next step begins on the live weights."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None
        self._ahead: tuple[Version, Future[Drafts]] | None = None
        self.handover: Handover | None = None  # of versions on the device, where there is one
        self._copies: Future[None] | None = None  # from there to the host

    def prepare(
        self,
        version: Version,
        store: WeightStore,
        exact: WeightStore,
        num_bytes: tuple[int, int],
    ) -> None:
        """Have the memory of a version that is to come made ready in a thread: for one of some
        gigabytes that takes longer than filling it. `num_bytes`: of it and of its exact state."""
        self._drop_prepared()
        pool = ThreadPoolExecutor(1, thread_name_prefix="publish-room")
        self._ahead = version, pool.submit(_make_room, version, store, exact, num_bytes, pin)
        pool.shutdown(wait=False)

    def begin(self, version: Version, store: WeightStore, exact: WeightStore | None) -> Drafts:
        """Memory for a version, prepared or not."""
        if self._ahead is not None and self._ahead[0] == version and exact is not None:
            (_, made), self._ahead = self._ahead, None
            with contextlib.suppress(
                Exception
            ):  # what was in the way is said below, if it still is
                return made.result()
        return _make_room(version, store, exact)

    def snapshot(
        self, policy: Policy, dtype: torch.dtype, version: Version, drafts: Drafts | None
    ) -> None:
        """Copy every tensor of the checkpoint, gathered from all ranks and cast, and what the cast
        took from the masters, where that is wanted. All ranks take part; those without drafts keep
        nothing."""
        # Adapters are merged as the policy merges them, so that it computes with what is sealed.
        own_dtype, splits, ranges = exact_names(policy), None, Ranges()
        if drafts is not None and drafts.exact is not None:
            # What is gathered or put in another form is a copy, which is not to be kept.
            stays = isinstance(policy, Decoder) and world()[1] == 1
            splits = Splits(drafts.version.room, drafts.exact.room, stays)
        to_copy: list[tuple[Tensor, Tensor]] = []
        if self.handover is not None:
            self.settle()
            self.handover.begin(version)
        for name, tensor in named_weights(policy, gathered, policy.compute_dtype):
            if drafts is None:
                continue
            kind = tensor.dtype if name in own_dtype else dtype
            ranges.add(name, tensor, kind)
            aside = self._aside(name, tensor, kind, keeps_low=splits is not None)
            if splits is not None:
                splits.add(name, tensor, kind, aside)
                continue
            room = drafts.version.room(name, tensor.shape, kind)
            if aside is None:
                room.copy_(tensor, non_blocking=True)
            else:
                to_copy.append((room, aside.published.copy_(tensor)))
        if splits is not None:
            splits.finish()
            to_copy = splits.to_copy
        if drafts is not None and next(policy.parameters()).is_cuda:
            torch.cuda.current_stream().synchronize()  # copies run behind each other
        ranges.check(f"version {version}")
        if self.handover is not None:
            self._copy_beside(to_copy, self.handover)

    def _aside(
        self, name: str, tensor: Tensor, dtype: torch.dtype, *, keeps_low: bool
    ) -> Aside | None:
        if self.handover is None:
            return None
        published = self.handover.room(name, tensor.shape, dtype)
        halved = keeps_low and dtype == torch.bfloat16 and tensor.dtype == torch.float32
        return Aside(published, self.handover.aside(tensor.shape, torch.int16) if halved else None)

    def _copy_beside(self, pairs: list[tuple[Tensor, Tensor]], handover: Handover) -> None:
        pool = ThreadPoolExecutor(1, thread_name_prefix="publish-copy")
        self._copies = pool.submit(copy_all, pairs, handover.offer)
        pool.shutdown(wait=False)

    def settle(self) -> None:
        """Returns when nothing is copied to the host any more. How that went is the seal's."""
        if self._copies is not None:
            wait([self._copies])

    def seal(
        self,
        drafts: Drafts,
        canary: Canary | None,
        background: bool,
        base: str = "",
        turn: Callable[[], None] = lambda: None,
    ) -> Future[str]:
        """The checksum, as a future; already there unless `background`. The version is sealed when
        `turn` has returned and its exact state is sealed; that of older versions stays."""
        copies = self._copies

        def seal() -> str:
            if copies is not None:
                copies.result()
            if drafts.exact is None:
                return drafts.version.seal(canary, base, turn)
            with ThreadPoolExecutor(1, thread_name_prefix="publish-exact") as beside:
                state = beside.submit(drafts.exact.seal, canary, base, turn)
                return drafts.version.seal(canary, base, state.result)

        if background:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="publish")
            return self._pool.submit(seal)
        done: Future[str] = Future()
        done.set_result(seal())
        return done

    def close(self) -> None:
        self._drop_prepared()
        self.settle()
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = None

    def _drop_prepared(self) -> None:
        if self._ahead is not None:
            (_, made), self._ahead = self._ahead, None
            made.add_done_callback(
                lambda made: None if made.exception() else made.result().discard()
            )
