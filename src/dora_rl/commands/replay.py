"""`dora-rl replay RUN`: feed a run's event log to the core again; it must decide the same."""

from __future__ import annotations

import argparse

from dora_rl.commands.arguments import RUN, events_folder

SUMMARY = "feed a run's event log to the core again and compare its decisions"
EMPTY = 3  # as the audit says it of a log that proves nothing


ARGUMENTS = (RUN,)


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.eventlog import read, replay

    result = replay(read(events_folder(args.run)))
    snapshots = f" and {result.num_snapshots} snapshots" if result.num_snapshots else ""
    if not result.num_entries and not result.num_snapshots and result.ok:
        print("the log is empty: there is nothing to replay")
        return EMPTY
    if result.ok:
        print(f"{result.num_entries} entries{snapshots} replayed: the same actions")
        return 0
    print(f"after {result.num_entries} entries: {result.difference}")
    return 1
