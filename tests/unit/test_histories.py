"""The tree of histories: what a row of it holds, and that each token is one row's own."""

from __future__ import annotations

import random

import numpy as np

from dora_rl.envs.base import turns_of
from dora_rl.histories import ROOT, Tree, history_of, longest_history, rows_of, turn_starts
from dora_rl.types import Branch

PROMPT = np.array([1, 2], np.int32)
# a a A A | b B B | c C C, as in the docstring of the module.
IDS = np.array([10, 11, 12, 13, 20, 21, 22, 30, 31, 32], np.int32)
MASK = np.array([0, 0, 1, 1, 0, 1, 1, 0, 1, 1], np.uint8)
BRANCHES = (ROOT, Branch(4, 0, 4), Branch(7, 0, 2))


def test_the_rows_of_a_response() -> None:
    long, short = rows_of(PROMPT, IDS, MASK, BRANCHES)
    assert long.token_ids.tolist() == [1, 2, 10, 11, 12, 13, 20, 21, 22], "one row goes on"
    assert long.own.tolist() == [0, 1, 2, 3, 4, 5, 6] and long.place.tolist() == [*range(2, 9)]
    assert short.token_ids.tolist() == [1, 2, 10, 11, 30, 31, 32]
    assert short.own.tolist() == [7, 8, 9] and short.place.tolist() == [4, 5, 6]
    assert (long.last, short.last) == (False, True)
    assert longest_history(2, 10, BRANCHES) == 9


def test_a_response_without_branches_is_one_row() -> None:
    (row,) = rows_of(PROMPT, IDS, MASK, ())
    assert row.token_ids.tolist() == [1, 2, *IDS.tolist()] and row.own.tolist() == [*range(10)]
    assert row.last and longest_history(2, 10, ()) == 12


def test_a_branch_may_leave_the_prompt_and_follow_a_turn_at_once() -> None:
    branches = (ROOT, Branch(2, 0, -1), Branch(4, 1, 2))
    ids, mask = np.array([5, 6, 7, 8, 9], np.int32), np.array([1, 1, 0, 1, 1], np.uint8)
    assert history_of(PROMPT, ids, branches, 1).tolist() == [1, 7, 8]
    assert history_of(PROMPT, ids, branches).tolist() == [1, 7, 8, 9]
    assert turn_starts(mask, branches).tolist() == [0, 3, 4]
    assert turns_of(ids.tolist(), mask.tolist(), [0, 2, 4]) == [(5, 6), (8,), (9,)]


def test_a_row_without_a_turn_of_the_policy_is_none() -> None:
    """The first request did not begin with the prompt: the root holds nothing."""
    branches = (ROOT, Branch(0, 0, -2))
    (row,) = rows_of(PROMPT, np.array([7, 8], np.int32), np.array([0, 1], np.uint8), branches)
    assert row.token_ids.tolist() == [7, 8] and row.last


def test_a_turn_that_begins_a_branch_at_once_is_a_turn_of_its_own() -> None:
    """The same request twice: the second branch is given nothing."""
    tree = Tree([1, 2])
    assert tree.place([1, 2, 3]) == (None, (3,))
    tree.grow(None, [3], [9, 9])
    assert tree.place([1, 2, 3]) == (Branch(3, 0, 1), ())
    tree.grow(Branch(3, 0, 1), [], [8])
    assert tree.place([1, 2, 3, 9, 9, 4]) == (Branch(4, 0, 3), (4,)), "the first goes on"
    assert tree.place([1, 2, 3, 8]) == (Branch(4, 1, 2), ()), "nothing new: no extension"
    assert tree.place([1, 2, 3, 8, 5]) == (None, (5,))


def test_every_token_of_random_trees_is_the_own_of_exactly_one_row() -> None:
    """Against a plain book of histories: what each turn followed is what its row has before it."""
    for seed in range(200):
        draw = random.Random(seed)
        prompt = [draw.randrange(3) for _ in range(draw.randrange(1, 5))]
        tree, known = Tree(prompt), [prompt]
        ids: list[int] = []
        mask: list[int] = []
        branches: list[Branch] = [ROOT]
        followed: dict[int, list[int]] = {}  # place in the response: all before it
        for _ in range(draw.randrange(1, 9)):
            base = draw.choice(known)
            cut = base[: draw.randrange(1, len(base) + 1)] if draw.random() < 0.6 else base
            history = [*cut, *(draw.randrange(3) for _ in range(draw.randrange(3)))]
            turn = [draw.randrange(3) for _ in range(draw.randrange(1, 4))]
            branch, new_ids = tree.place(history)
            branches += [branch] if branch is not None else []
            tree.grow(branch, new_ids, turn)
            for offset, token in enumerate(turn):
                followed[len(ids) + len(new_ids) + offset] = [*history, *turn[:offset], token]
            ids += [*new_ids, *turn]
            mask += [0] * len(new_ids) + [1] * len(turn)
            known.append([*history, *turn])
        shape = tuple(branches) if len(branches) > 1 else ()
        arrays = (np.array(prompt, np.int32), np.array(ids, np.int32), np.array(mask, np.uint8))
        trained: list[int] = []
        rows = rows_of(*arrays, shape)
        for row in rows:
            for place, own in zip(row.place.tolist(), row.own.tolist(), strict=True):
                if mask[own]:
                    trained.append(own)
                    assert row.token_ids[: place + 1].tolist() == followed[own], seed
        assert sorted(trained) == np.flatnonzero(mask).tolist(), seed
        assert sum(row.last for row in rows) == 1
        assert len(turn_starts(arrays[2], shape)) == len(known) - 1
        assert longest_history(len(prompt), len(ids), shape) >= max(len(r.token_ids) for r in rows)
