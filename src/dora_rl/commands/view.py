"""`dora-rl dashboard`, `plot` and `trace`: look at a run, while it runs or afterwards."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Sequence
from pathlib import Path

from dora_rl.commands.arguments import RUN, argument, command, events_folder, prepare_output
from dora_rl.user_code import require

RUNS_MAX = 32  # each has its history in memory


@command(
    "look at a run in the browser, live or finished; or at several, side by side",
    argument(
        "runs", type=Path, nargs="+", metavar="RUN", help="run directories, or a folder of them"
    ),
    argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)"),
    argument("--port", type=int, default=8265, help="0 takes a free one (8265)"),
    argument(
        "--token", default="", help="ask for this token (made up where --host is not loopback)"
    ),
    argument("--no-open", action="store_true", help="do not open a browser"),
)
def dashboard(args: argparse.Namespace) -> int:
    from dora_rl.observe.segments import start_readers

    runs = runs_in(args.runs)
    # The processes that read a long log are at work while we load the rest.
    readers = start_readers(events_folder(runs[0])) if len(runs) == 1 else None
    from dora_rl.dashboard.watcher import Watcher

    watchers = [Watcher(run, readers=readers) for run in runs]
    for watcher in watchers:
        watcher.start()
    try:
        from dora_rl.dashboard.server import Server

        server = Server(watchers, args.host, args.port, args.token)
        what = f"{runs[0]} is" if len(runs) == 1 else f"{len(runs)} runs are"
        print(f"{what} shown at {server.url}  (Ctrl-C ends it)", flush=True)
        if not args.no_open:
            webbrowser.open(server.url)
        server.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        for watcher in watchers:
            watcher.close()
    return 0


def runs_in(given: Sequence[Path]) -> list[Path]:
    """The runs that are meant: a folder without a log of its own stands for the runs in it."""
    found: list[Path] = []
    for path in given:
        runs = [path]
        if not _holds_log(path):
            runs = [run for run in sorted(path.iterdir()) if run.is_dir() and _holds_log(run)]
        require((runs, f"{path} holds no event log; give the run directory of a run"))
        found += runs
    found = list(dict.fromkeys(found))
    more = f"{len(found)} runs are more than the {RUNS_MAX} that are shown at once; name some"
    require((len(found) <= RUNS_MAX, more))
    return found


def _holds_log(folder: Path) -> bool:
    from dora_rl.observe.segments import segments

    return any(path.stem.isdigit() for path in segments(events_folder(folder)))


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
