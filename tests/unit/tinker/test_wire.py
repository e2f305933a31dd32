"""Protocol buffers: whatever bytes come in, reading them ends with a message or one line."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.tinker import wire
from dora_rl.tinker.messages import pass_names, read_training_pass
from dora_rl.types import UserError
from tests.kit.places import ROOT

RECORD = json.loads((ROOT / "tests" / "vectors" / "tinker_sdk.json").read_text())
PASSES = [bytes.fromhex(entry["body"]) for entry in RECORD["log"] if "protobuf" in entry["type"]]


@given(st.integers(min_value=-(2**63), max_value=2**63 - 1))
def test_whole_numbers_come_back(value: int) -> None:
    (field,) = wire.fields(wire.put_whole(3, value))
    assert (field.number, field.whole()) == (3, value)


@given(st.lists(st.integers(min_value=0, max_value=2**31)), st.text(), st.floats(allow_nan=False))
def test_other_values_come_back(wholes: list[int], text: str, number: float) -> None:
    data = wire.put_wholes(1, wholes) + wire.put_text(2, text) + wire.put_double(3, number)
    one, two, three = wire.fields(data)
    assert (one.wholes(), two.text(), three.double()) == (wholes, text, number)


def read(body: bytes) -> None:
    for call in (read_training_pass, pass_names):
        try:
            call(body)
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 300


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_to_an_end(body: bytes) -> None:
    read(body)


def test_damaged_requests_are_told_in_one_line() -> None:
    draw = random.Random(0)
    for body in PASSES:
        for _ in range(300):
            damaged = bytearray(body)
            for _ in range(draw.randrange(1, 4)):
                at = draw.randrange(len(damaged))
                if draw.random() < 0.3:
                    del damaged[at : at + draw.randrange(1, 9)]
                else:
                    damaged[at] = draw.randrange(256)
            read(bytes(damaged))


def test_a_small_body_cannot_ask_for_much_memory() -> None:
    """A sparse matrix of a few bytes says how large it is when written out."""
    csr = wire.put_bytes(1, b"") + wire.put_bytes(2, b"\0" * 8) + wire.put_bytes(3, b"")
    tensor = wire.put_bytes(2, csr) + wire.put_whole(3, 1) + wire.put_wholes(4, [1 << 40, 1 << 20])
    entry = wire.put_entry(2, "weights", wire.put_bytes(2, tensor))
    with pytest.raises(UserError, match="tensor 'weights' is too large"):
        read_training_pass(wire.put_bytes(3, entry))
