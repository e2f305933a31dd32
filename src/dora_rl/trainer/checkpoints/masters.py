"""Float32 masters beside their published rounding: what makes them whole again, bit for bit.

A version is published in the compute dtype. In bfloat16 it has the upper half of each master,
rounded to nearest; its last 16 bits are kept beside it, and the two give the master back:

    master bits = (published bits << 16) + low, with low = the last 16 bits read as a signed number

Rounding up adds one to the upper half exactly where the lower half, as a signed number, is
negative, so the sum takes it off again. One case has two answers: a master half-way between two
bfloat16 numbers rounds to the even one, from above or from below. Such masters (one of 65,536),
and whatever else the sum would not give back (a NaN with a payload), are kept whole by position.

Never guesses: `split` puts its own halves together and keeps whole whatever differs. Invariant:
what `whole` makes of the two results of `split` is the master in every bit, for every float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from dora_rl.ports import SealedWeights

LOW, AT, BITS, WHOLE = "low:", "at:", "bits:", "whole:"
CHUNK = 1 << 24  # elements at a time: a GPU that trains has no room for copies of whole tensors

MakeBuffer = Callable[[str, torch.Size, torch.dtype], Tensor]


def make_buffer(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """Room on the host; a caller that copies often brings room that it uses again."""
    del name
    return torch.empty(shape, dtype=dtype)


def host_room(source: Tensor) -> Tensor:
    """Room on the host for copies of a tensor, pinned where it is on a GPU: a copy is then thirty
    times as fast. Making it takes about as long as a slow copy, so it is used again."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


@torch.no_grad()
def split(
    name: str,
    master: Tensor,
    dtype: torch.dtype,
    publish: MakeBuffer = make_buffer,
    keep: MakeBuffer = make_buffer,
    beside: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Copies on the host: the master in `dtype`, in memory that `publish` gives, and by name what
    it lacks, in memory that `keep` gives. A float32 version lacks nothing; one in float16 has
    another exponent, and the master is kept as it is. Copies into pinned memory are only begun: the
    caller waits for the device before it reads them. `beside`: the published values on the device
    go there."""
    published = publish(name, master.shape, dtype)
    if dtype != torch.bfloat16 or master.dtype != torch.float32:
        source = master if beside is None else beside.copy_(master)
        published.copy_(source, non_blocking=True)
        if dtype == master.dtype:
            return published, {}
        lost = keep(WHOLE + name, master.shape, master.dtype)
        return published, {WHOLE + name: lost.copy_(master, non_blocking=True)}
    low = keep(LOW + name, master.shape, torch.int16)
    odd: list[Tensor] = []
    source, out, rest = master.reshape(-1), published.view(-1), low.view(-1)
    device = None if beside is None else beside.view(-1)
    for begin in range(0, source.numel(), CHUNK):
        part, span = source[begin : begin + CHUNK], slice(begin, begin + CHUNK)
        rounded = part.to(dtype) if device is None else device[span].copy_(part)
        bits, high = part.view(torch.int32), rounded.view(torch.int16).to(torch.int32) << 16
        lower = (bits - high).to(torch.int16)
        out[span].copy_(rounded, non_blocking=True)
        rest[span].copy_(lower, non_blocking=True)
        odd.append(torch.nonzero(high + lower != bits).view(-1).cpu() + begin)
    parts = {LOW + name: low}
    at = torch.cat(odd) if odd else torch.empty(0, dtype=torch.int64)
    if at.numel():
        bits = source[at.to(source.device)].view(torch.int32).cpu()
        for key, value in ((AT + name, at), (BITS + name, bits)):
            parts[key] = keep(key, value.shape, value.dtype).copy_(value)
    return published, parts


@torch.no_grad()
def whole(name: str, published: Tensor, parts: SealedWeights) -> Tensor:
    """The master again, from a published tensor and what was kept beside it."""
    names = set(parts.names())
    if WHOLE + name in names:
        return parts.tensor(WHOLE + name)
    if LOW + name not in names:
        return published
    high = published.contiguous().view(torch.int16).to(torch.int32) << 16
    bits = high + parts.tensor(LOW + name)
    if AT + name in names:
        bits.view(-1)[parts.tensor(AT + name)] = parts.tensor(BITS + name)
    return bits.view(torch.float32)


def prefixed(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def with_prefix(prefix: str, sealed: SealedWeights) -> dict[str, Tensor]:
    """The tensors whose names begin so, without it."""
    return dict(_with_prefix(prefix, sealed))


def _with_prefix(prefix: str, sealed: SealedWeights) -> Iterator[tuple[str, Tensor]]:
    for name in sealed.names():
        if name.startswith(prefix):
            yield name.removeprefix(prefix), sealed.tensor(name)
