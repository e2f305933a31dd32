"""More than one rank: FSDP2 sharding, and the few collectives the learner needs.

One rank needs no process group and none of this runs. Invariant: every rank is fed the same groups
and makes the same packing decisions, so all ranks run the same number of packs without talking
about it; only gradients (through FSDP2) and metrics are exchanged.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dora_rl.user_code import require

LOOPBACK = "127.0.0.1"
SIOCGIFADDR = 0x8915  # <linux/sockios.h>


def world() -> tuple[int, int]:
    """(rank, number of ranks); (0, 1) without a process group."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def interface_of(ip: str) -> str | None:
    """The name of the network interface that has this address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no address
                packed = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(packed[20:24]) == ip:
                    return name
    return None


def join(rendezvous: str | Path, rank: int, num_ranks: int, ip: str = "") -> None:
    """Meet the other ranks through a fresh file that all of them see; one rank needs nobody.

    `ip` is where ranks on other hosts reach this one; without it all are on one machine, and
    nobody else reaches them.
    """
    if num_ranks == 1:
        return
    if name := interface_of(ip or LOOPBACK):
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(variable, name)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{Path(rendezvous).resolve()}",
        rank=rank,
        world_size=num_ranks,
    )


def agree(what: str, value: int, hint: str) -> None:
    """Every rank must have found the same; a collective."""
    found = _of_first(value)
    require(
        (
            found == value,
            f"rank {world()[0]} finds {what} {value}, the first rank {found}; {hint}",
        )
    )


def decide(flag: bool) -> bool:
    """What the first rank says, on every rank; a collective."""
    return bool(_of_first(int(flag)))


def _of_first(value: int) -> int:
    if world()[1] == 1:
        return value
    found = torch.tensor([value], dtype=torch.int64, device=_device())
    dist.broadcast(found, 0)
    return int(found)


def _device() -> str:
    """Where a tensor must be that ranks exchange."""
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def shard(module: nn.Module, layers: Sequence[nn.Module], compute_dtype: torch.dtype) -> None:
    """FSDP2: each layer its own unit, then the rest; float32 shards, gradients reduced in float32.

    Gradients come back as the mean over ranks; the learner multiplies by their number.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh(next(module.parameters()).device.type, (dist.get_world_size(),))
    # Inputs stay as they are: cosines and sines are float32 on purpose.
    policy = MixedPrecisionPolicy(
        param_dtype=None if compute_dtype == torch.float32 else compute_dtype,
        reduce_dtype=torch.float32,
        cast_forward_inputs=False,
    )
    for part in (*layers, module):
        fully_shard(part, mesh=mesh, mp_policy=policy)


def like_shard(tensor: Tensor, parameter: Tensor) -> Tensor:
    """The part of a whole tensor that belongs where `parameter` is sharded."""
    if (mesh := getattr(parameter, "device_mesh", None)) is None:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    whole = tensor.to(device=parameter.device, dtype=parameter.dtype)
    # Every rank read the same tensor, so nothing has to be sent.
    return distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


def back_to_shards(module: nn.Module) -> None:
    """After a forward pass that no backward follows, FSDP2's root would stay gathered."""
    if (reshard := getattr(module, "reshard", None)) is not None:
        reshard()


def wait_for_all() -> None:
    """Return on no rank before every rank is here."""
    if world()[1] > 1:
        dist.barrier()


def add_up(values: Tensor) -> Tensor:
    """The sum over ranks; a collective."""
    if world()[1] > 1:
        values = values.to(_device(), copy=True)
        dist.all_reduce(values)
    return values


def gathered(tensor: Tensor) -> Tensor:
    """The whole tensor, if it is a shard; a collective that every rank must enter."""
    full = getattr(tensor, "full_tensor", None)
    return full() if full is not None else tensor
