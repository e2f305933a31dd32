"""Whole runs in the process of the test: tiny, seconds each, without threads or workers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.controller.run import Run
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit import AuditReport, audit_run
from dora_rl.observe.eventlog import read, replay
from dora_rl.setup.prepare import prepare
from dora_rl.worlds.kinds import open_run
from tests.kit.places import MODEL


def config_of(run_dir: Path, **sections: dict[str, Any]) -> RunConfig:
    base: dict[str, dict[str, Any]] = {
        "model": {"path": str(MODEL)},
        "data": {
            "train": [{"path": "dora_rl.data.tasks:Chains", "options": {"num_steps_max": 8}}],
        },
        "reward": {"functions": ["dora_rl.data.chains:reward"], "num_workers": 1},
        "rollout": {
            "num_instances": 2,
            "num_samples": 2,
            "tokens_max": 64,
            "seqs_max": 16,
            "kv_bytes_max": 1 << 25,
            "journal_steps": 4,
        },
        "orchestration": {"num_steps": 2, "batch_groups": 2},
        "trainer": {"lr": 1e-3, "threads": 1, "canonical_order": True},
        "logging": {"progress": False},
        "weights": {"root": str(run_dir) + "-shared"},
        "runtime": {"world": "inline", "device": "cpu", "run_dir": str(run_dir), "grace_s": 20.0},
    }
    for name, section in sections.items():
        base[name] = base.get(name, {}) | section
    return RunConfig.model_validate(base)


def train(
    config: RunConfig,
    *,
    resume: bool = False,
    watch: Callable[[Run], Callable[[], bool]] = lambda run: lambda: False,
) -> tuple[act.Stop, list[str]]:
    """As the command does. `watch` gives what says that the run is interrupted."""
    run, lines = open_run(prepare(config), resume=resume), list[str]()
    run.notify.on_lines = lines.extend
    try:
        stop = run.run(watch(run))
    finally:
        run.close()
    return stop, lines


def proven(run_dir: Path) -> AuditReport:
    """The audit, which must find nothing, after a replay, which must give the same actions."""
    assert replay(read(run_dir / "events")).difference is None
    report = audit_run(run_dir / "events")
    assert not report.findings, [str(finding) for finding in report.findings]
    return report


def events_of(run_dir: Path) -> list[ev.Event]:
    return [entry.event for entry in read(run_dir / "events")]
