"""The soak: thousands of small random worlds with random faults. `make soak SEEDS=n SEED0=first`.

Safety first: while faults happen, no promise may break. Then liveness: no new faults, those that
remain become permanent, and the run must still come to its end. A failing seed is printed with
the command that replays it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import traceback
from collections.abc import Iterable
from dataclasses import replace

from dora_rl.core import events as ev
from dora_rl.core.actions import Action, Stop
from dora_rl.core.events import Event
from dora_rl.core.state import State
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import (
    Entry,
    MemoryLog,
    encode_entry,
    encode_snapshot,
    recover_lines,
)
from dora_rl.observe.replay import replay
from dora_rl.sim.checkers import Checker, PromiseBroken, require
from dora_rl.sim.faults import FaultRates, RandomFaults
from dora_rl.sim.scenarios import random_world
from dora_rl.sim.world import ControllerCrash, World, WorldSpec
from dora_rl.types import Mode

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

    def append(self, now: float, event: Event, actions: Iterable[Action]) -> None:
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
        self.faults = RandomFaults(rates, random.Random(f"faults {seed}"))
        self.log = CrashingLog(self.rng.choice([5, 50, 500]))
        self.world = World(spec, self.faults, self.log)
        self.checker = Checker(self.world, self.log, every=self.rng.choice([1, 7]))
        self.checker.is_bad = self.faults.is_bad
        self.calm_s = self.rng.uniform(30, 600)

    def run(self) -> None:
        world, rates = self.world, self.faults.rates
        self._every(rates.death_every_s, self._kill_instance)
        self._every(rates.freeze_every_s, self._freeze_instance)
        self._every(rates.slow_every_s, self._slow_instance)
        self._every(rates.stall_every_s, self._stall_instance)
        self._every(rates.trainer_death_every_s, self._kill_trainer)
        self._every(rates.controller_death_every_s, self._kill_controller)
        self._every(rates.host_loss_every_s, self._lose_host)
        world.clock.at(self.calm_s, self._calm_down)
        world.start()
        if not self._until_its_end().done:
            return
        self.checker.finish()
        report = audit(self.log.entries)
        require(not report.findings, f"the audit objects: {report.findings[:3]}")
        result = replay(self.log.entries)
        require(result.ok, f"replay differs: {result.difference}")

    def _until_its_end(self) -> Stop:
        """A run that stops itself because a fault repeats is resumed by its user."""
        world = self.world
        for _ in range(STOPS_MAX):
            finished = world.run(self.calm_s + LIVENESS_S)
            require(finished, f"liveness: no end {LIVENESS_S:.0f} s after the last fault")
            stop = world.keeper.stop
            assert stop is not None
            if stop.done or "filtered" in stop.reason:
                return stop
            repeats = any(words in stop.reason for words in REPEATS)
            require(repeats, f"stopped: {stop.reason}")
            world.resume_stopped(self.log.recover())
        raise PromiseBroken("the run stops itself again and again")

    def _every(self, mean_s: float, what: object) -> None:
        if mean_s:
            assert callable(what)
            self.world.clock.after(
                self.rng.expovariate(1 / mean_s), lambda: self._again(mean_s, what)
            )

    def _again(self, mean_s: float, what: object) -> None:
        if self.faults.calm or self.world.keeper.stop is not None:
            return
        assert callable(what)
        what()
        self._every(mean_s, what)

    def _victim(self) -> str | None:
        alive = [name for name, inst in self.world.fleet.instances.items() if not inst.frozen]
        return self.rng.choice(alive) if alive else None

    def _kill_instance(self) -> None:
        name = self._victim()
        if name is None:
            return
        fleet = self.world.fleet
        fleet.die(name)
        if self.rng.random() < 0.7:  # otherwise only its silence tells
            fleet.tell(name, ev.InstanceLost(name, "process died"))
        spec, cost = fleet.specs[name]
        if self.rng.random() < 0.8:
            delay_s = self.rng.uniform(0.1, 40)
            self.world.clock.after(delay_s, lambda: self._rejoin(name, spec, cost))

    def _rejoin(self, name: str, spec: object, cost: object) -> None:
        del spec, cost
        fleet = self.world.fleet
        if name not in fleet.instances and self.world.loop is not None:
            fleet.join(name, *fleet.specs[name])

    def _freeze_instance(self) -> None:
        name = self._victim()
        if name is not None:
            instance = self.world.fleet.instances[name]
            instance.advance(self.world.clock.now())
            instance.frozen = True
            instance.turn += 1

    def _slow_instance(self) -> None:
        name = self._victim()
        if name is not None:
            instance = self.world.fleet.instances[name]
            instance.advance(self.world.clock.now())
            instance.speed = self.rng.choice([0.1, 0.5, 1.0, 2.0])
            self.world.fleet.schedule(instance)

    def _stall_instance(self) -> None:
        name = self._victim()
        if name is not None:
            instance = self.world.fleet.instances[name]
            instance.advance(self.world.clock.now())
            instance.stalled = True
            self.world.fleet.schedule(instance)

    def _kill_trainer(self) -> None:
        learner = self.world.learner
        if not learner.alive:
            return
        learner.die()
        if self.rng.random() < 0.7:
            self.world.post(ev.TrainerLost("process died", incarnation=learner.incarnation))
            self.world.clock.after(self.rng.uniform(4, 30), self._trainer_rejoins)

    def _trainer_rejoins(self) -> None:
        if not self.world.learner.alive and self.world.loop is not None:
            self.world.learner.join()

    def _kill_controller(self) -> None:
        if self.world.loop is None:
            return
        how = self.rng.choice(["torn", "logged", "between turns"])
        if how == "between turns":
            self.world.kill_controller()
        else:
            self.log.armed = how
        self.world.clock.after(self.rng.uniform(1, 30), self._resume_controller)

    def _lose_host(self) -> None:
        if self.world.loop is None:
            return
        self.world.lose_host()
        self.world.clock.after(self.rng.uniform(1, 30), self._resume_controller)

    def _resume_controller(self) -> None:
        if self.log.armed is not None:  # no turn happened since; die now
            self.log.armed = None
            self.world.kill_controller()
        if self.world.loop is not None:
            return
        changes: dict[str, int] = {}
        if self.world.spec.params.mode is not Mode.REPLICATION and self.rng.random() < 0.4:
            changes = {
                "max_staleness": self.rng.randint(0, 3),
                "batch_groups": self.rng.randint(1, 6),
            }
        self.world.resume_controller(self.log.recover(), **changes)

    def _calm_down(self) -> None:
        """No new faults; what is broken stays broken, as long as something is left to work with."""
        self.faults.calm = True
        if self.world.loop is None:
            self._resume_controller()
        if not self.world.learner.alive:
            self.world.clock.after(5.0, self._trainer_rejoins)
        fleet = self.world.fleet
        if all(inst.frozen for inst in fleet.instances.values()):
            for name in fleet.specs:
                if name not in fleet.instances:
                    fleet.join(name, *fleet.specs[name])
                    break


def with_levels(
    spec: WorldSpec, rates: FaultRates, rng: random.Random
) -> tuple[WorldSpec, FaultRates]:
    """Most worlds commit a version before it is on disk, and may lose their host then."""
    if rng.random() < 0.2:
        return spec, rates
    params = replace(spec.params, durable_behind=1)
    durable_s = rng.choice([0.0, rng.uniform(0, 5), rng.uniform(5, 60)])
    loss_s = rng.uniform(10, 120) if rng.random() < 0.7 else 0.0
    return replace(spec, params=params, durable_s=durable_s), replace(
        rates, host_loss_every_s=loss_s
    )


def run_seed(seed: int) -> str | None:
    """None if the seed passes, else what went wrong."""
    try:
        Soak(seed).run()
    except AssertionError:
        return traceback.format_exc(limit=-6)
    except (KeyError, ValueError, IndexError, AttributeError, TypeError, RuntimeError):
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
