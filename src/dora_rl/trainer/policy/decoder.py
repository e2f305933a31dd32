"""A lean packed decoder for the families of `model/families/`, on Hugging Face parameter names.

One pack of documents goes in as (P,) token ids: no batch dimension, no padding, no cache, few
operations. Never holds the logits of a pack (see `logprobs`).
Invariant: the states equal those of transformers' own model on each document alone, and the names
of the parameters are those of the Hugging Face checkpoint (experts are stacked; see `model`).

Weights stay in their own dtype (float32 masters) and are cast to the dtype of the activations
where they are used, so gradients arrive in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dora_rl.model.rope import inverse_frequencies, rotation
from dora_rl.model.spec import ModelSpec, MoeSpec
from dora_rl.trainer.attention import Attend, Layout
from dora_rl.trainer.policy.logprobs import (
    Output,
    Routing,
    TeacherLogits,
    TokenScores,
    scores_of,
)
from dora_rl.trainer.policy.lora import Linear, operator, side_by_side

Turn: TypeAlias = tuple[Tensor, Tensor]  # cosines and sines of a rotary embedding


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep parameters, and nothing else, in `dtype`. Buffers such as the frequencies of rotary
    positions are constants, not weights; rounded, they would turn late positions by another angle.
    """
    for p in module.parameters():
        p.data = p.data.to(dtype)


class RmsNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · (offset + weight), the mean in float32."""

    def __init__(self, width: int, arch: ModelSpec) -> None:
        super().__init__()
        self.eps, self.offset = arch.norm_eps, arch.norm_offset
        self.weight = nn.Parameter(torch.full((width,), 1.0 - self.offset))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions; q/k norms where the architecture has them."""

    def __init__(self, arch: ModelSpec, attend: Attend) -> None:
        super().__init__()
        h, d = arch.hidden, arch.head_dim
        self.arch, self.attend = arch, attend
        q, kv = arch.num_heads * d, arch.num_kv_heads * d
        if arch.fused_qkv:
            self.qkv_proj = Linear(h, q + 2 * kv, bias=arch.qkv_bias)
        else:
            self.q_proj = Linear(h, q, bias=arch.qkv_bias)
            self.k_proj = Linear(h, kv, bias=arch.qkv_bias)
            self.v_proj = Linear(h, kv, bias=arch.qkv_bias)
        self.o_proj = Linear(q, h, bias=arch.o_bias)
        whole = arch.qk_norm_whole
        self.q_norm = RmsNorm(q if whole else d, arch) if arch.qk_norm else None
        self.k_norm = RmsNorm(kv if whole else d, arch) if arch.qk_norm else None

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        arch, shape = self.arch, (x.shape[0], -1, self.arch.head_dim)
        q, k, v = self._made(x)
        if not arch.qk_norm_whole:
            q, k = q.view(shape), k.view(shape)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (y.view(shape) for y in (q, k, v))
        pairs = arch.rope.interleaved
        return rotate(q, cos, sin, pairs), rotate(k, cos, sin, pairs), v

    def _made(self, x: Tensor) -> Sequence[Tensor]:
        """Queries, keys and values, all heads of each side by side."""
        if not self.arch.fused_qkv:
            return side_by_side(x, self.q_proj, self.k_proj, self.v_proj)
        kv = self.arch.num_kv_heads * self.arch.head_dim
        sizes = (self.arch.num_heads * self.arch.head_dim, kv, kv)
        q, k, v = self.qkv_proj(x).split(sizes, -1)
        return q, k, v.contiguous()  # attention keeps it, and would keep all three


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


class Mlp(nn.Module):
    """down(act(gate(x)) · up(x))."""

    def __init__(self, arch: ModelSpec) -> None:
        super().__init__()
        self.fused = arch.fused_gate_up
        if self.fused:
            self.gate_up_proj = Linear(arch.hidden, 2 * arch.intermediate, bias=arch.mlp_bias)
        else:
            self.gate_proj = Linear(arch.hidden, arch.intermediate, bias=arch.mlp_bias)
            self.up_proj = Linear(arch.hidden, arch.intermediate, bias=arch.mlp_bias)
        self.down_proj = Linear(arch.intermediate, arch.hidden, bias=arch.mlp_bias)
        self.act = ACTIVATIONS[arch.activation]

    def forward(self, x: Tensor) -> Tensor:
        if self.fused:
            gate, up = self.gate_up_proj(x).chunk(2, -1)
        else:
            gate, up = side_by_side(x, self.gate_proj, self.up_proj)
        return self.down_proj(self.act(gate) * up)


class Choice(NamedTuple):
    """Of the tokens of a pack in one sparse layer."""

    probability_PE: Tensor
    own_PK: Tensor  # the top k
    expert_PK: Tensor  # where they went: those that were given, else the top k


class Router(nn.Module):
    """Softmax over experts in float32, then the top k (renormalised where the model says so).

    Replayed: the experts are given, as they were recorded when the tokens were sampled, and their
    shares are what this router makes of them. Where no choice is recorded it is the router's own.
    """

    def __init__(self, hidden: int, moe: MoeSpec) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(moe.num_experts, hidden))
        self.num_chosen, self.renormalise = moe.top_k, moe.normalise

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        share, expert = self._probabilities(x).topk(self.num_chosen, dim=-1)
        return self._shares(share, x.dtype), expert

    def replay(self, x: Tensor, given_PK: Tensor | None) -> tuple[Tensor, Choice]:
        probability = self._probabilities(x)
        share, own = probability.topk(self.num_chosen, dim=-1)
        expert = own
        if given_PK is not None:
            given = given_PK.long()
            expert = torch.where(given < probability.shape[-1], given, own)
            share = probability.gather(-1, expert)
        return self._shares(share, x.dtype), Choice(probability, own, expert)

    def _probabilities(self, x: Tensor) -> Tensor:
        return row_softmax(F.linear(x, self.weight.to(x.dtype)))

    def _shares(self, share: Tensor, dtype: torch.dtype) -> Tensor:
        if self.renormalise:
            share = share / share.sum(-1, keepdim=True)
        return share.to(dtype)


class Experts(nn.Module):
    """All experts of a layer: gate and up stacked as (E, 2·I, H), down as (E, H, I). One grouped
    matrix product each on CUDA, a loop over the experts that were hit elsewhere."""

    def __init__(self, hidden: int, moe: MoeSpec) -> None:
        super().__init__()
        e, i = moe.num_experts, moe.intermediate
        self.gate_up_proj = nn.Parameter(torch.zeros(e, 2 * i, hidden))
        self.down_proj = nn.Parameter(torch.zeros(e, hidden, i))

    def forward(self, x: Tensor, count_E: Tensor) -> Tensor:
        """Rows sorted by expert, `count_E` of them for each."""
        gate_up, down = self.gate_up_proj.to(x.dtype), self.down_proj.to(x.dtype)
        if x.is_cuda and x.dtype == torch.bfloat16:
            ends = count_E.cumsum(0).to(torch.int32)
            gate, up = F.grouped_mm(x, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
            return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)
        out = []
        for expert, rows in enumerate(x.split(count_E.tolist())):
            if rows.shape[0]:
                gate, up = F.linear(rows, gate_up[expert]).chunk(2, dim=-1)
                out.append(F.linear(F.silu(gate) * up, down[expert]))
        return torch.cat(out)


class SparseMlp(nn.Module):
    """Route, run the chosen experts, add up. What a token gets is the weighted sum over its top-k
    experts, whatever the other tokens of the pack are."""

    def __init__(self, hidden: int, moe: MoeSpec) -> None:
        super().__init__()
        self.gate = Router(hidden, moe)
        self.experts = Experts(hidden, moe)
        self.num_experts = moe.num_experts

    def forward(self, x: Tensor) -> Tensor:
        return self._visit(x, *self.gate(x))

    def replay(self, x: Tensor, given_PK: Tensor | None) -> tuple[Tensor, Choice]:
        share, choice = self.gate.replay(x, given_PK)
        return self._visit(x, share, choice.expert_PK), choice

    def _visit(self, x: Tensor, share: Tensor, expert: Tensor) -> Tensor:
        flat = expert.reshape(-1)
        order = flat.argsort(stable=True)
        # Not bincount: its output size is unknown to the compiler.
        count_E = torch.zeros(self.num_experts, dtype=torch.int64, device=x.device)
        count_E = count_E.index_add(0, flat, torch.ones_like(flat))
        token = order // expert.shape[1]
        y = self.experts(x.index_select(0, token), count_E)
        y = y * share.reshape(-1).index_select(0, order)[:, None]
        # Back beside each other and summed in a fixed order: adding rows up as they come would
        # give the same weights another result in every run on a GPU.
        place = torch.empty_like(order).index_copy(
            0, order, torch.arange(len(order), device=x.device)
        )
        return y.index_select(0, place).view(*expert.shape, -1).sum(1)


class Counts(NamedTuple):
    """What the router of one layer did: sums over the tokens of each document, and choices."""

    visits_SE: Tensor
    probability_SE: Tensor
    num_differing: Tensor


def count_choices(choice: Choice, given_PK: Tensor | None, layout: Layout) -> Counts:
    """Order does not count: a choice differs if its expert is none of the router's own top k."""
    probability, own, expert = choice
    zeros = probability.new_zeros(len(layout.lengths), probability.shape[-1])
    visits_PE = torch.zeros_like(probability).scatter_(-1, expert, 1.0)
    given = torch.zeros_like(expert, dtype=torch.bool)
    if given_PK is not None:
        given = given_PK < probability.shape[-1]
    differs = (expert[:, :, None] != own[:, None, :]).all(-1)
    return Counts(
        zeros.index_add(0, layout.document_P, visits_PE),
        zeros.index_add(0, layout.document_P, probability),
        (differs & given).sum(),
    )


def routing_of(counts: Sequence[Counts], layout: Layout, aux_coef: float) -> Routing:
    """Of all sparse layers; see `Routing`."""
    visits_LSE = torch.stack([c.visits_SE for c in counts])
    probability_LSE = torch.stack([c.probability_SE for c in counts])
    num_layers, _, num_experts = visits_LSE.shape
    length_S = torch.tensor(layout.lengths, dtype=visits_LSE.dtype, device=visits_LSE.device)
    rows_S = num_layers * length_S[:, None]
    share_SE, mean_SE = visits_LSE.sum(0) / rows_S, probability_LSE.sum(0) / rows_S
    visits_LE = visits_LSE.sum(1)
    return Routing(
        num_experts * (share_SE * mean_SE).sum(-1),
        (visits_LE.amax(-1) / visits_LE.mean(-1)).mean(),
        torch.stack([c.num_differing for c in counts]).sum(),
        aux_coef,
    )


class Layer(nn.Module):
    """One block. `before` and `after` are the two halves around attention (compiled on a GPU), and
    so is `after_routed`, of a sparse layer whose router is told where to go, or counted."""

    def __init__(self, arch: ModelSpec, index: int, attend: Attend) -> None:
        super().__init__()
        self.self_attn = Attention(arch, attend)
        self.mlp = (
            SparseMlp(arch.hidden, arch.moe) if arch.moe and arch.is_sparse(index) else Mlp(arch)
        )
        for name in filter(None, arch.norms):
            self.add_module(name, RmsNorm(arch.hidden, arch))
        self.norms, self.scale, self.window = arch.norms, arch.scale, arch.window_of(index)
        self.rope = arch.all_ropes().index(arch.rope_of(index))
        self.before: Callable[..., tuple[Tensor, Tensor, Tensor]] = self._before
        self.after: Callable[..., Tensor] = self._after
        self.after_routed: Callable[..., tuple[Tensor, Choice]] = self._after_routed

    def _norm(self, place: int, x: Tensor) -> Tensor:
        """By the norm at a place of `ModelSpec.norms`, if there is one."""
        name = self.norms[place]
        return self.get_submodule(name)(x) if name else x

    def _before(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self._norm(0, x), cos, sin)

    def _after(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self._norm(1, self.self_attn.o_proj(mixed))
        return x + self._norm(3, self.mlp(self._norm(2, x)))

    def _after_routed(
        self, x: Tensor, mixed: Tensor, given_PK: Tensor | None
    ) -> tuple[Tensor, Choice]:
        assert isinstance(self.mlp, SparseMlp)
        x = x + self._norm(1, self.self_attn.o_proj(mixed))
        y, choice = self.mlp.replay(self._norm(2, x), given_PK)
        return x + self._norm(3, y), choice

    def fuse(self, **how: Any) -> None:
        """Compile the two halves."""
        self.before = torch.compile(self._before, **how)
        self.after = torch.compile(self._after, **how)
        self.after_routed = torch.compile(self._after_routed, **how)

    def forward(
        self,
        x: Tensor,
        turns: Sequence[Turn],
        layout: Layout,
        given_PK: Tensor | None = None,
        counted: bool = False,
    ) -> tuple[Tensor, Counts | None]:
        q, k, v = self.before(x, *turns[self.rope])
        mixed = self.self_attn.attend(q, k, v, layout, self.scale, self.window)
        mixed = mixed.reshape(x.shape[0], -1)
        if given_PK is None and not counted:
            return self.after(x, mixed), None
        x, choice = self.after_routed(x, mixed, given_PK)
        return x, count_choices(choice, given_PK, layout) if counted else None


class Backbone(nn.Module):
    """Embedding, blocks and the final norm, under the name `model` as Hugging Face has it."""

    def __init__(self, arch: ModelSpec, attend: Attend) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(arch.vocab, arch.hidden)
        self.layers = nn.ModuleList(Layer(arch, i, attend) for i in range(arch.num_layers))
        self.norm = RmsNorm(arch.hidden, arch)


class Decoder(nn.Module):
    """Token ids (P,) to states (P, H), and on to the log-probs of chosen tokens.

    The log-probs are part of `forward` so that a sharded model's hooks see every parameter it uses.
    """

    def __init__(self, arch: ModelSpec, attend: Attend, compute_dtype: torch.dtype) -> None:
        super().__init__()
        self.arch, self.compute_dtype = arch, compute_dtype
        self.vocab, self.hidden, self.positions_max = arch.vocab, arch.hidden, arch.context_max
        self.checkpointing = self.compiled = False
        self.chunk_tokens = 0
        # Of a mixture of experts: whether it goes where the tokens went when they were sampled,
        # where that is known, and the weight of the routers' balance in the loss.
        self.replays, self.router_aux_coef = arch.moe is not None, 0.0
        self.model = Backbone(arch, attend)
        if not arch.tied:
            self.lm_head = Linear(arch.hidden, arch.vocab, bias=False)
        self.set_frequencies()

    def set_frequencies(self, device: torch.device | None = None) -> None:
        """Of each rotary embedding, and the factor on its cosines and sines."""
        found = [inverse_frequencies(rope, self.arch.head_dim) for rope in self.arch.all_ropes()]
        freqs = torch.stack([freq for freq, _ in found])
        self.register_buffer("inv_freq", freqs.to(device), persistent=False)
        self.rope_scales = [scale for _, scale in found]

    @property
    def blocks(self) -> list[nn.Module]:
        """What is sharded on its own."""
        return list(self.model.layers)

    def forward(
        self,
        token_ids_P: Tensor,
        layout: Layout,
        rows_T: Tensor,
        target_T: Tensor,
        temperature: float = 1.0,
        teacher: TeacherLogits | None = None,
        experts_PLK: Tensor | None = None,
    ) -> TokenScores:
        """Scores of `target_T[i]` as the token after row `rows_T[i]` of the pack. `experts_PLK`: of
        a mixture, where its tokens went before."""
        given_PLK = experts_PLK if self.replays else None
        states_PH, counts = self._run(token_ids_P, layout, given_PLK)
        states_TH = states_PH.index_select(0, rows_T)
        scores = scores_of(
            states_TH, self.output(), target_T, temperature, self.chunk_tokens, teacher
        )
        if counts:
            scores = scores._replace(routing=routing_of(counts, layout, self.router_aux_coef))
        return scores

    def output(self) -> Output:
        """What makes logits of final states."""
        return Output(self.model.embed_tokens.weight if self.arch.tied else self.lm_head.weight)

    def states(self, token_ids_P: Tensor, layout: Layout) -> Tensor:
        """The final states (P, H) of every token of the pack."""
        return self._run(token_ids_P, layout, None)[0]

    def _run(
        self, token_ids_P: Tensor, layout: Layout, given_PLK: Tensor | None
    ) -> tuple[Tensor, list[Counts]]:
        """The final states; in training passes that replay, or balance, what the routers did."""
        with_gradient = torch.is_grad_enabled()
        counted = with_gradient and (given_PLK is not None or self.router_aux_coef > 0)
        places = self.arch.moe.sparse_layers if self.arch.moe is not None else ()
        counts: list[Counts] = []
        x = F.embedding(token_ids_P, self.model.embed_tokens.weight).to(self.compute_dtype)
        if self.arch.embed_scale != 1.0:
            x = x * torch.tensor(self.arch.embed_scale, dtype=x.dtype).item()
        freqs: Tensor = self.inv_freq  # type: ignore[assignment]
        kinds = zip(freqs.unbind(), self.rope_scales, strict=True)
        turns = [rotation(layout.position_P, freq, scale) for freq, scale in kinds]
        for index, layer in enumerate(self.model.layers):
            told: tuple[Any, ...] = ()
            if index in places:
                given = None if given_PLK is None else given_PLK[:, places.index(index)]
                told = (given, counted)
            if self.checkpointing and with_gradient:
                x, of_layer = checkpoint(layer, x, turns, layout, *told, use_reentrant=False)
            else:
                x, of_layer = layer(x, turns, layout, *told)
            counts += [of_layer] if of_layer is not None else []
        return self.model.norm(x), counts


# -- operators with gradients of their own --------------------------------------------------------
#
# For float32 on a CPU, where each pass over memory costs and autograd's composition makes two to
# three times as many as needed. Where layers are compiled, the plain formulas beside them are,
# except for sums over a row: the compiler cuts those up as it finds fastest for each graph, with
# gradients or without, and a frozen twin would not round as the policy does. They are operators of
# their own here, which it leaves alone. Each function equals its plain form (the oracle in the
# tests), values and gradients.


def is_lean(x: Tensor) -> bool:
    """Whether the hand-written form is the faster one here. What is compiled is fused anyway."""
    lean = x.device.type == "cpu" and x.dtype == torch.float32
    return lean and not torch.compiler.is_compiling()


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (x * scale).mul_(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """y = x·s·w, s = (mean x² + ε)^-½:  dx = g·w·s − x·s³·mean(g·w·x),  dw = Σ g·x·s."""
        (grad,) = grads
        x, weight, scale = ctx.saved_tensors
        width = x.shape[-1]
        gx = (grad * x).view(-1, width)
        dot = torch.mv(gx, weight).view(scale.shape)
        grad_weight = torch.mv(gx.t(), scale.reshape(-1))
        coefficient = dot.mul_(scale.pow(3)).mul_(-1.0 / width)
        grad_x = (grad * weight).mul_(scale).addcmul_(x, coefficient)
        return grad_x, grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """x / sqrt(mean(x²) + eps) · (offset + weight) over the last dimension."""
    if is_lean(x):
        return _RmsNorm.apply(x, weight + offset if offset else weight, eps)  # type: ignore[return-value]
    # As in transformers: normalise in float32, round, then scale.
    scale = (row_norm(x).square() / x.shape[-1] + eps).rsqrt()
    normed, weight = (x * scale).to(x.dtype), weight.to(x.dtype)
    if not offset:
        return normed * weight
    # As published, then exact: 1 + w has more digits than w.
    return (normed * (weight.to(_wide(x)) + offset)).to(x.dtype)


def _wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _row_norm_backward(ctx: Any, grad: Tensor) -> Tensor:
    """d‖x‖/dx = x/‖x‖, and 0 for a row of zeros."""
    x, norm = ctx.saved_tensors
    return (x * (grad / norm.clamp_min(torch.finfo(norm.dtype).tiny))).to(x.dtype)


@operator(
    shape=lambda x: x.new_empty((*x.shape[:-1], 1), dtype=_wide(x)),
    keep=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output),
    backward=_row_norm_backward,
)
def row_norm(x: Tensor) -> Tensor:
    """The Euclidean norm of each row in float32, (..., 1)."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=_wide(x))


def _keep_softmax(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)
    ctx.dtype = inputs[0].dtype


def _row_softmax_backward(ctx: Any, grad: Tensor) -> Tensor:
    """dL/dx = p·(g − Σ g·p)."""
    (p,) = ctx.saved_tensors
    return (p * (grad - (grad * p).sum(-1, keepdim=True))).to(ctx.dtype)


@operator(
    shape=lambda x: x.new_empty(x.shape, dtype=torch.float32),
    keep=_keep_softmax,
    backward=_row_softmax_backward,
)
def row_softmax(x: Tensor) -> Tensor:
    """The softmax of each row in float32."""
    return x.softmax(-1, dtype=torch.float32)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _turn(x, cos, sin, -1.0, interleaved)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grads[0], cos, sin, 1.0, ctx.interleaved), None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, sign: float, interleaved: bool) -> Tensor:
    out, width = torch.empty_like(x), 2 * cos.shape[-1]
    (a, b), (c, d) = (_pairs(y[..., :width], interleaved) for y in (x, out))
    torch.mul(a, cos, out=c).addcmul_(b, sin, value=sign)
    torch.mul(b, cos, out=d).addcmul_(a, sin, value=-sign)
    if width < x.shape[-1]:
        out[..., width:] = x[..., width:]
    return out


def _pairs(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The first and the second number of every pair."""
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    first, second = x.chunk(2, dim=-1)
    return first, second


def rotate(x_PQD: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the pair (x[i], x[i + R/2]), or that of neighbours, by the token's angle:
    (a·c − b·s, b·c + a·s). R are the numbers that there are angles for, from the first on.

    In float32 and rounded once, as engines do: cosines in half precision are exact near position 0
    only, so that two programs would differ more the later a token is.
    """
    if is_lean(x_PQD):
        return _Rotate.apply(x_PQD, cos, sin, interleaved)  # type: ignore[return-value]
    width = 2 * cos.shape[-1]
    a, b = _pairs(x_PQD[..., :width].float(), interleaved)
    both = (a * cos - b * sin, b * cos + a * sin)
    turned = torch.stack(both, -1).flatten(-2) if interleaved else torch.cat(both, dim=-1)
    turned = turned.to(x_PQD.dtype)
    return turned if width == x_PQD.shape[-1] else torch.cat((turned, x_PQD[..., width:]), dim=-1)
