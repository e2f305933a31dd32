"""What lets one kernel begin while the one before it ends (programmatic dependent launch).

A kernel launched with `OVERLAP` may start as soon as every program of its predecessor has called
`begin`. Until `ready` returns it may only read what no kernel of the same pass writes (weights,
slots, positions, block tables). Every kernel calls
`ready` before its first write, so that by induction all earlier kernels have ended by then.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


def jit(kernel: Any) -> Any:
    """`triton.jit`, typed so that a launch, `kernel[grid](...)`, is understood."""
    return triton.jit(kernel)


@jit
def begin(OVERLAP: tl.constexpr):
    """The next kernel may be started from here on."""
    if OVERLAP:
        gdc_launch_dependents()


@jit
def ready(OVERLAP: tl.constexpr):
    """Wait for the results of everything before."""
    if OVERLAP:
        gdc_wait()


@lru_cache
def overlap(device: torch.device) -> dict[str, Any]:
    """Launch arguments: overlap on a Hopper or later, nothing elsewhere."""
    on = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return {"OVERLAP": True, "launch_pdl": True} if on else {"OVERLAP": False}


@lru_cache
def is_hopper(device: torch.device) -> bool:
    """Whose tensor cores take their operands from shared memory; no other GPU's do it so."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9
