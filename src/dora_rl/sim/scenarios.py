"""Small random worlds for the soak: one seed, one world.

Every size is drawn small, because small numbers meet the edges (one instance, one slot, K = 0,
groups larger than all slots together) far more often than large ones.
"""

from __future__ import annotations

import random

from dora_rl.core.params import Deadlines, MoveCost, Params
from dora_rl.sim.fleet import InstanceSpec
from dora_rl.sim.hardware import H800, TINY_100M, Efficiency, Engine, RolloutCost, TrainCost
from dora_rl.sim.world import WorldSpec
from dora_rl.types import InstanceId, Mode, RequestId


def random_world(rng: random.Random) -> WorldSpec:
    """A run of a few steps in a random mode on a few instances."""
    mode = rng.choice([*Mode, Mode.MULTI_VERSION, Mode.MULTI_VERSION, Mode.MULTI_VERSION])
    group_size = rng.randint(1, 4)
    params = random_params(rng, mode, group_size)
    lengths_seed = rng.randrange(2**32)
    tail = rng.uniform(0.6, 2.0)
    train = TrainCost(H800, TINY_100M, Efficiency(), 1, 1, update_overhead_s=rng.uniform(0.1, 10))

    def task(prompt: int, sample: int) -> tuple[int, int]:
        draw = random.Random(f"{lengths_seed}/{prompt}/{sample}")
        return draw.randint(4, 64), 1 + min(20_000, int(draw.lognormvariate(5.5, tail)))

    def reward_of(request: RequestId, prompt: int) -> float:
        return float((prompt * 7 + request.sample * 3 + lengths_seed) % 3)

    def latency_of(request: RequestId, prompt: int) -> float:
        return random.Random(f"{lengths_seed}:{prompt}:{request.sample}").expovariate(2.0)

    return WorldSpec(
        params=params,
        instances=tuple(random_fleet(rng)),
        train=train,
        task=task,
        reward_of=reward_of,
        latency_of=latency_of,
        report_s=rng.uniform(0.5, 4.0),
        tick_s=rng.uniform(0.5, 3.0),
        colocated_s=rng.uniform(0.0, 2.0),
    )


def random_params(rng: random.Random, mode: Mode, group_size: int) -> Params:
    batch = rng.randint(1, 6)
    attempts_max = rng.choice([4, 6, 10])
    rules = rng.random() < 0.85  # else those of older logs
    return Params(
        mode=mode,
        max_staleness=rng.randint(0, 3),
        batch_groups=batch,
        group_size=group_size,
        num_steps=rng.randint(3, 7),
        inflight_groups=rng.randint(1, 4 * batch),
        ready_max=rng.choice([1, 3, 1_000]),
        samples_min=rng.choice([0, 0, 1]),
        streaming=rng.random() < 0.7,
        kv_moves=rng.random() < 0.8,
        repartition=rng.random() < 0.8,
        level_running=rng.random() < 0.3,
        level_slack=rng.choice([0.0, 0.3]),
        filter_equal=group_size > 1 and rng.random() < 0.3,
        filtered_max=60,  # such a world has no other end: its rewards are equal
        failed_share_max=1.0,
        attempts_max=attempts_max,
        losses_max=rng.choice([1, 2]) if rules else 0,
        group_failures_max=attempts_max if rules else 0,
        trainer_losses_max=rng.choice([0, 3]) if rules else 0,
        instance_losses_max=rng.choice([0, attempts_max + 4]) if rules else 0,
        load_failures_max=rng.choice([0, 4]) if rules else 0,
        oversample=rng.choice([1.0, 1.5, 2.0]),
        fill_older_max=rng.choice([0, 0, 2]),
        rebalance_period_s=rng.uniform(2, 20),
        rebalance_min_s=rng.choice([0.0, 1.0, 3.0]),
        event_actions_max=rng.choice([2, 10, 2_000, 2_000]),
        cost=MoveCost(1.2e4, rng.choice([1e6, 1e9]), 0.01, 2e4),
        deadlines=Deadlines(
            report_s=rng.uniform(8, 20),
            load_s=30,
            move_s=20,
            score_s=10,
            trainer_s=120,
            progress_s=rng.uniform(20, 40) if rules else 0.0,
        ),
    )


def random_fleet(rng: random.Random) -> list[tuple[InstanceId, InstanceSpec, RolloutCost]]:
    resident = rng.choice([1, 1, 2, 2, 4])
    mixed = rng.random() < 0.2
    elastic_share = rng.choice([0.0, 0.0, 0.5, 0.8, 1.0])
    fleet: list[tuple[InstanceId, InstanceSpec, RolloutCost]] = []
    engine = Engine(load_overhead_s=rng.uniform(0.1, 4.0), sleep_wake_s=rng.uniform(0, 1))
    for index in range(rng.randint(1, 6)):
        seats = rng.randint(1, 3) if mixed else resident
        kv = rng.choice([0, 2_000, 20_000])
        spec = InstanceSpec(rng.randint(1, 8), seats, kv, rng.random() < elastic_share)
        cost = RolloutCost(H800, TINY_100M, engine, Efficiency(), 1, seats)
        fleet.append((f"i{index}", spec, cost))
    return fleet
