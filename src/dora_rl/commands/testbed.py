"""The arguments that `sim` and `plan` share: which preset, how many GPUs, what is changed in it."""

from __future__ import annotations

import argparse
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from dora_rl.types import UserError

if TYPE_CHECKING:
    from dora_rl.sim.presets import Preset

_WORKERS_MAX = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("preset", metavar="PRESET", help="testbed: paper-64, moe-agentic, small, …")
    parser.add_argument(
        "--gpus", type=_count, metavar="N", help="number of GPUs; the batch stays as it is"
    )
    parser.add_argument(
        "--seed", type=int, metavar="N", default=0, help="of the response lengths (default 0)"
    )
    parser.add_argument("--steps", type=_count, metavar="N", help="training steps to simulate")
    parser.add_argument(
        "--batch-scale", type=float, metavar="X", default=1.0, help="scale the batch by this"
    )
    parser.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change a field of the preset: max_staleness=3, device.nic_bytes_per_s=25e9, "
        "lengths=lognormal:MEAN,SIGMA,MAX | pareto:ALPHA,MIN,MAX | file:PATH, …",
    )
    parser.add_argument("--no-kv-moves", action="store_true", help="re-prefill instead of moving")
    parser.add_argument("--no-repartition", action="store_true", help="no proportional partition")
    parser.add_argument("--no-streaming", action="store_true", help="train on whole batches only")
    parser.add_argument(
        "--jobs", type=_count, metavar="N", help="simulations at once (default: one per core)"
    )


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


_count.__name__ = "whole number"  # argparse puts it into its error line


def preset_of(args: argparse.Namespace) -> Preset:
    """The preset as the arguments want it, checked."""
    from dora_rl.commands.overrides import apply
    from dora_rl.sim.presets import preset_named, scaled

    preset = scaled(preset_named(args.preset), args.gpus, args.batch_scale)
    if args.steps is not None:
        preset = replace(preset, num_steps=args.steps)
    preset = apply(preset, args.settings)
    preset = replace(
        preset,
        kv_moves=preset.kv_moves and not args.no_kv_moves,
        repartition=preset.repartition and not args.no_repartition,
        streaming=preset.streaming and not args.no_streaming,
    )
    preset.validate()
    if preset.num_devices % preset.tensor_parallel:
        raise UserError(
            f"{preset.name} builds instances of {preset.tensor_parallel} GPUs; --gpus must be a "
            f"multiple of that, not {preset.num_devices}"
        )
    return preset


def workers_of(args: argparse.Namespace) -> int:
    return args.jobs or min(_WORKERS_MAX, len(os.sched_getaffinity(0)))
