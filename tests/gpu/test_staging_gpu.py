"""Pinned memory that steps share: nothing is overwritten before it has arrived.

Run with `pytest tests/gpu -m gpu` on a machine with a CUDA device.
"""

from __future__ import annotations

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_what_was_sent_arrives_however_late_the_device_is() -> None:
    from dora_rl.engine.cuda.slots import Staging

    staging, sent = Staging(), list[torch.Tensor]()
    for step in range(40):
        staging.turn()
        torch.cuda._sleep(5_000_000)  # the copy waits behind it, a few milliseconds
        for dtype in (torch.int32, torch.int64, torch.float32):
            host = staging.take((37, 5), dtype)
            assert host.is_pinned()
            sent.append(host.fill_(step).to("cuda", non_blocking=True))
    assert [int(data.unique()) for data in sent] == [s for s in range(40) for _ in range(3)]


def test_a_full_stretch_gives_way_to_memory_of_its_own() -> None:
    from dora_rl.engine.cuda.slots import STRETCH_BYTES, Staging

    staging = Staging()
    staging.turn()
    first = staging.take((4,), torch.int64).fill_(1)
    large = staging.take((STRETCH_BYTES,), torch.uint8).fill_(2)
    second = staging.take((4,), torch.int64).fill_(3)
    assert large.is_pinned() and large.shape == (STRETCH_BYTES,)
    assert first.tolist() == [1] * 4 and second.tolist() == [3] * 4
