"""An instance that waits for its first weights warms up, a part at a time, and then no more."""

from __future__ import annotations

from collections.abc import Iterator

from dora_rl.workers.loads import Warming


class Engine:
    def __init__(self, num_parts: int) -> None:
        self.num_parts, self.done, self.resident, self.plain = num_parts, 0, (), None

    def warm_up(self, plain: bool) -> Iterator[None]:
        self.plain = plain
        for _ in range(self.num_parts):
            self.done += 1
            yield

    def versions(self) -> tuple[int, ...]:
        return self.resident


def test_a_part_at_a_time_until_there_is_none_left() -> None:
    engine = Engine(3)
    warming = Warming(engine, plain=True)
    assert engine.done == 0 and [warming.part() for _ in range(5)] == [True] * 3 + [False] * 2
    assert engine.done == 3


def test_not_once_weights_are_there_even_when_they_are_gone_again() -> None:
    engine = Engine(3)
    warming = Warming(engine, plain=False)
    assert warming.part()
    engine.resident = (0,)
    assert not warming.part()
    engine.resident = ()
    assert not warming.part() and engine.done == 1
