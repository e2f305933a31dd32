"""What the GPU tests share."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def hopper() -> None:
    """For kernels in CUDA C. What does not compile on a Hopper fails its tests; to do without is
    for other machines."""
    from dora_rl.engine.cuda.kernels import driver
    from dora_rl.engine.cuda.kernels.overlap import is_hopper

    if not (is_hopper(torch.device("cuda", 0)) and driver.is_here()):
        pytest.skip("needs a Hopper and cuda-bindings")
