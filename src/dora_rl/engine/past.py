"""What a session has beside the branch that it is in: all that it read and wrote before.

A branch is a request of its own, whose prompt is the history that it follows; the engine knows no
more of it than that. Pure data. Invariant: past and branch together are the whole response, each
token of it once, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.histories import ROOT, history_of
from dora_rl.types import Branch, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Past:
    """What a session had read and written before it went back to begin a branch, and what it read
    to begin it: all of its response so far, in order, whose first prompt was `prompt_ids`."""

    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    loss_mask: tuple[int, ...]
    segments: tuple[Segment, ...]
    branches: tuple[Branch, ...]
    raw_logprobs: tuple[float, ...] = ()
    # Which experts the tokens of the first prompt, and of the response without what it read to
    # begin the branch, went to: the bytes of `Trajectory.expert_ids`. Empty: not recorded.
    expert_ids: bytes = b""


NO_PAST = Past((), (), (), (), (), ())


def past_of(so_far: Trajectory, branch: Branch, new_ids: Sequence[int]) -> Past:
    """Of a session that goes back to begin a branch."""
    none, raw, routing = [0] * len(new_ids), so_far.raw_logprobs, so_far.expert_ids
    assert branch.start == len(so_far.token_ids), "a branch begins where the response ends"
    return Past(
        prompt_ids=tuple(so_far.prompt_ids.tolist()),
        token_ids=(*so_far.token_ids.tolist(), *new_ids),
        logprobs=(*so_far.logprobs.tolist(), *map(float, none)),
        loss_mask=(*so_far.loss_mask.tolist(), *none),
        segments=so_far.segments,
        branches=(*(so_far.branches or (ROOT,)), branch),
        raw_logprobs=(*raw.tolist(), *map(float, none)) if raw is not None else (),
        expert_ids=routing.tobytes() if routing is not None else b"",
    )


def joined_segments(past: Past, segments: Sequence[Segment]) -> list[Segment]:
    """Those of a whole response; a version that goes on in a branch is one segment."""
    found = list(past.segments)
    for start, version in segments:
        if found[-1].version != version:
            found.append(Segment(len(past.token_ids) + start, version))
    return found


def whole_routing(
    computed: NDArray[Any] | None, num_tokens: int, num_prompt: int, past: Past | None
) -> NDArray[Any] | None:
    """Of every token of prompt and response, `computed` being those of the branch that have been
    so far. A token that several branches share has the experts of when it was computed first."""
    if computed is None:
        return None
    none = np.iinfo(computed.dtype).max
    own = np.full((num_tokens, *computed.shape[1:]), none, computed.dtype)
    own[: len(computed)] = computed
    if past is None:
        return own
    branch, first = past.branches[-1], len(past.prompt_ids)
    before = np.full((first + branch.start, *own.shape[1:]), none, own.dtype)
    if past.expert_ids:
        before[:] = np.frombuffer(past.expert_ids, own.dtype).reshape(before.shape)
    # What the newest token of a turn went to is known once a branch has followed it.
    shared = num_prompt - (len(past.token_ids) - branch.start)
    places = np.arange(len(before), dtype=np.int32)
    rows = history_of(places[:first], places[first:], past.branches[:-1], branch.parent)[:shared]
    before[rows] = np.where(before[rows] == none, own[:shared], before[rows])
    return np.concatenate([before, own[shared:]])
