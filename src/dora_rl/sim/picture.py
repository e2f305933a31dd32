"""The picture of a comparison: bars of every mode, and who worked on which version when.

Top: time of a step (how much of it is rollout alone) and throughput, with published figures as
marks. Below: a Gantt chart for a few modes on the same time axis; one row per instance (a sample
of them), the trainer above. The height of an instance's bar is the share of its slots in use, so
a batch that drains shows as a stair. Reads finished results only; matplotlib is imported when a
picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.sim.compare import Comparison
from dora_rl.sim.presets import COLOCATED
from dora_rl.sim.report import Row, row_split, rows_of, unit_of
from dora_rl.sim.run import Bar, ModeResult
from dora_rl.types import Mode, UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GANTT_MODES = (Mode.SYNC, Mode.ONE_STEP_OFF, Mode.PARTIAL, Mode.MULTI_VERSION, Mode.REPLICATION)
_GANTTS_MAX = 3
_INSTANCES_MAX = 12
_STEPS_SHOWN = 2  # of the slowest mode shown
_INK, _PALE, _GRID = "#2b2b2b", "#f1f1ee", "#d9d9d4"
_ROLLOUT, _REST = "#d1495b", "#8fa3ad"
# Neighbouring versions differ in hue and lightness; ten live versions are never on screen at once.
_VERSIONS = (
    "#2e5eaa",
    "#e07a1f",
    "#3a9d5d",
    "#8e4fa8",
    "#c9a227",
    "#17869c",
    "#b5446e",
    "#7a8b2a",
    "#6c63c7",
    "#a0603a",
)


def draw(comparison: Comparison, path: Path) -> None:
    """Write the picture; its format follows the name."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    style: Any = {
        "font.size": 9,
        "axes.edgecolor": _GRID,
        "axes.labelcolor": _INK,
        "text.color": _INK,
        "xtick.color": _INK,
        "ytick.color": _INK,
        "svg.fonttype": "none",
    }
    charts = _charts(comparison)
    heights = [1.4 + 0.34 * len(rows_of(comparison))]
    heights += [0.75 + 0.17 * (1 + len(_sampled(result))) for result in charts]
    with mpl.rc_context(style):
        figure = Figure(figsize=(12, sum(heights) + 0.6), layout="constrained")
        _compose(figure, comparison, charts, heights)
        try:
            figure.savefig(path, dpi=130)
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from error


def _compose(
    figure: Figure, comparison: Comparison, charts: Sequence[ModeResult], heights: list[float]
) -> None:
    rows = rows_of(comparison)
    grid = figure.add_gridspec(1 + len(charts), 2, height_ratios=heights)
    preset = comparison.preset
    figure.suptitle(
        f"{preset.name}: {preset.model.name} on {preset.num_devices} × {preset.device.name}, "
        f"{preset.batch_groups * preset.group_size:,} trajectories a step (simulated)",
        fontsize=13,
        fontweight="bold",
    )
    _step_bars(figure.add_subplot(grid[0, 0]), rows)
    _rate_bars(figure.add_subplot(grid[0, 1]), rows)
    if charts:
        _gantts(figure, grid, charts, comparison)


def _charts(comparison: Comparison) -> list[ModeResult]:
    """The modes to show in time, in the order of the bars."""
    outcomes = comparison.outcomes
    wanted = sorted(
        [mode for mode in _GANTT_MODES if mode in outcomes and outcomes[mode].main.timeline.bars],
        key=lambda mode: mode is not Mode.MULTI_VERSION,
    )[:_GANTTS_MAX]
    return [outcomes[mode].main for mode in outcomes if mode in wanted]


def _bar_axes(axes: Axes, rows: Sequence[Row], title: str) -> None:
    axes.set_yticks(range(len(rows)), [f"{row.mode.value}\n{row_split(row)}" for row in rows])
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    axes.xaxis.grid(True, color=_GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _step_bars(axes: Axes, rows: Sequence[Row]) -> None:
    unit_s, unit = unit_of(max(row.result.step_s for row in rows))
    steps = [row.result.step_s / unit_s for row in rows]
    alone = [row.result.rollout_only_share * step for row, step in zip(rows, steps, strict=True)]
    rest = [step - part for step, part in zip(steps, alone, strict=True)]
    places = range(len(rows))
    axes.barh(places, alone, 0.62, color=_ROLLOUT, label="rollout only, the trainer waits")
    axes.barh(places, rest, 0.62, left=alone, color=_REST, label="training (rollout may go on)")
    marks = [row.paper.step_s / unit_s if row.paper else 0.0 for row in rows]
    _marks(axes, marks)
    for place, (step, mark) in enumerate(zip(steps, marks, strict=True)):
        axes.text(max(step, mark), place, f"  {step:.1f}", va="center", ha="left", fontsize=8.5)
    _bar_axes(axes, rows, f"time of a step, {unit} (less is better)")
    axes.set_xlim(0, max(steps) * 1.12)
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.08),
        ncols=3,
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
    )


def _rate_bars(axes: Axes, rows: Sequence[Row]) -> None:
    rates = [row.result.tokens_per_s for row in rows]
    axes.barh(
        range(len(rows)),
        rates,
        0.62,
        color=[_VERSIONS[0] if row.mode is Mode.MULTI_VERSION else _REST for row in rows],
    )
    marks = [row.paper.tokens_per_s if row.paper else 0.0 for row in rows]
    _marks(axes, marks)
    for place, (rate, mark) in enumerate(zip(rates, marks, strict=True)):
        text = f"  {rate:,.0f}  (×{rate / rates[0]:.2f})"
        axes.text(max(rate, mark), place, text, va="center", ha="left", fontsize=8.5)
    _bar_axes(axes, rows, "tokens trained per second (more is better)")
    axes.set_yticks([])
    axes.set_xlim(0, max(rates) * 1.25)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")


def _marks(axes: Axes, values: Sequence[float]) -> None:
    """The published figure of each row that has one (0: none)."""
    if known := [(value, place) for place, value in enumerate(values) if value]:
        across, places = zip(*known, strict=True)
        axes.scatter(across, places, marker="D", s=26, color=_INK, zorder=3, label="published")


def _gantts(
    figure: Figure, grid: Any, charts: Sequence[ModeResult], comparison: Comparison
) -> None:
    begin = min(_steady_s(result, comparison.preset.warmup_steps) for result in charts)
    span = _STEPS_SHOWN * max(result.step_s for result in charts)
    unit_s, unit = unit_of(span)
    shown: set[int] = set()
    parts = [figure.add_subplot(grid[place, :]) for place in range(1, 1 + len(charts))]
    for axes, result in zip(parts, charts, strict=True):
        shown |= _gantt(
            axes, result, _steady_s(result, comparison.preset.warmup_steps) or begin, span, unit_s
        )
        axes.set_title(_chart_title(result), loc="left", fontsize=10.5, fontweight="bold")
        axes.set_xlim(0, span / unit_s)
    parts[-1].set_xlabel(
        f"{unit} after the warm-up steps;   one row per instance (a sample), colour: version, "
        "height: requests running"
    )
    _legend(figure, sorted(shown))


def _chart_title(result: ModeResult) -> str:
    rollout, train = result.split["rollout"], result.split["train"]
    both = f"the same {rollout} GPUs generate, then train"
    apart = f"{rollout} GPUs generate, {train} train"
    return f"{result.mode}: {both if result.mode in COLOCATED else apart}"


def _steady_s(result: ModeResult, warmup_steps: int) -> float:
    """When the warm-up steps were over: the commit of the last of them."""
    trained = [b for b in result.timeline.bars if b.row == "trainer" and b.version is not None]
    ends = sorted(bar.end_s for bar in trained)
    return ends[warmup_steps - 1] if 0 < warmup_steps <= len(ends) else 0.0


def _sampled(result: ModeResult) -> list[str]:
    names = sorted({bar.row for bar in result.timeline.bars if bar.row != "trainer"})
    num = min(len(names), _INSTANCES_MAX)
    return [names[i * len(names) // num] for i in range(num)]


def _gantt(axes: Axes, result: ModeResult, begin: float, span: float, unit_s: float) -> set[int]:
    """Draw one chart; returns the versions that can be seen."""
    rows = {name: place for place, name in enumerate(["trainer", *_sampled(result)])}
    bars = [bar for bar in result.timeline.bars if bar.row in rows and bar.version is not None]
    bars = [bar for bar in bars if bar.end_s > begin and bar.begin_s < begin + span]
    most = max((bar.num_requests for bar in bars if bar.row != "trainer"), default=1)
    for row, place in rows.items():
        axes.barh(place, span / unit_s, 0.86, color=_PALE, zorder=0)
        _row(axes, [bar for bar in bars if bar.row == row], place, most, (begin, unit_s))
    axes.set_ylim(len(rows) - 0.4, -0.6)
    names = [name if name == "trainer" else name.lstrip("i0") or "0" for name in rows]
    axes.set_yticks(list(rows.values()), names, fontsize=7.5)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return {bar.version for bar in bars if bar.version is not None}


def _row(
    axes: Axes, bars: Sequence[Bar], place: int, most: int, scale: tuple[float, float]
) -> None:
    begin, unit_s = scale
    for bar in bars:
        assert bar.version is not None
        full = bar.row == "trainer"
        height = 0.86 if full else 0.86 * max(0.08, bar.num_requests / most)
        left, right = max(bar.begin_s - begin, 0.0) / unit_s, (bar.end_s - begin) / unit_s
        axes.barh(
            place + 0.43 - height / 2,
            right - left,
            height,
            left=left,
            color=_VERSIONS[bar.version % len(_VERSIONS)],
            edgecolor="white" if full else "none",
            linewidth=1.0 if full else 0.0,
        )


def _legend(figure: Figure, versions: Sequence[int]) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(color=_VERSIONS[version % len(_VERSIONS)], label=f"version {version}")
        for version in versions
    ]
    handles.append(Patch(color=_PALE, label="idle"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=min(9, len(handles)),
        frameon=False,
        fontsize=8.5,
        handlelength=1.2,
    )
