"""An agent of the user's as an environment: a function that talks to an OpenAI endpoint.

    def agent(base_url, api_key, session_id, row):
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...                          # as many chat requests as it likes, one after the other
        return 1.0                   # the reward, or None: POSTed, or left to reward.functions

Every chat request becomes a turn of the trajectory. The function (or coroutine) runs beside the
endpoint; a plain function gets a thread of its own. Invariant: the agent sees nothing but HTTP, so
the same function runs against `dora-rl serve` unchanged.

The endpoint listens on loopback, one per event loop, with a key per episode. Sampling settings of
the requests are not looked at: the run's own count, so that all of a trajectory comes from the
policy that is trained. It never generates. Invariant: the ids an episode has read and written are
those of its trajectory, in order.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from dora_rl.chat.conversation import ChatTemplate, Conversation
from dora_rl.chat.conversation import Turn as ChatTurn
from dora_rl.chat.requests import (
    ApiError,
    Ask,
    Message,
    bad_request,
    session_busy,
    session_not_found,
)
from dora_rl.chat.service import Piece
from dora_rl.chat.texts import PlainTexts, next_turn
from dora_rl.envs.base import Environment, Observation, Row, Turn, TurnText
from dora_rl.envs.host import KEY
from dora_rl.types import REWARD_MAX, Finish, Version
from dora_rl.user_code import load_object, one_line, require

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
        self._endpoint = endpoint(self.text)
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
        else:
            threading.Thread(
                target=self._run_thread,
                args=(asyncio.get_running_loop(), arguments),
                daemon=True,
                name="agent",
            ).start()

    async def _run_async(self, arguments: dict[str, Any]) -> None:
        try:
            self._ended(await self._function(**arguments), None)
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            self._ended(None, error)

    def _run_thread(self, loop: asyncio.AbstractEventLoop, arguments: dict[str, Any]) -> None:
        ended: tuple[object, Exception | None]
        try:
            ended = self._function(**arguments), None
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            ended = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, *ended)

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
    require((callable(function), f"env: {name} is not a function; see docs/serving.md"))
    parameters = inspect.signature(function).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return list(ARGUMENTS)
    needed = [one.name for one in parameters if one.default is one.empty]
    unknown = ", ".join(word for word in needed if word not in ARGUMENTS)
    require((not unknown, f"env: {name} wants {unknown}; an agent is given {', '.join(ARGUMENTS)}"))
    return [one.name for one in parameters if one.name in ARGUMENTS]


CONNECTIONS_MAX = 1 << 16  # agents are the user's own; the episodes are what limits them
AGENT_S_MAX = 600.0  # for a request that an agent has begun, or an answer that it has not read
MODEL = "policy"  # what the endpoint calls it; agents may write any name


class Call:
    """One request of an agent: the ids it adds, and the policy's turn once it is there."""

    def __init__(self, episode: Episode, turn: ChatTurn, new_ids: tuple[int, ...]) -> None:
        self._episode, self._turn, self.new_ids = episode, turn, new_ids
        self.prompts: Sequence[tuple[int, ...]] = [turn.prompt_ids]
        self.answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()

    @property
    def version(self) -> Version:
        return self._episode.version

    @property
    def session(self) -> dict[str, Any]:
        return {
            "id": self._episode.id,
            "continued": self._turn.continued,
            "turn": self._episode.past.num_turns + (0 if self.answer.done() else 1),
        }

    async def pieces(self) -> AsyncIterator[Piece]:
        """All of the turn at once: an episode is asked when its turn is complete."""
        written = await self.answer
        yield Piece(
            0,
            written.token_ids,
            written.logprobs,
            finish=Finish.STOP if written.stopped else Finish.LENGTH,
        )

    def replied(self, reply: Message) -> None:
        written = self.answer.result()
        self._episode.past.add(self._turn, written.token_ids, written.logprobs, reply)
        self._episode.call = None

    def close(self) -> None:
        """An agent that leaves in the middle of a turn cannot be trained on."""
        if self._episode.call is self:
            self._episode.fail("the agent did not wait for the answer to its request")


class Episode:
    """The agent's side of one trajectory. `events` are what the environment waits for: a `Call`,
    the end (None), or what went wrong."""

    def __init__(self, name: str, prompt_ids: tuple[int, ...], stops: Sequence[str]) -> None:
        self.id, self.key = name, secrets.token_urlsafe(18)
        self.prompt_ids, self.stops = prompt_ids, tuple(stops)
        self.version: Version = -1
        self.past = Conversation()
        self.call: Call | None = None
        self.reward: float | None = None
        self.events: asyncio.Queue[Call | Exception | None] = asyncio.Queue()

    def begin(self, turn: ChatTurn) -> Call:
        """The next request, if it goes on from the trajectory."""
        if self.call is not None:
            raise session_busy(self.id)
        new_ids = turn.new_ids
        if not self.past.num_turns:
            known = len(self.prompt_ids)
            if turn.prompt_ids[:known] != self.prompt_ids:
                raise self._refused(
                    "its first request does not begin with the row's prompt (where the agent "
                    'writes its own, set prompt_tokens = "first" in data.train)'
                )
            new_ids = turn.prompt_ids[known:]
        elif not turn.continued:
            raise self._refused(f"its messages do not go on from the episode ({turn.why})")
        self.call = Call(self, turn, new_ids)
        self.events.put_nowait(self.call)
        return self.call

    def fail(self, reason: str, cause: Exception | None = None) -> None:
        failure = RuntimeError(reason)
        failure.__cause__ = cause  # whoever raises it shows where the agent did
        self.events.put_nowait(failure)

    def answer(self, turn: Turn) -> None:
        assert self.call is not None, "an episode without a request has no turn"
        self.version = turn.version
        self.call.answer.set_result(turn)

    def end(self) -> None:
        """Nobody answers any more."""
        if self.call is not None and not self.call.answer.done():
            self.call.answer.set_exception(ApiError(410, "the episode has ended", code="ended"))
            self.call.answer.exception()

    def _refused(self, why: str) -> ApiError:
        self.fail(f"the agent cannot be trained: {why}")
        return bad_request(f"this episode cannot be trained: {why}", "messages")


class AgentEndpoint:
    """Implements `chat.service.Service` for the episodes of one event loop, and listens."""

    def __init__(self, text: TurnText) -> None:
        self._text = text
        self.template = ChatTemplate(text.tokenizer)
        self.texts = PlainTexts(self.template, client_templates=True, reads_prompts=False)
        self._episodes: dict[str, Episode] = {}
        self._keys: dict[str, str] = {}  # key -> episode
        self._num_opened = 0
        from dora_rl.chat.access import Access
        from dora_rl.chat.app import make_app
        from dora_rl.chat.http import BACKLOG, Bodies, HttpLimits, http_server

        sock = socket.socket()
        sock.bind(("127.0.0.1", 0))
        sock.listen(BACKLOG)
        self.url = f"http://127.0.0.1:{sock.getsockname()[1]}/v1"
        waits = dict.fromkeys(("head_s_max", "body_s_max", "write_s_max"), AGENT_S_MAX)
        limits = HttpLimits(connections_max=CONNECTIONS_MAX, **waits)
        app = make_app(self, Access(sessions=self._keys, loopback=True), Bodies(limits))
        server = http_server(app, limits)
        self._task = asyncio.create_task(server.serve(sockets=[sock]))

    def open(self, prompt_ids: tuple[int, ...]) -> Episode:
        self._num_opened += 1
        episode = Episode(f"episode-{self._num_opened}", prompt_ids, self._text.stop_strings)
        self._episodes[episode.id] = episode
        self._keys[episode.key] = episode.id
        return episode

    def close(self, episode: Episode) -> None:
        if self._episodes.pop(episode.id, None) is not None:
            del self._keys[episode.key]
            episode.end()

    # -- the service ------------------------------------------------------------------------------

    def healthy(self) -> bool:
        return True

    def models(self) -> list[dict[str, Any]]:
        return [{"id": MODEL, "object": "model", "created": 0, "owned_by": "dora-rl"}]

    async def chat(self, ask: Ask) -> Call:
        if ask.num_samples != 1:
            raise bad_request("an episode goes on with one reply: 'n' must be 1", "n")
        if ask.params.logprobs_top_n:
            raise bad_request("'top_logprobs' is not there while training", "top_logprobs")
        episode = self._get(ask.session_id or "")
        options = self._text.template_options | ask.template_options
        turn = await next_turn(episode.past, ask, options, self.texts, self._text.stop_ids)
        return episode.begin(turn)

    async def complete(self, ask: Ask) -> Call:
        del ask
        raise bad_request("an agent in training uses /v1/chat/completions")

    def open_session(self, session_id: str | None, owner: str) -> dict[str, Any]:
        del owner  # the key names the session, so nobody can ask for another's
        raise bad_request(f"the key stands for the session already (not {session_id!r})")

    def read_session(self, session_id: str, owner: str) -> dict[str, Any]:
        del owner
        past = self._get(session_id).past
        return {"id": session_id, "object": "session", "messages": past.messages}

    async def end_session(
        self, session_id: str, owner: str, reward: float | None
    ) -> dict[str, Any]:
        """The reward of the episode, which ends when the agent does."""
        del owner
        self._get(session_id).reward = reward
        return {"id": session_id, "object": "session", "reward": reward}

    def _get(self, session_id: str) -> Episode:
        if session_id not in self._episodes:
            raise session_not_found(session_id)
        return self._episodes[session_id]


_ENDPOINTS: WeakKeyDictionary[asyncio.AbstractEventLoop, AgentEndpoint] = WeakKeyDictionary()


def endpoint(text: TurnText) -> AgentEndpoint:
    """The endpoint of the running loop."""
    loop = asyncio.get_running_loop()
    if loop not in _ENDPOINTS:
        _ENDPOINTS[loop] = AgentEndpoint(text)
    return _ENDPOINTS[loop]
