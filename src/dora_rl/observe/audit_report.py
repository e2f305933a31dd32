"""What an audit says: findings that name a promise and its culprit, and the figures of the run.

Pure values plus the notebook the checkers write into. Knows nothing of how a promise is checked.

    C1            one version per trajectory
    C2            every group ends exactly once; every trained sample was finished and scored once
    C3            staleness at most K, by the invariant of docs/staleness.md
    batch         every step trains exactly B groups, once, in order
    conservation  issued = outstanding + ended, after every entry
    prompts       every prompt of the stream in order, each once; again only after a failure
    versions      published before use, loaded before decoding, retired last
    log           the entries themselves: chained, numbered without gaps, nothing after the stop
    files         what lies beside the log is what the log tells of (`audit --files`)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from dora_rl.core.events import Event, Tick
from dora_rl.types import RequestId

FINDINGS_MAX = 1_000  # kept in full; further ones are only counted


class Promise(StrEnum):
    C1 = "C1"
    C2 = "C2"
    C3 = "C3"
    BATCH = "batch"
    CONSERVATION = "conservation"
    PROMPTS = "prompts"
    VERSIONS = "versions"
    LOG = "log"
    FILES = "files"


@dataclass(frozen=True, slots=True)
class Finding:
    """One broken promise: `subject` is the group, instance, version or step that broke it.

    `entry` is -1 where no entry of the log is at fault but a file beside it.

    >>> str(Finding(Promise.C3, 812, "group 7", "staleness 3, 2 is allowed"))
    'C3: group 7: staleness 3, 2 is allowed (entry 812)'
    """

    promise: Promise
    entry: int
    subject: str
    message: str

    def __str__(self) -> str:
        where = f" (entry {self.entry})" if self.entry >= 0 else ""
        return f"{self.promise}: {self.subject}: {self.message}{where}"


@dataclass(frozen=True, slots=True)
class AuditFigures:
    """Counted from the log alone. The mean staleness is that of trained samples, as in
    `Records.summary`; tokens are response tokens."""

    mode: str
    num_entries: int
    num_resumes: int
    steps: int
    groups_issued: int
    groups_trained: int
    groups_filtered: int
    groups_failed: int
    groups_surplus: int
    groups_outstanding: int
    groups_discarded: int  # failed, surplus or lost
    samples_trained: int
    samples_masked: int
    tokens_trained: int
    discarded_tokens: int  # of finished samples that failed, or whose group was discarded
    staleness_mean: float
    staleness_max: int
    staleness_counts: tuple[int, ...]  # groups trained at staleness 0, 1, 2, ...
    mixed_version_frac: float
    batch_sizes: tuple[int, ...]
    live_versions_max: int
    migrations: int
    kv_bytes_moved: int
    finished: bool  # the log ends with a completed run
    set_aside: tuple[int, ...] = ()  # prompts that are not issued again
    stopped: str = ""  # the reason of the stop that the log ends with
    num_recomputed: int = 0  # samples computed again during the run, from sealed weights
    recomputed_gap_max: float = 0.0  # the largest difference of a log-prob among them
    num_chained: int = 0  # lines with a digest chained over those before them
    num_unchained: int = 0  # lines without: written by an older release
    groups_lost: int = 0  # with a version that was lost with its host
    num_rewound: int = 0  # how often the run went back to a durable version


@dataclass(frozen=True, slots=True)
class AuditReport:
    """`proved` is the proof: the whole run was read and no promise was broken.

    `ok` alone says that nothing was broken as far as the log goes.
    """

    findings: tuple[Finding, ...]
    num_findings: int
    figures: AuditFigures

    @property
    def ok(self) -> bool:
        return self.num_findings == 0

    @property
    def proved(self) -> bool:
        return self.ok and self.figures.finished

    @property
    def unfinished(self) -> str:
        """Why this log cannot prove that every promise was kept; "" where it can."""
        figures = self.figures
        if figures.finished:
            return ""
        if not figures.num_entries:
            return "the log is empty"
        left = f"{figures.groups_outstanding} groups outstanding"
        if figures.stopped:
            return f"{left}, stopped: {figures.stopped}"
        return f"{left}, no stop record"


@dataclass(slots=True)
class Notebook:
    """Where the checkers write, and what they share about the entry being read."""

    entry: int = -1
    event: Event = field(default_factory=Tick)
    finished: RequestId | None = None  # the sample that this entry's event really finished
    num: int = 0
    found: list[Finding] = field(default_factory=list[Finding])

    def add(self, promise: Promise, subject: str, message: str) -> None:
        self.num += 1
        if len(self.found) < FINDINGS_MAX:
            self.found.append(Finding(promise, self.entry, subject, message))
