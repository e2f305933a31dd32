"""The engine's GPU half: Triton kernels, the forward pass, the runner with its CUDA graphs.

Imported only when the device is a GPU (or, in tests, with Triton's interpreter on the CPU).
"""

from __future__ import annotations

from typing import Any

import triton


def jit(kernel: Any) -> Any:
    """`triton.jit`, typed so that a launch, `kernel[grid](...)`, is understood."""
    return triton.jit(kernel)
