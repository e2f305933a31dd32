"""Tables and JSON of a comparison."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from rich.console import Console

from dora_rl.sim.compare import CompareOptions, Comparison, Outcome, compare
from dora_rl.sim.presets import PRESETS, scaled
from dora_rl.sim.report import (
    PAPER,
    amount,
    as_json,
    duration,
    percent,
    promise_table,
    published,
    published_shares,
    rows_of,
    speed_table,
)
from dora_rl.types import Mode, UserError
from tests.unit.sim.sim_results import made_result

KEYS = {
    "step_s",
    "rollout_only_share",
    "tokens_per_s",
    "instance_idle_ratio",
    "trainer_idle_ratio",
    "staleness_mean",
    "staleness_max",
    "mixed_version_frac",
    "discarded_tokens",
    "migrations",
    "kv_bytes_moved",
    "overhead_share",
    "length_bias",
    "split",
}
PAPER_64 = PRESETS["paper-64"]
SMALL = PRESETS["small"]


def text_of(*tables: object) -> str:
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    for table in tables:
        console.print(table)
    return console.export_text()


def paper_comparison() -> Comparison:
    matched = made_result(rollout=28, step_s=880.2, split={"rollout": 28, "train": 36})
    best = made_result(rollout=32, step_s=800.0, split={"rollout": 32, "train": 32})
    sync = made_result("sync", step_s=1374.6, split={"rollout": 64, "train": 64})
    outcomes = {
        Mode.SYNC: Outcome(sync),
        Mode.MULTI_VERSION: Outcome(matched, True, best, (matched, best)),
    }
    return Comparison(PAPER_64, 7, outcomes)


def test_json_has_the_promised_shape_for_every_mode():
    comparison = compare(replace(SMALL, num_steps=5), list(Mode), CompareOptions(seed=3))
    document = json.loads(json.dumps(as_json(comparison)))
    assert (document["preset"], document["gpus"], document["seed"]) == ("small", 8, 3)
    assert list(document["modes"]) == [mode.value for mode in Mode]
    for entry in document["modes"].values():
        assert set(entry) >= KEYS
    multi = document["modes"]["multi_version"]
    assert set(multi["best"]) >= KEYS and multi["matched"] is False
    assert multi["split"] == multi["best"]["split"]  # nothing published: the best is shown
    assert "best" not in document["modes"]["sync"]


def test_matched_split_is_the_main_entry_and_the_best_stands_beside_it():
    entry = as_json(paper_comparison())["modes"]["multi_version"]
    assert entry["matched"] is True
    assert entry["split"]["rollout"] == 28 and entry["best"]["split"]["rollout"] == 32
    assert entry["paper"]["step_difference"] == pytest.approx(0, abs=1e-9)
    text = text_of(speed_table(paper_comparison()))
    assert "28 + 36" in text and "32 + 32" in text
    assert "matched" in text and "best" in text and "14.67 +0%" in text


def test_the_search_comes_as_near_to_a_share_as_any_split_does():
    shares = {Mode.MULTI_VERSION: 0.2}
    options = CompareOptions(shares=shares)
    outcome = compare(SMALL, [Mode.MULTI_VERSION], options).outcomes[Mode.MULTI_VERSION]
    every = [compare(SMALL, [Mode.MULTI_VERSION], CompareOptions(split=n)) for n in range(1, 8)]
    distances = [
        abs(one.outcomes[Mode.MULTI_VERSION].main.rollout_only_share - 0.2) for one in every
    ]
    assert abs(outcome.main.rollout_only_share - 0.2) == pytest.approx(min(distances))
    assert outcome.best is not None
    rates = [one.outcomes[Mode.MULTI_VERSION].main.tokens_per_s for one in every]
    assert outcome.best.tokens_per_s == pytest.approx(max(rates))


def test_published_figures_hold_for_their_testbed_only():
    assert published(PAPER_64) == PAPER["paper-64", 64]
    assert published(replace(PAPER_64, max_staleness=1, kv_moves=False))
    assert not published(scaled(PAPER_64, 128, 1.0))
    assert not published(scaled(PAPER_64, None, 2.0))
    assert not published(replace(PAPER_64, prompt_tokens=2048))
    assert not published(SMALL)


def test_only_modes_without_a_published_split_are_matched():
    assert published_shares(PAPER_64) == {Mode.ONE_STEP_OFF: 0.33, Mode.MULTI_VERSION: 0.12}


def test_one_row_when_the_matched_split_is_the_best():
    only = made_result()
    rows = rows_of(Comparison(SMALL, 0, {Mode.MULTI_VERSION: Outcome(only, True, only)}))
    assert [row.kind for row in rows] == ["both"]


def test_tables_name_what_a_mode_gives_up():
    result = made_result("replication", discarded_tokens=81_000, length_bias=0.76)
    text = text_of(promise_table(Comparison(SMALL, 0, {Mode.REPLICATION: Outcome(result)})))
    assert "81.0 k" in text and "0.76" in text


def test_a_log_is_of_one_mode_and_a_split_needs_a_mode_that_splits(tmp_path):
    with pytest.raises(UserError, match="one --mode"):
        compare(SMALL, [Mode.SYNC, Mode.PARTIAL], CompareOptions(log=tmp_path))
    with pytest.raises(UserError, match="--split"):
        compare(SMALL, [Mode.SYNC], CompareOptions(split=4))


def test_units():
    assert duration(880) == "14.67 min" and duration(9.94) == "9.9 s"
    assert percent(0.123) == "12%" and percent(0.034) == "3.4%" and percent(0) == "0%"
    assert amount(950) == "950 " and amount(2.5e12) == "2.5 T"
