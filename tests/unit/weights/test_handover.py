"""Versions through the memory of a device: taken if they are whole, from shared memory if not.

The device is played by memory of this process; tests/gpu has the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.weights.handover import OFFER, Handovers, Shelf, sums_of
from dora_rl.weights.store import SharedMemoryWeightStore, WeightsError
from tests.kit.device_memory import Played

TENSORS = {
    "layers.0.w": torch.randn(40, 130).bfloat16(),
    "layers.1.w": torch.randn(3, 4096).bfloat16(),
    "norm": torch.randn(7),
}


def fill(shelf: Shelf, version: int, scale: float) -> None:
    shelf.begin(version)
    for name, tensor in TENSORS.items():
        shelf.room(name, tensor.shape, tensor.dtype).copy_(tensor * scale)


@pytest.fixture
def store(tmp_path: Path) -> SharedMemoryWeightStore:
    store = SharedMemoryWeightStore(tmp_path / "store")
    for version in (1, 2):
        store.publish(version, [(name, t * version) for name, t in TENSORS.items()])
    return store


def test_what_is_offered_is_taken_and_nothing_else(store: SharedMemoryWeightStore) -> None:
    card = Played()
    shelf, taker = Shelf(store.root, 1 << 20, card), Handovers(store.root, card)
    assert taker.find(store.map(1)) is None, "nothing is offered yet"
    fill(shelf, 1, 1.0)
    assert taker.find(store.map(1)) is None, "it is not complete"
    shelf.offer()
    found = taker.find(store.map(1))
    assert found is not None
    found.check()
    assert found.checksum == store.checksum(1) and list(found.names()) == list(TENSORS)
    assert all(torch.equal(found.tensor(name), TENSORS[name]) for name in TENSORS)
    assert taker.find(store.map(2)) is None, "another version"
    assert Handovers(store.root, Played("another card")).find(store.map(1)) is None
    assert Handovers(store.root, None).find(store.map(1)) is None
    fill(shelf, 2, 2.0)
    assert taker.find(store.map(1)) is taker.find(store.map(2)) is None
    shelf.offer()
    assert taker.find(store.map(2)) is not None and card.num_opened == 1, "it is mapped once"
    (store.root / OFFER).write_text('{"version": 2')
    assert taker.find(store.map(2)) is None


@pytest.mark.parametrize("name", list(TENSORS))
def test_a_version_that_is_replaced_meanwhile_is_noticed(
    store: SharedMemoryWeightStore, name: str
) -> None:
    card = Played()
    shelf, taker = Shelf(store.root, 1 << 20, card), Handovers(store.root, card)
    fill(shelf, 1, 1.0)
    shelf.offer()
    found = taker.find(store.map(1))
    assert found is not None
    found.tensor(name).view(-1)[-1] += 1
    with pytest.raises(WeightsError, match="was replaced while it was copied"):
        found.check()


def test_the_sums_see_single_bits_and_places() -> None:
    plain = torch.randint(-5, 5, (5000,), dtype=torch.int16)
    swapped, flipped = plain.clone(), plain.clone()
    swapped[:2048], swapped[2048:4096] = plain[2048:4096], plain[:2048]
    flipped[4999] ^= 1
    sums = [sums_of(data.view(torch.uint8)) for data in (plain, swapped, flipped, plain.clone())]
    assert len(set(sums)) == 3 and sums[0] == sums[3]
    assert sums_of(torch.empty(0, dtype=torch.uint8)) == (0, 0)


def test_what_is_aside_is_nobody_elses(store: SharedMemoryWeightStore) -> None:
    card = Played()
    shelf, taker = Shelf(store.root, 1 << 20, card), Handovers(store.root, card)
    shelf.begin(1)
    kept = []
    for name, tensor in TENSORS.items():
        shelf.room(name, tensor.shape, tensor.dtype).copy_(tensor)
        kept.append(shelf.aside(tensor.shape, torch.int16).fill_(len(kept)))
    shelf.offer()
    found = taker.find(store.map(1))
    assert found is not None
    for place in kept:
        place.add_(1)
    found.check()
    assert all(torch.equal(found.tensor(name), TENSORS[name]) for name in TENSORS)
    assert [int(place.unique()) for place in kept] == [1, 2, 3], "no room is given out twice"
