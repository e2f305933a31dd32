"""The old names of `dora_rl.types.Group` and `Trajectory`: still work, with one line of warning."""

import warnings
from collections.abc import Sequence
from typing import Any

from dora_rl.types import Finish, Group, RequestId, Segment, Trajectory

warnings.warn(
    "dora_rl.trainer.batch: GroupBatch and Sample are now Group and Trajectory of dora_rl.types",
    FutureWarning,
    stacklevel=2,
)


def Sample(
    token_ids: Any,
    logprobs: Any,
    loss_mask: Any,
    reward: float | None,
    segments: tuple[Segment, ...] = (),
    truncated: bool = False,
) -> Trajectory:
    """Its group and version are those of the `GroupBatch` that it is put into."""
    return Trajectory(
        RequestId(0, 0),
        0,
        token_ids,
        logprobs,
        loss_mask,
        Finish.LENGTH if truncated else Finish.STOP,
        segments,
        reward=reward,
    )


def GroupBatch(group: int, version: int, prompt_ids: Any, samples: Sequence[Trajectory]) -> Group:
    return Group(group, version, prompt_ids, tuple(samples))
