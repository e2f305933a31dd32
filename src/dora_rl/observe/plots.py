"""The picture of a run: reward and evaluation, staleness, lengths, and who did what when.

Read from the run directory alone: the event log, and metrics.jsonl where there is one. The
timeline has one row per instance, coloured by version; the height of the colour is the number of
requests running. Matplotlib is imported when a picture is drawn.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.io.append_log import read_lines
from dora_rl.observe.history import History, read_history
from dora_rl.observe.placements import coverage
from dora_rl.user_code import require

FORMATS = (".png", ".svg", ".pdf")
# Names of evaluations that are no score between 0 and 1.
_NOT_SCORES = ("length", "num_", "failure")
_CURVES = ("#0072b2", "#d55e00", "#009e73", "#aa4f85", "#e69f00", "#56b4e9")


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def check_format(path: Path) -> None:
    """Refuse what cannot be drawn before the work begins."""
    require(
        (path.suffix.lower() in FORMATS, f"{path}: the name must end in {', '.join(FORMATS)}"),
        (can_draw(), "drawing needs matplotlib: pip install 'dora-rl[plot]'"),
    )


def draw_run(run: Path, path: Path | None = None, *, only: str | None = None) -> Path:
    """Write run.png (or `path`) and return where it is. `only`: "curves" or "timeline"."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    history = read_history(run / "events" if (run / "events").is_dir() else run)
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
    num_rows = 1 + min(INSTANCES_MAX, max(1, len(history.names)))
    heights = {"curves": 3.0, "timeline": 1.5 + 0.42 * num_rows}
    parts = [only] if only else ["curves", "timeline"]
    with mpl.rc_context(style):
        figure = Figure(figsize=(12, sum(heights[part] for part in parts)), layout="constrained")
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
    lines = [*read_lines(run / "metrics.jsonl")]
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
    curves = history.curves()
    axes[0].plot(curves["reward/mean"], color=_CURVES[0], linewidth=1.8, label="training")
    names = [n for n in (evaluations[0] if evaluations else {}) if n.startswith("eval/")]
    names = [name for name in names if not any(word in name for word in _NOT_SCORES)]
    for place, name in enumerate(names[:5], start=1):
        there = [line for line in evaluations if line.get(name) is not None]
        xs, ys = [line["version"] for line in there], [line[name] for line in there]
        colour, label = _CURVES[place], name.removeprefix("eval/")
        axes[0].plot(xs, ys, "o--", color=colour, linewidth=1.1, markersize=3.5, label=label)
    _plain(axes[0], "reward, and evaluation by version")
    _legend(axes[0])
    axes[1].plot(curves["staleness/mean"], color=_CURVES[0], linewidth=1.8, label="mean")
    axes[1].plot(curves["staleness/max"], ".", color=_CURVES[1], markersize=5, label="max")
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
        axis.plot(
            xs,
            [line[f"response_length/{name}"] for line in steps],
            color=_CURVES[place],
            linewidth=1.6,
            label=name,
        )
    if names:
        if any(line[f"response_length/{name}"] > 0 for line in steps for name in names):
            axis.set_yscale("log")
        _plain(axis, "response length, tokens")
        _legend(axis)
        return
    tokens = history.samples["tokens"][history.samples["tokens"] > 0]
    if len(tokens):
        axis.hist(tokens, np.geomspace(1, tokens.max() + 1, 40), color=_CURVES[0])
        axis.set_xscale("log")
    _plain(axis, "response length, all samples", "tokens")


# -- the timeline ----------------------------------------------------------------------------------


INK, SOFT, PALE = "#2b2b2b", "#6b7280", "#f1f1ee"
# Safe for colour-blind eyes (after Okabe and Ito); neighbouring versions differ in hue and light.
VERSIONS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a800")
INSTANCES_MAX = 16
STEPS_MAX = 24  # the last ones are shown
BINS = 900
ARROWS_MAX = 250


def draw_timeline(axis: Any, history: History) -> None:
    begin, end = _window(history)
    names = sorted(history.names, key=lambda name: (len(name), name))
    if len(names) > INSTANCES_MAX:
        names = [names[i * len(names) // INSTANCES_MAX] for i in range(INSTANCES_MAX)]
    rows = {history.names[name]: place for place, name in enumerate(names, start=1)}
    for place in range(len(names) + 1):
        axis.barh(place + 0.45, end - begin, 0.9, left=begin, color=PALE, zorder=0)
    shown = _fill(axis, history, rows, begin, end)
    _learner(axis, history, begin, end)
    _loads(axis, history, rows, begin, end)
    _moves(axis, history, rows, begin, end)
    axis.set_xlim(begin, end)
    axis.set_ylim(len(names) + 1, -0.1)
    axis.set_yticks([place + 0.45 for place in range(len(names) + 1)], ["learner", *names])
    axis.set_xlabel("seconds;  height: requests running;  learner: pale while a batch fills")
    axis.tick_params(length=0)
    axis.spines[:].set_visible(False)
    last = f", last {STEPS_MAX} steps" if begin > 0 else ""
    axis.set_title(f"who worked on which version{last}", loc="left", fontsize=10, weight="bold")
    _versions_legend(axis, shown)


def _window(history: History) -> tuple[float, float]:
    """The last steps, from the end of the one before them."""
    done = [(s, r.committed_s) for s, r in history.steps.items() if not np.isnan(r.committed_s)]
    early = [now for step, now in done if step < history.committed - STEPS_MAX]
    return max(early, default=0.0), max(history.now_s, 1e-3)


def _fill(axis: Any, history: History, rows: dict[int, int], begin: float, end: float) -> list[int]:
    spans = history.placements.all_spans(history.now_s)
    here = (spans["end"] > begin) & (spans["begin"] < end) & np.isin(spans["instance"], list(rows))
    first, last, which = spans["begin"][here], spans["end"][here], spans["instance"][here]
    version = spans["version"][here]
    num = len(VERSIONS)
    key = np.array([rows.get(code, 0) for code in range(max(rows, default=0) + 1)])[which] * num
    mean = coverage(first, last, key + version % num, (len(rows) + 1) * num, (begin, end, BINS))
    levels = mean.reshape(len(rows) + 1, num, BINS)
    most = max(float(levels.sum(axis=1).max()), 1e-9)
    edges = np.linspace(begin, end, BINS + 1)
    for place in rows.values():
        floor = np.zeros(BINS)
        for colour in range(num):
            top = floor + 0.86 * levels[place, colour] / most
            if (top > floor).any():
                low, high = (place + 0.9 - np.append(y, y[-1:]) for y in (floor, top))
                axis.fill_between(edges, low, high, step="post", color=VERSIONS[colour], lw=0)
            floor = top
    return sorted(set(version.tolist()))


def _learner(axis: Any, history: History, begin: float, end: float) -> None:
    for step, record in history.steps.items():
        closed, done = history.or_now(record.closed_s), history.or_now(record.committed_s)
        if done < begin or record.fed_s > end:
            continue
        colour = VERSIONS[step % len(VERSIONS)]
        axis.barh(0.68, closed - record.fed_s, 0.44, left=record.fed_s, color=colour, alpha=0.35)
        if not np.isnan(record.closed_s):
            axis.barh(
                0.45, done - closed, 0.9, left=closed, color=colour, edgecolor="white", lw=0.8
            )
        if done - record.fed_s > 0.025 * (end - begin):
            axis.text(max(record.fed_s, begin), 0.24, f" {step}", fontsize=7, va="center")


def _loads(axis: Any, history: History, rows: dict[int, int], begin: float, end: float) -> None:
    for load in history.loads:
        until = history.or_now(load.end_s)
        if load.instance in rows and until > begin and load.begin_s < end:
            wide = max(until - load.begin_s, 0.002 * (end - begin))
            axis.barh(
                rows[load.instance] + 0.05,
                wide,
                0.1,
                left=load.begin_s,
                color=VERSIONS[load.version % len(VERSIONS)],
                hatch="////",
                ec=INK,
                lw=0,
            )


def _moves(axis: Any, history: History, rows: dict[int, int], begin: float, end: float) -> None:
    moves = history.moves
    near = max(1e-9, (end - begin) / 250)
    bundles: dict[tuple[int, int, int], float] = {}
    columns = (moves["now"].tolist(), moves["src"].tolist(), moves["dst"].tolist())
    for now, src, dst in zip(*columns, strict=True):
        if begin <= now <= end and src in rows and dst in rows:
            bundles.setdefault((int(now / near), src, dst), now)
    for (_, src, dst), now in list(bundles.items())[:ARROWS_MAX]:
        a, b = rows[src] + 0.5, rows[dst] + 0.5
        arrow = {"arrowstyle": "-|>", "color": INK, "lw": 0.9, "alpha": 0.7, "shrinkA": 0}
        arrow |= {"shrinkB": 0, "mutation_scale": 6, "connectionstyle": "arc3,rad=0.15"}
        axis.annotate("", (now + near, b), (now - near, a), arrowprops=arrow)


def _versions_legend(axis: Any, versions: list[int]) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    num = len(VERSIONS)
    labels = {colour: f"v{colour}, {colour + num}, …" for colour in range(num)}
    if len(versions) <= num:
        labels = {v % num: f"v{v}" for v in versions}
    handles: list[Any] = [Patch(color=VERSIONS[c], label=text) for c, text in labels.items()]
    arrow = Line2D([], [], color=INK, lw=1, marker=">", markersize=3, label="migration")
    handles += [Patch(color=PALE, label="idle"), arrow]
    place = {"loc": "lower right", "bbox_to_anchor": (1, 1.0)}
    axis.legend(handles=handles, ncols=len(handles), frameon=False, fontsize=7.5,
                handlelength=1.0, columnspacing=0.9, borderaxespad=0.2, **place)  # fmt: skip
