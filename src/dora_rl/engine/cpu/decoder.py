"""The forward pass of every family on the CPU: one flat batch of rows, several versions at once.

Rows of a version are contiguous and padded to tiles; all arithmetic on a row depends on that row
and its context alone. Matrix products run per version segment, everything else once for all rows.
LoRA versions share the base's product and differ in the low-rank part that is added to it.

A BLAS picks its kernel by shape, so the same row can come out one rounding different in a batch of
3 and a batch of 40. `RowLinear` always multiplies whole tiles of rows; `probe` measures, for the
machine, the thread count and each weight shape at hand, whether a plain product of any number of
tiles gives bit-identical rows. Where it does not (some shapes with several threads), the product
runs tile by tile as one batched call, which the probe checks too. Never trusted, always measured.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from dora_rl.engine.cpu.attention import Ints, Pairs, attend_decode, attend_prefill, pair_blocks
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.weights import Layer, ModelWeights
from dora_rl.model.rope import rope_tables
from dora_rl.model.spec import ModelSpec, MoeSpec

if TYPE_CHECKING:
    from dora_rl.engine.cpu.runner import Batch

TILES = (16, 32, 64)
_PROBE_TILES = (1, 2, 3, 4, 6, 8, 13)
_PROBE_OUT_MAX = 16_384  # a wider head repeats the same kernel over more columns
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}
Segments = list[tuple[int, int, int]]  # version slot, first row, row behind the last


class RowLinear:
    """`linear(x, w, bias)` for float32 on the CPU; `tile_rows` is the unit to pad rows to."""

    def __init__(self, shapes: Collection[tuple[int, int]], tile_rows: int = 0) -> None:
        self._tiled: set[tuple[int, ...]] = set()
        self.tile_rows, self.exact = tile_rows, False  # exact: every shape is row-invariant
        for tile in (tile_rows,) if tile_rows else TILES:
            plain = {shape: probe(shape, tile) for shape in shapes}
            self._tiled = {shape for shape, is_plain in plain.items() if not is_plain}
            self.tile_rows, self.exact = tile, None not in plain.values()
            if self.exact:
                break

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if tuple(weight.shape) not in self._tiled:
            return functional.linear(x, weight, bias)
        out = tiled_product(x, weight, self.tile_rows)
        return out if bias is None else out.add_(bias)


def tiled_product(x: Tensor, weight: Tensor, tile: int) -> Tensor:
    tiles = x.view(len(x) // tile, tile, -1)
    return torch.bmm(tiles, weight.t().expand(len(tiles), -1, -1)).view(len(x), -1)


def probe(shape: tuple[int, int], tile: int) -> bool | None:
    """True: plain products are row-invariant; False: only tiled ones are; None: neither."""
    generator = torch.Generator().manual_seed(1)
    rows = tile * max(_PROBE_TILES)
    x = torch.randn(rows, shape[1], generator=generator)
    weight = torch.randn(min(shape[0], _PROBE_OUT_MAX), shape[1], generator=generator)

    def invariant(product: Callable[[Tensor], Tensor]) -> bool:
        whole = product(x)
        parts = [
            slice(start, start + count * tile)
            for count in _PROBE_TILES
            for start in (0, rows - count * tile)
        ]
        alike = all(torch.equal(product(x[part]), whole[part]) for part in parts)
        return alike and torch.equal(product(x.roll(5, 0)), whole.roll(5, 0))

    if invariant(lambda part: functional.linear(part, weight)):
        return True
    return False if invariant(lambda part: tiled_product(part, weight, tile)) else None


class Rows(NamedTuple):
    """A batch as tensors: made once a pass, used by every layer."""

    segments: Segments  # by version, or by adapter under LoRA
    of_base: Segments  # that multiply with the same weights: under LoRA one with all rows
    slots: Tensor | int  # weight slot of each row, or the one of all
    turns: list[tuple[Tensor, Tensor]]  # cos and sin of each rotary embedding
    write_index: Tensor  # places of each row's keys, then values, in a layer's pool of vectors
    pairs: dict[int, Pairs | None]  # rows that decode, by window
    chunks: list[tuple[slice, int, list[int]]]  # others: rows, first position, blocks
    chosen: list[Tensor]  # experts of each row, by sparse layer, as they are chosen


class Decoder:
    """Computes logits; owns the RoPE tables and the row-invariant linear."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, linear: RowLinear, num_positions: int
    ) -> None:
        self.spec, self.weights, self.linear = spec, weights, linear
        ropes = spec.all_ropes()
        self._tables = [rope_tables(rope, spec.head_dim, num_positions) for rope in ropes]
        self._turns = [ropes.index(spec.rope_of(i)) for i in range(spec.num_layers)]
        self._windows = [spec.window_of(i) for i in range(spec.num_layers)]
        self._activate = ACTIVATIONS[spec.activation]

    def forward(self, batch: Batch, cache: KvCache, table: Ints) -> Tensor:
        """Float32 logits of the batch's logit rows; keys and values are written on the way."""
        rows, token_ids = self._rows(batch, cache, table), torch.from_numpy(batch.token_ids)
        x = self.weights.embed[rows.slots, token_ids]
        if self.spec.embed_scale != 1.0:
            x = x * torch.tensor(self.spec.embed_scale, dtype=x.dtype)
        for index, layer in enumerate(self.weights.layers):
            h = self._norm(x, layer.norm1, rows)
            h = self._attend(h, index, rows, cache.kv[index])
            x = x + self._norm(self._project(h, layer, "o", rows), layer.post1, rows)
            h = self._norm(x, layer.norm2, rows)
            x = x + self._norm(self._mlp(h, layer, rows), layer.post2, rows)
        if cache.routing is not None:
            block, token = np.divmod(batch.positions, cache.routing.shape[3])
            blocks = torch.from_numpy(table[batch.table_rows, block])
            cache.write_routing(blocks, torch.from_numpy(token), rows.chosen)
        return self._logits(self._norm(x, self.weights.norm, rows), batch)

    def _rows(self, batch: Batch, cache: KvCache, table: Ints) -> Rows:
        segments: Segments = batch.segments.tolist()
        lora, num_rows = self.weights.adapters is not None, len(batch.token_ids)
        of_base = [(0, 0, num_rows)] if lora else segments
        slot, start, stop = batch.segments.T
        several = len(of_base) > 1
        slots = torch.from_numpy(np.repeat(slot, stop - start)) if several else of_base[0][0]
        positions = torch.from_numpy(batch.positions)
        return Rows(
            segments,
            of_base,
            slots,
            [(cos[positions][:, None], sin[positions][:, None]) for cos, sin in self._tables],
            torch.from_numpy(write_index(batch, cache, table)),
            *split_rows(batch, table, cache.kv.shape[4], self._windows),
            [],
        )

    def _logits(self, hidden: Tensor, batch: Batch) -> Tensor:
        """Of gathered rows, themselves padded to tiles."""
        wanted, adapters = torch.from_numpy(batch.logit_rows), self.weights.adapters
        parts = [hidden.new_empty(0, self.spec.vocab)]
        for slot, start, stop in batch.logit_segments.tolist():
            if stop > start:
                x = self._padded(hidden[wanted[start:stop]])
                y = self.linear(x, self.weights.lm_head[slot if adapters is None else 0])
                if adapters is not None and adapters.head is not None:
                    a, b = adapters.head
                    y += self.linear(self.linear(x, a[slot]), b[slot])
                parts.append(y[: stop - start])
        return torch.cat(parts).float()

    def _padded(self, x: Tensor) -> Tensor:
        return functional.pad(x, (0, 0, 0, -len(x) % self.linear.tile_rows))

    def _norm(self, x: Tensor, weight: Tensor | None, rows: Rows) -> Tensor:
        if weight is None:
            return x
        scaled = functional.rms_norm(x.float(), (x.shape[-1],), None, self.spec.norm_eps)
        return scaled.to(x.dtype).mul_(weight[rows.slots])

    def _project(self, x: Tensor, layer: Layer, matrix: str, rows: Rows) -> Tensor:
        weight: Tensor = getattr(layer, matrix)
        bias: Tensor | None = getattr(layer, f"{matrix}_bias")
        if (up := layer.up.get(matrix)) is not None:
            return self._adapt(self.linear(x, weight[0]), bias, up, rows)
        return _joined(
            [
                self.linear(x[start:stop], weight[slot], None if bias is None else bias[slot])
                for slot, start, stop in rows.of_base
            ]
        )

    def _adapt(self, y: Tensor, bias: Tensor | None, up: Tensor, rows: Rows) -> Tensor:
        """The base's columns plus each row's own adapter (see `lora` for the columns)."""
        _, width, rank = up.shape
        out = y[:, :width].contiguous()
        if bias is not None:
            out += bias[0]
        for slot, start, stop in rows.segments:
            first = width + slot * rank
            out[start:stop] += self.linear(
                y[start:stop, first : first + rank].contiguous(), up[slot]
            )
        return out

    def _attend(self, h: Tensor, index: int, rows: Rows, pool: Tensor) -> Tensor:
        spec, layer, (cos, sin) = (
            self.spec,
            self.weights.layers[index],
            rows.turns[self._turns[index]],
        )
        count, heads, kv_heads, dim = len(h), spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = self._project(h, layer, "qkv", rows).view(count, -1, dim)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = self._qk_norm(qk, layer.qk_norm, rows)
        turned = torch.cat((qk[..., dim // 2 :], qk[..., : dim // 2]), -1).mul_(sin)
        qkv[:, : heads + kv_heads] = turned.add_(qk * cos)
        pool.view(-1, dim).index_copy_(0, rows.write_index, qkv[:, heads:].reshape(-1, dim))
        q = (qkv[:, :heads] * spec.scale).view(count, kv_heads, spec.num_groups, dim)
        window = self._windows[index]
        pairs = rows.pairs[window]
        if pairs is not None and len(pairs.rows) == count:
            return attend_decode(q, pool[0], pool[1], pairs).view(count, heads * dim)
        out = torch.zeros_like(q)
        if pairs is not None:
            out[pairs.rows] = attend_decode(q, pool[0], pool[1], pairs)
        for chunk, position, blocks in rows.chunks:
            out[chunk] = attend_prefill(q[chunk], pool[0], pool[1], position, blocks, window)
        return out.view(count, heads * dim)

    def _qk_norm(self, qk: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        """Of [row, head, dim]: each head alone, or all of the queries and all of the keys."""
        if not self.spec.qk_norm_whole:
            return self._norm(qk, weight, rows)
        sizes = [self.spec.num_heads, self.spec.num_kv_heads]
        weights = weight.split([size * self.spec.head_dim for size in sizes], -1)
        parts = zip(qk.split(sizes, 1), weights, strict=True)
        return torch.cat([self._norm(p.flatten(1), w, rows).view(p.shape) for p, w in parts], 1)

    def _mlp(self, h: Tensor, layer: Layer, rows: Rows) -> Tensor:
        if layer.router is not None:
            parts = [self._sparse(h[a:b], layer, slot) for slot, a, b in rows.of_base]
            rows.chosen.append(_joined([expert for _, expert in parts]))
            return _joined([out for out, _ in parts])
        gate, up = self._project(h, layer, "gate_up", rows).chunk(2, -1)
        return self._project(self._activate(gate) * up, layer, "down", rows)

    def _sparse(self, h: Tensor, layer: Layer, slot: int) -> tuple[Tensor, Tensor]:
        """Each row visits its top experts, expert by expert, in whole tiles: its products do not
        depend on how many others chose the same one. They are added in the order of their rank.
        Returns the sums, and the experts of each row."""
        moe, linear = self.spec.moe, self.linear
        assert moe is not None and layer.router is not None
        share, expert = route(linear(h, layer.router[slot]), moe, h.dtype)
        flat = expert.flatten()
        visits = h.new_empty((len(flat), h.shape[1]))
        counts = flat.bincount(minlength=moe.num_experts).tolist()
        for index, mine in enumerate(flat.argsort(stable=True).split(counts)):
            if len(mine):
                x = self._padded(h[mine // moe.top_k])
                gate, up = linear(x, layer.gate_up[slot, index]).chunk(2, -1)
                out = linear(self._activate(gate) * up, layer.down[slot, index])
                visits[mine] = out[: len(mine)]
        ranked = (visits.view(len(h), moe.top_k, -1) * share[..., None]).unbind(1)
        return sum(ranked[1:], ranked[0]), expert


def route(logits: Tensor, moe: MoeSpec, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Weights and expert numbers, [row, top_k] each."""
    share, expert = torch.softmax(logits.float(), -1).topk(moe.top_k, -1)
    if moe.normalise:
        share = share / share.sum(-1, keepdim=True)
    return share.to(dtype), expert


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def split_rows(
    batch: Batch, table: Ints, block_tokens: int, windows: Collection[int]
) -> tuple[dict[int, Pairs | None], list[tuple[slice, int, list[int]]]]:
    """Rows that decode, for each window, and chunks of several rows of one request; not padding,
    the last row of the table."""
    owners = batch.table_rows
    firsts = np.flatnonzero(np.diff(owners, prepend=-1))
    counts = np.diff(firsts, append=len(owners))
    real = owners[firsts] < len(table) - 1
    firsts, counts = firsts[real], counts[real]
    alone, chunks = firsts[counts == 1], []
    where = (batch.positions[alone], table[owners[alone]], block_tokens)
    pairs = {w: pair_blocks(alone, *where, w) if len(alone) else None for w in sorted({*windows})}
    for first, count in zip(firsts[counts > 1], counts[counts > 1], strict=True):
        position = int(batch.positions[first])
        blocks = table[owners[first], : -(-(position + count) // block_tokens)].tolist()
        chunks.append((slice(first, first + count), position, blocks))
    return pairs, chunks


def write_index(batch: Batch, cache: KvCache, table: Ints) -> Ints:
    """Rows of `[2 * block * kv head * token, head dim]` that each batch row writes, flat."""
    _, _, num_blocks, num_kv, block_tokens, _ = cache.kv.shape
    index, token = np.divmod(batch.positions, block_tokens)
    plane, head = np.divmod(np.arange(2 * num_kv), num_kv)  # keys in plane 0, values in plane 1
    blocks = plane * num_blocks + table[batch.table_rows, index][:, None]
    return ((blocks * num_kv + head) * block_tokens + token[:, None]).reshape(-1)
