"""The timeline behind the Gantt chart, and what the picture makes of it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from dora_rl.observe.plots import check_format
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.compare import CompareOptions, Comparison, Outcome, compare
from dora_rl.sim.picture import _charts, _sampled, _steady_s, draw
from dora_rl.sim.presets import PRESETS
from dora_rl.sim.run import Bar, Timeline, run_mode
from dora_rl.types import Mode, UserError
from tests.unit.sim.sim_results import made_result

SMALL = replace(PRESETS["small"], num_steps=5)


@pytest.mark.parametrize("mode", Mode)
def test_bars_of_a_row_never_overlap(mode):
    result = run_mode(SMALL, mode, 0, with_timeline=True)
    bars = result.timeline.close()
    rows = {bar.row for bar in bars}
    assert "trainer" in rows and len(rows) == 1 + result.split["rollout"]
    for row in rows:
        mine = [bar for bar in bars if bar.row == row]
        assert all(bar.begin_s < bar.end_s for bar in mine)
        assert all(a.end_s <= b.begin_s + 1e-9 for a, b in pairwise(mine))
    trained = [bar.version for bar in bars if bar.row == "trainer"]
    assert trained == list(range(SMALL.num_steps))


def test_a_draining_batch_is_a_stair():
    clock = VirtualClock()
    timeline = Timeline(clock)
    instance: Any = SimpleNamespace(name="i0", awake=True, held={3: 100}, running=range(100))
    for num in range(100, -1, -1):
        instance.held, instance.running = {3: num}, range(num)
        clock.at(float(100 - num), lambda: None)
        clock.run(lambda: clock.now() >= 100 - num)  # noqa: B023
        timeline.see_instance(instance)
    bars = timeline.close()
    heights = [bar.num_requests for bar in bars]
    assert heights == sorted(heights, reverse=True) and heights[0] == 100
    assert 5 < len(bars) < 30  # not one bar, and not one per request
    assert all(bar.version == 3 for bar in bars)


def test_a_sleeping_instance_is_idle():
    clock = VirtualClock()
    timeline = Timeline(clock)
    instance: Any = SimpleNamespace(name="i0", awake=False, held={1: 4}, running=range(4))
    timeline.see_instance(instance)
    clock.at(5.0, lambda: None)
    clock.run(lambda: clock.now() >= 5)
    assert timeline.close() == [Bar("i0", 0.0, 5.0, None, 0)]


def with_bars(mode: str, num_instances: int) -> Any:
    bars = [Bar(f"i{n:05d}", 0.0, 9.0, 1, 2) for n in range(num_instances)]
    bars += [Bar("trainer", 10.0 * step, 10.0 * step + 9, step, 1) for step in range(5)]
    return made_result(mode, timeline=Timeline(VirtualClock(), bars))


def test_large_fleets_are_sampled():
    names = _sampled(with_bars("multi_version", 1000))
    assert len(names) == 12 and names == sorted(names)
    assert len(_sampled(with_bars("multi_version", 3))) == 3


def test_charts_begin_after_the_warm_up():
    assert _steady_s(with_bars("sync", 1), 3) == 29.0
    assert _steady_s(with_bars("sync", 1), 0) == 0.0


def test_a_few_modes_are_charted_and_multi_version_always():
    outcomes = {mode: Outcome(with_bars(mode.value, 2)) for mode in Mode}
    charted = [result.mode for result in _charts(Comparison(SMALL, 0, outcomes))]
    assert charted == ["sync", "one_step_off", "multi_version"]


def test_drawing_needs_no_timeline(tmp_path):
    comparison = compare(SMALL, [Mode.SYNC], CompareOptions())
    draw(comparison, tmp_path / "bars.png")
    assert (tmp_path / "bars.png").stat().st_size > 10_000


def test_only_known_formats(tmp_path):
    check_format(tmp_path / "a.SVG")
    with pytest.raises(UserError, match="must end in"):
        check_format(tmp_path / "a.gif")


def test_a_place_that_cannot_be_written_is_the_users_error(tmp_path):
    comparison = compare(SMALL, [Mode.SYNC], CompareOptions())
    with pytest.raises(UserError, match="cannot write"):
        draw(comparison, tmp_path / "missing" / "a.png")
