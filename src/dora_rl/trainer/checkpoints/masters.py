"""Float32 masters beside their published rounding: what makes them whole again, bit for bit.

A version is published in the compute dtype. In bfloat16 it has the upper half of each master,
rounded to nearest; its last 16 bits are kept beside it, and the two give the master back:

    master bits = (published bits << 16) + low, with low = the last 16 bits read as a signed number

Rounding up adds one to the upper half exactly where the lower half, as a signed number, is
negative, so the sum takes it off again. One case has two answers: a master half-way between two
bfloat16 numbers rounds to the even one, from above or from below. Such masters (one of 65,536),
and whatever else the sum would not give back (a NaN with a payload), are kept whole by position.

Never guesses: `Splits` puts its own halves together and keeps whole whatever differs. Invariant:
what `whole` makes of what it gives is the master in every bit, for every float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from dora_rl.ports import SealedWeights

LOW, AT, BITS, WHOLE = "low:", "at:", "bits:", "whole:"
CHUNK = 1 << 24  # elements at a time: a GPU that trains has no room for copies of whole tensors
ODD_ROOM = 1 << 14  # room for one master in so many to be kept whole, four times what is usual

MakeBuffer = Callable[[str, torch.Size, torch.dtype], Tensor]


class Aside(NamedTuple):
    """Room on the device for copies of one tensor: of what is published, and of what that lacks."""

    published: Tensor
    low: Tensor | None  # None where nothing of the kind is kept


def host_room(source: Tensor) -> Tensor:
    """Room on the host for copies of a tensor, pinned where it is on a GPU: a copy is then thirty
    times as fast. Making it takes about as long as a slow copy, so it is used again."""
    return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)


class Found(NamedTuple):
    """Masters of one piece of a tensor that have to be kept whole, still on the device."""

    begin: int
    at: Tensor  # -1 where fewer were found than there was room for
    bits: Tensor
    num: Tensor


class Splits:
    """The masters of one version on their way to the host: rounded, in memory that `publish` gives,
    and what that lacks, in memory that `keep` gives. Copies into pinned memory are only begun: the
    caller waits for the device before it reads them. `stays`: masters are not changed or given back
    before `finish`, and the device is waited for only there. What went aside, on the device, is in
    `to_copy`, with its room on the host: to be copied by the caller, while masters change again."""

    def __init__(self, publish: MakeBuffer, keep: MakeBuffer, stays: bool = False) -> None:
        self._publish, self._keep, self._stays = publish, keep, stays
        self._found: dict[str, list[Found]] = {}
        self._masters: dict[str, tuple[Tensor, torch.dtype]] = {}
        self.to_copy: list[tuple[Tensor, Tensor]] = []

    @torch.no_grad()
    def add(
        self, name: str, master: Tensor, dtype: torch.dtype, aside: Aside | None = None
    ) -> None:
        """A float32 version lacks nothing; one in float16 has another exponent, and the master is
        kept as it is."""
        published = self._publish(name, master.shape, dtype)
        if dtype != torch.bfloat16 or master.dtype != torch.float32:
            if aside is None:
                published.copy_(master, non_blocking=True)
            else:
                self.to_copy.append((published, aside.published.copy_(master)))
            if dtype != master.dtype:
                lost = self._keep(WHOLE + name, master.shape, master.dtype)
                lost.copy_(master, non_blocking=True)
            return
        low = self._keep(LOW + name, master.shape, torch.int16)
        to, keep = published, low
        if aside is not None:
            assert aside.low is not None
            to, keep = aside.published, aside.low
            self.to_copy += [(published, to), (low, keep)]
        source, out, rest = master.reshape(-1), to.view(-1), keep.view(-1)
        self._found[name] = []
        if self._stays:
            self._masters[name] = source, dtype
        for begin in range(0, source.numel(), CHUNK):
            part, span = source[begin : begin + CHUNK], slice(begin, begin + CHUNK)
            rounded = part.to(dtype) if aside is None else out[span].copy_(part)
            bits, lower, odd = _halves(part, rounded)
            if aside is None:
                out[span].copy_(rounded, non_blocking=True)
            rest[span].copy_(lower, non_blocking=True)
            if self._stays:
                size = odd.numel() // ODD_ROOM + 64
                at = torch.nonzero_static(odd, size=size, fill_value=-1).view(-1)
            else:
                at = torch.nonzero(odd).view(-1)
            self._found[name].append(Found(begin, at, bits[at], odd.sum()))

    @torch.no_grad()
    def finish(self) -> None:
        """Masters that their halves do not give back, by position."""
        found = [piece for pieces in self._found.values() for piece in pieces]
        if not found:
            return
        counts = iter(torch.stack([piece.num for piece in found]).tolist())
        at_host = torch.cat([piece.at for piece in found]).cpu()
        bits_host = torch.cat([piece.bits for piece in found]).cpu()
        done = 0
        for name, pieces in self._found.items():
            at, bits = [at_host[:0]], [bits_host[:0]]
            for piece in pieces:
                span = slice(done, done + piece.at.numel())
                done, count = span.stop, next(counts)
                if count > piece.at.numel():
                    again = self._look_again(name, piece.begin)
                    at.append(again[0] + piece.begin)
                    bits.append(again[1])
                else:
                    at.append(at_host[span][:count] + piece.begin)
                    bits.append(bits_host[span][:count])
            if sum(each.numel() for each in at):
                for key, values in ((AT + name, at), (BITS + name, bits)):
                    value = torch.cat(values)
                    self._keep(key, value.shape, value.dtype).copy_(value)

    def _look_again(self, name: str, begin: int) -> tuple[Tensor, Tensor]:
        """Of a piece with more such masters than there was room for."""
        source, dtype = self._masters[name]
        part = source[begin : begin + CHUNK]
        bits, _, odd = _halves(part, part.to(dtype))
        at = torch.nonzero(odd).view(-1)
        return at.cpu(), bits[at].cpu()


def _halves(part: Tensor, rounded: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The bits of masters, their lower halves, and where the two halves do not give them back."""
    bits, high = part.view(torch.int32), rounded.view(torch.int16).to(torch.int32) << 16
    lower = (bits - high).to(torch.int16)
    return bits, lower, high + lower != bits


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
    names = [name for name in sealed.names() if name.startswith(prefix)]
    return {name.removeprefix(prefix): sealed.tensor(name) for name in names}
