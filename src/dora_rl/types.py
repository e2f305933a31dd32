"""The dictionary of the domain: small immutable values that every layer shares.

Never holds behaviour, I/O or tensors. Invariant: a value, once made, does not change, and every
piece of generated data carries the version that made it.

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
from typing import NamedTuple, TypeAlias

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


@dataclass(frozen=True, slots=True)
class Prompt:
    """One row of the data. `index` is its place in the (endless) prompt stream."""

    index: int
    token_ids: tuple[int, ...]
    text: str = ""
    answer: str | None = None
    columns: dict[str, object] = field(default_factory=dict[str, object])
    env: str = ""  # label of its environment, where the run has several


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One finished response.

    `loss_mask[i]` is 1 where token i was sampled by the policy and 0 where an environment wrote
    it. `segments` has exactly one entry except in the `partial` baseline.

        Trajectory(RequestId(7, 3), 2, prompt_ids=(5, 6), token_ids=(8, 9), logprobs=(-.1, -.2),
                   loss_mask=(1, 1), finish=Finish.STOP, segments=(Segment(0, 2),))
    """

    request: RequestId
    version: Version
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    finish: Finish
    segments: tuple[Segment, ...]
    text: str = ""
    reward: float | None = None
    raw_logprobs: tuple[float, ...] = ()
    turns: int = 1
    error: str = ""

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_ids) + len(self.token_ids)
