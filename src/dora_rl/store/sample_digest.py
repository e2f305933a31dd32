"""The digest of a sample: what the log remembers of its tokens and log-probs.

Taken by the instance where the sample is made, logged with `SampleFinished`, and compared by
`audit --files` with every file that holds the sample later. Log-probs count to four decimals, as
rollouts.jsonl has them, so that each of those files gives the same digest.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import ArrayLike

from dora_rl.types import RequestId, Segment

DECIMALS = 4


def sample_digest(
    request: RequestId,
    segments: Sequence[Segment],
    token_ids: ArrayLike,
    logprobs: ArrayLike,
    loss_mask: ArrayLike,
) -> str:
    """16 hexadecimal digits over all of it."""
    head = [list(request), [list(segment) for segment in segments]]
    found = blake2b(repr(head).encode(), digest_size=8)
    found.update(np.asarray(token_ids, dtype="<i4").tobytes())
    # Not every float can be scaled and be a whole number: those are infinite, and never trained.
    scaled = np.rint(np.asarray(logprobs, dtype=np.float64) * 10**DECIMALS)
    found.update(np.nan_to_num(scaled, posinf=2**62, neginf=-(2**62)).astype("<i8").tobytes())
    found.update(np.asarray(loss_mask, dtype=np.uint8).tobytes())
    return found.hexdigest()


def text_digest(text: str) -> str:
    """Of a file or a line that the log vouches for."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def rounded(logprobs: ArrayLike) -> list[float]:
    """As rollouts.jsonl has them."""
    return np.asarray(logprobs, dtype=np.float64).round(DECIMALS).tolist()
