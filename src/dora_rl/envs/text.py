"""Between token ids and text: what the policy wrote, and what is appended to it.

Never touches ids that are already in the trajectory: a turn is decoded for the environment to
read, an observation is encoded and appended, and nothing is ever encoded twice. Turns are told
apart by the loss mask alone:

    loss_mask   0 0 0 | 1 1 1 1 | 0 0 | 1 1 1
                opening  turn 1   obs   turn 2
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from dora_rl.envs.base import Message, Observation, Turn
from dora_rl.model.tokenizer import Tokenizer
from dora_rl.types import UserError

T = TypeVar("T")

# Stands for the turn of the policy in a rendered conversation; no template writes it by itself.
MARK = "\u2063turn\u2063"


def spans(loss_mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """Runs of equal mask: (start, end, mask) of each, in order.

    >>> spans([0, 1, 1, 0, 1])
    [(0, 1, 0), (1, 3, 1), (3, 4, 0), (4, 5, 1)]
    """
    found: list[tuple[int, int, int]] = []
    start = 0
    for mask, run in groupby(loss_mask):
        end = start + sum(1 for _ in run)
        found.append((start, end, int(mask)))
        start = end
    return found


def turns_of(token_ids: Sequence[T], loss_mask: Sequence[int]) -> list[tuple[T, ...]]:
    """The token ids (or their log-probs) of every turn of the policy."""
    return [tuple(token_ids[start:end]) for start, end, mask in spans(loss_mask) if mask]


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
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError("the observation is a message list, and the model has no chat template")
        whole = self.tokenizer.apply_chat_template(
            [*base, *messages],
            tokenize=False,
            add_generation_prompt=True,
            **self.template_options,
        )
        return str(whole).rpartition(MARK)[2]
