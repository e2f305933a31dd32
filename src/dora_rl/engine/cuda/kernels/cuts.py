"""How the work of a decode step is cut into programs of a GPU. Decides, and knows no torch.

Attention: `Splits` of a context and the `Ring` of tiles that a program holds. Products of 129 to
256 rows: `Cut`, tiles of the weights and splits of K. The figures were measured on an H200.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

LONG_BLOCKS = 16  # a program with more blocks than this is what the others wait for
SPLITS_MAX = 32


class Splits(NamedTuple):
    """Programs per row and head, and the fewest blocks that one of them takes."""

    number: int
    blocks_min: int


def choose_splits(
    num_rows: int, num_kv_heads: int, num_processors: int, blocks_max: int, wave: int = 0
) -> Splits:
    """As many programs as run at once, `wave` to a processor, or enough for nearly two waves of two
    per processor; and none with many blocks; where contexts may be that long, a short one is not
    split for it."""
    num_programs = num_rows * num_kv_heads
    wanted = -(-7 * num_processors // (2 * num_programs))
    if wave:
        wanted = wave * num_processors // num_programs
    few = max(1, min(wanted, blocks_max, SPLITS_MAX))
    if blocks_max <= few * LONG_BLOCKS:
        return Splits(few, 1)
    each = LONG_BLOCKS // 2
    return Splits(min(SPLITS_MAX, -(-blocks_max // each)), max(1, each // few))


class Ring(NamedTuple):
    """What a program holds: tiles of so many tokens, at most, and the bytes of all of them."""

    tokens: int
    num_bytes: int


# The largest with which so many programs run on a processor at once; with more, they take turns.
RINGS = {
    2: Ring(64, 96 * 1024),
    3: Ring(64, 64 * 1024),
    4: Ring(16, 48 * 1024),
    6: Ring(32, 32 * 1024),
}
RING = Ring(64, 32 * 1024)


def choose_ring(num_programs: int, num_processors: int) -> Ring:
    each = -(-num_programs // num_processors)
    return next((ring for most, ring in RINGS.items() if each <= most), RING)


class Tiles(IntEnum):
    """What a program has: 128 rows of weights, 64, or 64 and half of the next 64 of a pair."""

    WHOLE = 0
    HALF = 1
    SHARED = 2


class Cut(NamedTuple):
    """How a product is cut into programs: tiles of the weights, splits of K."""

    tiles: Tiles
    splits: int = 1


CUT_ROWS_MIN, CUT_ROWS_MAX = 129, 256
CUT_K = 64  # values of K in a step
CUT_SPLITS = (1, 2, 4, 8)
ROWS_OF = {Tiles.WHOLE: 128, Tiles.HALF: 64, Tiles.SHARED: 96}  # of weights, in a program
# Cycles: a step of a program; a column of a part, to write and read.
STEP_CYCLES = {Tiles.WHOLE: 1060, Tiles.HALF: 580, Tiles.SHARED: 790}
COLUMN_CYCLES = 0.4


def choose_cut(
    rows: int, versions: int, n: int, k: int, num_processors: int, gate: bool = False
) -> Cut | None:
    """The fastest for `rows` rows of each version with [n, k] weights, or None where another
    product is to be used."""
    if not CUT_ROWS_MIN <= rows <= CUT_ROWS_MAX:
        return None
    cuts = [
        Cut(tiles, splits)
        for tiles in Tiles
        for splits in ((1,) if gate else CUT_SPLITS)
        if n % (2 * ROWS_OF[tiles]) == 0
        and k % (CUT_K * splits) == 0
        # All at once, and most processors busy: elsewhere cuBLAS may be faster.
        and 2 * num_processors <= 3 * (versions * n // ROWS_OF[tiles] * splits)
        and versions * n // ROWS_OF[tiles] * splits <= num_processors
    ]
    return min(cuts, key=lambda cut: _cycles(cut, n, k), default=None)


def _cycles(cut: Cut, n: int, k: int) -> float:
    """What the choice makes: the steps of a program, and all parts to write and read."""
    steps = k // cut.splits // CUT_K
    return steps * STEP_CYCLES[cut.tiles] + cut.splits * n * COLUMN_CYCLES
