"""`dora-rl plot RUN -o FILE.png`: the curves and the timeline of a run as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.arguments import RUN, argument, events_folder, prepare_output

SUMMARY = "draw the curves and the timeline of a run"


ARGUMENTS = (
    RUN,
    argument("-o", "--output", type=Path, metavar="FILE", required=True, help=".png, .svg or .pdf"),
    argument(
        "--only", choices=("curves", "timeline"), help="one part instead of the whole picture"
    ),
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.plots import check_format, draw_run

    check_format(args.output)
    events_folder(args.run)
    prepare_output(args.output)
    draw_run(args.run, args.output, only=args.only)
    print(f"wrote {args.output}")
    return 0
