"""The figures of a comparison as tables for people and as JSON for scripts.

Never simulates anything. `PAPER` holds the published figures that a preset can be set against;
they are shown beside the simulated ones and used for nothing but choosing the split to show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from dora_rl.sim.compare import Comparison, Outcome
from dora_rl.sim.presets import COLOCATED, PRESETS, Preset
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode


@dataclass(frozen=True, slots=True)
class Published:
    """What a paper reports for one mode on one testbed."""

    step_s: float
    rollout_only_share: float
    tokens_per_s: float


# DORA (arXiv 2604.26256), 64 H800: minutes a step, rollout-only share, tokens/s.
PAPER: dict[tuple[str, int], dict[Mode, Published]] = {
    ("paper-64", 64): {
        Mode.SYNC: Published(22.91 * 60, 0.65, 14_143),
        Mode.ONE_STEP_OFF: Published(22.94 * 60, 0.33, 14_141),
        Mode.PARTIAL: Published(17.38 * 60, 0.46, 19_872),
        Mode.MULTI_VERSION: Published(14.67 * 60, 0.12, 23_327),
    }
}
_WORKLOAD = ("device", "model", "batch_groups", "group_size", "prompt_tokens", "lengths")


def published(preset: Preset) -> dict[Mode, Published]:
    """The published figures for this testbed; none when its workload was changed."""
    original = PRESETS.get(preset.name)
    same = original and all(getattr(preset, f) == getattr(original, f) for f in _WORKLOAD)
    return PAPER.get((preset.name, preset.num_devices), {}) if same else {}


def published_shares(preset: Preset) -> dict[Mode, float]:
    """Rollout-only shares to match, for the modes whose split is not published."""
    found = published(preset)
    return {mode: fig.rollout_only_share for mode, fig in found.items() if mode not in COLOCATED}


def as_json(comparison: Comparison) -> dict[str, Any]:
    """The document of `dora-rl sim --json`."""
    preset = comparison.preset
    paper = published(preset)
    modes: dict[str, Any] = {}
    for mode, outcome in comparison.outcomes.items():
        entry = outcome.main.as_json()
        if outcome.best is not None:
            entry["matched"] = outcome.matched
            entry["best"] = outcome.best.as_json()
            names = ("split", "step_s", "rollout_only_share", "tokens_per_s")
            entry["searched"] = [
                {n: getattr(result, n) for n in names} for result in outcome.searched
            ]
        if mode in paper:
            step_off, rate_off = _off(outcome.main, paper[mode])
            entry["paper"] = asdict(paper[mode]) | {
                "step_difference": step_off,
                "tokens_per_s_difference": rate_off,
            }
        modes[mode.value] = entry
    return {
        "preset": preset.name,
        "gpus": preset.num_devices,
        "seed": comparison.seed,
        "batch_groups": preset.batch_groups,
        "max_staleness": preset.max_staleness,
        "num_steps": preset.num_steps,
        "streaming": preset.streaming,
        "kv_moves": preset.kv_moves,
        "repartition": preset.repartition,
        "modes": modes,
    }


def _off(result: ModeResult, paper: Published) -> tuple[float, float]:
    """By how much our step and our throughput differ from the published ones."""
    return result.step_s / paper.step_s - 1, result.tokens_per_s / paper.tokens_per_s - 1


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the tables. `kind` says where the split comes from."""

    mode: Mode
    kind: str
    result: ModeResult
    paper: Published | None


def rows_of(comparison: Comparison) -> list[Row]:
    """The modes in order; where the shown split is not the best, the best follows."""
    rows: list[Row] = []
    paper = published(comparison.preset)
    for mode, outcome in comparison.outcomes.items():
        rows.append(Row(mode, _kind(mode, outcome), outcome.main, paper.get(mode)))
        if outcome.best is not None and outcome.best.split != outcome.main.split:
            rows.append(Row(mode, "best", outcome.best, None))
    return rows


def _kind(mode: Mode, outcome: Outcome) -> str:
    if outcome.best is None:
        return "shared" if mode in COLOCATED else "given"
    same = outcome.best.split == outcome.main.split
    return "best" if not outcome.matched else "both" if same else "matched"


def row_split(row: Row) -> str:
    """`28 + 36 matched`, or `all 64`."""
    return split_text(row.result) + ("" if row.kind == "shared" else f" {row.kind}")


def _table(title: str, heads: Sequence[str]) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("\nmode", no_wrap=True)
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    return table


def speed_table(comparison: Comparison) -> Table:
    """How fast each mode is, beside the published figures where there are any."""
    rows = rows_of(comparison)
    with_paper = any(row.paper is not None for row in rows)
    unit_s, unit = unit_of(max(row.result.step_s for row in rows))
    paper = ("\npaper",) if with_paper else ()
    heads = ["rollout\n+ train", f"step,\n{unit}", *paper, "rollout\nonly", *paper]
    preset = comparison.preset
    table = _table(
        f"{preset.name}: {preset.num_devices} GPUs, seed {comparison.seed}",
        [*heads, "\ntokens/s", *paper, "\n×"],
    )
    first = rows[0].result.tokens_per_s
    for row in rows:
        ours = (
            f"{row.result.step_s / unit_s:.2f}",
            percent(row.result.rollout_only_share),
            f"{row.result.tokens_per_s:,.0f}",
        )
        both = chain.from_iterable(zip(ours, _beside(row, unit_s), strict=True))
        shown = both if with_paper else ours
        ratio = f"{row.result.tokens_per_s / first:.2f}"
        table.add_row(row.mode.value, row_split(row), *shown, ratio)
    if any(outcome.matched for outcome in comparison.outcomes.values()):
        table.caption = (
            "matched: the split whose rollout-only share is nearest to the one asked for; "
            "best: the split with the most tokens/s; both: they are the same"
        )
    return table


def _beside(row: Row, unit_s: float) -> tuple[str, str, str]:
    """The published step, rollout-only share and rate of a row, and how far off we are."""
    paper = row.paper
    if paper is None:
        return "", "", ""
    step_off, rate_off = _off(row.result, paper)
    return (
        f"{paper.step_s / unit_s:.2f} {step_off:+.0%}",
        percent(paper.rollout_only_share),
        f"{paper.tokens_per_s:,.0f} {rate_off:+.0%}",
    )


def promise_table(comparison: Comparison) -> Table:
    """What each mode pays: idle devices, staleness, mixed or discarded data, moves."""
    table = _table(
        "what each mode leaves idle, gives up and moves",
        [
            "rollout\n+ train",
            "inst.\nidle",
            "trainer\nidle",
            "stale-\nness",
            "\nmax",
            "\nmixed",
            "tokens\ndropped",
            "length\nbias",
            "\nmoves",
            "KV\nmoved",
            "over-\nhead",
        ],
    )
    for row in rows_of(comparison):
        result = row.result
        table.add_row(
            row.mode.value,
            split_text(result),
            percent(result.instance_idle_ratio),
            percent(result.trainer_idle_ratio),
            f"{result.staleness_mean:.2f}",
            str(result.staleness_max),
            percent(result.mixed_version_frac),
            amount(result.discarded_tokens),
            f"{result.length_bias:.2f}",
            f"{result.migrations:,}",
            amount(result.kv_bytes_moved) + "B",
            percent(result.overhead_share),
        )
    return table


def unit_of(longest_s: float) -> tuple[float, str]:
    """Seconds per unit of time to show, and its name."""
    return (60.0, "min") if longest_s >= 120 else (1.0, "s")


def split_text(result: ModeResult) -> str:
    """`24 + 40`, or `64 shared` where the same devices do both."""
    rollout, train = result.split["rollout"], result.split["train"]
    return f"all {rollout}" if result.mode in COLOCATED else f"{rollout} + {train}"


def duration(seconds: float) -> str:
    return f"{seconds / 60:.2f} min" if seconds >= 120 else f"{seconds:.1f} s"


def percent(share: float) -> str:
    return f"{share:.1%}" if 0.0005 <= share < 0.1 else f"{share:.0%}"


def amount(number: float) -> str:
    """
    >>> amount(1_234_567)
    '1.2 M'
    """
    units = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    found = (f"{number / size:.1f} {letter}" for size, letter in units if number >= size)
    return next(found, f"{number:.0f} ")
