"""Weights in the compute dtype, where they are kept and where they are used.

Never touches a buffer: the frequencies of rotary positions and the like are constants of the
architecture, not weights; rounded, they would turn late positions by another angle. Invariant: a
policy that keeps float32 masters and a frozen twin that keeps their rounding compute with the same
numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def cast_parameters(module: nn.Module, dtype: torch.dtype) -> None:
    """Keep parameters, and nothing else, in `dtype`."""
    for p in module.parameters():
        p.data = p.data.to(dtype)


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
        masters = module._parameters
        self._masters.append(masters)
        casts: Any = {
            name: p if p is None or not p.is_floating_point() else p.to(self._dtype)
            for name, p in masters.items()
        }
        module._parameters = casts

    def restore(self, module: nn.Module, *_: Any) -> None:
        module._parameters = self._masters.pop()
