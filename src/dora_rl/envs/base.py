"""What an environment is: it reads what the policy wrote and answers, until the episode is done.

An environment sees one episode: `reset` with a row of the data, then `step` for every turn of the
policy. Both may be `async`. It never sees weights, versions or other episodes. Invariant asked of
every environment: the same row, seed and turns give the same observations and rewards, so that an
episode that was lost with its process is built again by taking the same steps.

    class Echo(Environment):
        def step(self, turn: Turn) -> Observation:
            return Observation(reward=float(turn.text == "hello"), done=True)

`TurnText` goes between token ids and text. It never touches ids that are already in the trajectory:
a turn is decoded for the environment to read, an observation is encoded and appended, and nothing
is ever encoded twice. Turns are told apart by the loss mask alone:

    loss_mask   0 0 0 | 1 1 1 1 | 0 0 | 1 1 1
                opening  turn 1   obs   turn 2
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Awaitable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias, TypeVar

from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import Branch
from dora_rl.user_code import require

Message: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Row:
    """The row of the data an episode is about. `prompt` is what the user wrote (a string or
    messages), `text` and `token_ids` what the policy reads first."""

    prompt: str | list[Message]
    text: str = ""
    answer: str | None = None
    columns: dict[str, Any] = field(default_factory=dict[str, Any])
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """What the policy wrote. `text` leaves special tokens out; `number` counts from 1; `stopped`
    is False where the turn was cut at `rollout.tokens_max`; `version` made it. `read_ids` is all
    that it follows, where a lost episode is built again, and else empty."""

    text: str
    token_ids: tuple[int, ...] = ()
    number: int = 1
    stopped: bool = True
    logprobs: tuple[float, ...] = ()
    version: int = 0
    read_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a turn.

    `text` is appended as it stands; a list of messages goes through the chat template; `token_ids`
    are appended unchanged and take the place of both. Rewards of all steps are summed; an episode
    in which no step gave one is scored by `reward.functions`. With `done` nothing is appended.

    `turn_rewards` takes the place of `reward`: what every turn so far was worth, also those that
    were given something before. With `branch` the ids follow an earlier state of the episode, and
    there may be none (see `dora_rl.histories`).
    """

    text: str | list[Message] = ""
    reward: float | None = None
    done: bool = False
    token_ids: tuple[int, ...] | None = None
    turn_rewards: tuple[float, ...] | None = None
    branch: Branch | None = None


class Environment:
    """Base of every environment. The options of its configuration are constructor arguments."""

    # True: `reset` returns an observation that is written behind the prompt before the first turn.
    opens = False
    # The run's tokenizer and template; set before `reset`.
    text: TurnText | None = None

    def reset(
        self, row: Row, seed: int
    ) -> Observation | Awaitable[Observation] | Awaitable[None] | None:
        """Begin the episode. `seed` is the same for all samples of a group."""

    def step(self, turn: Turn) -> Observation | Awaitable[Observation]:
        raise NotImplementedError

    def close(self) -> None:
        """The episode is over or given up: let go of what it held."""


class SingleTurn(Environment):
    """The trivial case: one turn, scored by `reward.functions`."""

    def step(self, turn: Turn) -> Observation:
        return Observation(done=True)


T = TypeVar("T")

# Stands for the turn of the policy in a rendered conversation; no template writes it by itself.
MARK = "\u2063turn\u2063"


def spans(loss_mask: Sequence[int], cuts: Sequence[int] = ()) -> list[tuple[int, int, int]]:
    """Runs of equal mask: (start, end, mask) of each, in order; none goes across a cut.

    >>> spans([0, 1, 1, 0, 1])
    [(0, 1, 0), (1, 3, 1), (3, 4, 0), (4, 5, 1)]
    >>> spans([1, 1, 1], cuts=[2])
    [(0, 2, 1), (2, 3, 1)]
    """
    found: list[tuple[int, int, int]] = []
    start = 0
    for (_, mask), run in groupby(enumerate(loss_mask), lambda at: (bisect(cuts, at[0]), at[1])):
        end = start + sum(1 for _ in run)
        found.append((start, end, int(mask)))
        start = end
    return found


def turns_of(
    token_ids: Sequence[T], loss_mask: Sequence[int], cuts: Sequence[int] = ()
) -> list[tuple[T, ...]]:
    """The token ids (or their log-probs) of every turn of the policy; branches begin at `cuts`."""
    return [tuple(token_ids[start:end]) for start, end, mask in spans(loss_mask, cuts) if mask]


class TurnText:
    """Decodes turns and encodes observations with the run's tokenizer."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_ids: Collection[int] = (),
        stop_strings: Sequence[str] = (),
        template_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop_ids, self.stop_strings = frozenset(stop_ids), tuple(stop_strings)
        self.template_options = dict(template_options or {})

    def read(self, token_ids: tuple[int, ...], number: int) -> Turn:
        """A turn as the environment sees it; a function of the ids alone, so a replay agrees."""
        text = self.tokenizer.decode(token_ids, skip_special_tokens=True)
        stopped = token_ids[-1] in self.stop_ids or any(s in text for s in self.stop_strings)
        return Turn(text, token_ids, number, stopped)

    def write(self, observation: Observation, after: tuple[int, ...]) -> tuple[int, ...]:
        """The ids to append behind a turn that ended with `after`."""
        if observation.token_ids is not None:
            return tuple(observation.token_ids)
        if isinstance(observation.text, str):
            return tuple(self.tokenizer.encode(observation.text, add_special_tokens=False))
        ids = tuple(self.tokenizer.encode(self._render(observation.text), add_special_tokens=False))
        # The template ends the policy's turn with a token that the policy has usually written.
        return ids[1:] if ids and after and ids[0] == after[-1] else ids

    def _render(self, messages: Sequence[Message]) -> str:
        """What the chat template writes from the end of the policy's turn on."""
        base = [{"role": "user", "content": "x"}, {"role": "assistant", "content": MARK}]
        require(
            (
                getattr(self.tokenizer, "chat_template", None),
                "the observation is a message list, and the model has no chat template",
            )
        )
        whole = self.tokenizer.apply_chat_template(
            [*base, *messages],
            tokenize=False,
            add_generation_prompt=True,
            **self.template_options,
        )
        return str(whole).rpartition(MARK)[2]
