"""Parameter names: the lean decoder's on one side, the Hugging Face checkpoint's on the other.

They differ only for experts, which the decoder stacks. Invariant: `to_checkpoint` and
`from_checkpoint` are inverses, tensor for tensor.

    model.layers.0.mlp.experts.gate_up_proj (E, 2·I, H)
        <-> model.layers.0.mlp.experts.{e}.{gate,up}_proj.weight (I, H)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

_STACKED = (".experts.gate_up_proj", ".experts.down_proj")


def to_checkpoint(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The checkpoint's tensors that one parameter of the decoder stands for."""
    if not name.endswith(_STACKED):
        yield name, tensor
        return
    prefix, kind = name.rsplit(".", 1)
    for expert in range(tensor.shape[0]):
        if kind == "down_proj":
            yield f"{prefix}.{expert}.down_proj.weight", tensor[expert]
            continue
        gate, up = tensor[expert].chunk(2, dim=0)
        yield f"{prefix}.{expert}.gate_proj.weight", gate
        yield f"{prefix}.{expert}.up_proj.weight", up


def from_checkpoint(name: str, shape: torch.Size, read: Callable[[str], Tensor]) -> Tensor:
    """One parameter of the decoder, read from a checkpoint by the checkpoint's names."""
    if not name.endswith(_STACKED):
        return read(name)
    prefix, kind = name.rsplit(".", 1)
    if kind == "down_proj":
        return torch.stack([read(f"{prefix}.{e}.down_proj.weight") for e in range(shape[0])])
    return torch.stack(
        [
            torch.cat([read(f"{prefix}.{e}.{part}_proj.weight") for part in ("gate", "up")])
            for e in range(shape[0])
        ]
    )
