"""`dora-rl audit RUN`: prove a run's promises from its event log. 0: kept, 1: broken."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.commands.files import events_folder, prepare_output, write_json

if TYPE_CHECKING:
    from dora_rl.observe.audit import AuditReport

SUMMARY = "prove from the event log that nothing was lost, mixed or too old"
_LINES_MAX = 20
_GIVEN_UP = {
    "partial": "; this mode does not promise C1, one version per trajectory",
    "replication": "; this mode does not promise C2, no group dropped",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=Path, metavar="RUN", help="run directory, or its event log")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write findings and figures")


def run(args: argparse.Namespace) -> int:
    from dora_rl.observe.audit import audit_run

    prepare_output(args.json)
    report = audit_run(events_folder(args.run))
    for line in _lines(report):
        print(line)
    if args.json is not None:
        write_json(args.json, _document(report))
    return 0 if report.ok else 1


def _lines(report: AuditReport) -> list[str]:
    figures = report.figures
    lines = [
        f"{figures.mode}: {figures.steps} steps, {figures.num_entries} log entries, "
        + ("finished" if figures.finished else "not finished"),
        f"groups: {figures.groups_issued} issued = {figures.groups_outstanding} outstanding + "
        f"{figures.groups_trained} trained + {figures.groups_filtered} filtered + "
        f"{figures.groups_failed} failed + {figures.groups_surplus} surplus",
        f"staleness: mean {figures.staleness_mean:.2f}, at most {figures.staleness_max}; "
        f"mixed-version share {figures.mixed_version_frac:.3f}; "
        f"discarded tokens {figures.discarded_tokens}",
    ]
    lines += [str(finding) for finding in report.findings[:_LINES_MAX]]
    if report.num_findings > _LINES_MAX:
        lines.append(f"… and {report.num_findings - _LINES_MAX} more")
    if report.ok:
        return [*lines, f"every promise was kept{_GIVEN_UP.get(figures.mode, '')}"]
    return [*lines, f"{report.num_findings} findings"]


def _document(report: AuditReport) -> dict[str, Any]:
    figures = report.figures
    findings = [
        {"promise": f.promise.value, "entry": f.entry, "subject": f.subject, "message": f.message}
        for f in report.findings
    ]
    return {
        "ok": report.ok,
        "num_findings": report.num_findings,
        "findings": findings,
        "figures": {name: getattr(figures, name) for name in figures.__slots__},
    }
