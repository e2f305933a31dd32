"""`dora-rl sim PRESET`: compare the modes in simulation."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.arguments import JSON, TESTBED, argument, hint, prepare_output, write_json
from dora_rl.types import Mode, UserError

SUMMARY = "compare the modes on a testbed, in simulation"


ARGUMENTS = (
    *TESTBED,
    argument("--mode", default="all", help="all, or one or more of " + ", ".join(Mode)),
    argument(
        "--split", type=int, metavar="N", help="GPUs that generate (default: search the best)"
    ),
    argument(
        "--match",
        action="append",
        default=[],
        metavar="MODE=SHARE",
        help="search the split with this rollout-only share instead, for example one_step_off=0.33",
    ),
    JSON,
    argument("--picture", type=Path, metavar="FILE", help="draw bars and a Gantt chart"),
    argument("--log", type=Path, metavar="DIR", help="write the event log of the mode"),
)


def modes_of(text: str) -> list[Mode]:
    """`all`, or a comma-separated list, in the order of the enumeration."""
    if text == "all":
        return list(Mode)
    wanted = [_mode(name.strip()) for name in text.split(",")]
    return [mode for mode in Mode if mode in wanted]


def _mode(name: str) -> Mode:
    if name not in list(Mode):
        raise UserError(f"unknown mode {name!r}{hint(name, ['all', *Mode])}")
    return Mode(name)


def shares_of(texts: list[str]) -> dict[Mode, float]:
    shares: dict[Mode, float] = {}
    for text in texts:
        name, _, share = text.partition("=")
        try:
            shares[_mode(name)] = float(share)
        except ValueError:
            raise UserError(
                f"--match {text!r}: write MODE=SHARE, for example {name}=0.33"
            ) from None
        if not 0 <= shares[_mode(name)] <= 1:
            raise UserError(f"--match {text!r}: a share is from 0 to 1")
    return shares


def run(args: argparse.Namespace) -> int:
    from dora_rl.commands.progress import console, showing
    from dora_rl.commands.testbed import preset_of, workers_of
    from dora_rl.sim.compare import CompareOptions, compare
    from dora_rl.sim.report import as_json, promise_table, published_shares, speed_table

    modes, preset = modes_of(args.mode), preset_of(args)
    prepare_output(args.json, args.picture)
    if args.picture is not None:
        from dora_rl.observe.plots import check_format

        check_format(args.picture)
    options = CompareOptions(
        seed=args.seed,
        split=args.split,
        shares=published_shares(preset) | shares_of(args.match),
        num_workers=workers_of(args),
        with_timeline=args.picture is not None,
        log=args.log / "events" if args.log is not None else None,
    )
    with showing([mode.value for mode in modes]) as see:
        comparison = compare(preset, modes, options, see)
    out = console()
    out.print(speed_table(comparison), promise_table(comparison))
    write_json(args.json, as_json(comparison))
    if args.picture is not None:
        from dora_rl.sim.picture import draw

        draw(comparison, args.picture)
    for path in (args.json, args.picture, args.log):
        if path is not None:
            out.print(f"wrote {path}", highlight=False, soft_wrap=True)
    return 0
