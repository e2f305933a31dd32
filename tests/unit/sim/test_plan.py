"""The split search and the planner."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.sim.compare import (
    Flow,
    Job,
    balanced_split,
    best_of,
    conduct,
    nearest_to,
    search_split,
    splits_of,
)
from dora_rl.sim.plan import Candidate, Change, Knobs, _Search, consequences, explain, plan
from dora_rl.sim.presets import PRESETS
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode
from tests.unit.sim.sim_results import made_result

SMALL = PRESETS["small"]
PAPER_64 = PRESETS["paper-64"]


def search(
    rates: list[float], shares: list[float], share: float | None, guess: int = 0
) -> dict[int, ModeResult]:
    """Drive the search over made-up results; split n has rates[n] and shares[n]."""
    flow = search_split(
        range(len(rates)), guess, lambda n: Job(SMALL, Mode.MULTI_VERSION, 0, n), share
    )
    jobs = next(flow)
    while True:
        places = [job.rollout_devices or 0 for job in jobs]
        results = [made_result(tokens_per_s=rates[n], rollout_only_share=shares[n]) for n in places]
        try:
            jobs = flow.send(results)
        except StopIteration as stop:
            return stop.value


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_search_finds_peak_and_share(data):
    count = data.draw(st.integers(1, 300))
    peak = data.draw(st.integers(0, count - 1))
    cross = data.draw(st.integers(0, count - 1))
    rates = [1000.0 - abs(n - peak) for n in range(count)]
    shares = [max(0.0, 0.5 + (cross - n) / 1000) for n in range(count)]
    guess = data.draw(st.integers(0, count - 1))
    tried = search(rates, shares, 0.5, guess)
    assert best_of(tried) == [peak]
    assert nearest_to(tried, 0.5) == [cross]
    assert len(tried) <= 5 + 6 * count.bit_length()


def test_search_without_a_share_tries_fewer():
    rates = [100.0 - abs(n - 20) for n in range(63)]
    shares = [1 - n / 63 for n in range(63)]
    without, with_share = search(rates, shares, None), search(rates, shares, 0.9)
    assert best_of(without) == [20] and len(without) < len(with_share) < 25


def test_the_first_guess_is_near_the_best_split():
    assert 24 <= balanced_split(PAPER_64) <= 36  # 28 is the best in simulation
    tried = search([100.0 - abs(n - 20) for n in range(63)], [0.5] * 63, None, guess=19)
    assert best_of(tried) == [20] and len(tried) <= 10


def test_search_reaches_the_ends():
    rising = [float(n) for n in range(15)]
    assert best_of(search(rising, [0.9] * 15, None)) == [14]
    assert best_of(search(rising[::-1], [0.9] * 15, None)) == [0]
    assert nearest_to(search(rising, [0.9 - n / 100 for n in range(15)], 0.1), 0.1) == [14]


def test_splits_leave_room_for_both_sides():
    assert splits_of(PAPER_64) == list(range(4, 61, 4))


def test_large_fleets_are_searched_in_larger_steps():
    splits = splits_of(PRESETS["moe-agentic"])
    assert 20 <= len(splits) <= 32 and all(split % 16 == 0 for split in splits)
    assert splits[0] < 200 and splits[-1] > 3900 and splits[-1] <= 4096 - 16


def test_every_setting_is_measured_after_its_bound_binds():
    planner = _Search(PAPER_64, 0)
    for staleness in (1, 2, 3):
        preset = planner.job(Knobs(28, staleness, 1.5)).preset
        assert preset.warmup_steps > staleness
        assert preset.num_steps - preset.max_staleness > preset.warmup_steps


def test_same_job_is_performed_once():
    def flow() -> Flow[list[ModeResult]]:
        job = Job(replace(SMALL, num_steps=4), Mode.SYNC, 0)
        first = yield [job, job]
        second = yield [job]
        return [*first, *second]

    seen: list[str] = []
    returned = conduct({"a": flow(), "b": flow()}, 1, lambda name, job, result: seen.append(name))
    assert seen == ["a"]
    assert returned["a"] == returned["b"] and len(returned["a"]) == 3


def test_plan_is_as_fast_as_anything_it_tried_and_no_staler_than_needed():
    result = plan(SMALL)
    fastest = max(candidate.result.tokens_per_s for candidate in result.top)
    assert result.best.result.tokens_per_s >= 0.99 * fastest
    assert result.top[0] == result.best
    whats = [change.what for change in result.changes]
    assert any(what.startswith("Split") for what in whats)
    assert any(what.startswith("K =") for what in whats)
    assert any(what.endswith("in flight") for what in whats)
    assert {"Freshness on", "Speculation on"} < set(whats)
    assert result.bottleneck in ("trainer", "rollout", "kv", "admission")
    assert len(result.reasons) == 2 + len(result.changes)
    document = result.as_json()
    assert document["best"]["split"]["rollout"] == result.best.knobs.rollout_devices
    assert len(document["top"]) == len(result.top)


def test_freshness_and_speculation_are_what_the_preset_says_and_their_opposite_is_compared():
    preset = replace(SMALL, freshness=True, num_steps=12)
    result = plan(preset)
    assert result.best.knobs.freshness and not result.best.knobs.speculation
    changes = {change.what: change for change in result.changes}
    assert changes["Freshness off"].candidate.knobs.freshness is False
    drafted = changes["Speculation on"].candidate  # the learner is the bottleneck here
    assert drafted.result.instance_idle_ratio > result.best.result.instance_idle_ratio
    assert result.as_json()["changes"][-1]["speculation"] is True


def test_equal_throughput_prefers_less_staleness():
    planner = _Search(SMALL, 0)
    lean, stale = Knobs(4, 1, 1.0), Knobs(4, 3, 2.0)
    planner.tried = {lean: made_result(tokens_per_s=995), stale: made_result(tokens_per_s=1000)}
    assert planner._modest([stale, lean]) == lean
    planner.tried[lean] = made_result(tokens_per_s=900)
    assert planner._modest([stale, lean]) == stale


def candidate(**figures: Any) -> Candidate:
    return Candidate(Knobs(4, 2, 1.5), made_result(**figures), 24, 0.4)


def test_the_bottleneck_is_who_is_busy():
    assert explain(candidate(trainer_idle_ratio=0.02))[0] == "trainer"
    assert explain(candidate(slot_idle_ratio=0.05))[0] == "kv"
    assert explain(candidate(instance_idle_ratio=0.05))[0] == "rollout"
    assert explain(candidate(instance_idle_ratio=0.4))[0] == "admission"


def test_consequences_name_gain_and_staleness():
    best = candidate()
    better = Change("K = 3", candidate(staleness_mean=0.9), 0.05)
    same = Change("K = 4", candidate(), 0.001)
    lines = consequences(best, [better, same])
    assert "K = 3: +5.0% tokens/s, staleness +0.40" in lines[1]
    assert "K = 4: no gain" in lines[2]
