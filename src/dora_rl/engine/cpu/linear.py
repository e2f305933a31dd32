"""Matrix products whose rows do not depend on how many rows stand beside them.

A BLAS picks its kernel by shape, so the same row can come out one rounding different in a batch of
3 and a batch of 40. We always multiply whole tiles of rows; `probe` measures, for the machine, the
thread count and each weight shape at hand, whether a plain product of any number of tiles gives
bit-identical rows. Where it does not (some shapes with several threads), the product runs tile by
tile as one batched call, which the probe checks too. Never trusted, always measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor
from torch.nn import functional

TILES = (16, 32, 64)
_PROBE_TILES = (1, 2, 3, 4, 6, 8, 13)
_PROBE_OUT_MAX = 16_384  # a wider head repeats the same kernel over more columns


class RowLinear:
    """`linear(x, w, bias)` for float32 on the CPU; `tile_rows` is the unit to pad rows to."""

    def __init__(self, shapes: Iterable[tuple[int, int]], tile_rows: int = 0) -> None:
        self._plain: dict[tuple[int, int], bool] = {}
        self.tile_rows = tile_rows or TILES[0]
        self.exact = False  # whether every shape was found row-invariant
        unique = sorted(set(shapes))
        for tile in (tile_rows,) if tile_rows else TILES:
            modes = {shape: probe(shape, tile) for shape in unique}
            self.tile_rows = tile
            self._plain = {shape: bool(mode) for shape, mode in modes.items()}
            self.exact = all(mode is not None for mode in modes.values())
            if self.exact:
                break

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._plain.get((weight.shape[0], weight.shape[1]), True):
            return functional.linear(x, weight, bias)
        rows, tile = x.shape[0], self.tile_rows
        out = torch.bmm(
            x.view(rows // tile, tile, -1), weight.t().expand(rows // tile, -1, -1)
        ).view(rows, -1)
        return out if bias is None else out.add_(bias)


def probe(shape: tuple[int, int], tile: int) -> bool | None:
    """True: plain products are row-invariant; False: only tiled ones are; None: neither."""
    generator = torch.Generator().manual_seed(1)
    num_out, num_in = min(shape[0], _PROBE_OUT_MAX), shape[1]
    rows = tile * max(_PROBE_TILES)
    x = torch.randn(rows, num_in, generator=generator)
    weight = torch.randn(num_out, num_in, generator=generator)

    def tiled(part: Tensor) -> Tensor:
        count = part.shape[0] // tile
        columns = weight.t().expand(count, -1, -1)
        return torch.bmm(part.view(count, tile, num_in), columns).view(part.shape[0], num_out)

    def invariant(product: Callable[[Tensor], Tensor]) -> bool:
        whole = product(x)
        for count in _PROBE_TILES:
            for start in (0, rows - count * tile):
                part = x[start : start + count * tile]
                if not torch.equal(product(part), whole[start : start + count * tile]):
                    return False
        moved = product(x.roll(5, 0))
        return torch.equal(moved, whole.roll(5, 0))

    if invariant(lambda part: functional.linear(part, weight)):
        return True
    return False if invariant(tiled) else None
