"""A model that is served, asked over HTTP: a question, its answer as JSON, what may be retried.

Retries what may pass (no connection, time-out, 408, 409, 429, 5xx, an answer that is none), honours
`Retry-After`, never retries a refusal. The key comes from the environment and is never logged.
"""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from dora_rl.user_code import one_line

NUM_ATTEMPTS = 3
RETRY_WAIT_S_MAX = 30.0
RETRIED = (408, 409, 429)
T = TypeVar("T")


class EndpointFailed(Exception):
    """No answer. `wait_s` is None where another try would give the same."""

    def __init__(self, reason: str, wait_s: float | None) -> None:
        super().__init__(reason)
        self.wait_s = wait_s


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`who` is how messages call it."""

    who: str
    url: str
    key_variable: str
    timeout_s: float
    attempts: int
    retry_wait_s: float
    answer_bytes_max: int

    def ask(self, body: Mapping[str, Any], read: Callable[[Any], T]) -> T:
        """What `read` makes of the answer. Raises `EndpointFailed` after the last try."""
        for attempt in range(1, self.attempts + 1):
            try:
                return self._read(self._post(body), read)
            except EndpointFailed as failed:
                if failed.wait_s is None or attempt == self.attempts:
                    reason = f"{failed} (try {attempt} of {self.attempts})"
                    raise EndpointFailed(reason, failed.wait_s) from failed
                backoff_s = self.retry_wait_s * 2 ** (attempt - 1)
                time.sleep(min(max(failed.wait_s, backoff_s), RETRY_WAIT_S_MAX))
        raise AssertionError("attempts is at least 1")

    def _post(self, body: Mapping[str, Any]) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get(self.key_variable):
            headers["Authorization"] = f"Bearer {key}"
        request = urllib.request.Request(self.url, json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=self.timeout_s) as answer:
                return answer.read(self.answer_bytes_max)
        except urllib.error.HTTPError as error:
            raise self._from_status(error) from error
        except OSError as error:
            raise EndpointFailed(f"cannot reach {self.who}: {one_line(error)}", 0.0) from error

    def _read(self, answer: bytes, read: Callable[[Any], T]) -> T:
        try:
            return read(json.loads(answer))
        except (ValueError, LookupError, TypeError) as error:
            reason = f"the answer of {self.who} is no completion: {one_line(error)}"
            raise EndpointFailed(reason, 0.0) from error

    def _from_status(self, error: urllib.error.HTTPError) -> EndpointFailed:
        retried = error.code in RETRIED or error.code >= 500
        try:
            wait_s = float(error.headers.get("Retry-After") or 0)
        except ValueError:
            wait_s = 0.0
        told = error.read(200).decode(errors="replace").strip()
        reason = f"{self.who} answered {error.code} {told.splitlines()[0] if told else ''}".strip()
        return EndpointFailed(reason, wait_s if retried else None)
