"""Sampling on the device: two kernels, and tokens stay where the next step needs them.

The first, which looks at every logit, is spared where the product that made the logits has done it
on the way (`skinny.multiply_scored`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from dora_rl.engine.cuda.kernels.overlap import overlap
from dora_rl.engine.cuda.kernels.rows import VOCAB_CHUNK, chunk_kernel, draw_kernel
from dora_rl.engine.cuda.slots import DeviceSlots


class Chunks(NamedTuple):
    """Peaks and sums of exponentials [row, chunk] of scaled logits, `size` tokens a chunk."""

    size: int
    peak: Tensor
    total: Tensor


def empty_chunks(rows: int, vocab: int, size: int, device: torch.device) -> Chunks:
    shape = (rows, triton.cdiv(vocab, size))
    peak = torch.empty(shape, dtype=torch.float32, device=device)
    return Chunks(size, peak, torch.empty_like(peak))


def chunks_of(logits: Tensor, slots: Tensor, temperature: Tensor) -> Chunks:
    """Of logits [row, vocab], scaled by the temperature of each row's request slot."""
    rows, vocab = logits.shape
    chunks = empty_chunks(rows, vocab, VOCAB_CHUNK, logits.device)
    chunk_kernel[tuple(chunks.peak.shape)](
        logits,
        slots,
        temperature,
        chunks.peak,
        chunks.total,
        vocab,
        chunks.peak.shape[1],
        CHUNK=VOCAB_CHUNK,
        num_warps=8,
        **overlap(logits.device),
    )
    return chunks


def draw(
    logits: Tensor,
    chunks: Chunks,
    slots: Tensor,
    positions: Tensor,
    state: DeviceSlots,
    out: Tensor,
) -> None:
    """Draw one token per row at its slot's temperature, and advance the slots.

    `out` [step, 2, row], int32: tokens, and log-probs as their bits.
    """
    rows, vocab = logits.shape
    num_chunks = chunks.peak.shape[1]
    draw_kernel[(rows,)](
        logits,
        slots,
        positions,
        state.temperature,
        state.key,
        state.prompt,
        chunks.peak,
        chunks.total,
        state.last_token,
        state.position,
        state.step,
        out,
        out.view(torch.float32),
        vocab,
        num_chunks,
        state.num_slots,
        len(out),
        CHUNK=chunks.size,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **overlap(logits.device),
    )
