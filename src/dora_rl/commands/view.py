"""`dora-rl dashboard`, `plot` and `trace`: look at a run, while it runs or afterwards."""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path

from dora_rl.commands.arguments import RUN, argument, command, events_folder, prepare_output
from dora_rl.user_code import require


@command(
    "look at a run in the browser, live or finished",
    RUN,
    argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)"),
    argument("--port", type=int, default=8265, help="0 takes a free one (8265)"),
    argument(
        "--token", default="", help="ask for this token (made up where --host is not loopback)"
    ),
    argument("--no-open", action="store_true", help="do not open a browser"),
)
def dashboard(args: argparse.Namespace) -> int:
    from dora_rl.observe.segments import segments, start_readers

    events = events_folder(args.run)
    require((segments(events), f"{args.run} holds no event log; give the run directory of a run"))
    readers = start_readers(events)  # they are at work while we load the rest
    from dora_rl.dashboard.watcher import Watcher

    watcher = Watcher(args.run, readers=readers)
    watcher.start()
    try:
        from dora_rl.dashboard.server import Server

        server = Server(watcher, args.host, args.port, args.token)
        print(f"{args.run} is shown at {server.url}  (Ctrl-C ends it)", flush=True)
        if not args.no_open:
            webbrowser.open(server.url)
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        watcher.close()
    return 0


@command(
    "draw the curves and the timeline of a run",
    RUN,
    argument("-o", "--output", type=Path, metavar="FILE", required=True, help=".png, .svg or .pdf"),
    argument(
        "--only", choices=("curves", "timeline"), help="one part instead of the whole picture"
    ),
)
def plot(args: argparse.Namespace) -> int:
    from dora_rl.observe.plots import check_format, draw_run

    check_format(args.output)
    events_folder(args.run)
    prepare_output(args.output)
    draw_run(args.run, args.output, only=args.only)
    print(f"wrote {args.output}")
    return 0


@command(
    "write a run as a trace for ui.perfetto.dev",
    RUN,
    argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        default=Path("trace.json"),
        help="where to write it; .gz compresses (trace.json)",
    ),
)
def trace(args: argparse.Namespace) -> int:
    from dora_rl.observe.history import read_history
    from dora_rl.observe.trace import write_trace

    prepare_output(args.output)
    number = write_trace(read_history(events_folder(args.run)), args.output)
    print(f"wrote {number} events to {args.output}; open it at https://ui.perfetto.dev")
    return 0
