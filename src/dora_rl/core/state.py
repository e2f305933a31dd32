"""The core's memory: the ledger of groups and requests, instances, versions, the step in filling.

Plain data with a few derived figures; every change is made by the handlers beside this file.
Ended groups leave the ledger (only counters stay), so memory follows what is alive, not the run.

Conservation, checked by `invariants.check_invariants`:
    issued = live groups + ended;  a request is in exactly one place;  counters equal recounts.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import ClassVar, TypeAlias

from dora_rl.core.actions import Action, End
from dora_rl.core.curriculum import Curriculum
from dora_rl.core.freshness import Freshness
from dora_rl.core.params import Params, Policy, policy_of
from dora_rl.core.window import Bound
from dora_rl.types import GroupId, InstanceId, RequestId, StepIndex, Version

Deadline: TypeAlias = tuple[float, int, str, str]
"""(moment, number, kind, key), in a heap; see `waits`."""
Flip: TypeAlias = tuple[InstanceId, Version | None, Version]
"""(instance, the version it gives up, the version it gets)."""


class Phase(StrEnum):
    """Where a request is."""

    PENDING = "pending"  # waits for a slot; its KV may be parked at `instance`
    RUNNING = "running"
    MOVING = "moving"  # from `instance` to `dest`
    SCORING = "scoring"
    SCORED = "scored"
    FAILED = "failed"


GENERATING = (Phase.PENDING, Phase.RUNNING, Phase.MOVING)


class GroupPhase(StrEnum):
    """Where a group is; `ended` groups are no longer in the ledger."""

    ISSUED = "issued"
    RUNNING = "running"
    REWARDING = "rewarding"
    READY = "ready"
    TRAINING = "training"


@dataclass(slots=True)
class Request:
    """One sample. Its length now is base_tokens + (instance's decode_steps - mark).

    `attempts`, `losses` and `alone_losses` count since it last gained tokens (see `suspects`).
    """

    id: RequestId
    version: Version
    phase: Phase = Phase.PENDING
    instance: InstanceId | None = None
    dest: InstanceId | None = None
    kv_version: Version | None = None  # the version its tokens so far were decoded under
    epoch: int = 0
    attempts: int = 0
    kept: int = 0  # tokens its journal had when it was last continued
    losses: int = 0  # of its instance while it ran there
    alone_losses: int = 0  # of these: while it ran there alone
    clearings: int = 0
    suspect: bool = False
    crowd: int = 0  # suspects that may be tried together with it, itself included; 0: no limit
    lost_on: InstanceId | None = None
    score_attempts: int = 0  # numbers the questions
    score_failures: int = 0
    num_moves: int = 0  # ordered so far
    base_tokens: int = 0
    mark: int = 0
    reward: float | None = None


@dataclass(slots=True)
class Group:
    id: GroupId
    prompt: int
    version: Version
    requests: list[Request]
    phase: GroupPhase = GroupPhase.ISSUED
    step: StepIndex | None = None
    num_scored: int = 0
    num_failed: int = 0


@dataclass(slots=True)
class Held:
    """One resident version of an instance: how many requests run, leave and arrive on it."""

    num: int = 0
    outgoing: int = 0
    incoming: int = 0
    offset: int = 0  # sum of (base_tokens - mark) over the `num` running requests

    @property
    def busy(self) -> bool:
        return bool(self.num or self.outgoing or self.incoming)


@dataclass(slots=True)
class Instance:
    FORMER_FIELDS: ClassVar = {"wants": "load_queue"}

    id: InstanceId
    index: int
    slots_max: int
    resident_max: int
    kv_tokens_max: int
    elastic: bool
    awake: bool = True
    held: dict[Version, Held] = field(default_factory=dict[Version, Held])
    leaving: dict[Version, None] = field(default_factory=dict[Version, None])
    load_queue: list[Version] = field(default_factory=list[Version])
    loading: Version | None = None
    donor: InstanceId | None = None
    load_failures: int = 0
    num_loads: int = 0  # ordered so far
    requests: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    incoming: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    parked: dict[RequestId, None] = field(default_factory=dict[RequestId, None])
    decode_steps: int = 0
    kv_tokens: int = 0
    speed: float = 1.0
    reported_s: float = 0.0
    progress_s: float = 0.0  # a token was gained, or none was expected
    still: dict[RequestId, float] = field(default_factory=dict[RequestId, float])  # since when
    isolating: Version | None = None  # kept free for suspects of this version

    @property
    def load(self) -> int:
        return len(self.requests) + len(self.incoming)

    @property
    def num_running(self) -> int:
        return sum(held.num for held in self.held.values())

    @property
    def slots_free(self) -> int:
        free = self.slots_max - len(self.requests) - len(self.incoming)
        return free if self.isolating is None else 0

    def will_hold(self, version: Version) -> bool:
        """It does, or will as far as was decided."""
        return version in self.held or version in self.load_queue or version == self.loading


@dataclass(slots=True)
class Live:
    """One live version."""

    version: Version
    untaken: int = 0
    unended: int = 0
    num_active: int = 0  # requests generating: pending, running or moving
    num_pending: int = 0
    pending: deque[RequestId] = field(default_factory=deque[RequestId])
    suspects: deque[RequestId] = field(default_factory=deque[RequestId])  # pending ones
    isolation: InstanceId | None = None  # where they are tried
    load_failures: int = 0  # from the store, since it was last loaded
    ready: deque[GroupId] = field(default_factory=deque[GroupId])
    holders: dict[InstanceId, None] = field(default_factory=dict[InstanceId, None])
    leavers: dict[InstanceId, None] = field(default_factory=dict[InstanceId, None])  # hold it still
    coming: dict[InstanceId, None] = field(default_factory=dict[InstanceId, None])  # will hold it
    donors: list[InstanceId] = field(default_factory=list[InstanceId])  # most loaded last
    heap: list[tuple[float, int, InstanceId]] = field(
        default_factory=list[tuple[float, int, InstanceId]]
    )


@dataclass(slots=True)
class Batch:
    """The groups of one step, filled under B = `size`, trained in `updates` optimizer updates."""

    step: StepIndex
    size: int
    updates: int
    groups: list[GroupId] = field(default_factory=list[GroupId])
    num_fed: int = 0
    closed: bool = False
    need_s: float | None = None  # of its takes, and when it was full: see `freshness`
    closed_s: float | None = None
    close_sent: bool = False


@dataclass(slots=True)
class Learner:
    alive: bool = False
    incarnation: int = -1
    progress: int = -1
    progress_s: float = 0.0


@dataclass(slots=True)
class State:
    """Everything the core knows. `committed` is both the steps done and the newest version.

    A step's batch and groups stay until the version that it made is durable: only then can nothing
    make the run train it again.
    """

    # Of snapshots of older releases: old name -> new name.
    FORMER_FIELDS: ClassVar = {
        "trainer": "learner",
        "trainer_losses": "learner_losses",
        "drowsy": "to_sleep",
        "waking": "to_wake",
        "stirred": "maybe_idle",
        "seats": "newest_due",
    }

    params: Params
    target: Params | None = None  # K or B asked for on resume and not yet in force
    groups: dict[GroupId, Group] = field(default_factory=dict[GroupId, Group])
    instances: dict[InstanceId, Instance] = field(default_factory=dict[InstanceId, Instance])
    incarnations: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])  # the newest
    versions: dict[Version, Live] = field(default_factory=dict[Version, Live])
    batches: dict[StepIndex, Batch] = field(default_factory=dict[StepIndex, Batch])
    learner: Learner = field(default_factory=Learner)
    filling: StepIndex = 0
    committed: StepIndex = 0
    next_group: GroupId = 0  # so many were issued
    next_prompt: int = 0  # so many prompts were drawn
    next_instance: int = 0
    reissue: deque[int] = field(default_factory=deque[int])
    reissued_last: bool = False  # the group issued last was of a prompt that had failed
    failures: dict[int, int] = field(default_factory=dict[int, int])  # groups, of open prompts
    set_aside: dict[int, str] = field(default_factory=dict[int, str])  # prompt -> reason
    failed_prompts: int = 0  # since the start or resume, as `judged_prompts`
    judged_prompts: int = 0
    learner_losses: int = 0  # in the step being trained
    instance_losses: int = 0  # since a request last gained something
    losses_among: int = 0  # so many instances there were at the first of them
    scored_s: float = -1.0e9  # when the rewards last answered
    num_ended: dict[End, int] = field(default_factory=lambda: dict.fromkeys(End, 0))
    num_inflight: int = 0  # groups issued and not yet ready
    num_ready: int = 0
    num_active: int = 0  # requests generating
    slots_awake: int = 0
    num_elastic: int = 0
    filtered_streak: int = 0
    filled_older: int = 0  # groups admitted on an older version in the step being filled
    rebalance_wanted: bool = False
    rebalanced_s: float = -1.0e9
    deadlines: list[Deadline] = field(default_factory=list[Deadline])
    old_deadlines: list[Deadline] = field(default_factory=list[Deadline])  # met ones are left out
    next_deadline: int = 0
    to_sleep: dict[InstanceId, None] = field(default_factory=dict[InstanceId, None])
    to_wake: dict[InstanceId, None] = field(default_factory=dict[InstanceId, None])
    retiring: bool = False  # a version that has no group left is still loaded somewhere
    waiting_for: tuple[GroupId, ...] = ()
    maybe_idle: dict[InstanceId, None] = field(default_factory=dict[InstanceId, None])
    newest_due: deque[InstanceId] = field(default_factory=deque[InstanceId])  # shall load it
    partition_due: bool = False  # a rebalance has looked and not yet decided
    flips: deque[Flip] = field(default_factory=deque[Flip])  # decided by a rebalance, not begun
    flip_room: dict[Version, int] = field(default_factory=dict[Version, int])  # their free slots
    stopped: str | None = None
    on_disk: Version = 0  # the newest version that was said to be durable; see `durable`
    lineage: int = 0  # how often the run went back to a durable version
    freshness: Freshness = field(default_factory=Freshness)
    curriculum: Curriculum = field(default_factory=Curriculum)
    policy: Policy = field(init=False)
    ended: list[Group] = field(init=False, default_factory=list[Group])  # only to be freed

    def __post_init__(self) -> None:
        self.put_in_force(self.params)
        if not self.versions:
            self.versions[self.committed] = Live(self.committed)
        if not self.batches:
            self.open_batch(self.filling)

    @property
    def newest(self) -> Version:
        return self.committed

    @property
    def durable(self) -> Version:
        """The newest version that no loss of the host can undo."""
        return min(self.committed, self.on_disk) if self.params.durable_behind else self.committed

    @property
    def batch(self) -> Batch:
        return self.batches[self.filling]

    @property
    def is_training(self) -> bool:
        """A closed batch is with the learner and its version is not published yet."""
        batch = self.batches.get(self.committed)
        return batch is not None and batch.close_sent

    @property
    def streams(self) -> bool:
        """Groups are fed while their batch still fills."""
        return self.policy.streaming and not self.num_elastic

    def has_room(self, out: list[Action], more: int = 0) -> bool:
        """Whether this event, which has caused `out` (and `more` work), may cause another action.

        Whatever is decided in a loop asks; what it leaves is found again by the next event.
        """
        return len(out) + more < self.params.event_actions_max

    def put_in_force(self, params: Params) -> None:
        """The one place where params change. A snapshot has no policy: it follows from them."""
        self.params = params
        self.policy = policy_of(params)

    def open_batch(self, step: StepIndex) -> None:
        """Begin to fill a step under the B in force."""
        params = self.params
        self.batches[step] = Batch(step, params.batch_groups, params.updates_per_step)
        self.filling, self.filled_older, self.waiting_for = step, 0, ()

    @property
    def bound(self) -> Bound:
        params = self.params
        return Bound(
            filling=self.filling,
            free=params.batch_groups - len(self.batch.groups),
            max_staleness=self.policy.max_staleness,
            batch=params.batch_groups,
            last=params.num_steps - 1,
        )

    @property
    def untaken(self) -> list[tuple[Version, int]]:
        """Ascending, because versions enter the dictionary in order."""
        return [(live.version, live.untaken) for live in self.versions.values()]

    def request(self, request: RequestId) -> Request | None:
        group = self.groups.get(request.group)
        return group.requests[request.sample] if group is not None else None

    def running_on(self, inst: Instance) -> list[Request]:
        """The requests that decode on an instance, without those that are on their way out."""
        found = [self.groups[rid.group].requests[rid.sample] for rid in inst.requests]
        return [request for request in found if request.phase is Phase.RUNNING]

    def length_of(self, request: Request) -> int:
        """Tokens in the KV cache of a request now, as far as the core can tell."""
        if request.phase is not Phase.RUNNING or request.instance is None:
            return request.base_tokens
        return request.base_tokens + self.instances[request.instance].decode_steps - request.mark
