"""`dora-rl audit` and `replay`: what the event log proves of a run.

Exit status: 0 every promise was kept, or the core decides the same again; 1 something was found;
3 not finished, or an empty log.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.commands.arguments import (
    RUN,
    argument,
    command,
    events_folder,
    prepare_output,
    write_json,
)
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.observe.audit import AuditReport

ABOUT = """Finds what accidents and buggy code do to a run: lines of the log that were changed, cut
or moved, and promises that were broken; with --files also other files that are not what the log
tells of. Whoever rewrites every file of a run on purpose can make a run that passes.
Status: 0 every promise was kept, 1 something was found, 3 the log is unfinished or empty, or no
sample could be recomputed (nothing was found, and not everything is proved)."""
UNFINISHED = 3
_LINES_MAX = 20
_GIVEN_UP = {
    "partial": "; this mode does not promise C1, one version per trajectory",
    "replication": "; this mode does not promise C2, no group dropped",
}


@command(
    "prove from the event log that nothing was lost, mixed or too old",
    RUN,
    argument(
        "--files",
        action="store_true",
        help="compare rollouts, table, metrics, config, weights and checkpoints with the log",
    ),
    argument(
        "--recompute",
        type=int,
        default=None,
        metavar="N",
        help="compute N stored samples again from their sealed versions, and compare log-probs",
    ),
    argument("--json", type=Path, metavar="FILE", help="write findings and figures"),
    about=ABOUT,
)
def audit(args: argparse.Namespace) -> int:
    from dora_rl.observe.audit import read_through

    prepare_output(args.json)
    again_too = args.recompute is not None
    require(
        (
            not again_too or args.recompute >= 1,
            f"--recompute {args.recompute}: give a number of samples, at least 1",
        )
    )
    folder, beside = events_folder(args.run), args.files or again_too
    require(
        (
            not beside or folder != args.run,
            f"{args.run} is an event log; give the run directory for this",
        )
    )
    auditor = read_through(folder, keep=bool(beside))
    report, notes, again, nothing = auditor.report(), list[str](), list[str](), False
    found, num = list(report.findings), report.num_findings
    if args.files:
        from dora_rl.audit.files import FileAudit

        files = FileAudit(args.run, auditor)
        found += files.check()
        num, notes = num + files.book.num, files.notes
    if again_too:
        from dora_rl.audit.recompute import recompute

        outcome = recompute(args.run, auditor, args.recompute)
        again = outcome.lines()
        found += outcome.findings
        num += len(outcome.findings)
        nothing = not outcome.found
    report = replace(report, findings=tuple(found), num_findings=num)
    print(*_lines(report, notes, again), sep="\n")
    print(_verdict(report, notes, files=args.files, nothing=nothing))
    proved = report.proved and not nothing
    write_json(args.json, _document(report, notes, again) | {"proved": proved})
    return 0 if proved else 1 if not report.ok else UNFINISHED


def _lines(report: AuditReport, notes: list[str], again: list[str]) -> list[str]:
    figures = report.figures
    lost = f" + {figures.groups_lost} lost" if figures.groups_lost else ""
    unchained = f" in {figures.num_unchained} lines" if figures.num_chained else ""
    more = report.num_findings - _LINES_MAX
    lines = (
        f"{figures.mode}: {figures.steps} steps, {figures.num_entries} log entries, "
        + ("finished" if figures.finished else "not finished"),
        f"groups: {figures.groups_issued} issued = {figures.groups_outstanding} outstanding + "
        f"{figures.groups_trained} trained + {figures.groups_filtered} filtered + "
        f"{figures.groups_failed} failed + {figures.groups_surplus} surplus{lost}",
        figures.num_rewound
        and f"went back to the last durable version {figures.num_rewound} times",
        f"staleness: mean {figures.staleness_mean:.2f}, at most {figures.staleness_max}; "
        f"mixed-version share {figures.mixed_version_frac:.3f}; "
        f"discarded tokens {figures.discarded_tokens}",
        figures.samples_masked
        and f"samples: {figures.samples_trained} trained + {figures.samples_masked} failed in "
        "trained groups",
        figures.num_unchained and f"no chain{unchained}: written by an older release",
        figures.num_recomputed
        and f"computed again during the run: {figures.num_recomputed} samples, log-probs at most "
        f"{figures.recomputed_gap_max:.2g} apart",
        *again,
        *(f"not compared: {note}" for note in notes),
        *map(str, report.findings[:_LINES_MAX]),
        more > 0 and f"… and {more} more",
    )
    return [line for line in lines if line]


def _verdict(report: AuditReport, notes: list[str], *, files: bool, nothing: bool) -> str:
    if not report.ok:
        more = f"; unfinished: {report.unfinished}" if report.unfinished else ""
        return f"{report.num_findings} findings{more}"
    if report.unfinished:
        return f"unfinished: {report.unfinished}; no promise was broken so far"
    beside = "; the files are what the log tells of" if files else ""
    beside += ", as far as they were compared" if files and notes else ""
    if nothing:
        return f"nothing could be recomputed; the log breaks no promise{beside}"
    return f"every promise was kept{_GIVEN_UP.get(report.figures.mode, '')}{beside}"


def _document(report: AuditReport, notes: list[str], again: list[str]) -> dict[str, Any]:
    return {
        "ok": report.ok,
        "proved": report.proved,
        "unfinished": report.unfinished,
        "num_findings": report.num_findings,
        "findings": [asdict(f) | {"promise": f.promise.value} for f in report.findings],
        "not_compared": notes,
        "recomputed": again,
        "figures": asdict(report.figures),
    }


@command("feed a run's event log to the core again and compare its decisions", RUN)
def replay(args: argparse.Namespace) -> int:
    from dora_rl.observe.eventlog import read
    from dora_rl.observe.eventlog import replay as replayed

    result = replayed(read(events_folder(args.run)))
    snapshots = f" and {result.num_snapshots} snapshots" if result.num_snapshots else ""
    if not result.ok:
        print(f"after {result.num_entries} entries: {result.difference}")
        return 1
    if not result.num_entries and not result.num_snapshots:
        print("the log is empty: there is nothing to replay")
        return UNFINISHED
    print(f"{result.num_entries} entries{snapshots} replayed: the same actions")
    return 0
