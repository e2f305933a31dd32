"""Log-probs and entropies of chosen tokens, in chunks: the logits of a whole pack never exist.

Forward keeps the log-normaliser of each token; backward recomputes a chunk's logits from it. All
softmax arithmetic is float32. Invariant: values and gradients do not depend on the chunk size
(beyond the order of float32 sums over chunks in the output matrix's gradient).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Elements of one chunk's float32 logits: fits the caches of a CPU, feeds a GPU's matrix units.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 29}


class Routing(NamedTuple):
    """What the routers of a mixture of experts did in a pack.

    `balance_S` is the auxiliary loss of each document: E · Σ_e f_e · p_e, where of its tokens in
    all sparse layers f_e is the share that went to expert e, and p_e the mean of its probability.
    """

    balance_S: Tensor
    load_max: Tensor  # of the busiest expert over an even share, mean over layers
    num_differing: Tensor  # of the choices that were given, those the model would not have made
    aux_coef: float  # of the balance in the loss


class TokenScores(NamedTuple):
    """Log-probs of the targets; entropies of the distributions they were drawn from, and their
    divergences from a teacher's, where there is one."""

    logprobs_T: Tensor
    entropy_T: Tensor
    teacher_kl_T: Tensor | None = None
    routing: Routing | None = None


class Output(NamedTuple):
    """What makes logits of states. `finish` as in `Head`."""

    weight_VH: Tensor
    bias_V: Tensor | None = None
    finish: Callable[[Tensor], Tensor] | None = None


class Head(NamedTuple):
    """What lies between the output layer and the softmax. `finish` is the model's own soft-cap or
    scaling of logits, where it has one; it has no parameters."""

    temperature: float
    chunk: int
    finish: Callable[[Tensor], Tensor] | None

    def scaled(self, values: Tensor) -> Tensor:
        """Logits at the temperature, and their gradients on the way back."""
        return values if self.temperature == 1.0 else values / self.temperature

    def logits(self, raw_CV: Tensor) -> Tensor:
        return self.scaled(raw_CV if self.finish is None else self.finish(raw_CV).float())


def _product(states_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    if states_CH.is_cuda and states_CH.dtype != torch.float32:
        logits = torch.mm(states_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(states_CH, weight_VH.t()).float()
    return logits if bias_V is None else logits.add_(bias_V.to(states_CH.dtype))


def _reduce(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(log-prob, entropy, log-normaliser) per row; H = lse − Σ p·logit."""
    lse = logits.logsumexp(-1)
    logprob = logits.gather(-1, target[:, None]).squeeze(-1) - lse
    entropy = lse - ((logits - lse[:, None]).exp() * logits).sum(-1)
    return logprob, entropy, lse


def _differentiate_logprob(logits: Tensor, target: Tensor, lse: Tensor, g_lp: Tensor) -> Tensor:
    """d/dlogit of the log-prob alone: g_lp·(1[target] − p)."""
    grad = (logits - lse[:, None]).exp() * -g_lp[:, None]
    return grad.scatter_add(-1, target[:, None], g_lp[:, None])


def _differentiate(
    logits: Tensor, target: Tensor, lse: Tensor, g_lp: Tensor, entropy: Tensor, g_ent: Tensor
) -> Tensor:
    """d/dlogit: g_lp·(1[target] − p) − g_ent·p·(log p + H)."""
    log_p = logits - lse[:, None]
    grad = log_p.exp() * (-g_lp[:, None] - g_ent[:, None] * (log_p + entropy[:, None]))
    return grad.scatter_add(-1, target[:, None], g_lp[:, None])


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)


def _fused(function: Callable[..., Any], x: Tensor) -> Callable[..., Any]:
    """On a GPU one kernel instead of several."""
    return _compiled(function) if x.is_cuda else function


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: Head
    ) -> tuple[Tensor, Tensor]:
        cast = weight.to(states.dtype)
        reduce = _fused(_reduce, states)
        parts = [
            reduce(how.logits(_product(s, cast, bias)), t)
            for s, t in zip(states.split(how.chunk), target.split(how.chunk), strict=True)
        ]
        logprob, entropy, lse = (torch.cat(p) for p in zip(*parts, strict=True))
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(states, weight, bias, target, lse, entropy)
        ctx.how = how
        return logprob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, bias, target, lse, entropy = ctx.saved_tensors
        g_lp, g_ent = grads

        def of_logits(logits: Tensor, at: slice) -> Tensor:
            outer = torch.zeros_like(lse[at]) if g_lp is None else g_lp[at]
            if g_ent is None:  # most losses do not use it, which saves a third of the work
                run, more = _fused(_differentiate_logprob, states), ()
            else:
                run, more = _fused(_differentiate, states), (entropy[at], g_ent[at])
            return run(logits, target[at], lse[at], outer, *more)

        return *_backward(ctx, (states, weight, bias), of_logits), None, None


def _backward(
    ctx: Any,
    saved: tuple[Tensor, Tensor, Tensor | None],
    of_logits: Callable[[Tensor, slice], Tensor],
) -> tuple[Tensor | None, ...]:
    """Gradients of states, matrix and bias from those of a chunk's logits, chunk by chunk."""
    states, weight, bias = saved
    cast = weight.to(states.dtype)
    for_states, for_weight, for_bias = ctx.needs_input_grad[:3]
    grad_states = torch.empty_like(states) if for_states else None
    grad_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
    grad_bias = None
    if bias is not None and for_bias:
        grad_bias = torch.zeros_like(bias, dtype=torch.float32)
    for start in range(0, states.shape[0], ctx.how.chunk):
        at = slice(start, start + ctx.how.chunk)
        logits, back = _logits_again(_product(states[at], cast, bias), ctx.how)
        grad = back(of_logits(logits, at))
        if grad_bias is not None:
            grad_bias += grad.sum(0)
        grad = grad.to(states.dtype)
        if grad_states is not None:
            torch.mm(grad, cast, out=grad_states[at])
        if grad_weight is not None:
            grad_weight += grad.t() @ states[at]
    sums = ((grad_weight, weight), (grad_bias, bias))
    cast_back = (g if g is None or p is None else g.to(p.dtype) for g, p in sums)
    return grad_states, *cast_back


def _logits_again(raw_CV: Tensor, how: Head) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A chunk's logits, and the way from their gradient to that of the output layer's values."""
    if how.finish is None:
        return how.scaled(raw_CV), how.scaled
    with torch.enable_grad():
        logits = how.logits(raw_CV.requires_grad_())
    return logits.detach(), lambda grad: torch.autograd.grad(logits, raw_CV, grad)[0]


class TeacherLogits(NamedTuple):
    """What a frozen teacher makes of the same rows, a chunk at a time. With `top_k` only as many of
    the policy's most likely tokens are told apart."""

    states_TH: Tensor
    output: Output
    top_k: int = 0

    def log_softmax(self, at: slice, vocab: int, temperature: float) -> Tensor:
        """Of the policy's own vocabulary; a teacher's may be padded further."""
        states, (weight, bias, finish) = self.states_TH[at], self.output
        raw = _product(states, weight.to(states.dtype), bias)
        return Head(temperature, 0, finish).logits(raw).log_softmax(-1)[:, :vocab]


def _gaps(logits: Tensor, teacher: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """(p, log p − log q) of each token. With `top_k` that of the tokens beyond is the one of all of
    them together: log Σ p − log Σ q."""
    log_p = logits.log_softmax(-1)
    gap = log_p - teacher
    if 0 < top_k < logits.shape[-1]:
        beyond = torch.ones_like(log_p, dtype=torch.bool)
        beyond.scatter_(-1, log_p.topk(top_k, -1).indices, value=False)
        sums = (x.masked_fill(~beyond, -torch.inf).logsumexp(-1, True) for x in (log_p, teacher))
        rest_p, rest_q = sums
        gap = torch.where(beyond, rest_p - rest_q, gap)
    return log_p.exp(), gap


class _Divergence(torch.autograd.Function):
    """KL(p‖q) = Σ p·gap of each row; d/dlogit: p·(gap − KL), of tokens that count as one too."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, q: TeacherLogits, how: Head
    ) -> Tensor:
        ctx.save_for_backward(states, weight, bias)
        ctx.how, ctx.q = how, q
        parts: list[Tensor] = []
        for start in range(0, states.shape[0], how.chunk):
            at = slice(start, start + how.chunk)
            logits = how.logits(_product(states[at], weight.to(states.dtype), bias))
            p, gap = _gaps(logits, q.log_softmax(at, weight.shape[0], how.temperature), q.top_k)
            parts.append((p * gap).sum(-1))
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        def of_logits(logits: Tensor, at: slice) -> Tensor:
            vocab = logits.shape[-1]
            teacher = ctx.q.log_softmax(at, vocab, ctx.how.temperature)
            p, gap = _gaps(logits, teacher, ctx.q.top_k)
            return grads[0][at, None] * p * (gap - (p * gap).sum(-1, keepdim=True))

        return *_backward(ctx, ctx.saved_tensors, of_logits), None, None


def teacher_divergence(
    states_TH: Tensor, output: Output, teacher: TeacherLogits, temperature: float, chunk: int
) -> Tensor:
    """KL of the policy's distribution from the teacher's at each row, with its gradient."""
    weight, bias, finish = output
    # Tables of both models and what lies between them exist at once: a quarter of the tokens.
    how = Head(temperature, max(1, _chunk(states_TH, weight, chunk) // 4), finish)
    return _Divergence.apply(states_TH, weight, bias, teacher, how)  # type: ignore[return-value]


def _chunk(states_TH: Tensor, weight_VH: Tensor, chunk: int) -> int:
    elements = _CHUNK_ELEMENTS.get(states_TH.device.type, 1 << 26)
    return chunk or max(64, elements // weight_VH.shape[0])


def token_scores(
    states_TH: Tensor,
    weight_VH: Tensor,
    target_T: Tensor,
    temperature: float,
    chunk: int,
    bias_V: Tensor | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> TokenScores:
    """Log-prob of each target and entropy of its distribution, both with gradients. A `chunk` of
    0 is as many tokens as fit the device."""
    assert states_TH.shape[0] == target_T.shape[0] > 0
    how = Head(temperature, _chunk(states_TH, weight_VH, chunk), finish)
    return TokenScores(*_Chunked.apply(states_TH, weight_VH, bias_V, target_T, how))  # type: ignore[misc]


def scores_of(
    states_TH: Tensor,
    output: Output,
    target_T: Tensor,
    temperature: float,
    chunk: int,
    teacher: TeacherLogits | None = None,
) -> TokenScores:
    """What a policy's forward gives."""
    weight, bias, finish = output
    scores = token_scores(states_TH, weight, target_T, temperature, chunk, bias, finish)
    if teacher is None:
        return scores
    kl_T = teacher_divergence(states_TH, output, teacher, temperature, chunk)
    return scores._replace(teacher_kl_T=kl_T)
