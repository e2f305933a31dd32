"""The controller alone: real loop, log and messages; instances decode by the cost model.

    python benchmarks/control_plane.py --instances 64 --json control_plane.json
    python benchmarks/control_plane.py --instances 64 --hands ray

Every instance is a worker of its own (a process, or a Ray actor) that takes orders over TCP, lets
time pass as the simulator's cost model says, `--speed` times as fast, and reports. Learner and
rewards are one worker more. Measured is the controller's thread: events per second, time from
taking a message to the last order sent for it, share of a core; in four parts of the run, so that
growth would be seen.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from dora_rl.config import ModelConfig, RunConfig
from dora_rl.controller.loop import Control
from dora_rl.controller.ports import FromInstances
from dora_rl.controller.world import Notify
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.step import initial
from dora_rl.data.lengths import LogNormal
from dora_rl.observe.audit import audit_run
from dora_rl.observe.eventlog import FileLog
from dora_rl.ports import FleetAction
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.faults import Faults
from dora_rl.sim.fleet import Fleet, SimRequest
from dora_rl.sim.presets import preset_named, world_spec
from dora_rl.sim.world import WorldSpec
from dora_rl.types import Mode, RequestId, Segment
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import WorkerPool
from dora_rl.workers.worker import Setup
from dora_rl.worlds.hosts import Cluster, Host, HostProcesses, Task
from dora_rl.worlds.local import SameHost

GROUP_SIZE = 8
SLOTS = 8
PARTS = 4


def spec_of(num_instances: int, num_steps: int) -> WorldSpec:
    """64 instances of 8 requests, lengths with a long tail."""
    preset = replace(
        preset_named("small"),
        num_devices=num_instances + max(1, num_instances // 2),
        batch_groups=max(4, num_instances * SLOTS // GROUP_SIZE // 2),
        group_size=GROUP_SIZE,
        updates_per_step=1,
        lengths=LogNormal.with_mean(1500, 1.2, 16_384),
        num_steps=num_steps,
        warmup_steps=1,
        report_s=10.0,
        inflight_share=2.0,
    )
    spec = world_spec(preset, Mode.MULTI_VERSION, 0, num_instances)
    few = tuple((name, replace(s, slots_max=SLOTS), cost) for name, s, cost in spec.instances)
    return replace(spec, instances=few)


# -- the workers ----------------------------------------------------------------------------------

NO_FILE = "the state of a request is in its message"


class LoneFleet(Fleet):
    """One instance of the simulator in a process of its own: moves leave through the controller."""

    channel: msg.Channel

    def export(self, action: act.Move) -> None:
        src = self.instances[action.src]
        src.advance(self.clock.now())
        request = src.running.get(action.request) or src.parked.get(action.request)
        if request is None or request.epoch != action.epoch:
            return
        if request.id in src.running:
            src.remove(request)
        src.parked.pop(request.id, None)
        self.schedule(src)
        state = [request.version, request.prompt_tokens, request.total, request.done]
        saved = {"state": state, "segments": [list(s) for s in request.segments]}
        who, tokens = (request.id, request.epoch, action.attempt, action.dst), int(request.context)
        said = msg.Exported(*who, tokens, NO_FILE, saved=saved)
        delay_s = src.cost.move_s(request.context)
        self.clock.after(delay_s, lambda: self.channel.send(said))

    def take_over(self, name: str, export: msg.Exported) -> None:
        instance = self.instances[name]
        instance.advance(self.clock.now())
        assert export.saved is not None
        version, prompt_tokens, total, done = export.saved["state"]
        segments = [Segment(*pair) for pair in export.saved["segments"]]
        who = (export.request, export.epoch)
        request = SimRequest(*who, version, prompt_tokens, total, done=done)
        request.segments = segments
        instance.add(request)
        self.schedule(instance)
        self.channel.send(msg.Imported(export))


def serve_instance(setup: Setup, channel: msg.Channel) -> None:
    """One simulated instance, in real time made faster."""
    extra = setup.extra
    spec = spec_of(extra["instances"], extra["steps"])
    place = next(entry for entry in spec.instances if entry[0] == setup.name)
    clock, began, speed = VirtualClock(), time.monotonic(), float(extra["speed"])

    def post(event: ev.Event, valid: Any) -> None:
        if valid():
            channel.send(msg.Told(event))

    fleet = LoneFleet(clock, post, spec.task, Faults(), report_s=spec.report_s)
    fleet.channel = channel
    fleet.join(*place)
    while True:
        while channel.poll(0.01):
            message = channel.receive()
            clock.run(lambda: False, (time.monotonic() - began) * speed)
            match message:
                case msg.End():
                    return
                case msg.Exported():
                    fleet.take_over(setup.name, message)
                case msg.Dispatched() | msg.MoveEnded():
                    pass
                case _:
                    order(fleet, cast(FleetAction, message))
        clock.run(lambda: False, (time.monotonic() - began) * speed)


def order(fleet: LoneFleet, action: FleetAction) -> None:
    if isinstance(action, act.Move):
        fleet.export(action)
    else:
        fleet.do(action)


def serve_rest(setup: Setup, channel: msg.Channel) -> None:
    """Learner and rewards: the learner takes as long as its cost model says, rewards no time."""
    extra = setup.extra
    spec = spec_of(extra["instances"], extra["steps"])
    channel.send(msg.Told(ev.LearnerJoined(0, 0)))
    due: list[tuple[float, ev.Event]] = []
    while True:
        wait_s = max(0.0, min((moment for moment, _ in due), default=1e9) - time.monotonic())
        if channel.poll(min(0.2, wait_s)):
            message = channel.receive()
            match message:
                case msg.End():
                    return
                case msg.Note(line):
                    group, sample, prompt, attempt = json.loads(line)
                    rid = RequestId(group, sample)
                    reward = spec.reward_of(rid, prompt)
                    channel.send(msg.Told(ev.Scored(rid, attempt, reward)))
                case msg.Close(action):
                    channel.send(msg.Told(ev.BatchAccepted(action.step)))
                    took_s = spec.train.update_s() / float(extra["speed"])
                    done = ev.StepCommitted(action.step, "sealed")
                    due.append((time.monotonic() + took_s, done))
                case _:
                    pass
        now = time.monotonic()
        for _, event in [entry for entry in due if entry[0] <= now]:
            channel.send(msg.Told(event))
        due = [entry for entry in due if entry[0] > now]


# -- the hands ------------------------------------------------------------------------------------


class Program:
    """A worker as a process. Implements `cluster.Task`."""

    def __init__(self, setup: str) -> None:
        words = [sys.executable, "-m", "dora_rl.workers.worker"]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE)
        assert self._process.stdin is not None
        self._process.stdin.write(setup.encode() + b"\n")
        self._process.stdin.flush()

    def wait(self) -> str:
        return f"status {self._process.wait()}"

    def kill(self) -> None:
        self._process.kill()


class Processes:
    """Implements `cluster.Cluster` on this machine."""

    head = Host("here", "127.0.0.1", {})

    def hosts(self) -> list[Host]:
        return [self.head]

    def launch(self, host: Host, demand: Mapping[str, float], setup: str) -> Task:
        del host, demand
        return Program(setup)

    def close(self) -> None:
        pass


def open_hands(kind: str) -> Cluster:
    here = str(Path(__file__).parent)
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])
    if kind == "processes":
        return Processes()
    from dora_rl.worlds.kinds import authenticate

    authenticate(own=True)
    from dora_rl.worlds.ray import RayCluster

    return RayCluster("", 2)


# -- the controller -------------------------------------------------------------------------------


class Figures:
    """The timings of one part of the run."""

    def __init__(self) -> None:
        self.began_s, self.cpu_s = time.monotonic(), time.process_time()
        self.handled_s: list[float] = []

    def end(self) -> dict[str, float]:
        wall, cpu = time.monotonic() - self.began_s, time.process_time() - self.cpu_s
        took_ms = 1e3 * np.array(self.handled_s)
        return {
            "events_per_s": len(took_ms) / wall,
            "decision_ms_p50": float(np.percentile(took_ms, 50)),
            "decision_ms_p99": float(np.percentile(took_ms, 99)),
            "cpu_share": cpu / wall,
            "events_per_cpu_s": len(took_ms) / cpu,
        }


class ToWorkers:
    """All four ports: orders become messages."""

    def __init__(self, pool: WorkerPool, control: Control) -> None:
        self.pool, self.control = pool, control
        self.counted: Counter[str] = Counter()

    def do(self, action: Any) -> None:
        self.counted[type(action).__name__] += 1
        match action:
            case act.Score():
                asked = [*action.request, action.prompt, action.attempt]
                self.pool.send("rest", msg.Note(json.dumps(asked)))
            case act.Feed():
                self.pool.send("rest", msg.Fed(action, 1, 1, msg.ints()))
            case act.CloseStep():
                self.pool.send("rest", msg.Close(action))
            case act.Stop():
                self.control.stop = action
            case act.IssueGroup() | act.EndGroup() | act.RetireVersion() | act.WaitFor():
                pass
            case act.InForce() | act.OptimizerRewound() | act.RestartLearner():
                pass
            case _:
                name = action.src if isinstance(action, act.Move) else action.instance
                self.pool.send(name, action)


class Controller:
    """The loop of a run, and its handler of what instances say."""

    def __init__(self, args: argparse.Namespace, folder: Path, cluster: Cluster) -> None:
        self.spec = spec_of(args.instances, args.steps)
        config = RunConfig(model=ModelConfig(path="none"))
        extra = {"instances": args.instances, "steps": args.steps, "speed": args.speed}
        hosts = HostProcesses(folder, cluster, lambda role, name: {}, lambda host: {})
        self.pool = WorkerPool(config, folder, hosts)
        self.control = Control(initial(self.spec.params))
        self.hands = ToWorkers(self.pool, self.control)
        self.totals = SimpleNamespace(migrations=0, kv_bytes_moved=0)
        files: Any = SimpleNamespace(records=SimpleNamespace(totals=self.totals))
        nobody: Any = None  # environments and text have no part in this
        self.instances = FromInstances(
            self.control, files, self.pool, SameHost(), nobody, nobody, Notify()
        )
        self.log = log = FileLog.create(folder / "events")
        self.control.connect(Wall(), self.hands, self.hands, self.hands, self.hands, log)
        self.pool.start("control_plane:serve_rest", "rest", extra)
        for name, _, _ in self.spec.instances:
            self.pool.start("control_plane:serve_instance", name, extra)

    @property
    def state(self) -> Any:
        return self.control.state

    def handle(self, event: ev.Event) -> None:
        self.control.handle(event)

    def run(self) -> list[dict[str, float]]:
        self.handle(ev.Started(self.spec.params))
        parts: list[dict[str, float]] = []
        figures, ticked = Figures(), time.monotonic()
        while self.control.stop is None:
            try:
                envelope = self.pool.inbox.get(timeout=0.2)
            except queue.Empty:
                envelope = None
            if envelope is not None:
                began = time.perf_counter()
                assert envelope.message is not None, f"{envelope.name} ended"
                self.instances.hear(self.pool.workers[envelope.name], envelope.message)
                figures.handled_s.append(time.perf_counter() - began)
            if time.monotonic() - ticked > 0.5:
                ticked, began = time.monotonic(), time.perf_counter()
                self.handle(ev.Tick())
                figures.handled_s.append(time.perf_counter() - began)
            done = self.state.committed * PARTS // self.spec.params.num_steps
            if done > len(parts):
                parts.append(figures.end())
                figures = Figures()
        return parts


class Wall:
    def now(self) -> float:
        return time.monotonic()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--instances", type=int, default=64)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--speed", type=float, default=20.0)
    parser.add_argument("--hands", choices=("processes", "ray"), default="processes")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    cluster = open_hands(args.hands)
    with tempfile.TemporaryDirectory() as folder:
        run = Controller(args, Path(folder), cluster)
        try:
            parts = run.run()
        finally:
            run.pool.end(5.0)
            cluster.close()
        run.log.close()
        findings = audit_run(Path(folder) / "events").findings
    print(f"{args.instances} instances ({args.hands}), {args.steps} steps, {args.speed:g}x time")
    print("part  events/s  decision ms p50    p99   share of a core  events per cpu second")
    for number, part in enumerate(parts):
        print(
            f"{number + 1:4} {part['events_per_s']:9.0f} {part['decision_ms_p50']:16.3f} "
            f"{part['decision_ms_p99']:6.2f} {part['cpu_share']:17.3f} "
            f"{part['events_per_cpu_s']:22.0f}"
        )
    print(f"moves {run.totals.migrations}, audit findings {len(findings)}")
    assert not findings
    if args.json:
        body = {"args": {k: str(v) for k, v in vars(args).items()}, "parts": parts}
        body |= {"moves": run.totals.migrations, "actions": dict(run.hands.counted)}
        args.json.write_text(json.dumps(body, indent=1) + "\n")


if __name__ == "__main__":
    main()
