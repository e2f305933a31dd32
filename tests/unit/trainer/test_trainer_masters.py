"""Masters out of their rounding and what it took: every float32 there is comes back bit for bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.setup.memory import shelf_bytes
from dora_rl.trainer.checkpoints.masters import AT, LOW, Aside, Splits, whole
from dora_rl.trainer.checkpoints.publish import copy_all
from dora_rl.trainer.learner import Learner
from dora_rl.types import UserError
from dora_rl.weights.handover import Shelf
from tests.kit.device_memory import Played
from tests.kit.trainer_cases import flat, make_groups, write_tiny_model
from tests.kit.trainer_store import MemoryStore

BF16 = TrainerConfig(lr=1e-6, device="cpu", compute_dtype="bfloat16")


@pytest.fixture(autouse=True)
def plain_products() -> Iterator[None]:
    """Some virtual machines announce matrix instructions for bfloat16 that they then refuse."""
    with torch.backends.mkldnn.flags(enabled=False):
        yield


class Parts:
    version, checksum, canary, base = 0, "", None, ""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> Sequence[str]:
        return list(self._tensors)

    def tensor(self, name: str) -> torch.Tensor:
        return self._tensors[name]


def split(
    name: str,
    master: torch.Tensor,
    dtype: torch.dtype,
    stays: bool = False,
    aside: Aside | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    made: dict[str, torch.Tensor] = {}

    def room(key: str, shape: torch.Size, kind: torch.dtype) -> torch.Tensor:
        made[key] = torch.empty(shape, dtype=kind)
        return made[key]

    splits = Splits(room, room, stays)
    splits.add(name, master, dtype, aside)
    splits.finish()
    copy_all(splits.to_copy, lambda: None)
    return made.pop(name), made


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.int32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def check(bits: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    master = bits.view(torch.float32)
    published, parts = split("w", master, dtype)
    _, again = split("w", master, dtype, stays=True)
    assert parts.keys() == again.keys()
    assert all(same_bits(again[key], part) for key, part in parts.items())
    room = Aside(torch.empty_like(master, dtype=dtype), torch.empty_like(master, dtype=torch.int16))
    beside, aside = split("w", master, dtype, stays=True, aside=room)
    assert same_bits(beside, published) and aside.keys() == parts.keys(), "through the device"
    assert all(same_bits(aside[key], part) for key, part in parts.items())
    number = ~master.isnan()
    assert torch.equal(published[number], master.to(dtype)[number]), "the usual rounding"
    assert torch.equal(bits_of(whole("w", published, Parts(parts))), bits)
    return parts


# Zero, the smallest and largest denormals, one and its neighbours, the largest, infinite, NaN.
HIGH = [0x0000, 0x0001, 0x007F, 0x0080, 0x3F7F, 0x3F80, 0x3F81, 0x7F7E, 0x7F7F, 0x7F80, 0x7FC0]


@pytest.mark.parametrize("sign", [0, 0x8000])
def test_every_lower_half_under_every_kind_of_number(sign: int) -> None:
    low = np.arange(1 << 16, dtype=np.uint32)
    for high in HIGH:
        bits = torch.from_numpy((low | np.uint32((high | sign) << 16)).view(np.int32))
        parts = check(bits)
        if high < 0x7F80:  # of finite ones only the half-way case of an even upper half
            assert parts[LOW + "w"].numel() == 1 << 16
            at = parts[AT + "w"].tolist() if AT + "w" in parts else []
            assert at == ([] if high % 2 else [1 << 15])


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=0, max_size=64))
def test_any_float32_comes_back(words: list[int]) -> None:
    bits = torch.tensor(words, dtype=torch.int32)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        check(bits, dtype)


def test_more_masters_to_be_kept_whole_than_there_is_room_for() -> None:
    half_way = torch.full((3000,), 0x3F808000, dtype=torch.int32)  # every one rounds from above
    parts = check(half_way)
    assert parts[AT + "w"].tolist() == list(range(3000))


def test_what_is_kept_is_as_small_as_it_can_be() -> None:
    master = torch.randn(1000, 100)
    _, parts = split("w", master, torch.bfloat16)
    assert sum(t.numel() * t.itemsize for t in parts.values()) < 2.01 * master.numel()
    assert split("w", master, torch.float32)[1] == {}
    assert split("w", torch.tensor(1.5), torch.bfloat16)[0].shape == ()


@pytest.mark.parametrize("shelf", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_a_learner_goes_on_from_its_exact_masters(family: str, shelf: bool, tmp_path: Path) -> None:
    """Through the names of the checkpoint, where experts are single tensors."""
    model = write_tiny_model(tmp_path / "model", family)
    store, exact = MemoryStore(), MemoryStore()
    first = Learner(model, AlgorithmConfig(), BF16)
    if shelf:
        size = shelf_bytes(flat(first).numel(), 2)
        first.publisher.handover = Shelf(tmp_path, size, Played())
    first.begin_step(0)
    first.feed(make_groups(0, 2))
    first.finish_step()
    before = flat(first).clone()
    sealed = first.publish(store, 1, background=shelf, exact=exact)
    with torch.no_grad():
        for master in first.policy.parameters():
            master.mul_(1.5)  # the next step begins
    sealed.result()
    first.publisher.close()
    assert {t.dtype for t in store.sealed[1].tensors.values()} == {torch.bfloat16}
    second = Learner(model, AlgorithmConfig(), BF16)
    second.adopt(store, 1, exact)
    assert torch.equal(before, flat(second))
    assert (second.next_step, second.num_updates, second.optimizer.num_applied) == (1, 1, 1)
    exact.sealed[1] = exact.sealed[1].__class__(1, "", None, exact.sealed[1].tensors)
    with pytest.raises(UserError, match="belong to other weights"):
        second.adopt(store, 1, exact)
