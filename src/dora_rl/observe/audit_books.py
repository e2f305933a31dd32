"""The auditor's own books: what the log has shown so far about groups, steps and versions.

Plain data, kept by the checkers beside this file and shared between them. Nothing here comes from
the core's state; a run's books can be rebuilt by anyone who can read the log.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora_rl.core import actions as act
from dora_rl.core.params import Params
from dora_rl.types import GroupId, RequestId, Segment, StepIndex, Version


@dataclass(slots=True)
class Sample:
    """`asked` is the last attempt at scoring it, -1 before it finished.

    `num_lost` counts the times its generation was lost by somebody's fault, `num_unscored` the
    attempts at scoring that failed; `causes` are the words of those events. `failed`: enough of
    either, or one that no retry helps.
    """

    asked: int = -1
    num_tokens: int = 0
    mixed: bool = False
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
        self.failed = self.failed or final or self.num_lost >= attempts_max
        self._remember(cause)

    def unscored(self, cause: str, attempts_max: int) -> None:
        """An attempt at scoring it gave nothing."""
        self.num_unscored += 1
        last = self.num_unscored >= attempts_max or self.asked + 1 >= attempts_max
        self.failed = self.failed or last
        self._remember(cause)

    def _remember(self, cause: str) -> None:
        if cause not in self.causes:
            self.causes = [*self.causes[-7:], cause]


@dataclass(slots=True)
class GroupRecord:
    version: Version
    prompt: int
    samples: list[Sample]
    step: StepIndex | None = None  # the batch it was fed to
    update: int | None = None  # and the optimizer update of that step, under the B in force


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
class Tally:
    """Sums over ended groups."""

    ends: dict[act.End, int] = field(default_factory=dict[act.End, int])
    staleness: dict[int, int] = field(default_factory=dict[int, int])  # of groups
    staleness_sum: int = 0  # over trained samples
    samples: int = 0
    masked: int = 0
    mixed: int = 0
    tokens: int = 0
    discarded_tokens: int = 0
    recomputed: int = 0
    gap_max: float = 0.0


@dataclass(slots=True)
class Books:
    """`expected`: groups whose step this entry makes durable; each must end as trained in it."""

    params: Params = field(default_factory=Params)
    live: dict[GroupId, GroupRecord] = field(default_factory=dict[GroupId, GroupRecord])
    ended: dict[GroupId, act.End] = field(default_factory=dict[GroupId, act.End])
    num_issued: int = 0
    untaken: dict[Version, int] = field(default_factory=dict[Version, int])
    unended: dict[Version, int] = field(default_factory=dict[Version, int])
    filling: StepIndex = 0
    committed: StepIndex = 0  # also the newest version
    on_disk: Version = 0  # the newest that was said to be durable
    lineage: int = 0  # how often the run went back to a durable version
    taken: int = 0  # groups of the step being filled that the log shows as taken
    retired: set[Version] = field(default_factory=set[Version])
    in_force: list[act.InForce] = field(default_factory=list[act.InForce])
    expected: dict[GroupId, StepIndex] = field(default_factory=dict[GroupId, StepIndex])
    fed_samples: dict[GroupId, tuple[int, ...]] = field(
        default_factory=dict[GroupId, tuple[int, ...]]
    )
    tally: Tally = field(default_factory=Tally)
    weights: dict[Version, str] = field(default_factory=dict[Version, str])  # their checksums
    trained: dict[RequestId, TrainedSample] | None = None  # kept where somebody asks for it
    metrics: dict[StepIndex, str] = field(default_factory=dict[StepIndex, str])  # their digests
    config: str = ""  # digest of config.json
    # Losses of an instance on which nothing else ran, since the request last gained a token.
    alone: dict[RequestId, int] = field(default_factory=dict[RequestId, int])
    dirty: bool = False  # a figure of the invariant changed in this entry

    @property
    def durable(self) -> Version:
        """The newest version that is on disk, by the log. A log whose parameters let no version be
        behind is of a release that committed a version when it was on disk."""
        behind = self.params.durable_behind
        return min(self.committed, self.on_disk) if behind else self.committed

    def force(self, step: StepIndex) -> act.InForce:
        """K and B for this step."""
        for action in reversed(self.in_force):
            if action.step <= step:
                return action
        return act.InForce(0, self.params.max_staleness, self.params.batch_groups)
