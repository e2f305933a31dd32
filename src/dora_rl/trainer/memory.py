"""Memory of a learner: kept once it was taken, and what is done where it runs out in a pack.

By default glibc returns every large block to the kernel, and a training step on a CPU then spends a
quarter of its time in page faults. `Room` decides only: how much smaller the next try is, or why
there is none. Invariant: every try is smaller than the one before, so there is an end to them.

    a pack of several documents    at most half as many tokens in a pack, from now on
    one document                   its layers are computed again in the backward pass, and those of
                                   every document as long
    one document, computed again   nothing is smaller: the run ends, and says why

Log-probs under frozen weights keep no activations: a pack of them is halved too, and one document
that does not fit ends the run.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache

from dora_rl.out_of_memory import shortage
from dora_rl.types import UserError
from dora_rl.user_code import require

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@cache
def keep_freed_memory() -> bool:
    """Raise glibc's thresholds for this process, once. True if it took them."""
    linux = sys.platform.startswith("linux")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if linux else None
    if mallopt is None:
        return False
    # 32 MiB is the largest mmap threshold glibc accepts.
    settings = ((_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 1 << 30), (_M_TOP_PAD, 64 << 20))
    return all(mallopt(*setting) == 1 for setting in settings)


@contextmanager
def noting_shortage(may_recover: bool = True) -> Iterator[list[str]]:
    """What runs inside may run out of memory; then the list says what was missing. Recover after
    the block, not in a handler of the error, whose traceback holds the activations."""
    missing: list[str] = []
    try:
        yield missing
    except (RuntimeError, UserError) as error:
        line = shortage(error)
        if not line or not may_recover:
            raise
        missing.append(line)


class Room:
    """What fits, as far as it is known. `tell` gets a line whenever less does."""

    def __init__(self, pack_tokens: int, tell: Callable[[str], None] = lambda line: None) -> None:
        self.pack_tokens, self.tell = pack_tokens, tell
        self._recomputed_tokens: int | None = None  # packs of so many tokens or more

    def recomputes(self, num_tokens: int) -> bool:
        """Whether such a pack computes its layers again, whatever others do."""
        return self._recomputed_tokens is not None and num_tokens >= self._recomputed_tokens

    def _halve(self, tokens: int, what: str) -> None:
        self.pack_tokens = max(1, min(self.pack_tokens, tokens) // 2)
        self.tell(f"{what} packs have {self.pack_tokens:,} tokens at most from now on")

    def shrink(self, lengths: Sequence[int], reason: str, *, recomputed: bool) -> None:
        """A pack of documents of these lengths did not fit: let the next ones be smaller."""
        tokens = sum(lengths)
        if len(lengths) > 1:
            self._halve(
                tokens,
                f"out of memory in a pack of {tokens:,} tokens ({reason}); its update begins again "
                "and",
            )
        elif not recomputed:
            self._recomputed_tokens = min(tokens, self._recomputed_tokens or tokens)
            self.tell(
                f"out of memory in a document of {tokens:,} tokens ({reason}); its update begins "
                "again and layers of documents as long are computed twice from now on"
            )
        else:
            raise UserError(
                f"out of memory: a document of {tokens:,} tokens does not fit alone, with its "
                f"layers computed twice ({reason}); lower rollout.tokens_max, "
                "rollout.kv_bytes_max or trainer.logits_chunk_tokens, or train adapters "
                "(trainer.lora_rank)"
            )

    def shrink_scored(self, lengths: Sequence[int], reason: str) -> None:
        """A pack of documents that were only scored did not fit."""
        tokens = sum(lengths)
        require(
            (
                len(lengths) > 1,
                f"out of memory: a document of {tokens:,} tokens cannot be scored under frozen "
                f"weights ({reason}); lower rollout.tokens_max, rollout.kv_bytes_max or "
                "trainer.logits_chunk_tokens",
            )
        )
        self._halve(
            tokens,
            f"out of memory while {tokens:,} tokens were scored under frozen weights ({reason});",
        )
