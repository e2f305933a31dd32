"""What an environment is: it reads what the policy wrote and answers, until the episode is done.

An environment sees one episode: `reset` with a row of the data, then `step` for every turn of the
policy. Both may be `async`. It never sees weights, versions or other episodes. Invariant asked of
every environment: the same row, seed and turns give the same observations and rewards, so that an
episode that was lost with its process is built again by taking the same steps.

    class Echo(Environment):
        def step(self, turn: Turn) -> Observation:
            return Observation(reward=float(turn.text == "hello"), done=True)
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from dora_rl.envs.text import TurnText

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
    is False where the turn was cut at `rollout.tokens_max`; `version` made it."""

    text: str
    token_ids: tuple[int, ...] = ()
    number: int = 1
    stopped: bool = True
    logprobs: tuple[float, ...] = ()
    version: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a turn.

    `text` is appended as it stands; a list of messages goes through the chat template; `token_ids`
    are appended unchanged and take the place of both. Rewards of all steps are summed; an episode
    in which no step gave one is scored by `reward.functions`. With `done` nothing is appended.
    """

    text: str | list[Message] = ""
    reward: float | None = None
    done: bool = False
    token_ids: tuple[int, ...] | None = None


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
        del row, seed
        return None

    def step(self, turn: Turn) -> Observation | Awaitable[Observation]:
        raise NotImplementedError

    def close(self) -> None:
        """The episode is over or given up: let go of what it held."""
        return


class SingleTurn(Environment):
    """The trivial case: one turn, scored by `reward.functions`."""

    def step(self, turn: Turn) -> Observation:
        del turn
        return Observation(done=True)
