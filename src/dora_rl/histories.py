"""The tree of histories that an episode is, where its requests do not all go on from the last.

A response is written down once, in the order in which it came. Where a turn does not follow the
last one, a branch begins: it follows the first `fork` tokens of another branch's history.

    response   a a A A | b B B | c C C        lower case: given; upper case: the policy's turns
    branch 1 begins at b, follows `a a A A` of branch 0    -> history a a A A b B B
    branch 2 begins at c, follows `a a` of branch 0        -> history a a c C C

For training a response becomes rows. A branch that follows the very end of another goes on in the
row of that one (the first such branch does); every other begins a row of its own, in front of which
stands, with loss mask 0, the history that it shares. Pure. Invariant: each token of the response is
in exactly one row as its own, so what the policy wrote is trained exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dora_rl.types import Branch

if TYPE_CHECKING:
    from dora_rl.types import Ints, Mask

ROOT = Branch(0, 0, 0)


@dataclass(frozen=True, slots=True, eq=False)
class TrainingRow:
    """One history that is trained: its ids from the first to the last, prompt included.

    `own[i]` is the place in the response of the token that is `place[i]` in the row; what is before
    them is shared. `last`: it holds the newest token of the response.
    """

    token_ids: Ints
    place: Ints
    own: Ints
    last: bool


def bounds(branches: Sequence[Branch], num_tokens: int) -> Iterator[tuple[int, int]]:
    """Where the own tokens of each branch begin and end.

    >>> list(bounds([Branch(0, 0, 0), Branch(4, 0, 2)], 7))
    [(0, 4), (4, 7)]
    """
    starts = [branch.start for branch in branches or (ROOT,)]
    return zip(starts, [*starts[1:], num_tokens], strict=True)


def history_of(
    prompt_ids: Ints, token_ids: Ints, branches: Sequence[Branch], index: int = -1
) -> Ints:
    """All that the last token of a branch follows, and itself; of the newest branch, if none is
    named."""
    return _histories(prompt_ids, token_ids, branches)[index]


def _histories(prompt_ids: Ints, token_ids: Ints, branches: Sequence[Branch]) -> list[Ints]:
    found: list[Ints] = []
    places = bounds(branches, len(token_ids))
    for branch, (start, end) in zip(branches or (ROOT,), places, strict=True):
        before = found[branch.parent][: len(prompt_ids) + branch.fork] if found else prompt_ids
        found.append(np.concatenate([before, token_ids[start:end]]))
    return found


def longest_history(num_prompt: int, num_tokens: int, branches: Sequence[Branch]) -> int:
    """The most tokens of one history, prompt included."""
    return max(_lengths(num_prompt, num_tokens, branches))


def _lengths(num_prompt: int, num_tokens: int, branches: Sequence[Branch]) -> list[int]:
    lengths: list[int] = []
    for branch, (start, end) in zip(branches or (ROOT,), bounds(branches, num_tokens), strict=True):
        before = min(num_prompt + branch.fork, lengths[branch.parent] if lengths else num_prompt)
        lengths.append(before + end - start)
    return lengths


def follows(branch: Branch, num_prompt: int, num_tokens: int, branches: Sequence[Branch]) -> bool:
    """Whether a branch may begin behind such a response: what it shares is there."""
    lengths = dict(enumerate(_lengths(num_prompt, num_tokens, branches)))
    shared = num_prompt + branch.fork
    return branch.start == num_tokens and 0 <= shared <= lengths.get(branch.parent, -1)


def turn_starts(loss_mask: Mask, branches: Sequence[Branch]) -> Ints:
    """Where the turns of the policy begin in a response. One that begins a branch may follow
    another turn without a token in between."""
    mask = np.asarray(loss_mask) != 0
    begins = mask & ~np.concatenate([[False], mask[:-1]])
    for branch in branches:
        if branch.start < len(mask):
            begins[branch.start] = mask[branch.start]
    return np.flatnonzero(begins).astype(np.int32)


def rows_of(
    prompt_ids: Ints, token_ids: Ints, loss_mask: Mask, branches: Sequence[Branch]
) -> list[TrainingRow]:
    """The rows of a response that hold a token of the policy's."""
    num_prompt = len(prompt_ids)
    histories = _histories(prompt_ids, token_ids, branches)
    chains: list[list[int]] = []
    ends: dict[int, list[int]] = {}  # the chain that a branch is the end of
    for index, branch in enumerate(branches or (ROOT,)):
        whole = len(histories[branch.parent]) == num_prompt + branch.fork
        chain = ends.pop(branch.parent, None) if index and whole else None
        if chain is None:
            chains.append(chain := [])
        chain.append(index)
        ends[index] = chain
    spans = list(bounds(branches, len(token_ids)))
    rows: list[TrainingRow] = []
    for chain in chains:
        own = np.concatenate([np.arange(*spans[index], dtype=np.int32) for index in chain])
        ids = histories[chain[-1]]
        if loss_mask[own].any():
            place = np.arange(len(ids) - len(own), len(ids), dtype=np.int32)
            rows.append(TrainingRow(ids, place, own, last=bool(own[-1] == len(token_ids) - 1)))
    return rows


class Tree:
    """The histories of an episode as they grow. `place` says where a next history belongs."""

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self._num_prompt, self._num_tokens = len(prompt_ids), 0
        # As arrays: an agent may have hundreds, which are compared with each of its requests.
        self._histories: list[Ints] = [np.array(prompt_ids, np.int32)]
        self.tip = 0  # the branch that the newest turn is in

    def place(self, history: Sequence[int]) -> tuple[Branch | None, tuple[int, ...]]:
        """Where a history goes on from, which shares most with it; and the tokens that it adds.
        None: it goes on from the newest turn."""
        ids = np.array(history, np.int32)
        shared = [_shared(known, ids) for known in self._histories]
        tip = self.tip
        if shared[tip] == len(self._histories[tip]) and (
            len(history) > shared[tip] or not self._num_tokens
        ):
            return None, tuple(history[shared[tip] :])
        parent = max(range(len(shared)), key=lambda index: shared[index])
        fork = Branch(self._num_tokens, parent, shared[parent] - self._num_prompt)
        return fork, tuple(history[shared[parent] :])

    def grow(self, branch: Branch | None, new_ids: Sequence[int], turn: Sequence[int]) -> None:
        """The given ids and the turn of the policy that followed them."""
        if branch is not None:
            kept = self._num_prompt + branch.fork
            self._histories.append(self._histories[branch.parent][:kept])
            self.tip = len(self._histories) - 1
        grown = [self._histories[self.tip], np.array([*new_ids, *turn], np.int32)]
        self._histories[self.tip] = np.concatenate(grown)
        self._num_tokens += len(new_ids) + len(turn)


def _shared(one: Ints, other: Ints) -> int:
    """How many tokens two histories have in common at their beginning."""
    length = min(len(one), len(other))
    differs = np.flatnonzero(one[:length] != other[:length])
    return int(differs[0]) if len(differs) else length
