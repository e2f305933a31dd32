"""Row-wise kernels in Triton: norms, rotary embedding with the cache write, the gate, sampling.

Rows of version slot v are [v * rows_per_slot, (v + 1) * rows_per_slot), so that per-version norm
weights need no gather. Arithmetic is float32 inside, rounded where `transformers` rounds.

Sampling is two kernels, and tokens stay where the next step needs them. The first, which looks at
every logit, is spared where the product that made the logits has done it on the way
(`skinny.multiply_scored`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dora_rl.engine.cuda.kernels.overlap import begin, jit, overlap, ready
from dora_rl.engine.cuda.slots import DeviceSlots

VOCAB_CHUNK = 4096
ROWS_FEW = 256
ROPE_HEADS, ROPE_WARPS = 16, 8


@jit
def enter_kernel(
    slots_ptr,
    last_token_ptr,
    position_ptr,
    embed_ptr,
    x_ptr,
    positions_ptr,
    step_ptr,
    vocab,
    rows_per_slot,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """x = embedding of the last token of each row's request slot, and that slot's position. The
    first program counts the passes.

    Later kernels read positions before they are `ready`: this one lets none start early.
    """
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)
    slot = tl.load(slots_ptr + row)
    token = tl.load(last_token_ptr + slot) + row // rows_per_slot * vocab
    tl.store(positions_ptr + row, tl.load(position_ptr + slot))
    d = tl.arange(0, BLOCK)
    x = tl.load(embed_ptr + token * D + d, mask=d < D)
    tl.store(x_ptr + row * D + d, x, mask=d < D)


@jit
def sum_parts(pointers, mask, part_stride, PARTS: tl.constexpr, kind: tl.constexpr):
    """The sum over the splits of a product, rounded as one product would be."""
    x = tl.load(pointers, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        x += tl.load(pointers + part * part_stride, mask=mask, other=0.0).to(tl.float32)
    return x.to(kind).to(tl.float32)


@jit
def add_norm_kernel(
    x_ptr,
    delta_ptr,
    weight_ptr,
    out_ptr,
    rows_per_slot,
    part_stride,
    eps,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """x += sum of delta's parts (in place), out = norm(x) * weight of the row's version."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    inside = d < D
    weight = tl.load(weight_ptr + row // rows_per_slot * D + d, mask=inside, other=0.0)
    ready(OVERLAP)
    x = tl.load(x_ptr + row * D + d, mask=inside, other=0.0)
    if PARTS > 0:
        place = delta_ptr + row * D + d
        delta = sum_parts(place, inside, part_stride, PARTS, x_ptr.dtype.element_ty)
        x = (x.to(tl.float32) + delta).to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + row * D + d, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    out = normed * weight.to(tl.float32)
    tl.store(out_ptr + row * D + d, out.to(out_ptr.dtype.element_ty), mask=inside)


@jit
def rope_write_kernel(
    qkv_ptr,
    weight_ptr,
    cos_ptr,
    sin_ptr,
    slots_ptr,
    positions_ptr,
    table_ptr,
    q_ptr,
    pool_ptr,
    rows_per_slot,
    part_stride,
    eps,
    plane_stride,
    table_stride,
    H: tl.constexpr,
    KV: tl.constexpr,
    D: tl.constexpr,
    C: tl.constexpr,
    HB: tl.constexpr,
    PARTS: tl.constexpr,
    NORM: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Norm and rotate query and key heads; queries go to `q`, keys and values to the pool."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HB + tl.arange(0, HB)
    low = tl.arange(0, D // 2)
    high = low + D // 2
    slot = tl.load(slots_ptr + row).to(tl.int64)
    position = tl.load(positions_ptr + row).to(tl.int64)
    inside = head[:, None] < H + 2 * KV
    rotary = head[:, None] < H + KV
    base = qkv_ptr + row * (H + 2 * KV) * D + head[:, None] * D
    kind: tl.constexpr = q_ptr.dtype.element_ty
    ready(OVERLAP)
    x = sum_parts(base + low[None, :], inside, part_stride, PARTS, kind)
    y = sum_parts(base + high[None, :], inside, part_stride, PARTS, kind)
    if NORM:
        scale = tl.rsqrt((tl.sum(x * x, 1) + tl.sum(y * y, 1)) / D + eps)[:, None]
        weights = weight_ptr + row // rows_per_slot * (H + KV) * D + head[:, None] * D
        w = tl.load(weights + low[None, :], mask=rotary, other=1.0).to(tl.float32)
        w_high = tl.load(weights + high[None, :], mask=rotary, other=1.0).to(tl.float32)
        normed = ((x * scale).to(kind).to(tl.float32) * w).to(kind).to(tl.float32)
        normed_high = ((y * scale).to(kind).to(tl.float32) * w_high).to(kind).to(tl.float32)
        x = tl.where(rotary, normed, x)
        y = tl.where(rotary, normed_high, y)
    cos, sin = cos_ptr + position * D, sin_ptr + position * D
    turned = x * tl.load(cos + low)[None, :] + y * tl.load(sin + low)[None, :]
    turned_high = y * tl.load(cos + high)[None, :] + x * tl.load(sin + high)[None, :]
    x = tl.where(rotary, turned, x).to(kind)
    y = tl.where(rotary, turned_high, y).to(kind)
    q = q_ptr + row * H * D + head[:, None] * D
    tl.store(q + low[None, :], x, mask=head[:, None] < H)
    tl.store(q + high[None, :], y, mask=head[:, None] < H)
    block = tl.load(table_ptr + slot * table_stride + position // C).to(tl.int64)
    plane = (head >= H + KV).to(tl.int64)
    kv_head = head - H - plane * KV
    place = plane * plane_stride + ((block * KV + kv_head) * C + position % C) * D
    kept = inside & (head[:, None] >= H)
    tl.store(pool_ptr + place[:, None] + low[None, :], x, mask=kept)
    tl.store(pool_ptr + place[:, None] + high[None, :], y, mask=kept)


@jit
def gate_kernel(
    x_ptr,
    out_ptr,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    GELU: tl.constexpr = False,
):
    """out = act(gate) * up for packed [gate, up] rows: silu, or gelu by its formula with tanh."""
    begin(OVERLAP)
    ready(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < INNER
    gate = tl.load(x_ptr + row * 2 * INNER + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * INNER + INNER + i, mask=inside, other=0.0).to(tl.float32)
    kind = out_ptr.dtype.element_ty
    if GELU:  # (1 + tanh(u)) / 2 = sigmoid(2u)
        slope = tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        slope = tl.sigmoid(gate)
    activated = (gate * slope).to(kind).to(tl.float32)
    tl.store(out_ptr + row * INNER + i, (activated * up).to(kind), mask=inside)


@jit
def chunk_kernel(
    logits_ptr,
    slots_ptr,
    temperature_ptr,
    peak_ptr,
    sum_ptr,
    vocab,
    num_chunks,
    CHUNK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Peak and sum of exponentials of one chunk of one row's scaled logits."""
    begin(OVERLAP)
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    scale = tl.where(temperature > 0, 1.0 / temperature, 1.0)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    ready(OVERLAP)
    x = tl.load(logits_ptr + row * vocab + i, mask=i < vocab, other=-float("inf"))
    x = x.to(tl.float32) * scale
    peak = tl.max(x, 0)
    part = row * num_chunks + chunk
    safe = tl.where(peak == -float("inf"), 0.0, peak)
    tl.store(peak_ptr + part, peak)
    tl.store(sum_ptr + part, tl.sum(tl.exp(x - safe), 0))


@jit
def uniform(key, index):
    """splitmix64 of (key, index in the response) as a number in [0, 1), as in sampler.uniform."""
    x = key.to(tl.uint64, bitcast=True)
    x = x + (index + 1).to(tl.uint64, bitcast=True) * 0x9E3779B97F4A7C15
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    x = x ^ (x >> 31)
    return (x >> 40).to(tl.float32) * 5.9604644775390625e-08


@jit
def draw_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    temperature_ptr,
    key_ptr,
    prompt_ptr,
    peak_ptr,
    sum_ptr,
    last_token_ptr,
    position_ptr,
    step_ptr,
    token_out_ptr,
    logprob_out_ptr,
    vocab,
    num_chunks,
    num_slots,
    steps_max,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Draw a token by inverting the distribution, first over chunks, then inside one.

    The token becomes its slot's last token and the slot moves to the next position, on the device:
    the next step can be launched before the host has seen it. What the host reads later is
    [pass, (token, bits of the log-prob), row].
    """
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    row_position = tl.load(positions_ptr + row).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    scale = tl.where(temperature > 0, 1.0 / temperature, 1.0)
    c = tl.arange(0, CHUNKS)
    part = row * num_chunks + c
    ready(OVERLAP)
    peaks = tl.load(peak_ptr + part, mask=c < num_chunks, other=-float("inf"))
    sums = tl.load(sum_ptr + part, mask=c < num_chunks, other=0.0)
    peak, best_chunk = tl.max(peaks, 0, return_indices=True)
    sums = sums * tl.exp(peaks - peak)
    running = tl.cumsum(sums, 0)
    total = tl.sum(tl.where(c == CHUNKS - 1, running, 0.0), 0)
    index = row_position + 1 - tl.load(prompt_ptr + slot).to(tl.int64)
    threshold = uniform(tl.load(key_ptr + slot), index) * total
    chunk = tl.minimum(tl.sum((running <= threshold).to(tl.int32), 0), num_chunks - 1)
    before = tl.sum(tl.where(c == chunk - 1, running, 0.0), 0)
    chunk = tl.where(temperature > 0, chunk, best_chunk)
    i = tl.arange(0, CHUNK)
    inside = chunk * CHUNK + i < vocab
    logits = logits_ptr + row * vocab
    x = tl.load(logits + chunk * CHUNK + i, mask=inside, other=-float("inf")).to(tl.float32)
    w = tl.exp(x * scale - peak)
    place = tl.sum((tl.cumsum(w, 0) <= threshold - before).to(tl.int32), 0)
    last = tl.max(tl.where(w > 0, i, 0), 0)
    place = tl.where(temperature > 0, tl.minimum(place, last), tl.argmax(x, 0))
    token = tl.minimum(chunk * CHUNK + place, vocab - 1).to(tl.int64)
    logprob = tl.load(logits + token).to(tl.float32) * scale - peak - tl.log(total)
    place = ((tl.load(step_ptr) - 1) % steps_max) * 2 * tl.num_programs(0) + row
    tl.store(token_out_ptr + place, token.to(tl.int32))
    tl.store(logprob_out_ptr + place + tl.num_programs(0), logprob)
    real = slot < num_slots
    tl.store(last_token_ptr + slot, token, mask=real)
    tl.store(position_ptr + slot, (row_position + 1).to(tl.int32), mask=real)


def enter(
    slots: Tensor, last_token: Tensor, position: Tensor, step: Tensor, embed: Tensor
) -> tuple[Tensor, Tensor]:
    """Embeddings [row, width] and positions of decode rows; `embed` is [version, vocab, width]."""
    rows, (versions, vocab, width) = len(slots), embed.shape
    x = torch.empty((rows, width), dtype=embed.dtype, device=embed.device)
    positions = torch.empty(rows, dtype=position.dtype, device=embed.device)
    enter_kernel[(rows,)](
        slots,
        last_token,
        position,
        embed,
        x,
        positions,
        step,
        vocab,
        rows // versions,
        D=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return x, positions


def add_norm(
    x: Tensor, delta: Tensor | None, weight: Tensor, rows_per_slot: int, eps: float
) -> Tensor:
    """Residual add of `delta` [part, row, width] in place, then RMS norm with `weight` [slots,
    width]."""
    rows, width = x.shape
    out = torch.empty_like(x)
    block = triton.next_power_of_2(width)
    # Few rows leave processors idle: what counts then is how soon the one row of a program is done.
    warps = 4 if block <= 2048 else 8
    add_norm_kernel[(rows,)](
        x,
        x if delta is None else delta,
        weight,
        out,
        rows_per_slot,
        0 if delta is None else delta.stride(0),
        eps,
        D=width,
        BLOCK=block,
        PARTS=0 if delta is None else len(delta),
        num_warps=16 if rows <= ROWS_FEW and block >= 2048 else warps,
        **overlap(x.device),
    )
    return out


def gate(x: Tensor, gelu: bool = False) -> Tensor:
    rows, inner = x.shape[0], x.shape[1] // 2
    out = torch.empty((rows, inner), dtype=x.dtype, device=x.device)
    block = min(1024, triton.next_power_of_2(inner))
    gate_kernel[(rows, triton.cdiv(inner, block))](
        x,
        out,
        INNER=inner,
        BLOCK=block,
        num_warps=4,
        **overlap(x.device),
        **({"GELU": True} if gelu else {}),
    )
    return out


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
    advance: bool = True,
) -> None:
    """Draw one token per row at its slot's temperature, and `advance` the slots.

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
        state.num_slots if advance else 0,
        len(out),
        CHUNK=chunks.size,
        CHUNKS=triton.next_power_of_2(num_chunks),
        num_warps=8,
        **overlap(logits.device),
    )
