"""Any causal language model transformers can run, behind the decoder's interface.

The fallback for architectures the lean decoder does not know. The documents of a pack become rows
of batches, those of similar length together and padded on the right: to a causal model each is
alone, whatever the model mixes tokens with. States are what the model hands to its output layer,
and what it then does to the logits (soft-cap, scaling) is done by its own code.
Invariant: scores are those of transformers' model on each document alone (`check`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dora_rl.config import TrainerConfig
from dora_rl.model.spec import ModelSpec
from dora_rl.trainer.attention import BlockPlan, Layout, send
from dora_rl.trainer.checks import checkpoints_layers
from dora_rl.trainer.policy.logprobs import Output, TeacherLogits, TokenScores, scores_of
from dora_rl.user_code import require

_LAYER = re.compile(r"^.*?\.\d+\.")  # conversions never mix layers


class ForeignPolicy(nn.Module):
    """transformers' own model; `inner` is it, with the names it has there."""

    arch: ModelSpec | None = None  # not known
    replays = False  # the routing of a mixture of experts
    blocks: Sequence[nn.Module] = ()  # it is sharded as a whole

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
        self.checkpointing = checkpoints_layers(options)
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
        token_ids_P: Tensor,
        layout: Layout,
        rows_T: Tensor,
        target_T: Tensor,
        temperature: float = 1.0,
        teacher: TeacherLogits | None = None,
        experts_PLK: Tensor | None = None,
    ) -> TokenScores:
        """Scores of `target_T[i]` as the token after row `rows_T[i]` of the pack. A mixture of
        experts that transformers runs goes its own ways."""
        states_TH = self.states(token_ids_P, layout).index_select(0, rows_T)
        return scores_of(
            states_TH, self.output(), target_T, temperature, self.chunk_tokens, teacher
        )

    def output(self) -> Output:
        """What makes logits of what `states` gives."""
        layer, head = self.inner.get_output_embeddings(), self.head
        return Output(layer.weight, layer.bias, head.finish if head.finishes else None)

    def states(self, token_ids_P: Tensor, layout: Layout) -> Tensor:
        """What every token of the pack (P, H) hands to the output layer."""
        batches, back_P = layout.plan(_batches)
        dtype, parts = self.compute_dtype, []
        for rows_BL in batches:
            with torch.autocast(layout.device.type, dtype=dtype, enabled=dtype != torch.float32):
                parts.append(self.head.states(token_ids_P[rows_BL]).flatten(0, 1))
        return torch.cat(parts).index_select(0, back_P).to(dtype)

    def train(self, mode: bool = True) -> ForeignPolicy:
        """Dropout and jitter of the model itself never act: a log-prob is a number, not a sample.
        What was added to it (adapters) has its mode."""
        super().train(mode)
        for name, module in self.inner.named_modules():
            if "lora_" not in name:
                module.training = False
        return self


def _batches(layout: Layout) -> tuple[list[Tensor], Tensor]:
    """A pack as batches of rows: where each row's tokens are in the pack, and the way back."""
    plan = layout.plan(BlockPlan)
    into, back = plan.gather(heads=1)
    return [
        send(bucket.rows(into, 1, 1)[:, 0, :, 0], layout.device) for bucket in plan.buckets
    ], send(back, layout.device)


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
        require(
            (
                isinstance(layer, nn.Linear),
                f"{_named(model)}: its output layer is not a plain linear layer",
            )
        )
        self.hidden = layer.in_features
        with torch.no_grad():
            self._body, self._body_output = self._find_body(layer.weight.device)
        self.finishes = self._probe(layer.weight)

    def states(self, ids_BL: Tensor) -> Tensor:
        """What the model hands to its output layer (B, L, H)."""
        seen: list[Tensor] = []

        def take(states: Tensor) -> Tensor:
            seen.append(states)
            return states

        with _replaced(self._model.get_output_embeddings(), take):
            self._model(input_ids=ids_BL, use_cache=False)
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
        entered: list[nn.Module] = []
        outputs: dict[nn.Module, Any] = {}

        def leave(module: nn.Module, _: Any, output: Any) -> None:
            outputs.setdefault(module, output)

        modules = {m: n for n, m in self._model.named_modules() if n}
        hooks = [m.register_forward_pre_hook(lambda m, _: entered.append(m)) for m in modules]
        hooks += [m.register_forward_hook(leave) for m in modules]
        try:
            self.states(torch.zeros(1, 1, dtype=torch.int64, device=device))
        finally:
            for hook in hooks:
                hook.remove()
        return modules[entered[0]], outputs[entered[0]]

    @torch.enable_grad()
    def _probe(self, weight: Tensor) -> bool:
        """Whether `finish` does anything; that it is a function of the values alone."""
        raw = torch.linspace(-300.0, 300.0, 2 * weight.shape[0], device=weight.device).view(2, -1)
        made = self.finish(raw)
        require(
            (
                made.shape == raw.shape and not made.requires_grad,
                f"{_named(self._model)}: its logits are scaled by learned values",
            )
        )
        return not torch.equal(made, raw)


def recompute_layers(model: Any, on: bool) -> None:
    """Keep nothing of a layer but its input; run it again for its gradient."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    require(
        (
            layers or not on,
            f"{_named(model)}: trainer.activation_checkpointing 'layer' finds no layers that "
            "transformers can run again; use 'none'",
        )
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


# -- the dtype of the weights ---------------------------------------------------------------------


def cast_where_used(model: nn.Module, dtype: torch.dtype) -> None:
    """Let every module of a foreign model compute with its own parameters in `dtype`, as those of
    the lean decoder do.

    Autocast alone casts for matrix products: embeddings and norms would compute in float32 while
    they are trained, and in `dtype` in a twin.
    """
    for module in model.modules():
        if any(p is not None for p in module._parameters.values()):
            swap = _Swap(dtype)
            module.register_forward_pre_hook(swap.cast)
            module.register_forward_hook(swap.restore, always_call=True)


class _Swap:
    """A module's parameters, put aside while it runs with their casts."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._masters: list[dict[str, nn.Parameter | None]] = []

    def cast(self, module: nn.Module, _: Any) -> None:
        self._masters.append(module._parameters)
        casts: Any = {
            name: p if p is None or not p.is_floating_point() else p.to(self._dtype)
            for name, p in module._parameters.items()
        }
        module._parameters = casts

    def restore(self, module: nn.Module, *_: Any) -> None:
        module._parameters = self._masters.pop()


# -- names ----------------------------------------------------------------------------------------


class CheckpointFormat:
    """The tensors of a model on one side, those of its checkpoint on the other.

    transformers keeps some weights in another form than their checkpoints do (experts stacked,
    names changed) and knows how to go both ways; the conversions here are its own, those that
    loading used. `to_checkpoint` and `from_checkpoint` are inverses. Made before adapters are
    added, which change names.
    """

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import dot_natural_key, revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        own = own_tensors(model)
        self._own = frozenset(own)
        self._layers: dict[str, list[str]] = {}
        for name in own:
            found = _LAYER.search(name)
            self._layers.setdefault(found.group() if found else name, []).append(name)
        shapes = {n: torch.empty_like(t, device="meta") for n, t in own.items()}
        # By the numbers of layers and experts (2 before 10): so are lists of experts merged.
        made = (name for name, _ in self.to_checkpoint(shapes.__getitem__))
        self.names = sorted(made, key=dot_natural_key)
        self.buffers = self._own - {n for n, _ in model.named_parameters()}
        # Nothing rounds what is not trained, such as the biases that choose experts.
        self.exact = frozenset(self._revert(model, {n: shapes[n] for n in self.buffers}))

    def to_checkpoint(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors, made of the model's own, one layer at a time."""
        for names in self._layers.values():
            tensors = {name: read(name) for name in names}
            yield from self._revert(self._model, tensors).items()

    def from_checkpoint(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors by its own names, read one group at a time."""
        for first, transform in self._groups(read).items():
            made = transform.convert(first, model=self._model, config=self._model.config)
            for name, tensor in made.items():
                yield name, tensor[0] if isinstance(tensor, list) else tensor

    def _groups(self, read: Callable[[str], Tensor]) -> dict[str, Any]:
        """What makes which tensors, as transformers' loader groups them; nothing is read yet."""
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            rename_source_key,
        )

        conversions = getattr(self._model, "_weight_conversions", None) or []
        renamings = [c for c in conversions if isinstance(c, WeightRenaming)]
        converters = [c for c in conversions if isinstance(c, WeightConverter)]
        by_pattern = {p: c for c in converters for p in c.source_patterns}
        groups: dict[str, Any] = {}
        for name in self.names:
            own, pattern = rename_source_key(name, renamings, converters)
            if pattern is None:
                own = own if own in self._own else name
                group = groups.setdefault(own, WeightRenaming(name, own))
            else:
                group = groups.setdefault(own, deepcopy(by_pattern[pattern]))
            group.add_tensor(own, name, pattern or name, lambda name=name: read(name))
        return groups


def own_tensors(model: Any) -> dict[str, Tensor]:
    """What a checkpoint of the model holds: parameters, tied ones once, and buffers it keeps."""
    kept = model.state_dict().keys()
    buffers = {n: b for n, b in model.named_buffers() if n in kept}
    return {n: p.detach() for n, p in model.named_parameters()} | buffers
