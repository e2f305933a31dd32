"""Which requests an instance names as standing still."""

from __future__ import annotations

from dora_rl.types import RequestId
from dora_rl.workers.rollout import STILL_S, Stillness

ONE, TWO = RequestId(0, 0), RequestId(0, 1)


def test_a_request_is_named_when_it_has_gained_nothing_for_a_while() -> None:
    stillness = Stillness()
    assert stillness.look({ONE: 5, TWO: 5}, 0.0) == ()
    assert stillness.look({ONE: 5, TWO: 6}, STILL_S) == (ONE,)
    assert stillness.look({ONE: 6, TWO: 6}, STILL_S + 1) == ()
    assert stillness.look({ONE: 6, TWO: 6}, 2 * STILL_S) == (TWO,)


def test_a_request_that_was_away_begins_anew() -> None:
    """It waited for its environment, or was parked."""
    stillness = Stillness()
    stillness.look({ONE: 5}, 0.0)
    stillness.look({}, STILL_S)
    assert stillness.look({ONE: 5}, STILL_S + 1) == ()


def test_a_request_that_the_engine_does_not_know_is_named_too() -> None:
    stillness = Stillness()
    stillness.look({ONE: -1}, 0.0)
    assert stillness.look({ONE: -1}, STILL_S) == (ONE,)
