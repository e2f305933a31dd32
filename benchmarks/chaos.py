"""Real kills at random moments of small real runs: nothing is lost, nothing is done twice.

    python benchmarks/chaos.py                          # 200 kills
    python benchmarks/chaos.py --kills 10 --seed 7      # a quick look; a finding names its seed
    python benchmarks/chaos.py --kinds controller learner --json chaos.json

A run is the command line in a process of its own, on the shipped tiny models. At a moment that the
seed chooses (a number of lines of the event log) a process is killed or stopped for a while, or the
disk or the shared memory is full until the run has said so. A controller takes its whole run with
it, and the run is resumed. After some kills the run goes to its end. Then every group must have
ended exactly once and been trained exactly once, `audit --files` must find nothing, the last
version must load with finite weights, and no process, no shared memory and no temporary file may
be left. `recovered` is the time until the worker was there again and the event log moved on (for
processes that were stopped, the log alone). Status 1: something was found.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.core.actions import End, EndGroup, IssueGroup
from dora_rl.observe.eventlog import Entry, read
from dora_rl.setup.layout import plan_layout
from dora_rl.weights.store import SharedMemoryWeightStore

ROOT = Path(__file__).resolve().parents[1]
MODELS = ROOT / "recipes" / "models"
# A kind and the process that it meets: the first letters of a worker's name.
PROCESSES = {
    "controller": "",
    "learner": "learner",
    "instance": "instance",
    "reward": "reward",
    "environment": "env",
    "evaluator": "evaluator",
    "stopped instance": "instance",
    "stopped learner": "learner",
    "stopped reward": "reward",
}
FULL = {"full disk": "disk", "full shared memory": "memory"}
KINDS = (*PROCESSES, *FULL)
REPLACED = ("learner", "instance", "reward", "environment")  # there again while the run goes on
WEIGHTS = {"controller": 3, "learner": 2, "instance": 3}
DONE, CANNOT_GO_ON = 0, 3
IDLE = (b'"Tick"', b'"InstanceReport"', b'"LearnerReport"')
MOMENT_LINES = (2, 40)  # of the log, from one kill to the next
STOPPED_S = (0.5, 12.0)  # some are replaced meanwhile, some are not
REPORT_S = 6.0
WAIT_S_MAX = 600.0
ENDLESS = 100_000  # a run is stopped and resumed with fewer steps, so that it ends
WINDOW_STEPS = 6  # sealed, in training, in filling, and what two older versions may be owed
KILLS_PER_RUN = 25
TMPFS_MIB = {"disk": 64, "memory": 24}

CHAINS = {
    "model": {"path": str(MODELS / "tiny")},
    "data": {
        "train": [{"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 12}}],
        "eval": [{"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 12}}],
    },
    "reward": {"functions": ["dora_rl.data.chains:reward"], "timeout_s": 20.0},
    "rollout": {"tokens_max": 200, "ignore_eos": True},
}
TOOLS = {
    "model": {"path": str(MODELS / "tiny_tools")},
    "data": {
        "train": [{"path": "dora_rl.envs.calculator:Expressions"}],
        "eval": [{"path": "dora_rl.envs.calculator:Expressions"}],
    },
    "env": {"environments": [{"name": "calculator", "turns_max": 6, "latency_s": [0.01, 0.1]}]},
    "rollout": {"tokens_max": 16, "stop_ids": [19]},
}
ALL = {
    "rollout": {
        "num_instances": 2,
        "num_samples": 4,
        "seqs_max": 16,
        "kv_bytes_max": 33554432,
        "journal_steps": 1,
    },
    "orchestration": {
        "num_steps": ENDLESS,
        "batch_groups": 4,
        "attempts_max": 1000,
        "losses_max": 1000,
        "trainer_losses_max": 0,
        "instance_losses_max": 0,
        "failed_share_max": 1.0,
        "report_timeout_s": REPORT_S,
        "trainer_timeout_s": 120.0,
    },
    "evaluation": {"num_prompts": 8, "every_steps": 2, "failed_share_max": 1.0},
    "trainer": {"lr": 1e-4, "threads": 1},
    "checkpoint": {"every_steps": 2},
    "logging": {"progress": False},
    "runtime": {"grace_s": 20.0},
}


class Found(Exception):
    """A promise that was not kept."""


@dataclass(slots=True)
class Kill:
    kind: str
    run: int
    recovered_s: float = 0.0
    resumed: bool = False


@dataclass(slots=True)
class Log:
    """The lines of a run's event log that say that something happened, counted as they come."""

    folder: Path
    num_lines: int = 0
    _read: dict[Path, int] = field(default_factory=dict[Path, int])

    def count(self) -> int:
        for path in sorted(self.folder.glob("*.jsonl")):
            with path.open("rb") as file:
                file.seek(self._read.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._read[path] = self._read.get(path, 0) + len(whole)
            lines = whole.splitlines()
            self.num_lines += sum(not any(word in line[:120] for word in IDLE) for line in lines)
        return self.num_lines


class Victim:
    """One run, started and resumed as often as it takes."""

    def __init__(self, folder: Path, settings: dict[str, Any], said: Path) -> None:
        """`said`: where its words go, which is not the disk that gets full."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.run_dir = folder, folder / "run"
        self.temporary = folder / "tmp"
        self.temporary.mkdir(exist_ok=True)
        config = merged(ALL, settings, {"runtime": {"run_dir": str(self.run_dir)}})
        self._config = folder / "chaos.json"
        self._config.write_text(json.dumps(config))
        self.num_steps = ENDLESS
        self.log = Log(self.run_dir / "events")
        self.said = said
        self.process = self._start()

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-P", "-m", "dora_rl.cli", "train", str(self._config), *more]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TMPDIR": str(self.temporary)}
        with self.said.open("ab") as said:
            return subprocess.Popen(words, stdout=said, stderr=said, env=environment, cwd=ROOT)

    def resume(self) -> None:
        self.process = self._start("--resume", f"orchestration.num_steps={self.num_steps}")

    def finish(self) -> None:
        """Stop it, and resume it with as many steps as have a place for every group."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(WAIT_S_MAX)
        if self.status() != CANNOT_GO_ON:
            raise Found(f"stopped with status {self.status()}:\n{self.tail()}")
        gone(self, WAIT_S_MAX)
        actions = [action for entry in entries(self) for action in entry.actions]
        steps = [a.step for a in actions if isinstance(a, EndGroup) and a.step is not None]
        self.num_steps = max(steps, default=-1) + WINDOW_STEPS
        self.resume()
        self.process.wait(WAIT_S_MAX)
        if self.status() != DONE:
            raise Found(f"status {self.status()}:\n{self.tail()}")

    def status(self) -> int | None:
        return self.process.poll()

    def workers(self) -> dict[str, int]:
        """Live workers by name: those that write its logs."""
        logs, found = self.run_dir / "logs", dict[str, int]()
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    path = Path(os.readlink(entry / "fd" / "1"))
                    if path.parent == logs and path.stem != "fork_server":
                        found[path.stem] = int(entry.name)
        return found

    def until(self, what: str, ready: Callable[[], bool]) -> bool:
        """False: the run ended before."""
        began = time.monotonic()
        while not ready():
            if self.status() is not None:
                return False
            if time.monotonic() - began > WAIT_S_MAX:
                raise Found(f"the run does not move: waited {WAIT_S_MAX:g} s for {what}")
            time.sleep(0.1)
        return True

    def moves_on(self, lines: int) -> bool:
        want = self.log.count() + lines
        return self.until(f"{lines} lines of the log", lambda: self.log.count() >= want)

    def tail(self) -> str:
        return self.said.read_text(errors="replace")[-2000:]


def merged(*parts: dict[str, Any]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        for section, values in part.items():
            whole[section] = whole.get(section, {}) | values
    return whole


# -- what is done to a run -------------------------------------------------------------------------


def strike(run: Victim, kind: str, draw: random.Random, mounts: dict[str, Path]) -> Kill | None:
    """At this moment; None: there is nobody whom it would meet."""
    began = time.monotonic()
    kill, replaced = Kill(kind, 0), None
    if kind in FULL:
        fill(run, mounts[FULL[kind]], draw)
    elif kind == "controller":
        run.process.kill()
        run.process.wait()
    else:
        workers = run.workers()
        names = [name for name in sorted(workers) if name.startswith(PROCESSES[kind])]
        if not names:
            return None
        name = draw.choice(names)
        meet(workers[name], kind.startswith("stopped"), draw)
        if kind in REPLACED:
            replaced = (name, workers[name])
    kill.resumed = recover(run)
    if replaced is not None:
        run.until(
            "another worker", lambda: run.workers().get(replaced[0], replaced[1]) != replaced[1]
        )
    while not run.moves_on(1):  # it ended only now
        kill.resumed |= recover(run)
    kill.recovered_s = time.monotonic() - began
    return kill


def meet(pid: int, stopped: bool, draw: random.Random) -> None:
    with contextlib.suppress(ProcessLookupError):  # it ended by itself in this moment
        if not stopped:
            os.kill(pid, signal.SIGKILL)
            return
        os.kill(pid, signal.SIGSTOP)
        time.sleep(draw.uniform(*STOPPED_S))
        os.kill(pid, signal.SIGCONT)


def recover(run: Victim) -> bool:
    """Resume it if it has ended; whether it had."""
    if run.status() is None:
        return False
    if run.status() not in (CANNOT_GO_ON, -signal.SIGKILL):
        raise Found(f"a run ended with status {run.status()}:\n{run.tail()}")
    gone(run, WAIT_S_MAX)
    run.resume()
    return True


def gone(run: Victim, wait_s: float) -> None:
    """Its workers end with their controller."""
    until = time.monotonic() + wait_s
    while left := run.workers():
        if time.monotonic() > until:
            raise Found(f"workers live on without their controller: {sorted(left)}")
        time.sleep(0.05)


def fill(run: Victim, place: Path, draw: random.Random) -> None:
    """No room for one byte more, until the run has ended or for a while."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"\0" * size)
    until = time.monotonic() + draw.uniform(2.0, 20.0)
    while run.status() is None and time.monotonic() < until:
        time.sleep(0.05)
    filler.unlink()


# -- what must hold afterwards ---------------------------------------------------------------------


def check(run: Victim) -> None:
    """After its end; raises `Found`."""
    gone(run, 60.0)
    issued, ended = list[int](), dict[int, End]()
    for entry in entries(run):
        for action in entry.actions:
            if isinstance(action, IssueGroup):
                issued.append(action.group)
            elif isinstance(action, EndGroup):
                require(action.group not in ended, f"group {action.group} ended twice")
                ended[action.group] = action.end
    require(len(set(issued)) == len(issued), "a group was issued twice")
    require(set(issued) == set(ended), f"groups never ended: {set(issued) ^ set(ended)}")
    lines = (run.run_dir / "rollouts.jsonl").read_text().splitlines()
    rows = Counter((row["group"], row["sample"]) for row in map(json.loads, lines))
    require(set(rows.values()) <= {1}, "a sample was trained twice")
    trained = {group for group, end in ended.items() if end is End.TRAINED}
    require({group for group, _ in rows} == trained, "trained groups and rollouts.jsonl differ")
    words = [sys.executable, "-P", "-m", "dora_rl.cli", "audit", str(run.run_dir), "--files"]
    audit = subprocess.run(words, capture_output=True, text=True, check=False)
    require(audit.returncode == 0, f"audit --files: {audit.stdout}{audit.stderr}")
    check_weights(run)
    config = RunConfig.model_validate_json((run.run_dir / "config.json").read_text())
    layout = plan_layout(config, "cpu")
    for place in (layout.weights_root, layout.transfer_root):
        require(not place.exists(), f"{place} is left behind")
    # Torch makes the folder of its compiler's cache, which it keeps for the next program.
    left = [str(p) for p in run.temporary.iterdir() if not p.name.startswith("torchinductor_")]
    require(not left, f"left behind: {left}")


def entries(run: Victim) -> list[Entry]:
    return [record for record in read(run.run_dir / "events") if isinstance(record, Entry)]


def check_weights(run: Victim) -> None:
    store = SharedMemoryWeightStore(run.run_dir / "weights")  # proves every digest
    require(run.num_steps in store.versions(), f"version {run.num_steps} is not on disk")
    sealed = store.open(run.num_steps)
    for name in sealed.names():
        require(bool(sealed.tensor(name).isfinite().all()), f"{name} is not finite")


def require(holds: bool, what: str) -> None:
    if not holds:
        raise Found(what)


# -- all of it -------------------------------------------------------------------------------------


@contextlib.contextmanager
def small_places(folder: Path, wanted: Sequence[str]) -> Iterator[dict[str, Path]]:
    """Small file systems, where they can be mounted: for the run directory and for the weights."""
    mounts = dict[str, Path]()
    try:
        for name in wanted:
            place = folder / name
            place.mkdir(parents=True)
            size = f"size={TMPFS_MIB[name]}m"
            words = ["mount", "-t", "tmpfs", "-o", size, "none", str(place)]
            if subprocess.run(words, capture_output=True, check=False).returncode == 0:
                mounts[name] = place
        yield mounts
    finally:
        for place in mounts.values():
            subprocess.run(["umount", "-l", str(place)], check=False)


def one_run(
    number: int, kinds: Sequence[str], count: int, draw: random.Random, at: Path
) -> Iterator[Kill]:
    """So many kills, then the end and the checks. `at`: the folder of the run."""
    wanted = sorted({FULL[kind] for kind in kinds if kind in FULL})
    if number // 2 % 2 and not set(kinds) <= set(FULL):
        wanted = []  # half of the runs are where runs usually are
    with small_places(at, wanted) as mounts:
        settings = CHAINS if number % 2 else TOOLS
        if "memory" in mounts:
            settings = merged(settings, {"weights": {"root": str(mounts["memory"] / "w")}})
        run = Victim(mounts.get("disk", at / "plain"), settings, at / "said.log")
        # Each of these environments gives its own reward, and answers in the learner's stead.
        other = {"environment"} if number % 2 else {"reward", "stopped reward"}
        able = [k for k in kinds if k not in other and (k not in FULL or FULL[k] in mounts)]
        try:
            while count:
                if not run.moves_on(draw.randrange(*MOMENT_LINES)):
                    recover(run)
                    continue
                kind = draw.choices(able, [WEIGHTS.get(each, 1) for each in able])[0]
                kill = strike(run, kind, draw, mounts)
                if kill is not None:
                    kill.run, count = number, count - 1
                    yield kill
            run.finish()
            check(run)
        except Found as error:
            keep = Path(tempfile.mkdtemp(prefix="chaos-found-"))
            shutil.copytree(run.folder, keep, dirs_exist_ok=True)
            raise Found(f"run {number}: {error}\nkept in {keep}") from None
        finally:
            run.process.kill()
            run.process.wait()


def table(kills: Sequence[Kill], kinds: Sequence[str]) -> str:
    lines = [
        "| what | times | went on | resumed | recovered: median s | longest s |",
        "|---|---|---|---|---|---|",
    ]
    for kind in kinds:
        of_kind = [kill for kill in kills if kill.kind == kind]
        times = sorted(kill.recovered_s for kill in of_kind)
        resumed = sum(kill.resumed for kill in of_kind)
        shown = f"{median(times):.1f} | {times[-1]:.1f}" if times else "- | -"
        lines.append(
            f"| {kind} | {len(of_kind)} | {len(of_kind) - resumed} | {resumed} | {shown} |"
        )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--per-run", type=int, default=KILLS_PER_RUN, help="kills of one run")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS, metavar="KIND")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    seed = time.time_ns() % 100_000 if args.seed is None else args.seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its run and its disks end with it
    print(f"seed {seed}", flush=True)
    done, found, number = list[Kill](), list[str](), 0
    while len(done) < args.kills and not found:
        number += 1
        draw = random.Random(f"{seed}.{number}")
        # A short path: sockets lie below it.
        with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as folder:
            count = min(args.per_run, args.kills - len(done))
            try:
                for kill in one_run(number, args.kinds, count, draw, Path(folder)):
                    done.append(kill)
                    how = "resumed" if kill.resumed else "went on"
                    print(f"{len(done):4} {kill.kind}: {how}, {kill.recovered_s:.1f} s", flush=True)
            except Found as error:
                found.append(str(error))
        print(f"{len(done)} kills in {number} runs", flush=True)
    print(table(done, args.kinds))
    skipped = [kind for kind in args.kinds if not any(kill.kind == kind for kill in done)]
    print(
        f"not met or not possible here: {', '.join(skipped)}" if skipped else "every kind was met"
    )
    for line in found:
        print(f"FOUND (seed {seed}): {line}")
    if args.json:
        args.json.write_text(json.dumps({"seed": seed, "kills": [asdict(k) for k in done]}) + "\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
