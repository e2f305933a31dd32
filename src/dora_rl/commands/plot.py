"""`dora-rl plot RUN -o FILE.png`: the curves and the timeline of a run as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.files import events_folder, prepare_output

SUMMARY = "draw the curves and the timeline of a run"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, or its event log")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", required=True, help=".png, .svg or .pdf"
    )
    parser.add_argument(
        "--only", choices=("curves", "timeline"), help="one part instead of the whole picture"
    )


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.plots import check_format, draw_run

    check_format(args.output)
    events_folder(args.run)
    prepare_output(args.output)
    draw_run(args.run, args.output, only=args.only)
    print(f"wrote {args.output}")
    return 0
