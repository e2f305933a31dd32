"""`dora-rl check [CONFIG]`: what this machine has, and what a configuration would do on it.

0: fine, 1: something does not fit. Starts no worker and leaves nothing behind.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.commands.arguments import (
    JSON,
    OVERRIDES,
    argument,
    command,
    prepare_output,
    write_json,
)

if TYPE_CHECKING:
    from dora_rl.config import RunConfig


@command(
    "say what this machine has and what a configuration would do on it",
    argument("config", type=Path, nargs="?", help="a TOML file or a run's config.json"),
    OVERRIDES,
    argument(
        "--device-memory-gb",
        type=float,
        default=0.0,
        metavar="GB",
        help="plan for GPUs of this size, whether or not there is one here",
    ),
    JSON,
)
def check(args: argparse.Namespace) -> int:
    from dora_rl.setup.machine import look

    prepare_output(args.json)
    machine = look()
    print(*machine.lines(), sep="\n")
    document: dict[str, Any] = {"machine": asdict(machine)}
    problems: list[str] = []
    if args.config is not None:
        plan, described = _plan(args, machine)
        document["plan"], problems = plan, plan["problems"]
        print(*described, sep="\n")
    for problem in problems:
        print(f"problem: {problem}")
    if args.config is not None and not problems:
        print("this run fits")
    write_json(args.json, document)
    return 1 if problems else 0


def _plan(args: argparse.Namespace, machine: Any) -> tuple[dict[str, Any], list[str]]:
    """Every check of `train`, then the forecast and the memory of each GPU."""
    from dora_rl.setup.hub import with_local_model
    from dora_rl.setup.machine import forecast
    from dora_rl.setup.plan import imagined, memory_problems
    from dora_rl.setup.prepare import check_data, prepare
    from dora_rl.setup.settings import load_config

    config = with_local_model(load_config(args.config, args.overrides))
    size_gb = args.device_memory_gb
    prepared = prepare(_without_device(config) if size_gb else config)
    # Evaluation rows, the first prompt, the form of the reward, rows without an answer.
    data = check_data(prepared.config, prepared.train, prepared.evaluation)
    layout = imagined(prepared.config, size_gb) if size_gb else prepared.layout
    with contextlib.suppress(OSError):  # the layout has made a directory; one in use stays
        prepared.layout.transfer_root.rmdir()
    lines = [*prepared.describe(), *data.lines()]
    problems = [*memory_problems(prepared.config, layout), *data.problems]
    document: dict[str, Any] = {"data": asdict(data)}
    if not size_gb:
        figures, shown = forecast(config, machine, layout)
        document |= figures
        lines, problems = [*lines, *shown], [*figures["problems"], *problems]
    if layout.memory is not None:
        document["memory"] = layout.memory.document()
        lines += layout.memory.table()
    return document | {"problems": problems}, lines


def _without_device(config: RunConfig) -> RunConfig:
    """For a machine that is not this one: its GPU need not be here."""
    return config.changed("runtime", device="auto").changed("trainer", device="auto")
