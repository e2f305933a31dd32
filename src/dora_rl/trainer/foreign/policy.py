"""Any causal language model transformers can run, behind the decoder's interface.

The fallback for architectures the lean decoder does not know. The documents of a pack become rows
of batches, those of similar length together and padded on the right: to a causal model each is
alone, whatever the model mixes tokens with. States are what the model hands to its output layer,
and what it then does to the logits (soft-cap, scaling) is done by its own code.
Invariant: scores are those of transformers' model on each document alone (`foreign_check`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dora_rl.config import TrainerConfig
from dora_rl.config.section import choose
from dora_rl.trainer.attention.layout import Layout, send
from dora_rl.trainer.foreign.names import CheckpointFormat
from dora_rl.trainer.policy.casting import cast_where_used
from dora_rl.trainer.policy.logprobs import TokenScores, chunk_tokens, token_scores
from dora_rl.types import UserError


class ForeignPolicy(nn.Module):
    """transformers' own model; `inner` is it, with the names it has there."""

    def __init__(self, model: Any, dtype: torch.dtype, options: TrainerConfig) -> None:
        super().__init__()
        config = model.config.get_text_config()
        self.inner = model
        self.chunk_tokens = options.logits_chunk_tokens
        self.vocab = int(config.vocab_size)
        self.positions_max = int(getattr(config, "max_position_embeddings", None) or 1 << 30)
        self.format = CheckpointFormat(model)
        self.head = OutputLayer(model)
        self.hidden = self.head.hidden
        kinds = ("auto", "none", "layer")
        choose("trainer.activation_checkpointing", options.activation_checkpointing, kinds)
        self._checkpointing = False
        if options.activation_checkpointing == "layer":
            self.checkpointing = True
        self.compute_in(dtype)
        self.train()

    def compute_in(self, dtype: torch.dtype) -> None:
        """Matrix products through autocast, everything else through casts of the weights; once."""
        self.compute_dtype = dtype
        if dtype != torch.float32:
            cast_where_used(self.inner, dtype)

    @property
    def checkpointing(self) -> bool:
        """Whether layers are computed again in the backward pass."""
        return self._checkpointing

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self._checkpointing = on
        recompute_layers(self.inner, on)

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
        layer = self.inner.get_output_embeddings()
        chunk = chunk_tokens(self.vocab, states.device, self.chunk_tokens)
        finish = self.head.finish if self.head.finishes else None
        return token_scores(states, layer.weight, target_N, temperature, chunk, layer.bias, finish)

    def states(self, token_ids_T: Tensor, layout: Layout) -> Tensor:
        """What every token of the pack (T, hidden) hands to the output layer."""
        rows = layout.plan(_rows)
        half = self.compute_dtype != torch.float32
        parts = []
        for index_DL, kept in rows.batches:
            with torch.autocast(token_ids_T.device.type, dtype=self.compute_dtype, enabled=half):
                states = self.head.states(token_ids_T[index_DL])
            parts.append(states.flatten(0, 1).index_select(0, kept))
        return torch.cat(parts).index_select(0, rows.order_T).to(self.compute_dtype)

    def train(self, mode: bool = True) -> ForeignPolicy:
        """Dropout and jitter of the model itself never act: a log-prob is a number, not a sample.
        What was added to it (adapters) has its mode."""
        super().train(mode)
        for name, module in self.inner.named_modules():
            if "lora_" not in name:
                module.training = False
        return self


@dataclass(frozen=True, slots=True)
class _Rows:
    """A pack as batches of rows: where each row's tokens are in the pack (padding repeats the
    pack's first token), which places of the batch are tokens, and the way back."""

    batches: list[tuple[Tensor, Tensor]]
    order_T: Tensor


def _rows(layout: Layout) -> _Rows:
    batches, places = [], []
    for members in layout.bucket_members():
        lengths = torch.tensor([layout.lengths[d] for d in members])
        starts = torch.tensor([layout.starts[d] for d in members])
        column = torch.arange(int(lengths.max()))
        is_token = column < lengths[:, None]
        index = (starts[:, None] + column) * is_token
        kept = is_token.flatten().nonzero().squeeze(-1)
        places.append(index.flatten()[kept])
        batches.append((send(index, layout.device), send(kept, layout.device)))
    return _Rows(batches, send(torch.cat(places).argsort(), layout.device))


@contextmanager
def _replaced(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """For a moment, a module that computes something else."""
    module.forward = forward
    try:
        yield
    finally:
        del module.forward


class OutputLayer:
    """The two sides of a model's output layer: what comes in, and what is made of what comes out.

    Between them lies one product with a (vocabulary × hidden) matrix, which is never run for a
    whole pack at once (`logprobs`); so here the model runs with that layer taken out.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        layer = model.get_output_embeddings()
        if not isinstance(layer, nn.Linear):
            raise UserError(f"{_named(model)}: its output layer is not a plain linear layer")
        self.hidden = layer.in_features
        with torch.no_grad():
            self._body, self._body_output = self._find_body(layer.weight.device)
        self.finishes = self._probe(layer.weight)

    def states(self, ids_DL: Tensor) -> Tensor:
        """What the model hands to its output layer (D, L, hidden)."""
        seen: list[Tensor] = []

        def take(states: Tensor) -> Tensor:
            seen.append(states)
            return states

        with _replaced(self._model.get_output_embeddings(), take):
            self._model(input_ids=ids_DL, use_cache=False)
        (states,) = seen
        return states

    def finish(self, raw_CV: Tensor) -> Tensor:
        """What the model makes of the output layer's values before they are its logits."""
        layer, body = self._model.get_output_embeddings(), self._model.get_submodule(self._body)
        ids = torch.zeros(1, 1, dtype=torch.int64, device=raw_CV.device)
        with (
            _replaced(layer, lambda _: raw_CV[None]),
            _replaced(body, lambda *_, **__: self._body_output),
        ):
            return self._model(input_ids=ids, use_cache=False).logits[0]

    def _find_body(self, device: torch.device) -> tuple[str, Any]:
        """The first module that the model's forward calls, and what it returns for one token."""
        depth, found = 0, []

        def enter(*_: Any) -> None:
            nonlocal depth
            depth += 1

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                found.append((module, output))

        modules = {m: n for n, m in self._model.named_modules() if n}
        hooks = [m.register_forward_pre_hook(enter) for m in modules]
        hooks += [m.register_forward_hook(leave) for m in modules]
        try:
            self.states(torch.zeros(1, 1, dtype=torch.int64, device=device))
        finally:
            for hook in hooks:
                hook.remove()
        module, output = found[0]
        return modules[module], output

    @torch.enable_grad()
    def _probe(self, weight: Tensor) -> bool:
        """Whether `finish` does anything; that it is a function of the values alone."""
        raw = torch.linspace(-300.0, 300.0, 2 * weight.shape[0], device=weight.device)
        raw = raw.view(2, -1)
        made = self.finish(raw)
        if made.shape != raw.shape or made.requires_grad:
            raise UserError(f"{_named(self._model)}: its logits are scaled by learned values")
        return not torch.equal(made, raw)


def recompute_layers(model: Any, on: bool = True) -> None:
    """Keep nothing of a layer but its input; run it again for its gradient."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise UserError(
            f"{_named(model)}: trainer.activation_checkpointing 'layer' finds no layers that "
            "transformers can run again; use 'none'"
        )
    for layer in layers:
        # What a module runs when it is called, its hooks included.
        layer._compiled_call_impl = _recomputed(layer._call_impl) if on else None


def _recomputed(call: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return call(*args, **kwargs)
        return checkpoint(call, *args, use_reentrant=False, **kwargs)

    return run


def _named(model: Any) -> str:
    return f"model type '{model.config.model_type}'"
