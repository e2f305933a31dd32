"""What the core tells the world to do. Written to the log before it is performed.

`attempt` numbers orders that may be given again, so that an answer to an earlier one is known. It
says nothing of the decision: logs of releases that did not number them replay to equal actions.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias

from dora_rl.types import GroupId, InstanceId, RequestId, StepIndex, Version


class End(StrEnum):
    """How a group ends, exactly once."""

    TRAINED = "trained"
    FILTERED = "filtered"
    FAILED = "failed"
    SURPLUS = "surplus"  # replication only
    LOST = "lost"  # generated on a version that was lost with its host; its prompt is issued again


class How(StrEnum):
    """How a request reaches another instance."""

    KV = "kv"
    PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class IssueGroup:
    """A new group: `prompt` is its place in the prompt stream; `step` the step being filled."""

    group: GroupId
    prompt: int
    version: Version
    step: StepIndex


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Start (or, with `resume`, continue from the journal) these samples on an instance."""

    instance: InstanceId
    group: GroupId
    prompt: int
    version: Version
    samples: tuple[int, ...]
    epochs: tuple[int, ...]
    resume: bool


@dataclass(frozen=True, slots=True)
class _Order:
    """About one request on an instance."""

    instance: InstanceId
    request: RequestId
    epoch: int


@dataclass(frozen=True, slots=True)
class Abort(_Order):
    """Stop it and forget it."""


@dataclass(frozen=True, slots=True)
class Load:
    """Load a sealed version, from a peer that holds it or (donor None) from the store."""

    instance: InstanceId
    version: Version
    donor: InstanceId | None
    attempt: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class Unload:
    instance: InstanceId
    version: Version


@dataclass(frozen=True, slots=True)
class Move:
    request: RequestId
    epoch: int
    version: Version
    src: InstanceId
    dst: InstanceId
    how: How
    attempt: int = field(default=-1, compare=False)


@dataclass(frozen=True, slots=True)
class Park(_Order):
    """Stop decoding and keep the KV cache in host memory; the request needs no slot."""


@dataclass(frozen=True, slots=True)
class Unpark(_Order):
    version: Version


@dataclass(frozen=True, slots=True)
class Reversion(_Order):
    """`partial` only: continue a running request under new weights."""

    version: Version


@dataclass(frozen=True, slots=True)
class Sleep:
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Wake:
    instance: InstanceId


@dataclass(frozen=True, slots=True)
class Restart:
    """An instance made no progress for too long: replace it."""

    instance: InstanceId
    reason: str


@dataclass(frozen=True, slots=True)
class RestartLearner:
    FORMER_NAMES: ClassVar = ("RestartTrainer",)
    reason: str


@dataclass(frozen=True, slots=True)
class Score:
    request: RequestId
    prompt: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Feed:
    """This group is part of the step's batch; the learner may start on it."""

    step: StepIndex
    update: int
    group: GroupId
    version: Version
    samples: tuple[int, ...]  # the scored ones; the rest is masked


@dataclass(frozen=True, slots=True)
class CloseStep:
    step: StepIndex
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class EndGroup:
    group: GroupId
    version: Version
    end: End
    step: StepIndex | None  # the step that trained it
    reason: str


@dataclass(frozen=True, slots=True)
class SetAside:
    """This place of the prompt stream is not issued again: so many of its groups have failed.

    `kills`: it was alone on its instance each time that was lost, so that no other is to blame.
    """

    prompt: int
    group: GroupId  # the last one
    failures: int
    kills: bool
    reason: str


@dataclass(frozen=True, slots=True)
class RetireVersion:
    version: Version


@dataclass(frozen=True, slots=True)
class WaitFor:
    """The take rule blocks: the learner waits for these running groups. Nothing is discarded."""

    step: StepIndex
    groups: tuple[GroupId, ...]


@dataclass(frozen=True, slots=True)
class HoldBack:
    """Groups that could start are held back until the next version: they would only age. Once a
    version; `step` is the one in training. There are `ready` groups and `running` ones for it and
    the `ahead` groups beyond it; the learner needs the next batch in about `needed_s` seconds."""

    step: StepIndex
    ahead: int
    ready: int
    running: int
    needed_s: float


@dataclass(frozen=True, slots=True)
class InForce:
    """From this step on, these K and B hold."""

    step: StepIndex
    max_staleness: int
    batch_groups: int


@dataclass(frozen=True, slots=True)
class OptimizerRewound:
    version: Version
    optimizer_version: Version


@dataclass(frozen=True, slots=True)
class Stop:
    reason: str
    done: bool


Action: TypeAlias = (
    IssueGroup
    | Dispatch
    | Abort
    | Load
    | Unload
    | Move
    | Park
    | Unpark
    | Reversion
    | Sleep
    | Wake
    | Restart
    | RestartLearner
    | Score
    | Feed
    | CloseStep
    | EndGroup
    | SetAside
    | RetireVersion
    | WaitFor
    | HoldBack
    | InForce
    | OptimizerRewound
    | Stop
)
