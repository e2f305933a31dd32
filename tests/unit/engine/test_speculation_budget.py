"""How many guesses are made: as many as pay, by a clock that the test drives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan
from dora_rl.engine.runner import make_runner
from dora_rl.engine.scheduler import rows_of
from dora_rl.engine.sequence import Request
from dora_rl.engine.speculation import (
    LOOK_DRAFTED,
    LOOK_PLAIN,
    SLEEP_MIN,
    Speculation,
    State,
    StepTime,
)
from dora_rl.model.directory import read_spec
from dora_rl.types import RequestId, SamplingParams, Version
from tests.kit.engines import Saved, finish_all, random_prompts

PROMPTS = random_prompts((9, 20, 31, 12, 17, 25, 14, 22))
LONG = 400


class Timed:
    """A device whose steps take `fixed + rows * each`, by a clock of its own."""

    def __init__(self, inner: Any, fixed: float, each: float) -> None:
        self.inner, self.fixed, self.each, self.now = inner, fixed, each, 0.0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Any:
        if plan.spans:
            self.now += self.fixed + self.each * rows_of(plan)
        return self.inner.launch(plan, slots)


def make(path: Path, fixed: float, each: float, *, drafts: bool = True) -> tuple[Engine, Timed]:
    options = EngineOptions(
        block_tokens=16,
        num_blocks=256,
        context_max=448,
        seqs_max=8,
        versions_max=2,
        speculation="off",
    )
    device: Any = Timed(make_runner(read_spec(path), options), fixed, each)
    speculation = Speculation(clock=lambda: device.now) if drafts else None
    engine = Engine(read_spec(path), options, runner=device, speculation=speculation)
    for version in range(2):
        engine.load(version, path)
    return engine, device


def seconds(path: Path, fixed: float, each: float, count: int, heat: float) -> tuple[float, float]:
    """Of the same requests, without drafts and with."""
    params = SamplingParams(tokens_max=LONG, temperature=heat, ignore_eos=True)
    took: list[float] = []
    for drafts in (False, True):
        engine, device = make(path, fixed, each, drafts=drafts)
        for group in range(count):
            engine.submit(Request(RequestId(group, 0), 0, PROMPTS[group], params, seed=3))
        assert len(finish_all(engine)) == count
        took.append(device.now)
    return took[0], took[1]


@pytest.mark.parametrize("count", [1, 8])
def test_where_all_weights_are_read_for_a_few_rows_loops_are_guessed(
    saved: Saved, count: int
) -> None:
    """Greedy text of a random model repeats itself."""
    plain, drafted = seconds(saved("qwen3")[1], 1.0, 0.01, count, 0.0)
    assert drafted < 0.7 * plain


@pytest.mark.parametrize("count", [1, 8])
@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_a_full_device_has_no_row_to_spare(saved: Saved, count: int, heat: float) -> None:
    plain, drafted = seconds(saved("qwen3")[1], 0.0, 1.0, count, heat)
    assert drafted < 1.05 * plain


@pytest.mark.parametrize("fixed", [0.0, 1.0, 8.0])
def test_what_cannot_be_guessed_costs_little(saved: Saved, fixed: float) -> None:
    plain, drafted = seconds(saved("qwen3")[1], fixed, 0.25, 4, 1.0)
    assert drafted < 1.03 * plain


def test_it_looks_again_where_half_of_the_requests_have_ended(saved: Saved) -> None:
    """The tail of a batch does not wait until the long sleep of a full one is over."""
    engine, _ = make(saved("qwen3")[1], 0.0, 1.0)
    speculation = engine.speculation
    assert speculation is not None
    for group in range(8):
        length = LONG if group == 0 else 120
        params = SamplingParams(tokens_max=length, temperature=0.0, ignore_eos=True)
        engine.submit(Request(RequestId(group, 0), 0, PROMPTS[group], params))
    slept = 0
    while engine.stats().running != 1:
        engine.step()
        slept += speculation.state is State.ASLEEP
    assert slept > SLEEP_MIN // 2 and speculation.state is State.ASLEEP
    engine.step()
    assert speculation.state is State.LOOKING


def test_the_oldest_version_has_the_longest_drafts(saved: Saved) -> None:
    """Where the price of a row is near the chance of a guess."""
    engine, _ = make(saved("qwen3")[1], 1.0, 0.04)
    params = SamplingParams(tokens_max=LONG, temperature=0.0, ignore_eos=True)
    for group in range(8):
        for version in range(2):
            rid = RequestId(2 * group + version, 0)
            request = Request(rid, version, PROMPTS[group], params, stream=RequestId(group, 0))
            engine.submit(request)
    finish_all(engine)
    (old, _), (new, _) = engine.stats().drafts[0], engine.stats().drafts[1]
    assert old > new > 0


def test_a_line_through_steps() -> None:
    line = StepTime()
    assert line.error == float("inf")
    for rows in (4, 4, 8, 6, 4, 9, 5):
        line.add(rows, 3.0 + 0.5 * rows)
    assert line.each == pytest.approx(0.5) and line.fixed == pytest.approx(3.0)
    assert line.error == pytest.approx(0.0, abs=1e-6) and line.of(10) == pytest.approx(8.0)
    line.add(4, 1000.0)  # the machine stood still
    assert line.of(6) < 9.0


def test_steps_of_the_same_size_say_nothing_of_a_row() -> None:
    line = StepTime()
    for _ in range(20):
        line.add(8, 2.0)
    assert line.error == float("inf") and line.of(8) == pytest.approx(2.0)
    assert LOOK_PLAIN + LOOK_DRAFTED > 3


def test_a_step_in_which_nobody_decodes_has_no_drafts(saved: Saved) -> None:
    engine, _ = make(saved("qwen3")[1], 1.0, 0.01)
    speculation, plan = engine.speculation, Plan()
    assert speculation is not None
    speculation.state = State.DRAFTING
    speculation.end(plan, speculation.add_drafts(plan, engine.scheduler))
    assert not plan.spans
