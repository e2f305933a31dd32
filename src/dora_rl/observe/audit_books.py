"""What an audit says, and the books that its checkers share while they read a log.

Findings name a promise and its culprit; figures are counted from the log. The books say what the
log has shown so far about groups, steps and versions. Nothing here comes from the core's state: a
run's books can be rebuilt by anyone who can read the log. Never checks a promise itself.

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

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from dora_rl.core import actions as act
from dora_rl.core.events import Event, Tick
from dora_rl.core.params import Params
from dora_rl.types import GroupId, RequestId, Segment, StepIndex, Version

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


C1, C2, C3, BATCH, CONSERVATION, PROMPTS, VERSIONS, LOG, FILES = Promise


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


@dataclass(slots=True)
class AuditFigures:
    """Counted from the log alone, some while it is read and the rest by `Auditor.report`. The mean
    staleness is that of trained samples, as in `Records.summary`; tokens are response tokens."""

    mode: str = ""
    num_entries: int = 0
    num_resumes: int = 0
    steps: int = 0
    groups_issued: int = 0
    groups_trained: int = 0
    groups_filtered: int = 0
    groups_failed: int = 0
    groups_surplus: int = 0
    groups_outstanding: int = 0
    groups_discarded: int = 0  # failed, surplus or lost
    samples_trained: int = 0
    samples_masked: int = 0
    tokens_trained: int = 0
    discarded_tokens: int = 0  # of finished samples that failed, or whose group was discarded
    staleness_mean: float = 0.0
    staleness_max: int = 0
    staleness_counts: tuple[int, ...] = ()  # groups trained at staleness 0, 1, 2, ...
    mixed_version_frac: float = 0.0
    batch_sizes: tuple[int, ...] = ()
    live_versions_max: int = 1
    migrations: int = 0
    kv_bytes_moved: int = 0
    finished: bool = False  # the log ends with a completed run
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
        if figures.finished or not figures.num_entries:
            return "" if figures.finished else "the log is empty"
        end = f"stopped: {figures.stopped}" if figures.stopped else "no stop record"
        return f"{figures.groups_outstanding} groups outstanding, {end}"


@dataclass(slots=True)
class Findings:
    """Where the checkers write, and what they share about the entry being read."""

    entry: int = -1
    event: Event = field(default_factory=Tick)
    finished: RequestId | None = None  # the sample that this entry's event really finished
    num: int = 0
    kept: list[Finding] = field(default_factory=list[Finding])  # the first of them

    def check(self, holds: object, promise: Promise, subject: str, message: str) -> bool:
        """What must hold of a subject; `message` says what is wrong where it does not.

        Made in any case: what is checked for every sample spells the condition out instead.
        """
        if not holds:
            self.add(promise, subject, message)
        return bool(holds)

    def add(self, promise: Promise, subject: str, message: str) -> None:
        self.num += 1
        if len(self.kept) < FINDINGS_MAX:
            self.kept.append(Finding(promise, self.entry, subject, message))


# -- the books -------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sample:
    """`epoch` is that of its last dispatch; `asked` the last attempt at scoring it, -1 before it
    finished. `num_alone` counts losses of an instance on which nothing else ran, since it last went
    on with more tokens (`journaled`) than before.

    `num_lost` counts the times its generation was lost by somebody's fault, `num_unscored` the
    attempts at scoring that failed; `causes` are the words of those events. `failed`: enough of
    either, or one that no retry helps.
    """

    asked: int = -1
    epoch: int = -1
    num_alone: int = 0
    journaled: int = 0
    num_tokens: int = 0
    reward: float | None = None
    digest: str = ""
    segments: tuple[Segment, ...] = ()
    finish: str = ""
    num_lost: int = 0
    num_unscored: int = 0
    failed: bool = False
    causes: list[str] = field(default_factory=list[str])

    def lose(self, cause: str, attempts_max: int, *, final: bool = False) -> None:
        """Its generation was lost and has to go on elsewhere, or cannot."""
        self.num_lost += 1
        self._fail(cause, final or self.num_lost >= attempts_max)

    def unscored(self, cause: str, attempts_max: int) -> None:
        """An attempt at scoring it gave nothing."""
        self.num_unscored += 1
        self._fail(cause, max(self.num_unscored, self.asked + 1) >= attempts_max)

    def _fail(self, cause: str, last: bool) -> None:
        self.failed = self.failed or last
        if cause not in self.causes:
            self.causes = [*self.causes[-7:], cause]


@dataclass(slots=True)
class GroupRecord:
    version: Version
    prompt: int
    samples: list[Sample]
    step: StepIndex | None = None  # the batch it was fed to
    fed: tuple[int, ...] = ()  # with these samples
    update: int | None = None  # and the optimizer update of that step, under the B in force

    def rewards(self) -> set[float]:
        """The different ones."""
        return {sample.reward for sample in self.samples if sample.reward is not None}


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """What the log says of one sample that was trained; for those who compare files with it."""

    step: StepIndex
    version: Version
    prompt: int
    num_tokens: int
    reward: float | None
    digest: str
    segments: tuple[Segment, ...]
    finish: str


@dataclass(slots=True)
class Books:
    """`expected`: groups whose step this entry makes durable; each must end as trained in it."""

    params: Params = field(default_factory=Params)
    live: dict[GroupId, GroupRecord] = field(default_factory=dict[GroupId, GroupRecord])
    ended: dict[GroupId, act.End] = field(default_factory=dict[GroupId, act.End])
    untaken: Counter[Version] = field(default_factory=Counter[Version])
    unended: Counter[Version] = field(default_factory=Counter[Version])
    filling: StepIndex = 0
    committed: StepIndex = 0  # also the newest version
    on_disk: Version = 0  # the newest that was said to be durable
    taken: int = 0  # groups of the step being filled that the log shows as taken
    retired: set[Version] = field(default_factory=set[Version])
    in_force: list[act.InForce] = field(default_factory=list[act.InForce])
    expected: dict[GroupId, StepIndex] = field(default_factory=dict[GroupId, StepIndex])
    figures: AuditFigures = field(default_factory=AuditFigures)
    staleness: Counter[int] = field(default_factory=Counter[int])  # of trained groups
    staleness_sum: int = 0  # over trained samples
    num_mixed: int = 0  # trained samples of several versions
    weights: dict[Version, str] = field(default_factory=dict[Version, str])  # their checksums
    trained: dict[RequestId, TrainedSample] | None = None  # kept where somebody asks for it
    metrics: dict[StepIndex, str] = field(default_factory=dict[StepIndex, str])  # their digests
    config: str = ""  # digest of config.json
    dirty: bool = False  # a figure of the invariant changed in this entry

    @property
    def durable(self) -> Version:
        """The newest version that is on disk, by the log. A log whose parameters let no version be
        behind is of a release that committed a version when it was on disk."""
        return min(self.committed, self.on_disk) if self.params.durable_behind else self.committed

    def force(self, step: StepIndex) -> act.InForce:
        """K and B for this step."""
        asked = act.InForce(0, self.params.max_staleness, self.params.batch_groups)
        return next((known for known in reversed(self.in_force) if known.step <= step), asked)

    def sample(self, request: RequestId) -> Sample | None:
        """Of an outstanding group; None where that has ended or has no such sample."""
        record = self.live.get(request.group)
        samples = record.samples if record is not None else []
        return samples[request.sample] if request.sample < len(samples) else None


@dataclass(eq=False)
class Checker:
    """A part of the audit: follows the log in the books and adds to the findings."""

    books: Books
    findings: Findings

    def __post_init__(self) -> None:
        self.add, self.check = self.findings.add, self.findings.check
