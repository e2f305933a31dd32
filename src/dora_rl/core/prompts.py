"""Which prompt comes next, and which is set aside: the book of prompts whose groups have failed.

A prompt is a place of the prompt stream. One whose group failed is issued again, but never twice in
a row without a new one in between, and after `group_failures_max` failed groups it is set aside:
named, and not issued again. What counts against `failed_share_max` are prompts, not groups, so
that the repeats of a bad one do not stop a run whose other prompts are fine.

    new -> issued -> trained, filtered, surplus: forgotten here
              |  ^
              v  | reissued
            failed -> set aside
"""

from __future__ import annotations

from dora_rl.core.actions import Action, SetAside
from dora_rl.core.state import Group, State

REASON_CHARS_MAX = 300  # of a reason that is kept as long as the run


def next_prompt(state: State) -> int:
    """The prompt of the next group."""
    in_turn = state.params.group_failures_max and state.reissued_last
    if state.reissue and not in_turn:
        state.reissued_last = True
        return state.reissue.popleft()
    state.reissued_last = False
    state.next_prompt += 1
    return state.next_prompt - 1


def prompt_settled(state: State, prompt: int) -> None:
    """A group of this prompt ended as it should."""
    if state.failures.pop(prompt, 0):
        state.failed_prompts = max(0, state.failed_prompts - 1)
    else:
        state.judged_prompts += 1


def prompt_failed(
    state: State, group: Group, reason: str, out: list[Action], *, kills: bool
) -> None:
    """Its group has just failed: once more, or never again."""
    limit, prompt = state.params.group_failures_max, group.prompt
    if not limit:
        state.reissue.append(prompt)
        return
    failures = state.failures.get(prompt, 0) + 1
    if failures == 1:
        state.failed_prompts += 1
        state.judged_prompts += 1
    if failures < limit and not kills:
        state.failures[prompt] = failures
        state.reissue.append(prompt)
        return
    state.failures.pop(prompt, None)
    state.set_aside[prompt] = reason[:REASON_CHARS_MAX]
    out.append(SetAside(prompt, group.id, failures, kills, state.set_aside[prompt]))
