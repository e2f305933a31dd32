"""Every term of the cost model: its units, what it grows with, and what it never falls below."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.data.lengths import LogNormal
from dora_rl.sim.fleet import SimInstance, SimRequest
from dora_rl.sim.hardware import (
    DRAFTS,
    H800,
    NO_DRAFT,
    QWEN25_32B,
    TINY_100M,
    Efficiency,
    Engine,
    RolloutCost,
    TrainCost,
    Trainer,
    largest_part,
)
from dora_rl.sim.presets import KV_FILL, PRESETS, kv_peak, mean_context, slots_of, world_spec
from dora_rl.sim.run import run_mode
from dora_rl.types import Mode, RequestId

ENGINE = Engine(host_s=8e-3, launch_s=5e-6, allreduce_s=15e-6)
COST = RolloutCost(H800, QWEN25_32B, ENGINE, Efficiency(decode_bandwidth=0.7), 4)
LENGTHS = st.lists(st.integers(1, 30_000), min_size=1, max_size=60)


def rollout(**changes: object) -> RolloutCost:
    return replace(COST, **changes)


def train(num_devices: int, **trainer: float) -> TrainCost:
    settings = replace(Trainer(model_parallel=8), **trainer)
    return TrainCost(H800, QWEN25_32B, Efficiency(), num_devices, 16, settings)


# -- decoding --------------------------------------------------------------------------------------


def test_the_floor_is_host_launches_and_two_all_reduces_of_every_layer():
    assert COST.step_base_s() == pytest.approx(8e-3 + 64 * (11 * 5e-6 + 2 * 15e-6))
    alone = rollout(tensor_parallel=1)
    assert alone.step_base_s() == pytest.approx(8e-3 + 64 * 11 * 5e-6)  # nothing to reduce


@pytest.mark.parametrize("name", ["host_s", "launch_s", "allreduce_s", "kernels_per_layer"])
def test_the_floor_rises_with_each_of_its_parts(name):
    more = rollout(engine=replace(ENGINE, **{name: 2 * getattr(ENGINE, name)}))
    assert more.step_base_s() > COST.step_base_s()


def test_more_devices_shorten_the_bytes_and_not_the_floor():
    wide = rollout(tensor_parallel=8)
    assert wide.step_base_s() == COST.step_base_s()
    assert wide.weights_s(1) == pytest.approx(COST.weights_s(1) / 2)
    assert wide.kv_s_per_token() == pytest.approx(COST.kv_s_per_token() / 2)
    # 65.6 GB at 70 % of 4 x 3.35 TB/s, and 262 kB a token.
    assert COST.weights_s(1) == pytest.approx(65.6e9 / (0.7 * 4 * 3.35e12))
    assert COST.kv_s_per_token() == pytest.approx(262_144 / (0.7 * 4 * 3.35e12))


def instance_with(cost: RolloutCost, num: int, context: int) -> SimInstance:
    instance = SimInstance("i", cost, 0.0)
    instance.loaded[0] = None
    for index in range(num):
        request = SimRequest(RequestId(0, index), 0, 0, context, 100)
        instance.add(request)
    return instance


def token_s(cost: RolloutCost, num: int, context: int = 1000) -> float:
    return (instance_with(cost, num, context).next_end_s() or 0.0) / 100


def test_a_lone_request_pays_floor_and_weights_and_hardly_more():
    floor_s = COST.step_base_s() + COST.weights_s(1)
    assert floor_s < token_s(COST, 1) < 1.01 * floor_s


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 400), context=st.integers(1, 20_000), drafts=st.booleans())
def test_a_token_takes_longer_in_a_larger_batch_and_never_less_than_the_floor(num, context, drafts):
    cost = rollout(speculation=drafts)
    assert token_s(cost, num, context) <= token_s(cost, num + 1, context) + 1e-12
    assert token_s(cost, num, context) <= token_s(cost, num, context + 100) + 1e-12
    most = max(cost.tokens_of(draft) for draft in DRAFTS) if drafts else 1.0
    assert token_s(cost, num, context) >= cost.step_base_s() / most


# -- speculation -----------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(num=st.integers(1, 1000), context=st.integers(1, 20_000), share=st.floats(0, 1.1))
def test_speculation_is_never_slower_in_the_model_and_brings_no_more_than_its_tokens(
    num, context, share
):
    plain = rollout(engine=replace(ENGINE, draft_share=share))
    ratio = token_s(plain, num, context) / token_s(replace(plain, speculation=True), num, context)
    assert 1 - 1e-9 <= ratio <= 1 + share * (max(d.tokens for d in DRAFTS) - 1) + 1e-9


def test_drafts_get_shorter_as_the_batch_fills_the_device():
    gains = [
        token_s(COST, num, 200) / token_s(rollout(speculation=True), num, 200)
        for num in (1, 64, 512, 2048)
    ]
    assert gains[0] > 1.8 and gains == sorted(gains, reverse=True)
    # Where rows cost as much as they bring, there are no drafts.
    dear = replace(ENGINE, draft_row_s=1e-3)
    assert token_s(rollout(engine=dear, speculation=True), 512) == token_s(COST, 512)


def test_speculation_is_off_unless_it_is_asked_for_and_then_faster_with_the_same_tokens():
    preset = replace(PRESETS["small"], num_steps=6)
    assert not preset.speculation and COST.drafts() == (NO_DRAFT,)
    plain = run_mode(preset, Mode.SYNC, 0)
    drafted = run_mode(replace(preset, speculation=True), Mode.SYNC, 0)
    assert drafted.step_s < 0.9 * plain.step_s
    tokens = [result.tokens_per_s * result.step_s for result in (plain, drafted)]
    assert tokens[0] == pytest.approx(tokens[1])


# -- training --------------------------------------------------------------------------------------


def test_work_of_a_sample_is_eight_per_parameter_and_token_and_quadratic_attention():
    short, long = QWEN25_32B.train_flops(1), QWEN25_32B.train_flops(30_720)
    assert short == pytest.approx(8 * 32.8e9, rel=1e-4)
    assert long / 30_720 / short == pytest.approx(1.31, abs=0.01)
    assert TINY_100M.train_flops(1000) == 8e11  # no width is known: no attention


def test_samples_are_shared_by_all_devices():
    lengths = [100, 2000, 30_000]
    assert train(64).samples_s(lengths) == pytest.approx(train(128).samples_s(lengths) * 2)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 600), st.floats(0, 1))
def test_an_update_takes_as_long_as_its_longest_sample_on_one_rank(lengths, devices, balanced):
    cost = train(devices, balanced=balanced)
    took_s = cost.samples_s(lengths) + cost.imbalance_s(lengths)
    longest_s = cost.samples_s([max(lengths)]) * cost.num_ranks  # a rank has a share of the devices
    assert took_s >= longest_s * (1 - 1e-9)
    assert cost.imbalance_s(lengths) >= -1e-9


def test_ranks_with_equal_work_do_not_wait_and_one_rank_never_does():
    assert train(64).imbalance_s([500] * 64) == pytest.approx(0, abs=1e-9)
    assert train(8).imbalance_s([1, 7, 30_000]) == pytest.approx(0, abs=1e-9)


@settings(max_examples=100, deadline=None)
@given(LENGTHS, st.integers(1, 40))
def test_the_largest_part_is_within_one_sample_of_the_mean(lengths, parts):
    found = largest_part(lengths, parts)
    least = max(max(lengths), sum(lengths) / parts)
    assert least <= found <= sum(lengths) / parts + max(lengths)


def test_balanced_ranks_wait_less():
    draw = LogNormal.with_mean(2400, 1.3, 30_720).draw(np.random.default_rng(1).random(512))
    lengths = [int(n) for n in draw]
    waits = [train(64, balanced=share).imbalance_s(lengths) for share in (0.0, 0.5, 1.0)]
    assert waits[0] > waits[1] > waits[2] >= 0


def test_512_samples_cannot_keep_4096_devices_busy():
    draw = LogNormal.with_mean(2400, 1.3, 30_720).draw(np.random.default_rng(1).random(512))
    lengths = [int(n) for n in draw]

    def busy(devices: int) -> float:
        cost = train(devices, update_s=0.0)
        needed_s = cost.samples_s(lengths)
        return needed_s / (needed_s + cost.imbalance_s(lengths))

    shares = [busy(devices) for devices in (64, 256, 1024, 4096)]
    assert shares == sorted(shares, reverse=True) and shares[0] > 0.75 and shares[-1] < 0.1


def test_reduction_is_nothing_for_one_rank_and_has_a_limit():
    times = [train(devices).reduce_s() for devices in (8, 16, 64, 4096)]
    assert times[0] == 0 and times == sorted(times)
    # 6 bytes for each of 32.8 B / 8 parameters over 75 % of 50 GB/s.
    assert times[-1] == pytest.approx(6 * 32.8e9 / 8 / (0.75 * 50e9), rel=0.01)
    assert train(64, update_s=3.0).update_s() == pytest.approx(3.0 + train(64).reduce_s())


def test_publication_and_loading_fall_to_their_fixed_part():
    times = [train(devices, publish_s=1.0).publish_s() for devices in (4, 64, 4096)]
    assert times == sorted(times, reverse=True) and times[-1] == pytest.approx(1.0, abs=1e-3)
    link = 0.75 * 50e9 * 4
    assert COST.load_s() == pytest.approx(2.0 + 65.6e9 / link)
    assert COST.move_s(1000) == pytest.approx(0.02 + 262_144_000 / link)


# -- slots -----------------------------------------------------------------------------------------


def decoded_by_hand(lengths: list[int], prompt: int, slots: int) -> int:
    waiting, running, peak = list(lengths), list[tuple[int, int]](), 0
    while waiting or running:
        while waiting and len(running) < slots:
            running.append((0, waiting.pop(0)))
        running = [(done + 1, total) for done, total in running]
        peak = max(peak, sum(prompt + done for done, _ in running))
        running = [(done, total) for done, total in running if done < total]
    return peak


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.integers(1, 9), st.integers(1, 25))
def test_the_peak_of_the_cache_is_that_of_decoding_step_by_step(lengths, prompt, slots):
    expected = decoded_by_hand(lengths, prompt, slots)
    assert kv_peak(np.array(lengths), prompt, slots) == expected


def test_a_batch_that_starts_together_may_have_more_requests_than_a_stream():
    preset = PRESETS["paper-64"]
    _, spec, cost = world_spec(preset, Mode.SYNC, 0).instances[0]
    stream = slots_of(preset, cost)
    assert stream * mean_context(preset) <= KV_FILL * cost.kv_tokens_max()
    assert stream < slots_of(preset, cost, 1000) <= preset.engine.requests_max
    # The longer the queue, the more it is a stream.
    queues = [slots_of(preset, cost, num) for num in (600, 1200, 5000)]
    assert queues == sorted(queues, reverse=True) and queues[-1] >= stream
    assert spec.slots_max == 512 == 8192 // 16  # all of sync at 64 GPUs starts at once
