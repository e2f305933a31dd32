"""`dora-rl dashboard RUN`: look at a run in the browser, while it runs or afterwards."""

from __future__ import annotations

import argparse
import webbrowser

from dora_rl.commands.arguments import RUN, argument, events_folder
from dora_rl.types import UserError

SUMMARY = "look at a run in the browser, live or finished"


ARGUMENTS = (
    RUN,
    argument("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)"),
    argument("--port", type=int, default=8265, help="0 takes a free one (8265)"),
    argument(
        "--token", default="", help="ask for this token (made up where --host is not loopback)"
    ),
    argument("--no-open", action="store_true", help="do not open a browser"),
)


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.segments import segments, start_readers

    events = events_folder(args.run)
    if not segments(events):
        raise UserError(f"{args.run} holds no event log; give the run directory of a run")
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
