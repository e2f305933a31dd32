"""The picture of a run: reward and evaluation, staleness, lengths, and who did what when.

Read from the run directory alone: the event log, and metrics.jsonl where there is one. The
timeline is drawn by `plot_timeline`. Matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.core.actions import End
from dora_rl.observe.history import History
from dora_rl.observe.history_rows import ENDS
from dora_rl.observe.plot_timeline import INK, SOFT, draw_timeline, height_of
from dora_rl.observe.tail import read_history
from dora_rl.types import UserError

FORMATS = (".png", ".svg", ".pdf")
# Names of evaluations that are no score between 0 and 1.
_NOT_SCORES = ("length", "num_", "failure")
_CURVES = ("#0072b2", "#d55e00", "#009e73", "#aa4f85", "#e69f00", "#56b4e9")


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_format(path: Path) -> None:
    """Refuse what cannot be drawn before the work begins."""
    if path.suffix.lower() not in FORMATS:
        raise UserError(f"{path}: the name must end in {', '.join(FORMATS)}")
    if not can_draw():
        raise UserError("drawing needs matplotlib: pip install 'dora-rl[plot]'")


def draw_run(run: Path, path: Path | None = None, *, only: str | None = None) -> Path:
    """Write run.png (or `path`) and return where it is. `only`: "curves" or "timeline"."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    events = run / "events" if (run / "events").is_dir() else run
    history = read_history(events)
    steps, evaluations = _metrics(run)
    style: Any = {
        "font.size": 9,
        "axes.edgecolor": "#d9d9d4",
        "axes.labelcolor": INK,
        "text.color": INK,
        "xtick.color": SOFT,
        "ytick.color": SOFT,
        "svg.fonttype": "none",
    }
    heights = {"curves": 3.0, "timeline": height_of(history)}
    parts = [only] if only else ["curves", "timeline"]
    with mpl.rc_context(style):
        tall = sum(heights[part] for part in parts)
        figure = Figure(figsize=(12, tall), layout="constrained")
        folders: Any = figure.subfigures(len(parts), 1, height_ratios=[heights[p] for p in parts])
        for part, folder in zip(parts, np.atleast_1d(folders), strict=True):
            if part == "curves":
                _curves(folder.subplots(1, 3), history, steps, evaluations)
            else:
                draw_timeline(folder.subplots(), history)
        target = path or run / "run.png"
        figure.savefig(target, dpi=120)
    return target


def _metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    path = run / "metrics.jsonl"
    text = path.read_text() if path.is_file() else ""
    lines = [json.loads(line) for line in text.splitlines()]
    steps = [line for line in lines if "step" in line]
    return steps, [line for line in lines if "step" not in line]


def _plain(axis: Any, title: str, xlabel: str = "step") -> None:
    axis.set_title(title, loc="left", fontsize=10, fontweight="bold")
    axis.set_xlabel(xlabel)
    axis.grid(True, color="#e8e8e4", linewidth=0.7)
    axis.set_axisbelow(True)
    axis.tick_params(length=0)
    axis.spines[["top", "right"]].set_visible(False)


def _legend(axis: Any) -> None:
    if axis.get_legend_handles_labels()[0]:
        axis.legend(fontsize=8, frameon=False)


def _curves(
    axes: Any, history: History, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]
) -> None:
    groups = history.groups
    trained = groups["end"] == ENDS.index(End.TRAINED)
    step, num = groups["step"][trained], max(1, history.committed)
    samples = np.maximum(1, np.bincount(step, groups["scored"][trained], num))
    reward = np.bincount(step, groups["reward_sum"][trained], num) / samples
    axes[0].plot(reward, color=_CURVES[0], linewidth=1.8, label="training")
    names = [n for n in (evaluations[0] if evaluations else {}) if n.startswith("eval/")]
    names = [name for name in names if not any(word in name for word in _NOT_SCORES)]
    for place, name in enumerate(names[:5], start=1):
        there = [line for line in evaluations if line.get(name) is not None]
        xs, ys = [line["version"] for line in there], [line[name] for line in there]
        colour, label = _CURVES[place], name.removeprefix("eval/")
        axes[0].plot(xs, ys, "o--", color=colour, linewidth=1.1, markersize=3.5, label=label)
    _plain(axes[0], "reward, and evaluation by version")
    _legend(axes[0])
    stale = step - groups["version"][trained]
    most = np.zeros(num, np.int64)
    np.maximum.at(most, step, stale)
    mean = np.bincount(step, stale, num) / np.maximum(1, np.bincount(step, minlength=num))
    axes[1].plot(mean, color=_CURVES[0], linewidth=1.8, label="mean")
    axes[1].plot(most, ".", color=_CURVES[1], markersize=5, label="max")
    bound = history.params.max_staleness
    axes[1].axhline(bound, color=SOFT, linestyle=":", linewidth=1.2, label=f"bound {bound}")
    axes[1].set_ylim(-0.1, max(bound, 1) + 0.4)
    _plain(axes[1], "staleness, versions")
    _legend(axes[1])
    _lengths(axes[2], history, steps)


def _lengths(axis: Any, history: History, steps: list[dict[str, Any]]) -> None:
    names = [n for n in ("median", "mean", "p99") if steps and f"response_length/{n}" in steps[0]]
    xs = [line["step"] for line in steps]
    for place, name in enumerate(names):
        ys = [line[f"response_length/{name}"] for line in steps]
        axis.plot(xs, ys, color=_CURVES[place], linewidth=1.6, label=name)
    if names:
        axis.set_yscale("log")
        _plain(axis, "response length, tokens")
        _legend(axis)
        return
    tokens = history.samples["tokens"][history.samples["tokens"] > 0]
    if len(tokens):
        axis.hist(tokens, np.geomspace(1, tokens.max() + 1, 40), color=_CURVES[0])
        axis.set_xscale("log")
    _plain(axis, "response length, all samples", "tokens")
