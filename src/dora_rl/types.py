"""The dictionary of the domain: small immutable values that every layer shares.

Never holds behaviour or I/O, and imports nothing heavy. Invariant: a value, once made, does not
change, and every piece of generated data carries the version that made it.

    version     integer policy number; 0 is the start, each training step makes the next
    trajectory  one response (possibly many turns) with its tokens, log-probs and *the* version
    group       the G trajectories of one prompt, all on one version
    instance    one rollout engine (one data-parallel replica)
    step        one training iteration; step s trains version s and publishes version s + 1
    staleness   version being trained - version of the trajectory
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Ints: TypeAlias = NDArray[np.int32]
    Floats: TypeAlias = NDArray[np.float32]
    Mask: TypeAlias = NDArray[np.uint8]

Version: TypeAlias = int
GroupId: TypeAlias = int
InstanceId: TypeAlias = str
StepIndex: TypeAlias = int

# The largest reward there may be, either way: float32, in which advantages are computed, still
# holds its square.
REWARD_MAX = 1e18


class RequestId(NamedTuple):
    """One sample of one group: `RequestId(7, 3)` is the fourth response to group 7's prompt."""

    group: GroupId
    sample: int


class UserError(Exception):
    """The user's input is wrong: one line that says what, where and how to fix it."""


class BaseDiffers(UserError):
    """The weights under an adapter are not those it was trained on; no retry helps."""


class Mode(StrEnum):
    """The five paradigms, all small policies over the same core."""

    SYNC = "sync"
    ONE_STEP_OFF = "one_step_off"
    PARTIAL = "partial"
    REPLICATION = "replication"
    MULTI_VERSION = "multi_version"


class Finish(StrEnum):
    """Why a response ended."""

    STOP = "stop"  # an end-of-sequence id, stop id or stop string
    LENGTH = "length"  # the token limit
    REFUSED = "refused"  # can never fit, ids out of range, ...
    ERROR = "error"  # non-finite logits, environment failure, ...


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to draw tokens. `SamplingParams(temperature=0)` is greedy.

    `top_k=0`, `top_p=1` and `min_p=0` switch those filters off. `forced_ids` are emitted as they
    stand (to score a given text) before free sampling begins.
    """

    tokens_max: int = 256
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs_top_n: int = 0
    raw_logprobs: bool = False  # also return log-probs under temperature 1, no filters
    forced_ids: tuple[int, ...] = ()


class Segment(NamedTuple):
    """Tokens from position `start` of the response on were decoded under `version`."""

    start: int
    version: Version


class Branch(NamedTuple):
    """Tokens from position `start` of the response on follow the history of the branch `parent`,
    prompt included, up to and without the token `fork` of it, counted from the end of the prompt:
    below 0, so many tokens of the prompt are not shared either. The first branch is (0, 0, 0).
    See `dora_rl.histories`."""

    start: int
    parent: int
    fork: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data. `index` is its place in the (endless) prompt stream."""

    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    answer: str | None = None
    columns: dict[str, object] = field(default_factory=dict[str, object])
    env: str = ""  # label of its environment, where the run has several


@dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One finished response: the one type of a sample, from the engine to the loss.

    The engine returns it, messages carry it, the store keeps it, rewards and the learner read it.
    Per-token values are numpy arrays (any sequence that is given becomes one), one entry for each
    token of the response. Two are equal where all their values are.

        Trajectory(RequestId(7, 3), 2, token_ids=[8, 9], logprobs=[-0.1, -0.2], loss_mask=[1, 1])
    """

    request: RequestId
    # The version that generated it; in the `partial` baseline, where there may be several, the one
    # its group was issued on once it is stored, the last one before.
    version: Version
    token_ids: Ints
    # Under the policy that sampled them, at the temperature and with the filters of the sampling.
    logprobs: Floats
    # 1 where the policy sampled the token, 0 where an environment wrote it.
    loss_mask: Mask
    finish: Finish = Finish.STOP
    # Exactly one except in the `partial` baseline; none given: `version` throughout.
    segments: tuple[Segment, ...] = ()
    # A group has one prompt, which `Group` has: in messages and in the store this is empty.
    prompt_ids: Ints = ()  # pyright: ignore[reportAssignmentType]
    text: str = ""
    reward: float | None = None
    # What each reward function gave, by its label.
    parts: dict[str, float] = field(default_factory=dict[str, float])
    # At temperature 1 and without filters, where they were asked for.
    raw_logprobs: Floats | None = None
    turns: int = 1
    error: str = ""
    # Where the turns are not one history, the branches of the tree that they are, in the order in
    # which they came. None given: each token follows the one before it.
    branches: tuple[Branch, ...] = ()
    # What an environment gave for each turn, where it gave anything. Their sum is the reward.
    turn_rewards: tuple[float, ...] = ()
    # Of a mixture of experts: which experts each token of prompt and response was routed to when
    # it was computed, as [token, sparse layer, choice]. A number that no expert has: that token was
    # not computed in that layer. None: not recorded, or a dense model.
    expert_ids: NDArray[np.integer] | None = None
    # Of the same tokens under a teacher, where one was asked. None: not known.
    teacher_logprobs: Floats | None = None

    def __post_init__(self) -> None:
        from numpy import asarray

        for name, dtype in ARRAYS.items():
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, asarray(value, dtype))
        if not self.segments:
            object.__setattr__(self, "segments", (Segment(0, self.version),))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Trajectory):
            return NotImplemented
        from numpy import array_equal

        return all(
            array_equal(getattr(self, name), getattr(other, name))
            if name in ARRAYS
            else getattr(self, name) == getattr(other, name)
            for name in self.__slots__
        )

    @property
    def num_trained(self) -> int:
        """Tokens that the policy sampled."""
        return int((self.loss_mask != 0).sum())

    @property
    def truncated(self) -> bool:
        """It was cut off at the limit of tokens."""
        return self.finish is Finish.LENGTH

    @property
    def failure(self) -> str:
        """Why it is no answer at all; empty: it is one."""
        if self.finish in (Finish.STOP, Finish.LENGTH):
            return ""
        return self.error or f"the response was {self.finish.value}"

    @property
    def mixed(self) -> bool:
        """Several versions made it."""
        return len({segment.version for segment in self.segments}) > 1


# The fields of a trajectory that are arrays, and what of; None: of what they are made of.
ARRAYS: dict[str, str | None] = {
    "prompt_ids": "int32",
    "token_ids": "int32",
    "logprobs": "float32",
    "loss_mask": "uint8",
    "raw_logprobs": "float32",
    "expert_ids": None,  # the smallest integers that have a number for each expert
    "teacher_logprobs": "float32",
}


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The trajectories of one prompt, all issued on one version, as the learner is fed them.

    Group(7, 2, prompt_ids=[5, 6], samples=(first, second))
    """

    id: GroupId
    version: Version
    prompt_ids: Ints
    samples: tuple[Trajectory, ...]

    def __post_init__(self) -> None:
        from numpy import asarray

        object.__setattr__(self, "prompt_ids", asarray(self.prompt_ids, "int32"))
