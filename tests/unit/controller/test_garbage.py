"""A full collection falls between two events, and now and then there is one."""

from __future__ import annotations

import gc
import weakref

from dora_rl.controller.watchdog import FULL_EVERY_S, NEVER, Garbage


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


def test_a_cycle_goes_with_a_tick_and_settings_are_put_back() -> None:
    before, now = gc.get_threshold(), [0.0]
    garbage = Garbage(lambda: now[0])
    try:
        assert gc.get_threshold() == (*before[:2], NEVER)
        left = weakref.ref(Cycle())
        gc.collect(1)  # whatever is young enough goes as ever
        kept = Cycle()
        old = weakref.ref(kept)
        gc.collect(1)
        del kept
        assert left() is None
        now[0] = FULL_EVERY_S - 1
        garbage.tick()
        assert old() is not None
        now[0] = FULL_EVERY_S
        garbage.tick()
        assert old() is None
    finally:
        garbage.end()
    assert gc.get_threshold() == before
