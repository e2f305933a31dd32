"""How fast the core decides: events per second on one core, for few and for many instances.

    python benchmarks/core_events.py --json core_events.json

A multi-version run is recorded in the simulator and its events are fed to the core again. Timed is
the steady state, rebalances included: from the commit of step K + 1 to that of the last step but K.
(While a run fills up nearly all events are of one version and cheap: a run of three steps alone
looks twice as fast.) The work per instance is the same in every row. Garbage is collected as in a
real run; the recording itself is kept out of the collector's way. The slowest event is the one of
the whole run that took most processor time in the better of two replays.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from dora_rl.controller.watchdog import collect_no_more_in_full
from dora_rl.core import events as ev
from dora_rl.core.step import initial, step
from dora_rl.data.lengths import LogNormal
from dora_rl.observe.eventlog import Entry, MemoryLog
from dora_rl.sim.presets import preset_named, world_spec
from dora_rl.sim.world import World
from dora_rl.types import Mode

REQUESTS_PER_INSTANCE = 4
GROUP_SIZE = 16
STEPS_MIN = 8


def record(num_instances: int, num_steps: int) -> tuple[list[Entry], Any, float, float]:
    """A simulated run on so many instances, its params, wall seconds per step, virtual step."""
    groups = max(4, num_instances * REQUESTS_PER_INSTANCE // GROUP_SIZE)
    preset = replace(
        preset_named("small"),
        num_devices=num_instances + max(1, num_instances // 2),
        batch_groups=groups,
        group_size=GROUP_SIZE,
        updates_per_step=1,
        lengths=LogNormal.with_mean(1500, 1.2, 16_384),
        num_steps=num_steps,
        warmup_steps=1,
        report_s=30.0,
        inflight_share=2.0,
    )
    spec = world_spec(preset, Mode.MULTI_VERSION, 0, num_instances)
    few_slots = tuple((name, replace(s, slots_max=8), cost) for name, s, cost in spec.instances)
    log = MemoryLog()
    world = World(replace(spec, instances=few_slots), log=log)
    began = time.perf_counter()
    world.start()
    assert world.run(1e9)
    return log.entries, spec.params, (time.perf_counter() - began) / num_steps, groups * GROUP_SIZE


def steady(entries: list[Entry], max_staleness: int, num_steps: int) -> tuple[int, int]:
    """Places of the entries between start-up and drain: [first, last)."""
    commits = {
        entry.event.step: place + 1
        for place, entry in enumerate(entries)
        if isinstance(entry.event, ev.StepCommitted)
    }
    return commits[max_staleness], commits[num_steps - 1 - max_staleness]


def measure(entries: list[Entry], params: Any, first: int, last: int) -> tuple[float, float]:
    """Seconds of processor time to feed the entries to the core: the steady state, and all."""
    state = initial(params)
    gc.collect()
    gc.freeze()
    clock: list[float] = []
    for part in (entries[:first], entries[first:last], entries[last:]):
        began = time.process_time()
        for entry in part:
            step(state, entry.event, entry.now)
        clock.append(time.process_time() - began)
    gc.unfreeze()
    return clock[1], sum(clock)


def slowest(entries: list[Entry], params: Any) -> tuple[float, str]:
    """Seconds of processor time and kind of the slowest event; each counts its better replay."""
    best = array("d", [1e9]) * len(entries)
    for _ in range(2):
        state = initial(params)
        gc.collect()
        gc.freeze()
        for place, entry in enumerate(entries):
            began = time.process_time()
            step(state, entry.event, entry.now)
            best[place] = min(best[place], time.process_time() - began)
        gc.unfreeze()
    place = max(range(len(entries)), key=best.__getitem__)
    return best[place], type(entries[place].event).__name__


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, nargs="+", default=[64, 1024, 4096, 16_384])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    collect_no_more_in_full()  # as the controller of a run
    rows: list[dict[str, Any]] = []
    print(
        f"{'instances':>9} {'events':>9} {'events/s':>9} {'us/event':>9} {'whole run':>9} "
        f"{'sim s/step':>10} {'slowest ms':>10}"
    )
    for num_instances in args.instances:
        num_steps = max(STEPS_MIN, min(200, 16_384 // num_instances * 2))
        entries, params, step_wall_s, trajectories = record(num_instances, num_steps)
        first, last = steady(entries, params.max_staleness, num_steps)
        runs = [measure(entries, params, first, last) for _ in range(2)]
        took, whole = (min(times) for times in zip(*runs, strict=True))
        slowest_s, slowest_event = slowest(entries, params)
        row = {
            "instances": num_instances,
            "steps": num_steps,
            "events": last - first,
            "events_per_s": (last - first) / took,
            "us_per_event": 1e6 * took / (last - first),
            "events_per_s_whole": len(entries) / whole,
            "simulated_step_wall_s": step_wall_s,
            "trajectories_per_step": trajectories,
            "slowest_event_s": slowest_s,
            "slowest_event": slowest_event,
        }
        rows.append(row)
        print(
            f"{num_instances:9d} {row['events']:9d} {row['events_per_s']:9.0f} "
            f"{row['us_per_event']:9.1f} {row['events_per_s_whole']:9.0f} {step_wall_s:10.2f} "
            f"{1e3 * slowest_s:10.1f} {slowest_event}",
            flush=True,
        )
    ratio = rows[-1]["us_per_event"] / rows[0]["us_per_event"]
    print(
        f"time per event, {args.instances[-1]} against {args.instances[0]} instances: {ratio:.2f}"
    )
    if args.json:
        args.json.write_text(json.dumps({"rows": rows, "ratio": ratio}, indent=1) + "\n")


if __name__ == "__main__":
    main()
