"""Sessions of the server: each pinned to the version it began with, until it ends or lies idle.

Pure: the caller brings the time. Invariant: a version has as many pins as there are sessions and
running requests on it, and a version with a pin is never given up.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from dora_rl.chat.conversation import Conversation
from dora_rl.chat.errors import ApiError, session_not_found
from dora_rl.types import RequestId, Version


@dataclass(slots=True)
class Session:
    """One line of turns. `request` is its name in the engine, for all turns."""

    id: str
    version: Version
    request: RequestId
    seed: int
    used_s: float
    conversation: Conversation = field(default_factory=Conversation)
    busy: bool = False

    def summary(self) -> dict[str, Any]:
        past = self.conversation
        return {
            "id": self.id,
            "object": "session",
            "weight_version": self.version,
            "turns": past.num_turns,
            "num_tokens": len(past.prompt_ids) + len(past.token_ids),
        }

    def record(self, reward: float | None = None) -> dict[str, Any]:
        """Everything a trainer would want to know."""
        past = self.conversation
        return self.summary() | {
            "messages": past.messages,
            "prompt_token_ids": list(past.prompt_ids),
            "token_ids": list(past.token_ids),
            "logprobs": list(past.logprobs),
            "loss_mask": list(past.loss_mask),
            "reward": reward,
        }


class Sessions:
    """All of them, and the pins of the versions."""

    def __init__(self, num_max: int, idle_s_max: float) -> None:
        self._num_max, self._idle_s_max = num_max, idle_s_max
        self._by_id: dict[str, Session] = {}
        self._pins: Counter[Version] = Counter()

    def find(self, session_id: str) -> Session | None:
        return self._by_id.get(session_id)

    def get(self, session_id: str) -> Session:
        if session_id not in self._by_id:
            raise session_not_found(session_id)
        return self._by_id[session_id]

    def open(
        self, session_id: str | None, version: Version, request: RequestId, now: float
    ) -> Session:
        if len(self._by_id) >= self._num_max:
            message = f"The server has {self._num_max} open sessions; end one and try again"
            raise ApiError(429, message, code="too_many_sessions", kind="rate_limit_error")
        name = session_id or f"session-{secrets.token_hex(8)}"
        session = Session(name, version, request, secrets.randbits(63), now)
        self._by_id[name] = session
        self.pin(version)
        return session

    def end(self, session_id: str) -> Session:
        session = self.get(session_id)
        del self._by_id[session_id]
        self.unpin(session.version)
        return session

    def idle(self, now: float) -> list[Session]:
        """Those that nobody has used for too long."""
        oldest = now - self._idle_s_max
        return [s for s in self._by_id.values() if not s.busy and s.used_s < oldest]

    def on(self, version: Version) -> int:
        """How many sessions stay on a version."""
        return sum(session.version == version for session in self._by_id.values())

    def pin(self, version: Version) -> None:
        self._pins[version] += 1

    def unpin(self, version: Version) -> None:
        assert self._pins[version] > 0, f"version {version} has no pin"
        self._pins[version] -= 1

    def unused(self, versions: Collection[Version], live: Version) -> list[Version]:
        """Versions that can go: older than the live one, and nobody is on them."""
        return [v for v in sorted(versions) if v != live and not self._pins[v]]
