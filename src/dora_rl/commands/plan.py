"""`dora-rl plan PRESET`: the best split, K and number of groups in flight, and why."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.arguments import TESTBED, argument, prepare_output, write_json

SUMMARY = "search split, staleness bound and groups in flight for the best throughput"


ARGUMENTS = (
    *TESTBED,
    argument("--json", type=Path, metavar="FILE", help="write the plan"),
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.commands.progress import console, showing
    from dora_rl.commands.testbed import preset_of, workers_of
    from dora_rl.sim.plan import plan, plan_table

    preset = preset_of(args)
    prepare_output(args.json)
    with showing(["plan"]) as see:
        result = plan(preset, seed=args.seed, num_workers=workers_of(args), see=see)
    out = console()
    out.print(plan_table(result))
    for line in result.reasons:
        out.print(line, highlight=False)
    write_json(args.json, result.as_json())
    if args.json is not None:
        out.print(f"wrote {args.json}", highlight=False, soft_wrap=True)
    return 0
