"""The reward pool of a local run: samples out to worker processes, rewards back.

A worker has one sample at a time. One that hangs past its time or dies is replaced, and costs
that sample one attempt; the core decides whether to try again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.runtime.crew import Crew
from dora_rl.types import Prompt

Answer = Callable[[float | None, str], None]
"""Called with (reward, "") or (None, why not)."""


@dataclass(frozen=True, slots=True)
class Job:
    body: dict[str, Any]
    token_ids: NDArray[np.int32]
    answer: Answer


class ScoringPool:
    """Gives each job to a free worker; order of arrival."""

    def __init__(self, crew: Crew, num_workers: int, timeout_s: float, extra: dict[str, Any]):
        self._crew = crew
        self._timeout_s = timeout_s
        self._waiting: deque[Job] = deque()
        self._free: list[str] = []
        self._busy: dict[str, tuple[Job, float]] = {}
        self._next = 0
        self._extra = extra
        self.num_answered = 0
        self.names = [f"reward{index}" for index in range(num_workers)]

    def start(self) -> None:
        for name in self.names:
            self._crew.start("reward", name, self._extra)

    def submit(
        self, prompt: Prompt, text: str, token_ids: NDArray[np.int32], finish: str, answer: Answer
    ) -> None:
        self._next += 1
        body = {
            "id": self._next,
            "prompt": prompt.columns.get("prompt", prompt.text),
            "prompt_text": prompt.text,
            "completion": text,
            "answer": prompt.answer,
            "columns": prompt.columns,
            "finish": finish,
        }
        self._waiting.append(Job(body, token_ids, answer))
        self._give_out()

    def _give_out(self) -> None:
        while self._free and self._waiting:
            name, job = self._free.pop(), self._waiting.popleft()
            self._busy[name] = (job, time.monotonic())
            self._crew.send(name, "score", job.body, {"token_ids": job.token_ids})

    def ready(self, name: str) -> None:
        self._free.append(name)
        self._give_out()

    def scored(self, name: str, body: dict[str, Any]) -> None:
        """A worker answered."""
        held = self._busy.pop(name, None)
        self._free.append(name)
        self.num_answered += 1
        if held is not None and held[0].body["id"] == body["id"]:
            if "reward" in body:
                held[0].answer(body["reward"], "")
            else:
                held[0].answer(None, body["error"])
        self._give_out()

    def lost(self, name: str) -> None:
        """A worker's process ended: its sample failed, a new worker takes the name."""
        if name in self._free:
            self._free.remove(name)
        held = self._busy.pop(name, None)
        if not self._crew.closing:
            self._crew.restart(name)
        if held is not None:
            held[0].answer(None, "the reward ended its process")

    def check_time(self) -> None:
        """Replace workers that have been busy with one sample for too long."""
        now = time.monotonic()
        for name, (job, since) in list(self._busy.items()):
            if now - since > self._timeout_s:
                del self._busy[name]
                self._crew.restart(name)
                job.answer(None, f"the reward did not answer within {self._timeout_s:g} s")
