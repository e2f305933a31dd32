"""Tiny real runs for the end-to-end tests: the shipped model, two or three steps, seconds each.

Every run is the command line in a process of its own, as a user starts it. Nothing is patched.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from dora_rl.core.actions import EndGroup
from dora_rl.core.events import InstanceJoined
from dora_rl.observe.audit import AuditReport, audit_run
from dora_rl.observe.eventlog import Entry, read, replay
from tests.kit.places import MODEL, ROOT

RUN_S_MAX = 1200.0  # against hanging; a run takes seconds, on a slow and busy machine minutes
STOPPED = 3
# For a run that is stopped from outside: however late the signal comes, it is not done yet. It is
# resumed with `TinyRun.steps_enough`.
ENDLESS = 1_000

TINY = f"""
[model]
path = "{MODEL}"
[data]
train = [{{path = "dora_rl.data.tasks:Chains", options = {{num_steps_max = 12}}}}]
[reward]
functions = ["dora_rl.data.chains:reward"]
timeout_s = 5.0
[rollout]
num_instances = 2
num_samples = 4
tokens_max = 128
seqs_max = 16
kv_bytes_max = 33554432
journal_steps = 4
[orchestration]
num_steps = 3
batch_groups = 4
[trainer]
lr = 1e-4
threads = 1
[checkpoint]
every_steps = 1
[logging]
progress = false
[runtime]
grace_s = 20.0
"""


@dataclass(frozen=True)
class TinyRun:
    """A configuration file and its run directory."""

    config: Path
    run_dir: Path

    def command(self, *arguments: str) -> list[str]:
        where = f"runtime.run_dir={self.run_dir}"
        return [sys.executable, "-m", "dora_rl.cli", "train", str(self.config), where, *arguments]

    def start(self, *arguments: str, **environment: str) -> subprocess.Popen[str]:
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | environment
        return subprocess.Popen(
            self.command(*arguments),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def train(self, *arguments: str, status: int = 0) -> str:
        """Run to the end; returns what it said on both streams."""
        process = self.start(*arguments)
        return finish(process, status)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "summary.json").read_text())

    def lines(self, name: str) -> list[dict[str, Any]]:
        path = self.run_dir / name
        text = path.read_text() if path.is_file() else ""
        whole = text[: text.rfind("\n") + 1]  # the last line may be in the writing
        return [json.loads(line) for line in whole.splitlines()]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.lines("metrics.jsonl") if "step" in line]

    def steps_enough(self, max_staleness: int = 2) -> int:
        """A number of steps with a place for every group that was issued (docs/staleness.md)."""
        actions = [action for entry in self.entries() for action in entry.actions]
        trained = [a.step for a in actions if isinstance(a, EndGroup) and a.step is not None]
        # Sealed, in training, in filling, and what the window may still owe to later ones.
        return max(trained, default=-1) + 2 + 2 + max_staleness

    def entries(self) -> list[Entry]:
        return [record for record in read(self.run_dir / "events") if isinstance(record, Entry)]

    def joined(self) -> set[str]:
        """The instances that have joined so far."""
        if not any((self.run_dir / "events").glob("*.jsonl")):
            return set()
        events = [entry.event for entry in self.entries()]
        return {event.instance for event in events if isinstance(event, InstanceJoined)}

    def weights(self, version: int) -> dict[str, Any]:
        return load_file(self.run_dir / "weights" / f"{version:08d}" / "model.safetensors")

    def proven(self) -> AuditReport:
        """The audit, which must find nothing, after a replay, which must give the same actions."""
        assert replay(read(self.run_dir / "events")).difference is None
        report = audit_run(self.run_dir / "events")
        assert not report.findings, [str(finding) for finding in report.findings]
        return report


def finish(process: subprocess.Popen[str], status: int = 0) -> str:
    out, err = process.communicate(timeout=RUN_S_MAX)
    assert process.returncode == status, f"status {process.returncode}\n{out}\n{err}"
    return out + err


def tiny_run(folder: Path, **settings: Any) -> TinyRun:
    """A run below `folder`; `settings` are `section__key=value` on top of `TINY`."""
    folder.mkdir(parents=True, exist_ok=True)
    data = tomllib.loads(TINY)
    for name, value in settings.items():
        section, _, key = name.partition("__")
        data.setdefault(section, {})[key] = value
    config = folder / "tiny.json"
    config.write_text(json.dumps(data))
    return TinyRun(config, folder / "run")


def wait_until(
    what: str, ready: Callable[[], bool], process: subprocess.Popen[str] | None = None
) -> None:
    """Poll; a run that ended meanwhile is shown."""
    until = time.monotonic() + RUN_S_MAX
    while not ready():
        if process is not None and process.poll() is not None:
            out, err = process.communicate()
            raise AssertionError(f"the run ended before {what}:\n{out}\n{err}")
        assert time.monotonic() < until, f"waited too long for {what}"
        time.sleep(0.02)


def slow_twin(out: Path, num_layers: int = 16) -> Path:
    """The tiny model with layers on top that add nothing, until they are trained: the same answers,
    later. Requests then live long enough for instances to report their lengths, by which the core
    decides to move the KV."""
    shutil.copytree(MODEL, out)
    config = json.loads((MODEL / "config.json").read_text())
    config["num_hidden_layers"] = num_layers
    config["layer_types"] = ["full_attention"] * num_layers
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(MODEL / "model.safetensors")
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        for layer in range(2, num_layers):
            copy = tensors[name] * (0 if adds else 1)
            tensors[name.replace("layers.1.", f"layers.{layer}.")] = copy
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out


def start_together(run: TinyRun, count: int = 2) -> subprocess.Popen[str]:
    """A run whose first instance stands still until all have joined: each gets its requests."""
    process = run.start()
    wait_until("an instance", lambda: bool(run.joined()), process)
    first = min(run.joined())
    os.kill(pid_of(run, first), signal.SIGSTOP)
    wait_until("all instances", lambda: len(run.joined()) == count, process)
    os.kill(pid_of(run, first), signal.SIGCONT)
    return process


def pid_of(run: TinyRun, name: str) -> int:
    """The process whose log this is."""
    log = str(run.run_dir / "logs" / f"{name}.log")
    for pid in workers_of(run.run_dir):
        with suppress(FileNotFoundError):  # one that has just ended
            if os.readlink(f"/proc/{pid}/fd/1") == log:
                return pid
    raise AssertionError(f"no process writes {log}")


def open_files(process: Path) -> set[str]:
    """What a process (/proc/ID) has open; a file that it closes while we look does not matter."""
    found: set[str] = set()
    for link in (process / "fd").iterdir():
        with suppress(FileNotFoundError):
            found.add(os.readlink(link))
    return found


def workers_of(run_dir: Path) -> dict[int, str]:
    """Live processes that hold the run's lock: {process id: command line}."""
    lock = str(run_dir / ".lock")
    found: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if lock in open_files(entry):
                words = (entry / "cmdline").read_bytes().split(b"\0")
                found[int(entry.name)] = " ".join(word.decode() for word in words)
        except OSError:
            continue  # it ended while we looked
    return found
