"""The picture at the end of a run: reward, staleness and lengths over steps, and the timeline.

Read from the run directory alone (metrics.jsonl and the event log).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import Entry, read


def draw_run(run_dir: Path, path: Path | None = None) -> Path:
    """Write run.png (or `path`) and return where it is."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "step" in line]
    evaluations = [line for line in lines if "version" in line]
    figure, axes = plt.subplots(2, 2, figsize=(12, 7), layout="constrained")
    _curves(axes, steps, evaluations)
    timeline = axes[1][1]
    _timeline(timeline, run_dir)
    target = path or run_dir / "run.png"
    figure.savefig(target, dpi=110)
    plt.close(figure)
    return target


def _curves(axes: Any, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    xs = [line["step"] for line in steps]
    reward = axes[0][0]
    reward.plot(xs, [line["reward/mean"] for line in steps], label="training reward")
    versions = [line["version"] for line in evaluations]
    for name, style in (("sampled", "o--"), ("greedy", "s--"), ("tail_sampled", "^:")):
        reward.plot(
            versions, [e[f"eval/{name}"] for e in evaluations], style, label=f"held-out {name}"
        )
    reward.set(title="reward", xlabel="step", ylim=(0, 1.05))
    reward.legend(fontsize=8)
    stale = axes[0][1]
    stale.plot(xs, [line["staleness/mean"] for line in steps], label="mean")
    stale.plot(xs, [line["staleness/max"] for line in steps], ".", label="max")
    stale.set(title="staleness (versions)", xlabel="step")
    stale.legend(fontsize=8)
    lengths = axes[1][0]
    for name in ("median", "mean", "p99"):
        lengths.plot(xs, [line[f"response_length/{name}"] for line in steps], label=name)
    lengths.set(title="response length (tokens)", xlabel="step", yscale="log")
    lengths.legend(fontsize=8)


def _timeline(axis: Any, run_dir: Path) -> None:
    """When each version was loaded, generated and trained."""
    import matplotlib.pyplot as plt

    begin: float | None = None
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    train: dict[int, list[float]] = {}
    version_of: dict[int, int] = {}
    for record in read(run_dir / "events"):
        if not isinstance(record, Entry):
            continue
        begin = record.now if begin is None else begin
        now = record.now - begin
        for action in record.actions:
            if isinstance(action, act.IssueGroup):
                version_of[action.group] = action.version
                first.setdefault(action.version, now)
            elif isinstance(action, act.Feed):
                train.setdefault(action.step, [now, now])
        if isinstance(record.event, ev.SampleFinished):
            last[version_of.get(record.event.request.group, 0)] = now
        elif isinstance(record.event, ev.StepCommitted) and record.event.step in train:
            train[record.event.step][1] = now
    colours = plt.get_cmap("tab10")
    for version, start in first.items():
        width = last.get(version, start) - start
        axis.barh(version, width, left=start, height=0.4, color=colours(version % 10), alpha=0.8)
    for step, (start, end) in train.items():
        axis.barh(step + 0.45, end - start, left=start, height=0.3, color="0.3")
    axis.set(
        title="versions: generating (colour), training (grey)", xlabel="seconds", ylabel="version"
    )
    axis.invert_yaxis()
