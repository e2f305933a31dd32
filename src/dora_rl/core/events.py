"""What the world tells the core. Every event that was fed to the core is in the event log.

An event about a request carries the request's `epoch`: each new placement after a loss raises it,
so a late message from an instance that was given up is recognised and ignored.

What a worker says carries its `incarnation`, which counts the starts under its name: a late or
repeated message of an earlier one is recognised and ignored (see `step.is_late`). Answers to an
order that may be given again (a load, a move) carry the order's `attempt`. -1 is "not known", as in
logs of earlier releases, and is believed. Such logs may have an event under a name that it had then
(`FORMER_NAMES`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from dora_rl.core.params import Params
from dora_rl.types import Finish, InstanceId, RequestId, Segment, StepIndex, Version


@dataclass(frozen=True, slots=True)
class Started:
    """The first event of a run. `config`: digest of the configuration file it wrote."""

    params: Params
    config: str = ""


@dataclass(frozen=True, slots=True)
class Resumed:
    """The controller came back from the log; every worker is new. K, B, steps may differ."""

    params: Params
    config: str = ""


@dataclass(frozen=True, slots=True)
class Rewound:
    """The host was lost, and with its shared memory a version that was sealed and not durable. The
    run goes on from `version`, the last durable one, in a new lineage. Follows `Resumed`."""

    version: Version


@dataclass(frozen=True, slots=True)
class InstanceJoined:
    instance: InstanceId
    slots_max: int
    resident_max: int = 1
    kv_tokens_max: int = 0  # 0: unknown, no pressure handling
    elastic: bool = False
    versions: tuple[Version, ...] = ()  # already loaded and verified
    life: int = 0  # counts the starts of this instance, so that a repeated message is known


@dataclass(frozen=True, slots=True)
class InstanceLost:
    instance: InstanceId
    reason: str
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class InstanceReport:
    """A heart-beat. A running request gains one token per decode step, so its length follows."""

    instance: InstanceId
    decode_steps: int
    kv_tokens: int
    speed: float = 1.0  # relative to a healthy instance
    num_waiting: int = 0  # of its requests: between two turns, so that no token is expected
    still: tuple[RequestId, ...] = ()  # others that have gained no token for a while
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class Loaded:
    instance: InstanceId
    version: Version
    attempt: int = -1
    incarnation: int = -1
    checksum: str = ""  # of the weights that the instance holds now as this version


@dataclass(frozen=True, slots=True)
class LoadFailed:
    instance: InstanceId
    version: Version
    reason: str
    attempt: int = -1
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class _Decoded:
    request: RequestId
    epoch: int
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class SampleFinished(_Decoded):
    """Generation of one sample ended; `segments` is the engine's own record of versions.

    `digest` is taken over tokens, log-probs, loss mask and segments where the sample was made, so
    that files which hold them later can be compared with the log.
    """

    num_tokens: int
    finish: Finish
    segments: tuple[Segment, ...]
    incarnation: int = -1
    digest: str = ""


@dataclass(frozen=True, slots=True)
class SampleFailed(_Decoded):
    """The engine could not go on with this request (refused, non-finite logits, crash inside)."""

    reason: str
    final: bool = False  # trying elsewhere cannot help
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class Continued:
    """A request that was lost goes on from its journal, which had so many tokens of it."""

    request: RequestId
    epoch: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Move:
    request: RequestId
    epoch: int
    src: InstanceId
    dst: InstanceId


@dataclass(frozen=True, slots=True)
class Moved(_Move):
    """`incarnation` is that of the destination, which has the request now."""

    num_bytes: int
    num_tokens: int
    attempt: int = -1
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class MoveFailed(_Move):
    """`kept`: the source still runs the request; otherwise it restarts from its journal.

    `incarnation` is that of the source.
    """

    kept: bool
    reason: str
    attempt: int = -1
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class Scored:
    request: RequestId
    attempt: int
    reward: float


@dataclass(frozen=True, slots=True)
class ScoreFailed:
    request: RequestId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recomputed:
    """A finished sample's log-probs were computed again from the sealed version, by the learner.

    Differences are absolute, over its generated tokens. `tolerance` is for their mean; a response
    of few tokens, and a single token, may lie further off.
    """

    request: RequestId
    version: Version
    num_tokens: int
    gap_mean: float
    gap_max: float
    tolerance: float

    @property
    def is_same(self) -> bool:
        limit = self.tolerance * (1 + 20 / max(1, self.num_tokens))
        return self.gap_mean <= limit and self.gap_max <= 40 * self.tolerance


@dataclass(frozen=True, slots=True)
class BatchAccepted:
    """The learner holds the whole closed batch of this step."""

    step: StepIndex
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class StepCommitted:
    """The weights of version step + 1, and what makes their masters exact, are sealed: in the
    host's shared memory, checksummed. The death of any process leaves them there.

    `metrics`: digest of the step's line of metrics.jsonl, which is written before this. `durable`:
    the newest version that was on disk when this one was sealed; -1 in logs of earlier releases,
    where a version was on disk before it was told (`Params.durable_behind` is 0 there). `waited_s`:
    how long the learner had nothing to train on in this step; -1 where that was not told.
    """

    step: StepIndex
    checksum: str
    incarnation: int = -1
    metrics: str = ""
    durable: Version = -1
    waited_s: float = -1.0


@dataclass(frozen=True, slots=True)
class VersionDurable:
    """A sealed version, and what makes its masters exact, are on disk too."""

    version: Version
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class LearnerJoined:
    """A learner is there, holding sealed `version`; its optimizer may be older. `durable` is the
    newest version on disk, -1 where that was not told."""

    FORMER_NAMES: ClassVar = ("TrainerJoined",)
    version: Version
    optimizer_version: Version
    incarnation: int = -1
    durable: Version = -1


@dataclass(frozen=True, slots=True)
class LearnerLost:
    FORMER_NAMES: ClassVar = ("TrainerLost",)
    reason: str
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class LearnerReport:
    FORMER_NAMES: ClassVar = ("TrainerReport",)
    step: StepIndex
    progress: int
    incarnation: int = -1


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passes: deadlines and the periodic rebalance are looked at."""


@dataclass(frozen=True, slots=True)
class StopRequested:
    reason: str


FromInstance: TypeAlias = (
    InstanceLost
    | InstanceReport
    | Loaded
    | LoadFailed
    | SampleFinished
    | SampleFailed
    | Moved
    | MoveFailed
)
"""What is said of an instance that has joined, each with its incarnation."""

Event: TypeAlias = (
    Started
    | Resumed
    | Rewound
    | InstanceJoined
    | InstanceLost
    | InstanceReport
    | Loaded
    | LoadFailed
    | SampleFinished
    | SampleFailed
    | Continued
    | Moved
    | MoveFailed
    | Scored
    | ScoreFailed
    | Recomputed
    | BatchAccepted
    | StepCommitted
    | VersionDurable
    | LearnerJoined
    | LearnerLost
    | LearnerReport
    | Tick
    | StopRequested
)
