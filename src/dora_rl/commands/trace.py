"""`dora-rl trace RUN -o trace.json`: a trace for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

import argparse
from pathlib import Path

from dora_rl.commands.arguments import RUN, argument, events_folder, prepare_output

SUMMARY = "write a run as a trace for ui.perfetto.dev"


ARGUMENTS = (
    RUN,
    argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("trace.json"),
        help="where to write it; .gz compresses (trace.json)",
    ),  # fmt: skip,
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.history import read_history
    from dora_rl.observe.trace import write_trace

    prepare_output(args.output)
    number = write_trace(read_history(events_folder(args.run)), args.output)
    print(f"wrote {number} events to {args.output}; open it at https://ui.perfetto.dev")
    return 0
