"""The fit uses the one row of synchronous training, and the page shows what the program gives."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from math import nan

import pytest

from benchmarks import reproduction
from dora_rl.sim.constants import FIRST, FREE, INTERVALS, value_of, with_values
from dora_rl.sim.fit import CLOSE_S, ROUNDS_MAX, Fit, Row, fit, fit_flow
from dora_rl.sim.presets import PRESETS, Preset
from dora_rl.sim.report import PAPER, Published
from dora_rl.sim.run import ModeResult, run_mode
from dora_rl.types import Mode
from tests.kit.places import ROOT
from tests.unit.sim.sim_results import made_result

PAPER_64 = PRESETS["paper-64"]
PAGE = (ROOT / "docs" / "reproduction.md").read_text()
ROW = Row(1000.0, 0.6)


def linear(preset: Preset) -> ModeResult:
    """A world in which the longest response takes 10 ms a token beside the floor."""
    rollout_s = 30_720 * (0.010 + preset.engine.host_s)
    rest_s = 300 + 16 * preset.trainer.update_s
    return made_result(
        "sync", step_s=rollout_s + rest_s, rollout_only_share=rollout_s / (rollout_s + rest_s)
    )


def fitted(row: Row, world: Callable[[Preset], ModeResult] = linear) -> tuple[Fit, list[Preset]]:
    """Drive the fit; every preset it wants to be simulated."""
    seen: list[Preset] = []
    flow = fit_flow(PAPER_64, row)
    jobs = next(flow)
    while True:
        (job,) = jobs
        assert job.mode is Mode.SYNC and job.rollout_devices is None
        seen.append(job.preset)
        try:
            jobs = flow.send([world(job.preset)])
        except StopIteration as stop:
            return stop.value, seen


def test_the_fit_finds_the_two_values_that_give_the_row():
    found, _ = fitted(ROW)
    assert (found.outside, found.missed) == ((), "")
    assert found.values["engine.host_s"] == pytest.approx(600 / 30_720 - 0.010, abs=CLOSE_S / 3e4)
    assert found.values["trainer.update_s"] == pytest.approx(100 / 16, abs=CLOSE_S / 16)


def test_the_fit_simulates_nothing_but_sync_on_64_gpus_and_moves_nothing_but_two_constants():
    _, seen = fitted(ROW)
    assert len(seen) > 1
    for preset in seen:
        assert preset.num_devices == 64
        moved = {key: value_of(preset, key) for key in FREE}
        steps = {"num_steps": preset.num_steps, "warmup_steps": preset.warmup_steps}
        assert preset == replace(with_values(PAPER_64, moved), **steps)


def test_the_fit_begins_at_the_first_values_whatever_is_committed():
    _, seen = fitted(ROW)
    assert {key: value_of(seen[0], key) for key in FREE} == FIRST


def test_a_row_that_cannot_be_reached_inside_the_intervals_is_said():
    found, _ = fitted(Row(4000.0, 0.6))
    assert set(found.outside) == set(FREE)
    ends = {interval.key: interval.high for interval in INTERVALS if interval.key in FREE}
    assert found.values == ends
    assert "at an end of its interval: engine.host_s, trainer.update_s" in found.missed


def to_and_fro(preset: Preset) -> ModeResult:
    """A world that answers each move with twice as much, so that no round gets closer."""
    rollout_s = 600 + 2 * (preset.engine.host_s - 0.0085) * 30_720
    share = rollout_s / (rollout_s + 400)
    return made_result("sync", step_s=rollout_s + 400, rollout_only_share=share)


def test_a_fit_that_goes_to_and_fro_says_so_in_one_line():
    found, seen = fitted(ROW, to_and_fro)
    assert len(seen) == ROUNDS_MAX + 1
    assert found.outside == ()
    assert re.fullmatch(
        rf"the row was not reached \({ROUNDS_MAX} rounds made\): rollout only [+-]\d+\.\d s, "
        r"rest [+-]0\.0 s",
        found.missed,
    )
    assert found.missed in reproduction.fit_table(found).splitlines()


def test_a_fit_that_gets_there_in_its_last_round_is_not_missed():
    """Each round halves what is off and turns it round; only what follows the last one is close."""
    off_s = CLOSE_S * 2**ROUNDS_MAX * 0.9
    answers = [off_s / (-2) ** place for place in range(ROUNDS_MAX + 1)]
    told = iter(answers)

    def halved(preset: Preset) -> ModeResult:
        rollout_s = 600 + next(told)
        share = rollout_s / (rollout_s + 400)
        return made_result("sync", step_s=rollout_s + 400, rollout_only_share=share)

    found, seen = fitted(ROW, halved)
    assert (len(seen), found.missed, found.outside) == (ROUNDS_MAX + 1, "", ())


def test_a_set_that_is_not_fitted_is_left_out_and_counted():
    flow = reproduction.drawn_flow({}, 8, {64: {}})
    jobs = next(flow)
    with pytest.raises(StopIteration) as stop:
        while True:
            jobs = flow.send([to_and_fro(jobs[0].preset)])
    one = stop.value.value
    assert one.missed and not one.minutes
    said = reproduction.told([one, replace(one, missed="")]).splitlines()
    assert said == [
        "1 of 2 sets of constants could not be fitted and are left out",
        f"- {one.missed}",
    ]


def test_no_other_row_of_the_paper_comes_into_it(monkeypatch):
    row = reproduction.sync_row()
    others = {mode: Published(nan, nan, nan) for mode in Mode if mode is not Mode.SYNC}
    sync = replace(PAPER["paper-64", 64][Mode.SYNC], tokens_per_s=nan)
    monkeypatch.setitem(PAPER, ("paper-64", 64), others | {Mode.SYNC: sync})
    assert reproduction.sync_row() == row


def test_what_is_committed_is_what_the_program_fits():
    found = fit(PAPER_64, reproduction.sync_row())
    for key, value in found.values.items():
        assert value_of(PAPER_64, key) == pytest.approx(value, rel=0.01), key


def test_the_page_has_the_constants_as_they_are():
    assert reproduction.constants_table() in PAGE


def rows_of_page(columns: int) -> list[list[str]]:
    """The rows of the predictions."""
    part = PAGE[PAGE.index("## 16 to 4,096 GPUs") :]
    lines = re.findall(r"^\| (\d+ \| .*) \|$", part, re.MULTILINE)
    rows = [line.split(" | ") for line in lines]
    return [row for row in rows if len(row) == columns]


def simulated(row: list[str]) -> str:
    gpus, mode, split = int(row[0]), Mode(row[1]), row[2]
    preset = replace(PAPER_64, num_devices=gpus, num_steps=reproduction.STEPS)
    rollout = None if split.startswith("all") else int(split.split(" + ")[0])
    return f"{run_mode(preset, mode, 0, rollout).step_s / 60:.2f}"


def test_the_page_has_a_prediction_for_every_mode_at_every_size():
    found = {(int(row[0]), row[1]) for row in rows_of_page(10)}
    sizes = {gpus for gpus, _ in found}
    assert {16, 64, 4096} <= sizes
    every = {(gpus, mode.value) for gpus in sizes for mode in reproduction.MODES}
    assert every - found <= {(4096, "partial")}  # simulated too slowly; the page says so


def test_the_page_shows_what_the_program_gives_for_sync():
    for row in rows_of_page(10):
        if row[:2] == ["64", "sync"]:
            assert simulated(row) == row[3]


@pytest.mark.full
@pytest.mark.parametrize("size", ["16", "256", "4096"])
def test_the_page_shows_what_the_program_gives(size):
    for row in rows_of_page(10):
        if row[0] == size:
            assert simulated(row) == row[3], row
