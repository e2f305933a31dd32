"""The forward pass on a GPU, for decode rows (captured in graphs) and prefill rows.

Rows are [version slot, row] flattened, the same number for each of the S resident versions that
take part; with one version this is a plain batch. Matrix products over several versions are one
batched GEMM on the stacked weights. LoRA versions are rows of one plain batch on one base; what
each adds to it is a small kernel after every product (`adapters.py`). Everything allocates from
torch's caching allocator, so that a captured graph owns its scratch memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor
from torch.nn import functional

from dora_rl.engine.cuda.kernels import fused, paged, skinny, wide
from dora_rl.engine.cuda.kernels import rows as kernels
from dora_rl.engine.cuda.kernels.adapters import adapt
from dora_rl.engine.cuda.kernels.attention import DIM_USUAL, attend_decode
from dora_rl.engine.cuda.kernels.cuts import choose_splits
from dora_rl.engine.cuda.kernels.experts import choose_experts, sparse_rows
from dora_rl.engine.cuda.kernels.overlap import overlap
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.weights import Layer, ModelWeights
from dora_rl.model.rope import rope_tables
from dora_rl.model.spec import ModelSpec, RopeSpec

SCORED_ROWS_MAX = 32  # of a version; with more, a kernel that reads the logits again is faster


@dataclass(frozen=True, slots=True)
class Rows:
    """Which rows: version slots [first, first + num_versions), `per_version` rows each."""

    first: int
    num_versions: int
    per_version: int
    embedded: Tensor  # [row, width], changed in place by the pass
    slots: Tensor  # request slot of each row
    positions: Tensor
    table: Tensor
    adapters: Tensor | None = None  # adapter slot of each row, under LoRA
    blocks_max: int = 0  # of decode rows: blocks that none of their contexts exceeds
    wanted: Tensor | None = None  # of prefill rows: whose hidden states are asked for, else all
    own: bool = True  # our products, which are compiled for the number of rows, where they pay
    fresh: int = 0  # rows before a row, at most, that are of its request
    chosen: list[Tensor] | None = None  # by sparse layer the experts of each row, if recorded

    def only_wanted(self) -> Rows:
        """The wanted rows alone, of one version."""
        some, adapters = self.wanted, self.adapters
        assert some is not None
        assert self.num_versions == 1
        return replace(
            self,
            per_version=len(some),
            embedded=self.embedded[some],
            slots=self.slots[some],
            positions=self.positions[some],
            adapters=None if adapters is None else adapters[some],
            wanted=None,
            own=False,
        )


@dataclass(frozen=True, slots=True)
class Reach:
    """How the queries of a layer meet its keys: rotary tables, scale and window where they are not
    the usual ones, else 0."""

    cos: Tensor
    sin: Tensor
    scale: float
    window: int


class CudaDecoder:
    """Computes normed hidden states; `attend` is the attention of prefill rows."""

    def __init__(self, spec: ModelSpec, weights: ModelWeights, num_positions: int) -> None:
        self.spec, self.weights = spec, weights
        device = weights.embed.device
        tables: dict[RopeSpec, tuple[Tensor, Tensor]] = {}
        for rope in spec.all_ropes():
            cos, sin = rope_tables(rope, spec.head_dim, num_positions)
            tables[rope] = cos.to(device), sin.to(device)
        # A window as long as a context shows all of it.
        windows = (spec.window_of(i) for i in range(spec.num_layers))
        windows = (window if window < num_positions else 0 for window in windows)
        self._reach = [
            Reach(*tables[spec.rope_of(i)], spec.query_scale, window)
            for i, window in enumerate(windows)
        ]
        self._entry = float(torch.tensor(spec.embed_scale, dtype=weights.embed.dtype))
        self._gelu = spec.activation == "gelu_tanh"
        self._num_processors = 1
        if device.type == "cuda":
            self._num_processors = torch.cuda.get_device_properties(device).multi_processor_count

    def forward(
        self,
        rows: Rows,
        cache: KvCache,
        attend: Callable[[Tensor, Tensor, float, int], Tensor] | None,
    ) -> Tensor:
        """Hidden states of prefill rows, or of decode rows when there is no `attend`.

        Of rows that are not wanted the last layer has only keys and values.
        """
        if cache.routing is not None:
            assert rows.wanted is None, "where a row goes is recorded in every layer"
            rows = replace(rows, chosen=[])
        x = rows.embedded
        delta: Tensor | None = None
        for index, (layer, reach) in enumerate(zip(self.weights.layers, self._reach, strict=True)):
            h = self._norm(x, delta, layer.norm1, rows)
            pool = cache.kv[index]
            if attend is None:
                h = self._attend_decode(h, layer, reach, rows, pool)
            else:
                qkv = self._linear(h, layer, "qkv", rows)
                q = self._rope_write(qkv[None], layer, reach, rows, pool)
                h = attend(q, pool, reach.scale, reach.window).view(len(x), -1)
                if rows.wanted is not None and index == len(self.weights.layers) - 1:
                    h, rows = h[rows.wanted], rows.only_wanted()
                    if not len(h):
                        return h
                    x = rows.embedded
            delta = self._after(self._parts(h, layer, "o", rows), layer.post1, rows)
            h = self._norm(x, delta, layer.norm2, rows)
            delta = self._after(self._mlp(h, layer, rows), layer.post2, rows)
        if cache.routing is not None:
            self._record(rows, cache, cache.routing.shape[3])
        return self._norm(x, delta, self.weights.norm, rows)

    @staticmethod
    def _record(rows: Rows, cache: KvCache, block_tokens: int) -> None:
        """Where each row went, beside its keys and values."""
        assert rows.chosen is not None
        positions = rows.positions.long()
        blocks = rows.table[rows.slots, positions // block_tokens]
        cache.write_routing(blocks.long(), positions % block_tokens, rows.chosen)

    def _attend_decode(
        self, h: Tensor, layer: Layer, reach: Reach, rows: Rows, pool: Tensor
    ) -> Tensor:
        spec, where = self.spec, (rows.table, rows.slots, rows.positions)
        shape = (len(h), spec.num_kv_heads, self._num_processors, rows.blocks_max)
        if reach.window:
            blocks = -(-(reach.window - 1) // pool.shape[3]) + 1  # that it touches, at most
            splits = choose_splits(*shape[:3], min(rows.blocks_max, blocks))
            q = self._rope_write(self._parts(h, layer, "qkv", rows), layer, reach, rows, pool)
            return attend_decode(q, pool, *where, splits, reach.scale, reach.window).flatten(1)
        if paged.fits(pool, spec.num_groups):
            q = self._rope_write(self._parts(h, layer, "qkv", rows), layer, reach, rows, pool)
            how = (choose_splits(*shape, paged.WAVE), self._num_processors, reach.scale, rows.fresh)
            return paged.attend(q, pool, *where, *how).view(len(h), -1)
        wide_heads = spec.head_dim > DIM_USUAL
        # Fused, a row would not see fresh ones before it.
        if len(h) > fused.ROWS_MAX or spec.qk_norm_whole or wide_heads or rows.fresh:
            qkv = self._linear(h, layer, "qkv", rows)[None]
            q = self._rope_write(qkv, layer, reach, rows, pool)
            splits = choose_splits(*shape)
            return attend_decode(q, pool, *where, splits, reach.scale).view(len(h), -1)
        span = slice(rows.first, rows.first + rows.num_versions)
        return fused.attend_fused(
            self._parts(h, layer, "qkv", rows),
            None if layer.qk_norm is None else layer.qk_norm[span],
            (reach.cos, reach.sin),
            pool,
            where,
            (spec.num_kv_heads, spec.num_groups),
            choose_splits(*shape, fused.WAVE),
            spec.norm_eps,
            h.dtype,
            reach.scale,
        )

    def logits(self, hidden: Tensor, slot: int) -> Tensor:
        """Float32 logits of rows of one version."""
        return self.all_logits(hidden, slot, 1)

    def scored_logits(
        self, hidden: Tensor, first: int, num_versions: int, slots: Tensor, temperature: Tensor
    ) -> tuple[Tensor, kernels.Chunks]:
        """As `all_logits`, with what a draw at each row's temperature needs to know of them."""
        heads = self.weights.lm_head[first : first + num_versions]
        tiles = self._head_tiles(hidden, heads)
        if tiles is not None and len(hidden) // num_versions <= SCORED_ROWS_MAX:
            return skinny.multiply_scored(hidden, heads, tiles, slots, temperature)
        logits = self.all_logits(hidden, first, num_versions)
        return logits, kernels.chunks_of(logits, slots, temperature)

    def all_logits(self, hidden: Tensor, first: int, num_versions: int) -> Tensor:
        """Float32 logits of [version, row] rows, the same number of each version."""
        heads = self.weights.lm_head[first : first + num_versions]
        rows = hidden.view(num_versions, -1, hidden.shape[1])
        if hidden.dtype == torch.float32 or not hidden.is_cuda:
            return torch.bmm(rows, heads.transpose(1, 2)).float().view(len(hidden), -1)
        tiles = self._head_tiles(hidden, heads)
        if tiles is not None:
            return skinny.multiply(hidden, heads, tiles)[0]
        # Keep the accumulator: rounding logits to bfloat16 costs more log-prob accuracy than
        # everything before it.
        if num_versions == 1:
            return torch.mm(hidden, heads[0].t(), out_dtype=torch.float32)
        logits = torch.bmm(rows, heads.transpose(1, 2), out_dtype=torch.float32)
        return logits.view(len(hidden), -1)

    def _head_tiles(self, hidden: Tensor, heads: Tensor) -> skinny.Tiles | None:
        """The streamed product's, where that is used. A small vocabulary's would be in parts."""
        tiles = skinny.tiles_of(len(hidden) // len(heads), heads, self._num_processors)
        streamed = tiles is not None and tiles.row_stages and tiles.splits == 1
        return tiles if streamed else None

    def embed(self, token_ids: Tensor, slot: int) -> Tensor:
        """What prefill rows of one version begin with."""
        return self.entered(functional.embedding(token_ids, self.weights.embed[slot]))

    def entered(self, embedded: Tensor) -> Tensor:
        """Embeddings as they enter, changed in place where the family scales them."""
        return embedded if self._entry == 1.0 else embedded.mul_(self._entry)

    def _norm(self, x: Tensor, delta: Tensor | None, weight: Tensor | None, rows: Rows) -> Tensor:
        """`delta` is added to `x` in place; without a weight that is what comes back."""
        if weight is None:
            return x if delta is None else x.add_(_summed(delta, x.dtype))
        weight = weight[rows.first : rows.first + rows.num_versions]
        return kernels.add_norm(x, delta, weight, rows.per_version, self.spec.norm_eps)

    def _after(self, delta: Tensor, weight: Tensor | None, rows: Rows) -> Tensor:
        """What a half of a block adds, normalised where the family does that; in parts."""
        if weight is None:
            return delta
        return self._norm(_summed(delta, rows.embedded.dtype), None, weight, rows)[None]

    def _whole_norm(self, qkv: Tensor, weight: Tensor, rows: Rows) -> Tensor:
        """Queries and keys of `qkv` [part, row, width] normalised, over all heads of each."""
        spec, span = self.spec, slice(rows.first, rows.first + rows.num_versions)
        out = _summed(qkv, rows.embedded.dtype).view(rows.num_versions, rows.per_version, -1)
        sizes = [heads * spec.head_dim for heads in (spec.num_heads, spec.num_kv_heads)]
        *parts, values = out.split([*sizes, sizes[1]], -1)
        for i, (part, scale) in enumerate(zip(parts, weight[span].split(sizes, -1), strict=True)):
            normed = functional.rms_norm(part.float(), part.shape[-1:], None, spec.norm_eps)
            parts[i] = normed.to(part.dtype) * scale[:, None]
        return torch.cat((*parts, values), -1).view(1, qkv.shape[1], -1)

    def _parts(self, x: Tensor, layer: Layer, matrix: str, rows: Rows) -> Tensor:
        """A product as parts [part, row, out] whose sum it is; one part where cuBLAS made it."""
        weight = getattr(layer, matrix)[rows.first : rows.first + rows.num_versions]
        parts = None
        if rows.own and getattr(layer, f"{matrix}_bias") is None:
            parts = self._own_product(x, weight)
        if parts is None:
            return self._linear(x, layer, matrix, rows)[None]
        if rows.adapters is None:
            return parts
        return adapt(parts, layer.up[matrix], rows.adapters)[None]

    def _own_product(self, x: Tensor, weight: Tensor, gate: bool = False) -> Tensor | None:
        """By the kernel of ours for so many rows of a version; None where cuBLAS is to do it."""
        where = (len(x) // len(weight), weight, self._num_processors)
        if (tiles := skinny.tiles_of(*where, gate=gate)) is not None:
            return skinny.multiply(x, weight, tiles, gate=gate)
        if (cut := wide.cut_of(*where, gate=gate)) is not None:
            return wide.multiply(x, weight, cut, gate=gate)
        return None

    def _linear(self, x: Tensor, layer: Layer, matrix: str, rows: Rows) -> Tensor:
        span = slice(rows.first, rows.first + rows.num_versions)
        out = self._multiply(x, getattr(layer, matrix)[span])
        if rows.adapters is not None and matrix in layer.up:
            out = adapt(out[None], layer.up[matrix], rows.adapters)
        bias: Tensor | None = getattr(layer, f"{matrix}_bias", None)
        if bias is not None:
            out.view(rows.num_versions, rows.per_version, -1).add_(bias[span][:, None])
        return out

    @staticmethod
    def _multiply(x: Tensor, weight: Tensor) -> Tensor:
        if len(weight) == 1:
            return functional.linear(x, weight[0])
        parts = x.view(len(weight), -1, x.shape[1])
        return torch.bmm(parts, weight.transpose(1, 2)).view(len(x), -1)

    def _rope_write(
        self, qkv: Tensor, layer: Layer, reach: Reach, rows: Rows, pool: Tensor
    ) -> Tensor:
        """Queries of `qkv` [part, row, width]; keys and values go to the cache."""
        spec, norm = self.spec, layer.qk_norm
        if norm is not None and spec.qk_norm_whole:
            qkv, norm = self._whole_norm(qkv, norm, rows), None
        count, heads = qkv.shape[1], spec.num_heads + 2 * spec.num_kv_heads
        q = torch.empty(
            (count, spec.num_kv_heads, spec.num_groups, spec.head_dim),
            dtype=pool.dtype,
            device=qkv.device,
        )
        span = slice(rows.first, rows.first + rows.num_versions)
        kernels.rope_write_kernel[(count, triton.cdiv(heads, kernels.ROPE_HEADS))](
            qkv,
            qkv if norm is None else norm[span],
            reach.cos,
            reach.sin,
            rows.slots,
            rows.positions,
            rows.table,
            q,
            pool,
            rows.per_version,
            qkv.stride(0),
            spec.norm_eps,
            pool.stride(0),
            rows.table.stride(0),
            H=spec.num_heads,
            KV=spec.num_kv_heads,
            D=spec.head_dim,
            C=pool.shape[3],
            HB=kernels.ROPE_HEADS,
            PARTS=len(qkv),
            NORM=norm is not None,
            num_warps=kernels.ROPE_WARPS,
            **overlap(qkv.device),
        )
        return q

    def _mlp(self, h: Tensor, layer: Layer, rows: Rows) -> Tensor:
        if layer.router is not None:
            assert self.spec.moe is not None
            logits = self._linear(h, layer, "router", rows)
            chosen = choose_experts(logits, self.spec.moe, h.dtype, rows.num_versions)
            if rows.chosen is not None:
                rows.chosen.append(chosen[1] % self.spec.moe.num_experts)
            span = slice(rows.first, rows.first + rows.num_versions)
            stacked = (layer.gate_up[span].flatten(0, 1), layer.down[span].flatten(0, 1))
            return sparse_rows(h, *chosen, *stacked)[None]
        return self._parts(self._gated(h, layer, rows), layer, "down", rows)

    def _gated(self, h: Tensor, layer: Layer, rows: Rows) -> Tensor:
        """act(gate) * up."""
        weight, gelu = layer.gate_up[rows.first : rows.first + rows.num_versions], self._gelu
        gated = None
        if rows.own and layer.gate_up_bias is None and rows.adapters is None and not gelu:
            gated = self._own_product(h, weight, gate=True)
        if gated is not None:
            return gated
        return kernels.gate(self._linear(h, layer, "gate_up", rows), gelu)


def _summed(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """A product in parts, rounded as one product would be."""
    whole = parts[0] if len(parts) == 1 else parts.sum(0, dtype=torch.float32)
    return whole.to(dtype)
