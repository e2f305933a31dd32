"""The soak: thousands of small random worlds with random faults. `make soak SEEDS=n SEED0=first`.

Every size is drawn small, because small numbers meet the edges (one instance, one slot, K = 0,
groups larger than all slots together) far more often than large ones. Safety first: while faults
happen, no promise may break. Then liveness: no new faults, those that remain become permanent, and
the run must still come to its end. A failing seed is printed with the command that replays it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import replace

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Deadlines, MoveCost, Params
from dora_rl.core.state import State
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import (
    Entry,
    MemoryLog,
    encode_entry,
    encode_snapshot,
    recover_lines,
    replay,
)
from dora_rl.sim.checkers import Checker, PromiseBroken, require
from dora_rl.sim.faults import FaultRates, Faults
from dora_rl.sim.fleet import InstanceSpec
from dora_rl.sim.hardware import (
    H800,
    TINY_100M,
    Efficiency,
    Engine,
    RolloutCost,
    TrainCost,
    Trainer,
)
from dora_rl.sim.world import ControllerCrash, World, WorldSpec
from dora_rl.types import InstanceId, Mode, RequestId, UserError


def random_world(rng: random.Random) -> WorldSpec:
    """A run of a few steps in a random mode on a few instances."""
    mode = rng.choice([*Mode, Mode.MULTI_VERSION, Mode.MULTI_VERSION, Mode.MULTI_VERSION])
    group_size = rng.randint(1, 4)
    params = random_params(rng, mode, group_size)
    lengths_seed = rng.randrange(2**32)
    tail = rng.uniform(0.6, 2.0)
    train = TrainCost(H800, TINY_100M, Efficiency(), 1, 1, Trainer(update_s=rng.uniform(0.1, 10)))

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


def with_pools(spec: WorldSpec, rng: random.Random) -> WorldSpec:
    """With a curriculum, every third time."""
    if rng.random() >= 0.3:
        return spec
    params = replace(
        spec.params,
        pools=rng.choice([2, 4, 10, 1_000]),
        pool_recent=rng.choice([1, 2, 16]),
        pool_share_min=rng.choice([0.05, 0.1, 0.5, 1.0]),
        pool_weights=rng.choice([(), (0.2, 1.0)]),
    )
    return replace(spec, params=params)


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
        fleet.append(
            (f"i{index}", spec, RolloutCost(H800, TINY_100M, engine, Efficiency(), 1, seats))
        )
    return fleet


LIVENESS_S = 50_000.0
REPEATS = ("the learner was lost", "instances in a row were lost", "loaded by no instance")
STOPS_MAX = 100


class CrashingLog(MemoryLog):
    """Keeps encoded lines like the file log, and can kill the controller in mid-turn."""

    def __init__(self, entries_per_segment: int) -> None:
        super().__init__()
        self._per_segment = entries_per_segment
        self._segment: list[bytes] = []
        self.armed: str | None = None  # "torn": the entry is lost; "logged": its actions are

    def append(self, now: float, event: ev.Event, actions: Iterable[act.Action]) -> None:
        armed, self.armed = self.armed, None
        if armed == "torn":
            raise ControllerCrash
        entry = Entry(self.num_entries, now, event, list(actions))
        super().append(now, event, entry.actions)
        self._segment.append(encode_entry(entry))
        if armed == "logged":
            raise ControllerCrash

    def snapshot_due(self) -> bool:
        return len(self._segment) > self._per_segment

    def snapshot(self, now: float, state: State) -> None:
        self._segment = [encode_snapshot(self.num_entries, now, state)]

    def recover(self) -> State:
        found = recover_lines(self._segment)
        assert found is not None and found[1] == self.num_entries
        return found[0]


class Soak:
    """One seed: a world, its faults and its checkers."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(f"soak {seed}")
        spec = random_world(self.rng)
        rates = FaultRates.swarm(self.rng)
        if not spec.params.losses_max:  # older rules know nothing of these
            rates = replace(rates, poison=0.0, kills=0.0, still=0.0, stall_every_s=0.0)
        spec, rates = with_levels(spec, rates, random.Random(f"levels {seed}"))
        fresh = random.Random(f"freshness {seed}").random() < 0.7
        spec = replace(spec, params=replace(spec.params, freshness=fresh))
        spec = with_pools(spec, random.Random(f"pools {seed}"))
        self.faults = Faults(rates, random.Random(f"faults {seed}"))
        self.log = CrashingLog(self.rng.choice([5, 50, 500]))
        self.world = World(spec, self.faults, self.log)
        self.checker = Checker(self.world, self.log, every=self.rng.choice([1, 7]))
        self.checker.is_bad = self.faults.is_bad
        self.calm_s = self.rng.uniform(30, 600)

    def run(self) -> None:
        world, rates = self.world, self.faults.rates
        for mean_s, what in (
            (rates.death_every_s, self._kill_instance),
            (rates.freeze_every_s, lambda: self._disturb("frozen")),
            (rates.slow_every_s, lambda: self._disturb("speed")),
            (rates.stall_every_s, lambda: self._disturb("stalled")),
            (rates.trainer_death_every_s, self._kill_learner),
            (rates.controller_death_every_s, self._kill_controller),
            (rates.host_loss_every_s, lambda: self._kill_controller(with_host=True)),
        ):
            self._every(mean_s, what)
        world.clock.at(self.calm_s, self._calm_down)
        world.start()
        if not self._until_its_end().done:
            return
        self.checker.finish()
        report = audit(self.log.entries)
        require(not report.findings, f"the audit objects: {report.findings[:3]}")
        result = replay(self.log.entries)
        require(result.ok, f"replay differs: {result.difference}")

    def _until_its_end(self) -> act.Stop:
        """A run that stops itself because a fault repeats is resumed by its user."""
        world = self.world
        for _ in range(STOPS_MAX):
            finished = world.run(self.calm_s + LIVENESS_S)
            require(finished, f"liveness: no end {LIVENESS_S:.0f} s after the last fault")
            stop = world.keeper.stop
            assert stop is not None
            if stop.done or "filtered" in stop.reason:
                return stop
            require(any(words in stop.reason for words in REPEATS), f"stopped: {stop.reason}")
            world.resume_stopped(self.log.recover())
        raise PromiseBroken("the run stops itself again and again")

    def _every(self, mean_s: float, what: Callable[[], None]) -> None:
        """Again and again, until it is calm or the run has ended."""

        def happen() -> None:
            if not self.faults.calm and self.world.keeper.stop is None:
                what()
                self._every(mean_s, what)

        if mean_s:
            self.world.clock.after(self.rng.expovariate(1 / mean_s), happen)

    def _victim(self) -> str | None:
        alive = [name for name, inst in self.world.fleet.instances.items() if not inst.frozen]
        return self.rng.choice(alive) if alive else None

    def _kill_instance(self) -> None:
        if (name := self._victim()) is None:
            return
        fleet = self.world.fleet
        fleet.die(name)
        if self.rng.random() < 0.7:  # otherwise only its silence tells
            fleet.tell(name, ev.InstanceLost(name, "process died"))
        if self.rng.random() < 0.8:
            self._rejoins(self.rng.uniform(0.1, 40), lambda: fleet.rejoin(name))

    def _rejoins(self, after_s: float, rejoin: Callable[[], None]) -> None:
        """If there is a controller then; who resumes one starts every worker."""
        world = self.world
        world.clock.after(after_s, lambda: rejoin() if world.loop is not None else None)

    def _disturb(self, what: str) -> None:
        """An instance hangs ("frozen"), decodes nothing any more ("stalled") or has another
        "speed"."""
        if (name := self._victim()) is None:
            return
        instance = self.world.fleet.instances[name]
        instance.advance(self.world.clock.now())
        setattr(instance, what, self.rng.choice([0.1, 0.5, 1.0, 2.0]) if what == "speed" else True)
        self.world.fleet.schedule(instance)

    def _kill_learner(self) -> None:
        learner = self.world.learner
        if not learner.alive:
            return
        learner.die()
        if self.rng.random() < 0.7:
            self.world.post(ev.LearnerLost("process died", incarnation=learner.incarnation))
            self._rejoins(self.rng.uniform(4, 30), learner.rejoin)

    def _kill_controller(self, *, with_host: bool = False) -> None:
        if self.world.loop is None:
            return
        how = "host" if with_host else self.rng.choice(["torn", "logged", "between turns"])
        if how == "host":
            self.world.lose_host()
        elif how == "between turns":
            self.world.kill_controller()
        else:
            self.log.armed = how
        self.world.clock.after(self.rng.uniform(1, 30), self._resume_controller)

    def _resume_controller(self) -> None:
        if self.log.armed is not None:  # no turn happened since; die now
            self.log.armed = None
            self.world.kill_controller()
        if self.world.loop is not None:
            return
        changes: dict[str, int] = {}
        if self.world.spec.params.mode is not Mode.REPLICATION and self.rng.random() < 0.4:
            staleness, batch = self.rng.randint(0, 3), self.rng.randint(1, 6)
            changes = {"max_staleness": staleness, "batch_groups": batch}
        self.world.resume_controller(self.log.recover(), **changes)

    def _calm_down(self) -> None:
        """No new faults; what is broken stays broken, as long as something is left to work with."""
        self.faults.calm = True
        if self.world.loop is None:
            self._resume_controller()
        if not self.world.learner.alive:
            self._rejoins(5.0, self.world.learner.rejoin)
        fleet = self.world.fleet
        if all(inst.frozen for inst in fleet.instances.values()):
            for name in [name for name in fleet.specs if name not in fleet.instances][:1]:
                fleet.rejoin(name)


def with_levels(
    spec: WorldSpec, rates: FaultRates, rng: random.Random
) -> tuple[WorldSpec, FaultRates]:
    """Most worlds commit a version before it is on disk, and may lose their host then."""
    if rng.random() < 0.2:
        return spec, rates
    params = replace(spec.params, durable_behind=1)
    durable_s = rng.choice([0.0, rng.uniform(0, 5), rng.uniform(5, 60)])
    return replace(spec, params=params, durable_s=durable_s), replace(
        rates, host_loss_every_s=rng.uniform(10, 120) if rng.random() < 0.7 else 0.0
    )


# The last: a log that the core itself does not take back.
FAULTS = (
    AssertionError, LookupError, ValueError, AttributeError, TypeError, RuntimeError, UserError,
)  # fmt: skip


def run_seed(seed: int) -> str | None:
    """None if the seed passes, else what went wrong."""
    try:
        Soak(seed).run()
    except FAULTS:
        return traceback.format_exc(limit=-8)
    return None


def _numbered(seed: int) -> tuple[int, str | None]:
    return seed, run_seed(seed)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--seed0", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args(argv)
    seeds = range(args.seed0, args.seed0 + args.seeds)
    num_failed = 0
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        for done, (seed, failure) in enumerate(pool.imap_unordered(_numbered, seeds, 8), start=1):
            if failure is not None:
                num_failed += 1
                print(f"seed {seed} failed; replay: make soak SEEDS=1 SEED0={seed}\n{failure}")
            if done % 500 == 0 or done == args.seeds:
                print(f"{done} seeds, {num_failed} failed", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
