"""Log-probs and entropies of chosen tokens, in chunks: the logits of a whole pack never exist.

Forward keeps the log-normaliser of each token; backward recomputes a chunk's logits from it. All
softmax arithmetic is float32. Invariant: values and gradients do not depend on the chunk size
(beyond the order of float32 sums over chunks in the output matrix's gradient).

Shapes: N chosen tokens, H hidden, V vocabulary, C tokens of one chunk.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Elements of one chunk's float32 logits: fits the caches of a CPU, feeds a GPU's matrix units.
_CHUNK_ELEMENTS = {"cpu": 1 << 20, "cuda": 1 << 29}


class TokenScores(NamedTuple):
    """`logprobs_N` of the targets; `entropy_N` of the distributions they were drawn from."""

    logprobs_N: Tensor
    entropy_N: Tensor


class Head(NamedTuple):
    """What lies between the output layer and the softmax. `finish` is the model's own soft-cap or
    scaling of logits, where it has one; it has no parameters."""

    temperature: float
    chunk: int
    finish: Callable[[Tensor], Tensor] | None = None


def chunk_tokens(vocab: int, device: torch.device, asked: int) -> int:
    """How many tokens share a chunk; `asked` wins if it is not 0."""
    if asked:
        return asked
    return max(64, _CHUNK_ELEMENTS.get(device.type, 1 << 26) // vocab)


def _product(states_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None) -> Tensor:
    if states_CH.is_cuda and states_CH.dtype != torch.float32:
        logits = torch.mm(states_CH, weight_VH.t(), out_dtype=torch.float32)
    else:
        logits = torch.mm(states_CH, weight_VH.t()).float()
    return logits if bias_V is None else logits.add_(bias_V.to(states_CH.dtype))


def _logits(states: Tensor, weight: Tensor, bias: Tensor | None, how: Head) -> Tensor:
    logits = _product(states, weight, bias)
    if how.finish is not None:
        logits = how.finish(logits).float()
    return logits if how.temperature == 1.0 else logits / how.temperature


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
    logits: Tensor, target: Tensor, lse: Tensor, entropy: Tensor, g_lp: Tensor, g_ent: Tensor
) -> Tensor:
    """d/dlogit: g_lp·(1[target] − p) − g_ent·p·(log p + H)."""
    log_p = logits - lse[:, None]
    grad = log_p.exp() * (-g_lp[:, None] - g_ent[:, None] * (log_p + entropy[:, None]))
    return grad.scatter_add(-1, target[:, None], g_lp[:, None])


@cache
def _compiled(name: str) -> Any:
    function = {
        "reduce": _reduce,
        "logprob": _differentiate_logprob,
        "both": _differentiate,
    }[name]
    return torch.compile(function, dynamic=True)


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, states: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, how: Head
    ) -> tuple[Tensor, Tensor]:
        cast = weight.to(states.dtype)
        reduce = _compiled("reduce") if states.is_cuda else _reduce
        parts = [
            reduce(_logits(s, cast, bias, how), t)
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
        cast = weight.to(states.dtype)
        for_states, for_weight, for_bias = ctx.needs_input_grad[:3]
        grad_states = torch.empty_like(states) if for_states else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if for_weight else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if for_bias else None
        for start in range(0, states.shape[0], ctx.how.chunk):
            at = slice(start, start + ctx.how.chunk)
            logits, back = _logits_again(states[at], cast, bias, ctx.how)
            grad = _grad_logits(logits, target[at], lse[at], entropy[at], g_lp, g_ent, at)
            grad = back(grad)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
            grad = grad.to(states.dtype)
            if grad_states is not None:
                torch.mm(grad, cast, out=grad_states[at])
            if grad_weight is not None:
                grad_weight += grad.t() @ states[at]
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight.dtype)
        if grad_bias is not None:
            grad_bias = grad_bias.to(bias.dtype)
        return grad_states, grad_weight, grad_bias, None, None


def _logits_again(
    states: Tensor, weight: Tensor, bias: Tensor | None, how: Head
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """A chunk's logits, and the way from their gradient to that of the output layer's values."""
    scale = how.temperature
    if how.finish is None:

        def straight(grad: Tensor) -> Tensor:
            return grad if scale == 1.0 else grad / scale

        return _logits(states, weight, bias, how), straight
    raw = _product(states, weight, bias)
    with torch.enable_grad():
        finished = how.finish(raw.requires_grad_()).float() / scale
    return finished.detach(), lambda grad: torch.autograd.grad(finished, raw, grad)[0]


def _grad_logits(
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    entropy: Tensor,
    g_lp: Tensor | None,
    g_ent: Tensor | None,
    at: slice,
) -> Tensor:
    """The chunk's gradient; most losses do not use the entropy, which saves a third of the work."""
    outer = torch.zeros_like(lse) if g_lp is None else g_lp[at]
    if g_ent is None:
        run = _compiled("logprob") if logits.is_cuda else _differentiate_logprob
        return run(logits, target, lse, outer)
    run = _compiled("both") if logits.is_cuda else _differentiate
    return run(logits, target, lse, entropy, outer, g_ent[at])


def token_scores(
    states_NH: Tensor,
    weight_VH: Tensor,
    target_N: Tensor,
    temperature: float,
    chunk: int,
    bias_V: Tensor | None = None,
    finish: Callable[[Tensor], Tensor] | None = None,
) -> TokenScores:
    """Log-prob of each target and entropy of its distribution, both with gradients."""
    assert states_NH.shape[0] == target_N.shape[0] > 0
    how = Head(temperature, chunk, finish)
    return TokenScores(*_Chunked.apply(states_NH, weight_VH, bias_V, target_N, how))  # type: ignore[misc]
