"""Draws the pictures of docs/concepts.md: window.png, group.png, waits.png. `make docs` runs it.

    python docs/pictures/draw.py

window.png and group.png are drawings; waits.png is the timeline of a simulated fleet, the same one
in each mode, by the code that decides in a real run.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

from dora_rl.sim.presets import preset_named
from dora_rl.sim.run import ModeResult, run_mode
from dora_rl.types import Mode

HERE = Path(__file__).parent
INK, PALE, GREY = "#2b2b2b", "#f1f1ee", "#8a8a86"
COLOURS = ("#2e5eaa", "#e07a1f", "#3a9d5d", "#8e4fa8", "#c9a227", "#17869c", "#b5446e", "#7a8b2a")
STEP = 10.0  # width of a step in window.png


def save(figure: Any, name: str) -> None:
    figure.savefig(HERE / name, dpi=100, metadata={"Software": None})
    plt.close(figure)
    print(HERE / name)


def text(axes: Any, x: float, y: float, words: str, **options: Any) -> None:
    axes.text(
        x, y, words, **{"ha": "center", "va": "center", "fontsize": 9, "color": INK} | options
    )


# -- the window ---------------------------------------------------------------------------------

# (version, start, end, step that trains it): eight groups, one of them six times as long.
GROUPS = (
    (0, 0.0, 7.0, 0),
    (0, 0.0, 9.0, 0),
    (0, 1.0, 14.0, 1),
    (0, 1.0, 28.5, 2),
    (1, 10.5, 18.0, 1),
    (1, 14.5, 24.0, 2),
    (2, 20.5, 29.5, 3),
    (2, 24.5, 33.0, 3),
)


def draw_window() -> None:
    figure, axes = plt.subplots(figsize=(10, 4.3), layout="constrained")
    for step in range(4):
        left = step * STEP
        axes.add_patch(Rectangle((left, 8.3), STEP - 0.15, 0.9, color=COLOURS[step], alpha=0.25))
        text(
            axes,
            left + STEP / 2,
            8.75,
            f"step {step} fills, then trains version {step}",
            fontsize=7.5,
        )
        if step:
            axes.axvline(left, color=GREY, lw=0.8, ls=":")
            text(axes, left, 9.55, f"version {step} published", fontsize=8, color=GREY)
    for row, (version, start, end, step) in enumerate(GROUPS):
        y = 7.4 - row
        axes.barh(y, end - start, left=start, height=0.62, color=COLOURS[version])
        label = f"version {version}"
        text(axes, start + 0.3, y, label, color="white", fontsize=8, ha="left")
        stale = step - version
        words = f"taken by step {step}: staleness {stale}" + (
            " = K, the last that may" if stale == 2 else ""
        )
        text(axes, end + 0.3, y, words, fontsize=8, ha="left")
    axes.set(xlim=(-0.5, 4.6 * STEP), ylim=(-0.3, 9.9))
    axes.axis("off")
    axes.set_title(
        "K = 2, two groups a step: a group keeps its version and has a deadline", fontsize=10
    )
    save(figure, "window.png")


# -- the life of a group ------------------------------------------------------------------------

BOXES = {
    "issued": (0, 1, "issued", "on the newest version,\nif the bound still holds"),
    "running": (1, 1, "running", "G samples, one version,\ntoken by token"),
    "scored": (2, 1, "scored", "each sample,\nas it finishes"),
    "ready": (3, 1, "ready", "all samples\nhave a reward"),
    "taken": (4, 1, "taken", "a place in the step\nthat no older group needs"),
    "trained": (5, 1, "trained", "the step is committed:\nversion s + 1 is sealed"),
    "moved": (1, 0, "moved or parked", "with its KV cache, to an\ninstance of its own version"),
    "failed": (2, 0, "failed", "after n attempts;\nthe prompt is issued again"),
    "filtered": (3, 0, "filtered", "all rewards equal,\nif you ask for it"),
}
ARROWS = (
    ("issued", "running", INK),
    ("running", "scored", INK),
    ("scored", "ready", INK),
    ("ready", "taken", INK),
    ("taken", "trained", INK),
    ("running", "moved", GREY),
    ("scored", "failed", GREY),
    ("ready", "filtered", GREY),
)
ENDS = ("trained", "failed", "filtered")


def draw_group() -> None:
    figure, axes = plt.subplots(figsize=(11, 3.1), layout="constrained")
    for name, (x, y, title, words) in BOXES.items():
        colour = COLOURS[2] if name in ENDS else COLOURS[0]
        corner = (x * 2.0 - 0.78, y * 1.5 - 0.45)
        axes.add_patch(
            FancyBboxPatch(corner, 1.56, 0.9, boxstyle="round,pad=0.03", fc=PALE, ec=colour, lw=1.6)
        )
        text(axes, x * 2.0, y * 1.5 + 0.22, title, fontsize=10, weight="bold")
        text(axes, x * 2.0, y * 1.5 - 0.14, words, fontsize=7.5)
    for begin, end, colour in ARROWS:
        (x0, y0, *_), (x1, y1, *_) = BOXES[begin], BOXES[end]
        down = y0 != y1
        start = (x0 * 2.0, y0 * 1.5 - 0.5) if down else (x0 * 2.0 + 0.82, y0 * 1.5)
        stop = (x1 * 2.0, y1 * 1.5 + 0.5) if down else (x1 * 2.0 - 0.82, y1 * 1.5)
        style = "<|-|>" if end == "moved" else "-|>"
        axes.add_patch(
            FancyArrowPatch(start, stop, arrowstyle=style, mutation_scale=12, color=colour)
        )
    text(
        axes,
        9.0,
        0.0,
        "green: an end. Every issued group\nreaches exactly one of them (C2).",
        fontsize=9,
    )
    axes.set(xlim=(-1.0, 11.0), ylim=(-0.7, 2.15))
    axes.axis("off")
    save(figure, "group.png")


# -- who waits ----------------------------------------------------------------------------------

SHOWN = ((Mode.SYNC, None), (Mode.ONE_STEP_OFF, 16), (Mode.PARTIAL, None), (Mode.MULTI_VERSION, 16))
SEED = 1


def simulate(mode: Mode, rollout_devices: int | None) -> ModeResult:
    """Eight instances of four GPUs and a small batch with the paper's lengths."""
    preset = replace(preset_named("paper-64"), num_devices=32, batch_groups=96, num_steps=14)
    return run_mode(preset, mode, SEED, rollout_devices, with_timeline=True)


def draw_waits() -> None:
    results = [(mode, simulate(mode, devices)) for mode, devices in SHOWN]
    span = 2.6 * results[0][1].step_s
    figure, charts = plt.subplots(
        len(results), 1, figsize=(10, 8), layout="constrained", sharex=True
    )
    for axes, (mode, result) in zip(charts, results, strict=True):
        bars = result.timeline.close() if not result.timeline.bars else result.timeline.bars
        begin = min(bar.begin_s for bar in bars if bar.row == "trainer" and bar.version == 3)
        rows = ["trainer", *sorted({bar.row for bar in bars} - {"trainer"})]
        most = max(bar.num_requests for bar in bars if bar.row != "trainer")
        for place, row in enumerate(rows):
            axes.barh(place, span / 60, 0.86, color=PALE, zorder=0)
            for bar in bars:
                if bar.row != row or bar.version is None or bar.end_s < begin:
                    continue
                height = 0.86 if row == "trainer" else 0.86 * max(0.06, bar.num_requests / most)
                left = max(0.0, bar.begin_s - begin)
                width = min(bar.end_s - begin, span) - left
                if width > 0:
                    colour = COLOURS[bar.version % len(COLOURS)]
                    axes.barh(
                        place + 0.43 - height / 2, width / 60, height, left=left / 60, color=colour
                    )
        axes.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, span / 60))
        axes.set_yticks(
            range(len(rows)), ["trainer", *(f"{n}" for n in range(1, len(rows)))], fontsize=7
        )
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        note = f"{mode.value}: a step takes {result.step_s / 60:.1f} min"
        note += f", staleness {result.staleness_mean:.1f}"
        if result.mixed_version_frac:
            note += f", {result.mixed_version_frac:.0%} of the responses on mixed versions"
        axes.set_title(note, fontsize=9, loc="left")
    charts[-1].set_xlabel(
        "minutes; colour: version, height: share of decode slots in use, pale: waiting", fontsize=8
    )
    save(figure, "waits.png")


if __name__ == "__main__":
    plt.rcParams["font.family"] = "DejaVu Sans"
    draw_window()
    draw_group()
    draw_waits()
