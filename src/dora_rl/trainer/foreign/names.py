"""Tensors of a model run by transformers on one side, those of its checkpoint on the other.

transformers keeps some weights in another form than their checkpoints do (experts stacked, names
changed) and knows how to go both ways; the conversions here are its own, those that loading used.
Never invents a name. Invariant: `to_checkpoint` and `from_checkpoint` are inverses.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

_LAYER = re.compile(r"^.*?\.\d+\.")  # conversions never mix layers


class CheckpointFormat:
    """How one loaded model is written. Made before adapters are added: they change names."""

    def __init__(self, model: Any) -> None:
        from transformers.core_model_loading import revert_weight_conversion

        self._model, self._revert = model, revert_weight_conversion
        own = own_tensors(model)
        self._own = frozenset(own)
        self._layers: dict[str, list[str]] = {}
        for name in own:
            found = _LAYER.search(name)
            self._layers.setdefault(found.group() if found else name, []).append(name)
        shapes = {n: torch.empty_like(t, device="meta") for n, t in own.items()}
        self._names = _in_order(n for n, _ in self.to_checkpoint(shapes.__getitem__))
        parameters = {n for n, _ in model.named_parameters()}
        self.buffers = frozenset(n for n in own if n not in parameters)
        kept = {n: shapes[n] for n in self.buffers}
        # Nothing rounds what is not trained, such as the biases that choose experts.
        self.exact = frozenset(self._revert(model, kept))

    @property
    def names(self) -> list[str]:
        """The names of the checkpoint's tensors, in order."""
        return list(self._names)

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
        for name in self._names:
            own, pattern = rename_source_key(name, renamings, converters)
            if pattern is None and own not in self._own:
                own = name
            if pattern is None:
                group = groups.setdefault(own, WeightRenaming(name, own))
            else:
                group = groups.setdefault(own, deepcopy(by_pattern[pattern]))
            group.add_tensor(own, name, pattern or name, lambda name=name: read(name))
        return groups


def _in_order(names: Iterable[str]) -> list[str]:
    """By the numbers of layers and experts (2 before 10): so are lists of experts merged."""
    from transformers.core_model_loading import dot_natural_key

    return sorted(names, key=dot_natural_key)


def own_tensors(model: Any) -> dict[str, Tensor]:
    """What a checkpoint of the model holds: parameters, tied ones once, and buffers it keeps."""
    kept = model.state_dict().keys()
    tensors = {n: p.detach() for n, p in model.named_parameters()}
    tensors.update({n: b for n, b in model.named_buffers() if n in kept})
    return tensors
