"""How long bursts are; nothing here needs a GPU."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora_rl.engine.cuda.buckets import FED_LAUNCHES, Bursts


@given(st.integers(1, 16), st.lists(st.booleans(), max_size=200))
def test_bursts_stay_in_bounds_and_move_the_right_way(steps_max: int, waited: list[bool]) -> None:
    bursts, steps = Bursts(steps_max), 1
    for starved in waited:
        after = bursts.after(steps, starved)
        assert 1 <= after <= steps_max
        assert after >= steps if starved else steps - 1 <= after <= steps
        steps = after


def test_a_gpu_that_waited_once_is_fed_for_a_while() -> None:
    bursts = Bursts(8)
    assert bursts.after(1, True) == 2
    assert [bursts.after(2, False) for _ in range(FED_LAUNCHES)] == [2] * (FED_LAUNCHES - 1) + [1]
    assert bursts.after(2, False) == 2, "counted from the last change"


def test_a_wait_begins_the_count_anew() -> None:
    bursts = Bursts(8)
    for _ in range(FED_LAUNCHES - 1):
        assert bursts.after(4, False) == 4
    assert bursts.after(4, True) == 8
    assert bursts.after(8, False) == 8
