"""Guesses that a GPU finds and checks itself, around a decode pass: look, choose, enter, accept.

    text     [text row, position] tokens of prompt and response of every request that ran lately
    length   [text row] tokens of it that are known
    lists    [slot, LISTED] text rows in which a slot's request looks, its own first; -1: none
    end      [slot] positions from here on have no place in the cache

`look` finds in each listed text the place whose past is most like the request's newest tokens;
`choose` takes the best of them, gives the rows of the pass to those guesses that are likeliest to
be right, and writes slot, token and position of each row; `enter` fetches the embeddings. Behind
the draw, `accept` compares: what was drawn counts as far as the guesses before it were drawn. Then
the request has its new tokens and position, and the next pass needs nothing from the host.

    request     a: p q           b: p             c (its end is reached)
    rows        a0 a1 a2 | b0 b1 | - - -          0: the newest token; then guesses; rest: dummies

None of them overlaps with another kernel: later ones read slots and positions before they are
`ready`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from dora_rl.engine.cuda.kernels.overlap import jit
from dora_rl.engine.guessing import CHOICES, GUESSES_MAX, PAST_MAX
from dora_rl.engine.texts import LISTED

LOOK_CHUNK = 1024
INFO = 4  # of a request in a step: first row, rows, tokens that it gained, common past


@jit
def look_kernel(
    slots_ptr,
    position_ptr,
    end_ptr,
    prompt_ptr,
    lists_ptr,
    length_ptr,
    text_ptr,
    best_ptr,
    text_stride,
    LISTED: tl.constexpr,
    PAST: tl.constexpr,
    GUESSES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program per (request, listed text): past << 48 | tokens that follow << 40 | place, of the
    best place; 0 where there is none. In others' texts the prompt is not looked at again."""
    request = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    slot = tl.load(slots_ptr + request)
    position = tl.load(position_ptr + slot)
    own = tl.load(lists_ptr + slot * LISTED).to(tl.int64)
    row = tl.load(lists_ptr + slot * LISTED + which).to(tl.int64)
    best = tl.zeros([CHUNK], tl.int64)
    if (row >= 0) & (position < tl.load(end_ptr + slot)):
        length = tl.load(length_ptr + row)
        mine = text_ptr + own * text_stride + position
        text = text_ptr + row * text_stride
        first = tl.where(which == 0, 1, tl.load(prompt_ptr + slot))
        newest = tl.load(mine)
        for start in range(first, length, CHUNK):
            place = start + tl.arange(0, CHUNK)
            there = place < length
            same = there & (tl.load(text + place - 1, mask=there, other=-1) == newest)
            past = same.to(tl.int32)
            for back in tl.static_range(1, PAST):
                token = tl.load(mine - back, mask=position >= back, other=-1)
                before = same & (place > back)
                same = before & (tl.load(text + place - 1 - back, mask=before, other=-2) == token)
                past += same.to(tl.int32)
            follow = tl.minimum(length - place, GUESSES).to(tl.int64)
            value = (past.to(tl.int64) << 48) | (follow << 40) | place.to(tl.int64)
            best = tl.maximum(best, tl.where(past > 0, value, 0))
    tl.store(best_ptr + request * LISTED + which, tl.max(best, 0))


@jit
def best_of(pointers, mask, LISTED: tl.constexpr, N: tl.constexpr):
    """The greatest of `LISTED` values each, and where it is."""
    best = tl.zeros([N], tl.int64)
    found = tl.zeros([N], tl.int32)
    for which in tl.static_range(LISTED):
        value = tl.load(pointers + which, mask=mask, other=0)
        found = tl.where(value > best, which, found)
        best = tl.maximum(value, best)
    return best, found


@jit
def choose_kernel(
    slots_ptr,
    position_ptr,
    end_ptr,
    last_token_ptr,
    lists_ptr,
    text_ptr,
    best_ptr,
    lengths_ptr,
    row_slot_ptr,
    row_position_ptr,
    row_token_ptr,
    info_ptr,
    step_ptr,
    num_requests,
    num_rows,
    num_slots,
    steps_max,
    text_stride,
    LISTED: tl.constexpr,
    PAST: tl.constexpr,
    GUESSES: tl.constexpr,
    CHOICES: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
):
    """One program per version: see the module docstring."""
    version = tl.program_id(0)
    i = tl.arange(0, N)
    at = version * num_requests + i
    inside = i < num_requests
    slot = tl.load(slots_ptr + at, mask=inside, other=num_slots)
    position = tl.load(position_ptr + slot)
    left = tl.load(end_ptr + slot) - position  # positions
    alive = inside & (left > 0)
    best, found = best_of(best_ptr + at.to(tl.int64) * LISTED, alive, LISTED, N)
    past = (best >> 48).to(tl.int32)
    place = (best & 0x7FFFFFFF).to(tl.int32)
    text = tl.load(lists_ptr + slot * LISTED + found, mask=past > 0, other=0).to(tl.int64)
    room = tl.where(past > 0, tl.minimum(((best >> 40) & 255).to(tl.int32), left - 1), 0)
    count = tl.zeros([N], tl.int32)
    spare = num_rows - tl.sum(alive.to(tl.int32), 0)
    for choice in tl.static_range(CHOICES):
        wanted = tl.minimum(tl.load(lengths_ptr + choice * (PAST + 1) + past), room)
        more = tl.maximum(wanted - count, 0)
        more = tl.where(tl.cumsum(more, 0) <= spare, more, 0)
        count += more
        spare -= tl.sum(more, 0)
    taken = tl.where(alive, count + 1, 0)
    begin = version * num_rows + tl.cumsum(taken, 0) - taken
    for n in tl.static_range(GUESSES + 1):
        there = n < taken
        if n == 0:
            token = tl.load(last_token_ptr + slot, mask=there, other=0)
        else:
            guess = text_ptr + text * text_stride + place + (n - 1)
            token = tl.load(guess, mask=there, other=0).to(tl.int64)
        tl.store(row_slot_ptr + begin + n, slot, mask=there)
        tl.store(row_position_ptr + begin + n, position + n, mask=there)
        tl.store(row_token_ptr + begin + n, token, mask=there)
    unused = version * num_rows + tl.sum(taken, 0) + tl.arange(0, R)
    nobody = unused < (version + 1) * num_rows
    tl.store(row_slot_ptr + unused, tl.zeros([R], tl.int64) + num_slots, mask=nobody)
    tl.store(row_position_ptr + unused, tl.zeros([R], tl.int32), mask=nobody)
    tl.store(row_token_ptr + unused, tl.zeros([R], tl.int64), mask=nobody)
    width = tl.num_programs(0) * num_requests
    info = info_ptr + (tl.load(step_ptr) % steps_max) * 4 * width + at
    tl.store(info, begin, mask=inside)
    tl.store(info + width, taken, mask=inside)
    tl.store(info + 3 * width, past, mask=inside)


@jit
def enter_kernel(
    row_token_ptr, embed_ptr, x_ptr, step_ptr, vocab, num_rows, D: tl.constexpr, BLOCK: tl.constexpr
):
    """x = embedding of each row's token. The first program counts the passes."""
    row = tl.program_id(0).to(tl.int64)
    if row == 0:
        tl.store(step_ptr, tl.load(step_ptr) + 1)
    token = tl.load(row_token_ptr + row) + row // num_rows * vocab
    d = tl.arange(0, BLOCK)
    x = tl.load(embed_ptr + token * D + d, mask=d < D)
    tl.store(x_ptr + row * D + d, x, mask=d < D)


@jit
def accept_kernel(
    slots_ptr,
    row_token_ptr,
    drawn_ptr,
    info_ptr,
    step_ptr,
    last_token_ptr,
    position_ptr,
    lists_ptr,
    length_ptr,
    text_ptr,
    width,
    all_rows,
    steps_max,
    text_stride,
    LISTED: tl.constexpr,
    GUESSES: tl.constexpr,
    N: tl.constexpr,
):
    """`N` requests a program; `width` requests and `all_rows` rows in all."""
    at = tl.program_id(0) * N + tl.arange(0, N)
    inside = at < width
    step = (tl.load(step_ptr) - 1) % steps_max
    info = info_ptr + step * 4 * width + at
    begin = tl.load(info, mask=inside, other=0)
    taken = tl.load(info + width, mask=inside, other=0)
    alive = taken > 0
    slot = tl.load(slots_ptr + at, mask=alive, other=0)
    position = tl.load(position_ptr + slot, mask=alive, other=0)
    own = tl.load(lists_ptr + slot * LISTED, mask=alive, other=-1).to(tl.int64)
    known = alive & (own >= 0)
    drawn = drawn_ptr + step * 2 * all_rows + begin
    right = alive
    gained = tl.zeros([N], tl.int32)
    newest = tl.zeros([N], tl.int32)
    for n in tl.static_range(GUESSES + 1):
        counts = right & (n < taken)
        token = tl.load(drawn + n, mask=counts, other=0)
        place = text_ptr + own * text_stride + position + (n + 1)
        tl.store(place, token, mask=counts & known)
        gained += counts.to(tl.int32)
        newest = tl.where(counts, token, newest)
        guess = tl.load(row_token_ptr + begin + n + 1, mask=counts & (n + 1 < taken), other=-1)
        right = counts & (guess == token.to(tl.int64))
    tl.store(info + 2 * width, gained, mask=inside)
    tl.store(last_token_ptr + slot, newest.to(tl.int64), mask=alive)
    tl.store(position_ptr + slot, position + gained, mask=alive)
    tl.store(length_ptr + own, position + gained + 1, mask=known)


class Told(NamedTuple):
    """What the device knows of requests, beside `DeviceSlots`: see the module docstring."""

    text: Tensor
    length: Tensor
    lists: Tensor
    end: Tensor
    lengths: Tensor  # [choice, past] guesses: see `Guessing.lengths`


class Entered(NamedTuple):
    """Rows of a pass."""

    x: Tensor
    slots: Tensor
    positions: Tensor
    tokens: Tensor


class Where(NamedTuple):
    """Of every slot, in `DeviceSlots`."""

    last_token: Tensor
    position: Tensor
    prompt: Tensor
    step: Tensor


def enter(
    slots: Tensor, where: Where, told: Told, info: Tensor, embed: Tensor, num_rows: int
) -> Entered:
    """`num_rows` rows for the requests in `slots` of each version; `embed` is [version, vocab,
    width], `info` [step, INFO, request]."""
    count, (versions, vocab, width) = len(slots), embed.shape
    each, device = count // versions, embed.device
    best = torch.empty((count, LISTED), dtype=torch.int64, device=device)
    look_kernel[(count, LISTED)](
        slots,
        where.position,
        told.end,
        where.prompt,
        told.lists,
        told.length,
        told.text,
        best,
        told.text.stride(0),
        LISTED=LISTED,
        PAST=PAST_MAX,
        GUESSES=GUESSES_MAX,
        CHUNK=LOOK_CHUNK,
        num_warps=8,
    )
    all_rows = versions * num_rows
    row_slots = torch.empty(all_rows, dtype=torch.int64, device=device)
    positions = torch.empty(all_rows, dtype=torch.int32, device=device)
    tokens = torch.empty(all_rows, dtype=torch.int64, device=device)
    choose_kernel[(versions,)](
        slots,
        where.position,
        told.end,
        where.last_token,
        told.lists,
        told.text,
        best,
        told.lengths,
        row_slots,
        positions,
        tokens,
        info,
        where.step,
        each,
        num_rows,
        len(told.end) - 1,
        len(info),
        told.text.stride(0),
        LISTED=LISTED,
        PAST=PAST_MAX,
        GUESSES=GUESSES_MAX,
        CHOICES=CHOICES,
        N=triton.next_power_of_2(each),
        R=triton.next_power_of_2(num_rows),
        num_warps=4,
    )
    x = torch.empty((all_rows, width), dtype=embed.dtype, device=device)
    enter_kernel[(all_rows,)](
        tokens,
        embed,
        x,
        where.step,
        vocab,
        num_rows,
        D=width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=4,
    )
    return Entered(x, row_slots, positions, tokens)


def accept(
    slots: Tensor, where: Where, told: Told, info: Tensor, tokens: Tensor, drawn: Tensor
) -> None:
    """What `drawn` [step, 2, row] says of the rows' tokens; requests go on behind it."""
    count = len(slots)
    block = min(128, triton.next_power_of_2(count))
    accept_kernel[(triton.cdiv(count, block),)](
        slots,
        tokens,
        drawn,
        info,
        where.step,
        where.last_token,
        where.position,
        told.lists,
        told.length,
        told.text,
        count,
        len(tokens),
        len(info),
        told.text.stride(0),
        LISTED=LISTED,
        GUESSES=GUESSES_MAX,
        N=block,
        num_warps=4,
    )
