"""Sampling on the device: two kernels, and tokens stay where the next step needs them."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from dora_rl.engine.cuda.overlap import overlap
from dora_rl.engine.cuda.rows import VOCAB_CHUNK, chunk_kernel, draw_kernel
from dora_rl.engine.cuda.slots import DeviceSlots


def draw(logits: Tensor, slots: Tensor, positions: Tensor, state: DeviceSlots, out: Tensor) -> None:
    """Draw one token per row at its slot's temperature, and advance the slots and the step.

    `out` [step, 2, row], int32: tokens, and log-probs as their bits.
    """
    rows, vocab = logits.shape
    num_chunks = triton.cdiv(vocab, VOCAB_CHUNK)
    device, launch = logits.device, overlap(logits.device)
    peak = torch.empty((rows, num_chunks), dtype=torch.float32, device=device)
    total = torch.empty_like(peak)
    best = torch.empty((rows, num_chunks), dtype=torch.int32, device=device)
    chunk_kernel[(rows, num_chunks)](
        logits,
        slots,
        state.temperature,
        peak,
        total,
        best,
        state.step,
        vocab,
        num_chunks,
        CHUNK=VOCAB_CHUNK,
        num_warps=8,
        **launch,
    )
    draw_kernel[(rows,)](
        logits,
        slots,
        positions,
        state.temperature,
        state.key,
        state.prompt,
        peak,
        total,
        best,
        state.last_token,
        state.position,
        state.step,
        out,
        out.view(torch.float32),
        vocab,
        num_chunks,
        state.num_slots,
        len(out),
        CHUNK=VOCAB_CHUNK,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **launch,
    )
