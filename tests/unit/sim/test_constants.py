"""The constants of the published testbed and the intervals they are drawn from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dora_rl.sim.constants import FREE, INTERVALS, draws, value_of, with_values
from dora_rl.sim.presets import PRESETS

PAPER_64 = PRESETS["paper-64"]
KEYS = [interval.key for interval in INTERVALS]


@pytest.mark.parametrize("interval", INTERVALS, ids=KEYS)
def test_every_constant_lies_in_its_interval_and_says_where_that_is_from(interval):
    assert interval.low <= value_of(PAPER_64, interval.key) <= interval.high
    assert interval.low < interval.high and len(interval.source) > 10
    assert not interval.choices or (interval.low, interval.high) == (
        min(interval.choices),
        max(interval.choices),
    )


def test_free_constants_are_two_and_have_intervals():
    assert len(FREE) == 2 and set(FREE) < set(KEYS) and len(set(KEYS)) == len(KEYS)


def test_draws_take_every_constant_from_all_parts_of_its_interval():
    sets = draws(8, seed=3)
    assert sets == draws(8, seed=3) != draws(8, seed=4)
    for interval in INTERVALS:
        found = [values.get(interval.key) for values in sets]
        if interval.key in FREE:
            assert found == [None] * 8
        elif not interval.choices:
            parts = [(v - interval.low) / (interval.high - interval.low) * 8 for v in found]
            assert sorted(int(part) for part in parts) == list(range(8)), interval.key
        else:
            assert set(found) <= set(interval.choices) and len(set(found)) > 1


def test_values_are_put_where_set_would_put_them():
    (values,) = draws(1)
    changed = with_values(PAPER_64, values)
    for key, value in values.items():
        expected = pytest.approx(value, rel=0.002 if key == "lengths.mean" else 1e-9)
        found = value_of(changed, key)
        assert found == (round(value) if isinstance(found, int) else expected), key
    same = {key: value_of(PAPER_64, key) for key in values if not key.startswith("lengths")}
    assert with_values(changed, same) == replace(PAPER_64, lengths=changed.lengths)
