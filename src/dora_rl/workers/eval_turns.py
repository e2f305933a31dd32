"""Environments inside the evaluator's own process: questions in, answers out, no waiting.

One thread runs the event loop of the episodes; the engine's loop asks and collects between its
steps. An environment that fails or hangs costs that answer only. Never used in training, where
environments have processes of their own.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.envs.host import Answer, Ask, Host, label_of, load_environments
from dora_rl.types import RequestId, Trajectory
from dora_rl.workers.turns import episode_seed, read_row, turn_text


class EvalTurns:
    """The episodes of one evaluation. `rows` has one entry for each prompt, as `row_of` makes it,
    with its `env`."""

    def __init__(self, config: RunConfig, base_dir: Path) -> None:
        self._loaded = load_environments(config.env, base_dir)
        self._host = Host(self._loaded, turn_text(config))
        # What an episode is worth that was cut off before it got a reward; None: functions say.
        self.cut_reward = None if config.reward.functions else 0.0
        self._rows: Sequence[dict[str, Any]] = ()
        self._answers: queue.SimpleQueue[tuple[RequestId, Answer]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self.num_open = 0
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, rows: Sequence[dict[str, Any]]) -> None:
        self._rows = rows

    def opens(self, prompt: int) -> bool:
        label = label_of(str(self._rows[prompt]["env"]), self._loaded)
        return self._loaded[label].kind.opens

    def ask(self, trajectory: Trajectory) -> None:
        rid = trajectory.request
        row = self._rows[rid.group]
        ask = Ask(
            rid,
            label_of(str(row["env"]), self._loaded),
            read_row(row),
            episode_seed(0, rid.group),
            tuple(trajectory.token_ids.tolist()),
            tuple(trajectory.loss_mask.tolist()),
            tuple(trajectory.logprobs.tolist()),
            trajectory.version,
        )
        self.num_open += 1
        asyncio.run_coroutine_threadsafe(self._answer(ask), self._loop)

    async def _answer(self, ask: Ask) -> None:
        self._answers.put((ask.request, await self._host.answer(ask)))

    def take(self, wait_s: float) -> list[tuple[RequestId, Answer]]:
        """What has been answered; waits for the first if there is a question open."""
        found: list[tuple[RequestId, Answer]] = []
        try:
            while self.num_open:
                found.append(self._answers.get(timeout=0.0 if found else wait_s))
                self.num_open -= 1
        except queue.Empty:
            pass
        return found

    def end(self) -> None:
        """The evaluation is over; the next one begins with fresh episodes."""
        for group in range(len(self._rows)):
            self._loop.call_soon_threadsafe(self._host.forget, group)
