"""Which requests of an instance gain nothing: a fact for its reports, on which the core decides."""

from __future__ import annotations

from collections.abc import Mapping

from dora_rl.types import RequestId

STILL_S = 10.0  # before a request is named; the core waits far longer before it acts


class Stillness:
    """Remembers how long each request was, and since when."""

    def __init__(self) -> None:
        self._seen: dict[RequestId, tuple[int, float]] = {}

    def look(self, lengths: Mapping[RequestId, int], now: float) -> tuple[RequestId, ...]:
        """Those that have been as long as now for `STILL_S`. Who is not given is forgotten."""
        before, self._seen = self._seen, {}
        for rid, length in lengths.items():
            was, since = before.get(rid, (-2, now))
            self._seen[rid] = (length, since if was == length else now)
        return tuple(rid for rid, (_, since) in self._seen.items() if now - since >= STILL_S)
