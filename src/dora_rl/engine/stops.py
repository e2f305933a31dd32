"""Where a response ends: stop strings, looked for in the newest tokens alone. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dora_rl.engine.sequence import Sequence as Seq

Decode = Callable[[Sequence[int]], str]


def hits_stop_string(seq: Seq, decode: Decode | None) -> bool:
    """Whether a stop string ends in the newest token."""
    strings = seq.request.params.stop_strings
    if not strings or decode is None:
        return False
    # A stop string of n characters ends in the newest token and began at most n tokens ago, and not
    # before this turn: an observation may well end in the string.
    num_tokens = max(len(string) for string in strings) + 1
    mask = seq.loss_mask[-num_tokens:]
    drawn = next((i for i, own in enumerate(reversed(mask)) if not own), len(mask))
    tail = decode(seq.tokens[len(seq.tokens) - drawn :])
    return any(string in tail for string in strings)
