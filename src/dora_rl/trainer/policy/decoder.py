"""A lean packed decoder for Llama, Qwen2, Qwen3 and Qwen3-MoE, on Hugging Face parameter names.

One pack of documents goes in as (T,) token ids: no batch dimension, no padding, no cache, few
operations. Never holds the logits of a pack (see `logprobs`).
Invariant: the states equal those of transformers' own model on each document alone, and the names
of the parameters are those of the Hugging Face checkpoint (experts are stacked; see `names`).

Weights stay in their own dtype (float32 masters) and are cast to the dtype of the activations
where they are used, so gradients arrive in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dora_rl.model.rope import inverse_frequencies, rotation
from dora_rl.model.spec import ModelSpec
from dora_rl.trainer.attention.backends import Attend
from dora_rl.trainer.attention.layout import Layout
from dora_rl.trainer.policy.experts import SparseMlp
from dora_rl.trainer.policy.lean_ops import rms_norm, rotate
from dora_rl.trainer.policy.linear import Linear, side_by_side
from dora_rl.trainer.policy.logprobs import TokenScores, chunk_tokens, token_scores


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight, the mean in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q/k norms where the architecture has them."""

    def __init__(self, arch: ModelSpec, attend: Attend) -> None:
        super().__init__()
        h, d = arch.hidden, arch.head_dim
        self.arch, self.attend, self.scale = arch, attend, d**-0.5
        self.q_proj = Linear(h, arch.num_heads * d, bias=arch.qkv_bias)
        self.k_proj = Linear(h, arch.num_kv_heads * d, bias=arch.qkv_bias)
        self.v_proj = Linear(h, arch.num_kv_heads * d, bias=arch.qkv_bias)
        self.o_proj = Linear(arch.num_heads * d, h, bias=arch.o_bias)
        self.q_norm = RmsNorm(d, arch.norm_eps) if arch.qk_norm else None
        self.k_norm = RmsNorm(d, arch.norm_eps) if arch.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t, d = x.shape[0], self.arch.head_dim
        made = side_by_side(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (y.view(t, -1, d) for y in made)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return rotate(q, cos, sin), rotate(k, cos, sin), v


class Mlp(nn.Module):
    """down(silu(gate(x)) · up(x))."""

    def __init__(self, arch: ModelSpec) -> None:
        super().__init__()
        self.gate_proj = Linear(arch.hidden, arch.intermediate, bias=arch.mlp_bias)
        self.up_proj = Linear(arch.hidden, arch.intermediate, bias=arch.mlp_bias)
        self.down_proj = Linear(arch.intermediate, arch.hidden, bias=arch.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = side_by_side(x, self.gate_proj, self.up_proj)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    """One block. `before` and `after` are the two halves around attention (compiled on a GPU)."""

    def __init__(self, arch: ModelSpec, index: int, attend: Attend) -> None:
        super().__init__()
        self.self_attn = Attention(arch, attend)
        self.mlp = (
            SparseMlp(arch.hidden, arch.moe) if arch.moe and arch.is_sparse(index) else Mlp(arch)
        )
        self.input_layernorm = RmsNorm(arch.hidden, arch.norm_eps)
        self.post_attention_layernorm = RmsNorm(arch.hidden, arch.norm_eps)
        self.before: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._before
        self.after: Callable[..., Tensor] = self._after

    def _before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x), cos, sin)

    def _after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.self_attn.o_proj(mixed)
        return x + self.mlp(self.post_attention_layernorm(x))

    def fuse(self, **how: Any) -> None:
        """Compile the two halves."""
        self.before = torch.compile(self._before, **how)
        self.after = torch.compile(self._after, **how)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
        q, k, v = self.before(x, cos, sin)
        mixed = self.self_attn.attend(q, k, v, layout, self.self_attn.scale)
        return self.after(x, mixed.reshape(x.shape[0], -1))


class Backbone(nn.Module):
    """Embedding, blocks and the final norm, under the name `model` as Hugging Face has it."""

    def __init__(self, arch: ModelSpec, attend: Attend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab, arch.hidden)
        self.layers = nn.ModuleList(Layer(arch, i, attend) for i in range(arch.num_layers))
        self.norm = RmsNorm(arch.hidden, arch.norm_eps)


class Decoder(nn.Module):
    """Token ids (T,) to states (T, hidden), and on to the log-probs of chosen tokens.

    The log-probs are part of `forward` so that a sharded model's hooks see every parameter it uses.
    """

    def __init__(self, arch: ModelSpec, attend: Attend, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.arch, self.compute_dtype = arch, compute_dtype
        self.vocab, self.hidden, self.positions_max = arch.vocab, arch.hidden, arch.context_max
        self.checkpointing = False
        self.compiled = False
        self.chunk_tokens = 0
        self.model = Backbone(arch, attend)
        if not arch.tied:
            self.lm_head = Linear(arch.hidden, arch.vocab, bias=False)
        freq, self.rope_scale = inverse_frequencies(arch.rope, arch.head_dim)
        self.register_buffer("inv_freq", freq, persistent=False)

    @property
    def output_weight(self) -> Tensor:
        return self.model.embed_tokens.weight if self.arch.tied else self.lm_head.weight

    def forward(
        self,
        token_ids_T: Tensor,
        layout: Layout,
        rows_N: Tensor,
        target_N: Tensor,
        temperature: float = 1.0,
    ) -> TokenScores:
        """Scores of `target_N[i]` as the token after row `rows_N[i]` of the pack."""
        states = self.states(token_ids_T, layout).index_select(0, rows_N)
        chunk = chunk_tokens(self.arch.vocab, states.device, self.chunk_tokens)
        return token_scores(states, self.output_weight, target_N, temperature, chunk)

    def states(self, token_ids_T: Tensor, layout: Layout) -> Tensor:
        """The final states (T, hidden) of every token of the pack."""
        x = F.embedding(token_ids_T, self.model.embed_tokens.weight).to(self.compute_dtype)
        freq: Tensor = self.inv_freq  # type: ignore[assignment]
        cos, sin = rotation(layout.position_T, freq, self.rope_scale)
        for layer in self.model.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, layout, use_reentrant=False)
            else:
                x = layer(x, cos, sin, layout)
        return self.model.norm(x)
