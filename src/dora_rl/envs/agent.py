"""An agent of the user's as an environment: a function that talks to an OpenAI endpoint.

    def agent(base_url, api_key, session_id, row):
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...                          # as many chat requests as it likes, one after the other
        return 1.0                   # the reward, or None: POSTed, or left to reward.functions

Every chat request becomes a turn of the trajectory. The function (or coroutine) runs beside the
endpoint; a plain function gets a thread of its own. Invariant: the agent sees nothing but HTTP, so
the same function runs against `dora-rl serve` unchanged.
"""

from __future__ import annotations

import asyncio
import inspect
import threading
from pathlib import Path
from typing import Any

from dora_rl.envs.agent_endpoint import AgentEndpoint, Call, Episode, endpoint
from dora_rl.envs.base import Environment, Observation, Row, Turn
from dora_rl.envs.load import KEY
from dora_rl.types import REWARD_MAX, UserError
from dora_rl.user_code import load_object, one_line

ARGUMENTS = ("base_url", "api_key", "session_id", "row", "seed")


class Agent(Environment):
    """`agent` is `path/to/file.py:function` or `package.module:function`."""

    opens = True

    def __init__(self, agent: str) -> None:
        self._function = load_object(agent, Path("."), section="env", key=KEY)
        self._names = _accepted(self._function, agent)
        self._endpoint: AgentEndpoint | None = None
        self._episode: Episode | None = None
        self._task: asyncio.Task[None] | None = None

    async def reset(self, row: Row, seed: int) -> Observation:
        assert self.text is not None, "the host gives every environment the run's tokenizer"
        self._endpoint = await endpoint(self.text)
        self._episode = self._endpoint.open(row.token_ids)
        known = {
            "base_url": self._endpoint.url,
            "api_key": self._episode.key,
            "session_id": self._episode.id,
            "row": row,
            "seed": seed,
        }
        self._run({name: known[name] for name in self._names})
        return await self._next()

    async def step(self, turn: Turn) -> Observation:
        assert self._episode is not None
        self._episode.answer(turn)
        return await self._next()

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._endpoint is not None and self._episode is not None:
            self._endpoint.close(self._episode)

    async def _next(self) -> Observation:
        """What the agent does next: another request, or its end."""
        assert self._episode is not None
        event = await self._episode.events.get()
        if isinstance(event, Exception):
            raise event
        if isinstance(event, Call):
            return Observation(token_ids=event.new_ids)
        if not self._episode.past.num_turns:
            raise RuntimeError("the agent ended without a single chat request")
        return Observation(reward=self._episode.reward, done=True)

    def _run(self, arguments: dict[str, Any]) -> None:
        if inspect.iscoroutinefunction(self._function):
            self._task = asyncio.create_task(self._run_async(arguments))
            return
        loop = asyncio.get_running_loop()
        call = (loop, arguments)
        threading.Thread(target=self._run_thread, args=call, daemon=True, name="agent").start()

    async def _run_async(self, arguments: dict[str, Any]) -> None:
        try:
            self._ended(await self._function(**arguments), None)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            self._ended(None, error)

    def _run_thread(self, loop: asyncio.AbstractEventLoop, arguments: dict[str, Any]) -> None:
        value: object = None
        error: Exception | None = None
        try:
            value = self._function(**arguments)
        except Exception as raised:  # noqa: BLE001 - the user's code may raise anything
            error = raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, value, error)

    def _ended(self, value: object, error: Exception | None) -> None:
        assert self._episode is not None
        number = isinstance(value, (int, float)) and abs(value) <= REWARD_MAX
        if error is not None:
            self._episode.fail(f"the agent failed: {one_line(error)}", error)
        elif value is not None and not number:
            self._episode.fail(f"the agent returned {value!r}, not a finite number or None")
        else:
            if isinstance(value, (int, float)):
                self._episode.reward = float(value)
            self._episode.events.put_nowait(None)


def _accepted(function: Any, name: str) -> list[str]:
    """The arguments the function wants, by name."""
    if not callable(function):
        raise UserError(f"env: {name} is not a function; see docs/serving.md")
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return list(ARGUMENTS)
    unknown = [one.name for one in parameters if one.default is one.empty]
    unknown = [one for one in unknown if one not in ARGUMENTS]
    if unknown:
        raise UserError(
            f"env: {name} wants {', '.join(unknown)}; an agent is given {', '.join(ARGUMENTS)}"
        )
    return [one.name for one in parameters if one.name in ARGUMENTS]
