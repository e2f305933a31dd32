"""Hints for misspelt names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def hint(word: str, names: Iterable[str]) -> str:
    """The end of an error line about an unknown name.

    >>> hint("snyc", ["sync", "partial"])
    "; did you mean 'sync'?"
    """
    known = [str(name) for name in names]
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"
