"""What the controller and its workers say to each other: one class per message.

Each is one frame of a `connection`, a JSON header and the raw bytes of its arrays:

    u32 header length | header {"kind", "body", "arrays": [[name, dtype, length], ...]} | bytes

What the core wants of an instance is a message as it is. Its events and actions are dataclasses,
and a union of those has a tag by the rule of `codec` alone; so messages are dataclasses too.
Whoever receives one matches on its type.

Never pickled, and nothing is looked up by a name that a stranger could choose: what has no class
here raises one of `NO_MESSAGE`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.envs.base import Row
from dora_rl.envs.host import Answer
from dora_rl.io.codec import Rule, pack_arrays, rule, unpack_arrays
from dora_rl.io.connection import FRAME_BYTES_MAX, Connection
from dora_rl.ports import FleetAction
from dora_rl.rewards.base import ScoreItem
from dora_rl.store.trajectories import from_message, to_message
from dora_rl.types import Branch, GroupId, RequestId, StepIndex, Trajectory, Version

Ints: TypeAlias = NDArray[np.int32]
Samples: TypeAlias = tuple[Trajectory, ...]
SavedRequest: TypeAlias = dict[str, Any]
"""A request as its journal has it (`engine.journal`)."""


def ints(values: Iterable[int] = ()) -> Ints:
    return np.asarray(tuple(values), dtype=np.int32)


# -- of any worker ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """The first one of a connection: who speaks."""

    role: str
    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The start went well. A reward worker takes `at_once` samples in a message."""

    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Serving:
    """A relay or a storage shard is up; `holds` are its versions or groups."""

    port: int
    holds: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """Nothing else to say."""


@dataclass(frozen=True, slots=True)
class Told:
    """An event for the core."""

    event: ev.Event


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds since the worker's start. Of an instance, too: how many tokens were guessed since it
    said so last, and how many of them were right."""

    busy_s: float
    cpu_s: float
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True, slots=True)
class Note:
    """A line for whoever watches."""

    line: str


@dataclass(frozen=True, slots=True)
class UserRaised:
    """The user's code raised; the traceback comes once for each place."""

    what: str
    place: str
    line: str
    trace: str = ""


@dataclass(frozen=True, slots=True)
class Fatal:
    """Why the worker ends, where something is wrong with the input or the machine."""

    reason: str
    ends_run: bool


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the worker ends, where it was our mistake or a shortage of memory."""

    reason: str


@dataclass(frozen=True, slots=True)
class Saving:
    """It was asked to end, and writes what the next start needs."""


@dataclass(frozen=True, slots=True)
class End:
    """To a worker: finish and leave."""


# -- instances -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LoadSealed:
    """The core's order to load, with the checksum that the log has of the version; empty: none."""

    action: act.Load
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Dispatched:
    """Samples to generate. `saved` has those that go on from their journal; `opens`: whether the
    environment speaks first, None where a response has a single turn."""

    action: act.Dispatch
    prompt_ids: Ints
    saved: dict[int, SavedRequest] = field(default_factory=dict[int, SavedRequest])
    opens: bool | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A sample is whole. On a cluster it goes to a storage shard instead of the controller."""

    event: ev.SampleFinished
    samples: Samples


@dataclass(frozen=True, slots=True)
class TurnEnded:
    """The environment's turn: what came of a request so far."""

    epoch: int
    samples: Samples


@dataclass(frozen=True, slots=True)
class Observed:
    """An environment's answer, for the instance that asked."""

    request: RequestId
    epoch: int
    turn: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Exported:
    """A request on its way to `dst`: as `saved` alone, or with its KV in the file `path`. The
    controller adds where it comes from, and the relay of another host, and sends it on."""

    request: RequestId
    epoch: int
    attempt: int
    dst: str
    num_tokens: int
    path: str
    num_bytes: int = 0
    saved: SavedRequest | None = None
    src: str = ""
    relay: str = ""


@dataclass(frozen=True, slots=True)
class Imported:
    """The destination has the request, or an `error` says why not."""

    export: Exported
    error: str = ""


@dataclass(frozen=True, slots=True)
class MoveEnded:
    """To the source: forget the request, or go on with it."""

    request: RequestId
    done: bool


@dataclass(frozen=True, slots=True)
class Shards:
    """Where the storage shards are now."""

    addresses: tuple[str, ...]


# -- the learner -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Where:
    """Samples of a group in a storage shard."""

    address: str
    group: GroupId
    samples: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fed:
    """A group for the learner: its samples, or where they are and what they got."""

    action: act.Feed
    batch_groups: int
    updates: int
    prompt_ids: Ints
    samples: Samples = ()
    where: Where | None = None
    rewards: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Close:
    """The step has all its groups."""

    action: act.CloseStep


@dataclass(frozen=True, slots=True)
class Rate:
    """What an evaluation gave the checkpoint of a step."""

    step: StepIndex
    score: float


@dataclass(frozen=True, slots=True)
class Committed:
    """A step is trained and its version sealed."""

    event: ev.StepCommitted
    metrics: dict[str, int | float]
    usage: Usage


# -- rewards, environments, evaluations ------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Lesson:
    """What a teacher is shown of a sample beside its token ids. `reward`: it has one already."""

    prompt_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    branches: tuple[Branch, ...] = ()
    reward: float | None = None


@dataclass(frozen=True, slots=True)
class Scorable:
    """A sample to score; its token ids are `num_tokens` of the message's, or in a shard."""

    item: ScoreItem
    num_tokens: int
    where: Where | None = None
    lesson: Lesson | None = None


@dataclass(frozen=True, slots=True)
class Score:
    id: int
    items: tuple[Scorable, ...]
    token_ids: Ints


@dataclass(frozen=True, slots=True)
class Reward:
    """Of one sample; None: why it has none. `parts`: what each function gave, by its label."""

    total: float | None = None
    error: str = ""
    parts: dict[str, float] = field(default_factory=dict[str, float])
    teacher_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Scored:
    id: int
    rewards: tuple[Reward, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """A question for an environment worker."""

    id: int
    label: str
    row: Row
    seed: int
    samples: Samples


@dataclass(frozen=True, slots=True)
class Stepped:
    """What became of the question."""

    id: int
    answer: Answer


@dataclass(frozen=True, slots=True)
class Forget:
    """A group has ended: to an environment worker or a storage shard that has of it."""

    group: GroupId


@dataclass(frozen=True, slots=True)
class EvalPrompt:
    row: Row
    env: str = ""


@dataclass(frozen=True, slots=True)
class Evaluate:
    """`checksum`: as in `LoadSealed`."""

    version: Version
    prompts: tuple[EvalPrompt, ...]
    num_samples: int
    checksum: str = ""


@dataclass(frozen=True, slots=True)
class Evaluated:
    """Per prompt its responses, the greedy one first: request (n, 0) is that of the n-th prompt.
    The reward is its environment's, None where functions score."""

    version: Version
    samples: Samples


# -- relays and storage shards ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Fetch:
    version: Version
    sources: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Fetched:
    version: Version
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Retire:
    versions: tuple[Version, ...]


@dataclass(frozen=True, slots=True)
class Stored:
    """A shard has the row of a finished sample: what the controller decides by."""

    event: ev.SampleFinished
    logprob_sum: float
    num_generated: int
    turns: tuple[tuple[int, int, int], ...]
    reward: float | None


@dataclass(frozen=True, slots=True)
class Rows:
    """What a shard answers a reader."""

    samples: Samples


@dataclass(frozen=True, slots=True)
class Sync:
    """What is there now has to survive the loss of the host."""


@dataclass(frozen=True, slots=True)
class Trained:
    """The group's lines of rollouts.jsonl are due. `prompt`: index, ids, text, environment."""

    step: StepIndex
    group: GroupId
    version: Version
    samples: tuple[int, ...]
    rewards: tuple[float, ...]
    parts: tuple[dict[str, float], ...]
    prompt: tuple[int, tuple[int, ...], str, str]


@dataclass(frozen=True, slots=True)
class Wrote:
    step: StepIndex
    group: GroupId


Message: TypeAlias = (
    Hello | Ready | Serving | Alive | Told | Usage | Note | UserRaised | Fatal | Fault | Saving
    | End | FleetAction | Dispatched | Finished | TurnEnded | Observed | Exported | Imported
    | LoadSealed | MoveEnded | Shards | Fed | Close | Rate | Committed | Score | Scored | Step
    | Stepped | Forget | Evaluate | Evaluated | Fetch | Fetched | Retire | Stored | Rows | Sync
    | Trained | Wrote
)  # fmt: skip
KINDS: dict[str, type[Any]] = {kind.__name__: kind for kind in get_args(Message)}
NO_MESSAGE = (
    ValueError,
    KeyError,
    TypeError,
    struct.error,
)  # what `unpack` raises of anything else


# -- as bytes --------------------------------------------------------------------------------------


def is_array(hint: Any) -> bool:
    """`NDArray[...]` is an alias that newer versions of numpy and Python do not resolve."""
    origin = get_origin(hint) or hint
    aliased = getattr(origin, "__value__", origin)
    return (get_origin(aliased) or aliased) is np.ndarray


@cache
def _plan(kind: type[Any]) -> tuple[dict[str, Rule], tuple[str, ...], bool]:
    """How the fields of one class travel: those that JSON carries, arrays, and whether it has
    samples, which are both."""
    hints = get_type_hints(kind)
    arrays = tuple(name for name, hint in hints.items() if is_array(hint))
    plain = {n: rule(h) for n, h in hints.items() if n not in arrays and h != Samples}
    return plain, arrays, hints.get("samples") == Samples


def pack(message: Message) -> bytes:
    plain, names, has_samples = _plan(type(message))
    body: dict[str, Any] = {n: r.encode(getattr(message, n)) for n, r in plain.items()}
    arrays = {name: getattr(message, name) for name in names}
    if has_samples:
        body["samples"], more = to_message(getattr(message, "samples"))  # noqa: B009 - not in all
        arrays |= more
    return pack_arrays({"kind": type(message).__name__, "body": body}, arrays)


def unpack(data: bytes | bytearray) -> Message:
    header, arrays = unpack_arrays(data)
    kind, body = KINDS[header["kind"]], header["body"]
    plain, names, has_samples = _plan(kind)
    values = {n: r.decode(body[n]) for n, r in plain.items() if n in body}
    values |= {name: arrays[name] for name in names}
    if has_samples:
        values["samples"] = tuple(from_message(body["samples"], arrays))
    return kind(**values)


class Channel(Connection):
    """One end between the controller and a worker. Sending is safe from several threads."""

    def send(self, message: Message) -> None:
        self.send_frame(pack(message))

    def receive(self, bytes_max: int = FRAME_BYTES_MAX) -> Message:
        """Raises EOFError when the other side is gone."""
        return unpack(self.receive_frame(bytes_max))


Send: TypeAlias = Callable[[Message], None]
