"""The forward pass of every family on the CPU: one flat batch of rows, several versions at once.

Rows of a version are contiguous and padded to tiles; all arithmetic on a row depends on that row
and its context alone. Matrix products run per version segment, everything else once for all rows.
LoRA versions share the base's product and differ in the low-rank part that is added to it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from dora_rl.engine.cpu.attention import PairTensors, attend_decode, attend_prefill
from dora_rl.engine.cpu.batch import Prefill, Segment
from dora_rl.engine.cpu.experts import sparse_mlp
from dora_rl.engine.cpu.linear import RowLinear
from dora_rl.engine.tensors.cache import KvCache
from dora_rl.engine.tensors.weights import Layer, ModelWeights
from dora_rl.model.rope import rope_tables
from dora_rl.model.spec import ModelSpec


@dataclass(slots=True)
class RowBatch:
    """One pass as tensors."""

    token_ids: Tensor
    positions: Tensor
    write_index: Tensor  # places of each row's keys, then values, in a layer's pool of vectors
    segments: list[Segment]
    row_slots: Tensor | None  # version slot of each row, when there is more than one
    decode: PairTensors | None
    prefills: list[Prefill]


class Decoder:
    """Computes hidden states and logits; owns the RoPE tables and the row-invariant linear."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, linear: RowLinear, num_positions: int
    ) -> None:
        self.spec, self.weights, self.linear = spec, weights, linear
        self.cos, self.sin = rope_tables(spec.rope, spec.head_dim, num_positions)
        self.scale = spec.head_dim**-0.5
        self.lora = weights.adapters is not None

    def forward(self, batch: RowBatch, cache: KvCache) -> Tensor:
        """Normed hidden states of every row; keys and values are written on the way."""
        x = self._embed(batch)
        cos = self.cos[batch.positions][:, None]
        sin = self.sin[batch.positions][:, None]
        for index, layer in enumerate(self.weights.layers):
            h = self._norm(x, layer.norm1, batch)
            h = self._attend(index, layer, h, batch, cache, cos, sin)
            x = x + self._project(h, layer, "o", batch)
            h = self._norm(x, layer.norm2, batch)
            x = x + self._mlp(layer, h, batch)
        return self._norm(x, self.weights.norm, batch)

    def logits(self, hidden: Tensor, segments: list[Segment]) -> Tensor:
        """Float32 logits of gathered rows, themselves in tile-padded version segments."""
        head = self.weights.lm_head
        if len(segments) == 1 or self.lora:
            return self.linear(hidden, head[0 if self.lora else segments[0].slot]).float()
        parts = [self.linear(hidden[s.start : s.stop], head[s.slot]) for s in segments]
        return torch.cat(parts).float()

    def _embed(self, batch: RowBatch) -> Tensor:
        if batch.row_slots is None or self.lora:
            return self._rowwise(self.weights.embed, batch)[batch.token_ids]
        return self.weights.embed[batch.row_slots, batch.token_ids]

    def _norm(self, x: Tensor, weight: Tensor, batch: RowBatch) -> Tensor:
        scaled = x.float() if x.dtype != torch.float32 else x
        scaled = functional.rms_norm(scaled, (x.shape[-1],), None, self.spec.norm_eps).to(x.dtype)
        return scaled.mul_(self._rowwise(weight, batch))

    def _rowwise(self, param: Tensor, batch: RowBatch) -> Tensor:
        """A parameter of the one version there is, or a row of it for every row."""
        if batch.row_slots is None or self.lora:
            return param[0 if self.lora else batch.segments[0].slot]
        return param[batch.row_slots]

    def _project(self, x: Tensor, layer: Layer, matrix: str, batch: RowBatch) -> Tensor:
        weight: Tensor = getattr(layer, matrix)
        bias: Tensor | None = getattr(layer, f"{matrix}_bias")
        if self.lora:
            return self._adapt(self.linear(x, weight[0]), bias, layer.up[matrix], batch)
        parts = [
            self.linear(x[s.start : s.stop], weight[s.slot], None if bias is None else bias[s.slot])
            for s in batch.segments
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _adapt(self, y: Tensor, bias: Tensor | None, up: Tensor, batch: RowBatch) -> Tensor:
        """The base's columns plus each row's own adapter (see `lora` for the columns)."""
        _, width, rank = up.shape
        out = y[:, :width].contiguous()
        if bias is not None:
            out += bias[0]
        for s in batch.segments:
            first = width + s.slot * rank
            down = y[s.start : s.stop, first : first + rank].contiguous()
            out[s.start : s.stop] += self.linear(down, up[s.slot])
        return out

    def _attend(
        self,
        index: int,
        layer: Layer,
        h: Tensor,
        batch: RowBatch,
        cache: KvCache,
        cos: Tensor,
        sin: Tensor,
    ) -> Tensor:
        spec = self.spec
        rows, heads, kv_heads, dim = len(h), spec.num_heads, spec.num_kv_heads, spec.head_dim
        qkv = self._project(h, layer, "qkv", batch).view(rows, -1, dim)
        qk = qkv[:, : heads + kv_heads]
        if layer.qk_norm is not None:
            qk = self._norm(qk, layer.qk_norm, batch)
        half = dim // 2
        turned = torch.cat((qk[..., half:], qk[..., :half]), -1).mul_(sin)
        qkv[:, : heads + kv_heads] = turned.add_(qk * cos)
        pool = cache.kv[index]
        pool.view(-1, dim).index_copy_(0, batch.write_index, qkv[:, heads:].reshape(-1, dim))
        keys, values = pool[0], pool[1]
        q = (qkv[:, :heads] * self.scale).view(rows, kv_heads, spec.num_groups, dim)
        decoded = None
        if batch.decode is not None:
            decoded = attend_decode(q, keys, values, batch.decode)
            if batch.decode.rows is None:
                return decoded.view(rows, heads * dim)
        out = torch.zeros_like(q)
        if batch.decode is not None and decoded is not None:
            out[batch.decode.rows] = decoded
        for chunk in batch.prefills:
            end = chunk.row + chunk.count
            out[chunk.row : end] = attend_prefill(q[chunk.row : end], keys, values, chunk)
        return out.view(rows, heads * dim)

    def _mlp(self, layer: Layer, h: Tensor, batch: RowBatch) -> Tensor:
        if layer.router is not None:
            assert self.spec.moe is not None
            if self.lora:
                return sparse_mlp(h, layer, 0, self.spec.moe, self.linear)
            parts = [
                sparse_mlp(h[s.start : s.stop], layer, s.slot, self.spec.moe, self.linear)
                for s in batch.segments
            ]
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        gate, up = self._project(h, layer, "gate_up", batch).chunk(2, -1)
        return self._project(functional.silu(gate) * up, layer, "down", batch)
