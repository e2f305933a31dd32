"""What a session has beside the branch that it is in: all that it read and wrote before.

A branch is a request of its own, whose prompt is the history that it follows; the engine knows no
more of it than that. Pure data. Invariant: past and branch together are the whole response, each
token of it once, in the order in which they came.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dora_rl.types import Branch, Segment


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


NO_PAST = Past((), (), (), (), (), ())


def joined_segments(past: Past, segments: Sequence[Segment]) -> list[Segment]:
    """Those of a whole response; a version that goes on in a branch is one segment."""
    found = list(past.segments)
    for start, version in segments:
        if found[-1].version != version:
            found.append(Segment(len(past.token_ids) + start, version))
    return found
