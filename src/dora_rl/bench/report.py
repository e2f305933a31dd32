"""The table and the picture of a comparison of paradigms. Only formats; never measures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

from rich.box import SIMPLE
from rich.table import Table

from dora_rl.bench.paradigms import ratios

Column: TypeAlias = tuple[str, str, str]  # label, figure, format

SPEED: tuple[Column, ...] = (
    ("tokens/s", "tokens_per_s", ",.0f"),
    ("wall s", "wall_s", ".1f"),
    ("GPU idle", "device_idle_ratio", ".2f"),
    ("CPU not used", "cpu_unused_ratio", ".2f"),
    ("nothing runs", "still_ratio", ".2f"),
    ("rollout idle", "rollout_idle_ratio", ".2f"),
    ("trainer idle", "trainer_idle_ratio", ".2f"),
)
PRICE: tuple[Column, ...] = (
    ("running", "requests_mean", ".0f"),
    ("staleness", "staleness_mean", ".2f"),
    ("mixed", "mixed_version_frac", ".2f"),
    ("discarded", "discarded_tokens", ".0f"),
    ("length bias", "length_bias", ".2f"),
    ("greedy", "eval_greedy", ".3f"),
    ("sampled", "eval_sampled", ".3f"),
)


def tables_of(result: dict[str, Any]) -> list[Table]:
    """How fast each mode was, and what that took: two tables that a terminal has room for."""
    begin, end = result["window"]
    seeds = ", ".join(map(str, result["seeds"]))
    title = f"{result['cores']} cores, seeds {seeds}, {result['steps']} steps"
    return [
        _table(f"{title}, steady state = steps {begin} to {end}", SPEED, result["rows"]),
        _table("what it took", PRICE, result["rows"]),
    ]


def _table(title: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> Table:
    """Without the columns that no row has a figure for."""
    table = Table(title=title, title_justify="left", box=SIMPLE, collapse_padding=True)
    table.add_column("", no_wrap=True)
    table.add_column("split", no_wrap=True)
    known = [column for column in columns if any(column[1] in row["mean"] for row in rows)]
    for label, _, _ in known:
        table.add_column(label, justify="right")
    for row in rows:
        mean: dict[str, float] = row["mean"]
        cells = [format(mean[key], form) if key in mean else "-" for _, key, form in known]
        table.add_row(row["name"], row["split"], *cells)
    return table


def ratio_lines(result: dict[str, Any]) -> list[str]:
    return [f"multi_version / {name}: {ratio:.2f}x" for name, ratio in ratios(result).items()]


def draw_bench(result: dict[str, Any], path: Path) -> None:
    """Bars of the speed with every seed as a dot, and where the time went."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    names = [row["name"] for row in rows]
    places = list(range(len(rows)))
    figure, (speed, idle) = plt.subplots(
        1, 2, figsize=(12, 1.6 + 0.5 * len(rows)), layout="constrained", sharey=True
    )
    ours = [row["mode"] == "multi_version" for row in rows]
    colours = ["#1f6f8b" if own else "#b9c4c9" for own in ours]
    speed.barh(places, [row["mean"]["tokens_per_s"] for row in rows], color=colours)
    for place, row in zip(places, rows, strict=True):
        values = [run["tokens_per_s"] for run in row["runs"]]
        speed.plot(values, [place] * len(values), "k.", markersize=5)
    speed.set(title="trained tokens/s, steady state (dots: seeds)", yticks=places)
    speed.set_yticklabels(names)
    speed.invert_yaxis()
    on_gpu = all("device_idle_ratio" in row["mean"] for row in rows)
    device = ("device_idle_ratio", "GPU idle") if on_gpu else ("cpu_unused_ratio", "CPU not used")
    for offset, (key, label, colour) in enumerate(
        (
            (*device, "#444444"),
            ("rollout_idle_ratio", "rollout idle", "#e08e45"),
            ("trainer_idle_ratio", "trainer idle", "#7aa95c"),
        )
    ):
        shifted = [place + 0.27 * (offset - 1) for place in places]
        idle.barh(
            shifted, [row["mean"][key] for row in rows], height=0.25, color=colour, label=label
        )
    idle.set(title="share of the time", xlim=(0, 1))
    idle.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
