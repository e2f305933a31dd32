"""An agent of the user's as an environment: a function that talks to an endpoint.

    def agent(base_url, api_key, session_id, row):
        client = OpenAI(base_url=base_url, api_key=api_key)
        ...                          # as many requests as it likes, side by side too
        return 1.0                   # the reward, or None: POSTed, or left to reward.functions

Every request becomes a turn of the trajectory. One that does not go on from the last begins a
branch (see `dora_rl.histories`). The function (or coroutine) runs beside the endpoint; a plain
function gets a thread of its own. Invariant: the agent sees nothing but HTTP, so the same function
runs against `dora-rl serve` unchanged.

The endpoint listens on loopback, one per event loop, with a key per episode. Requests are answered
one after the other, in the order in which they came. Sampling settings of the requests are not
looked at: the run's own count, so that all of a trajectory comes from the policy that is trained.
It never generates. Invariant: the histories an episode has read and written are those of its
trajectory, also where an agent that is run again asks for something else.
"""

from __future__ import annotations

import asyncio
import inspect
import secrets
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, suppress
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
    session_not_found,
)
from dora_rl.chat.service import Piece
from dora_rl.chat.texts import PlainTexts, next_turn
from dora_rl.envs.base import Environment, Observation, Row, Turn, TurnText
from dora_rl.envs.host import KEY
from dora_rl.histories import Tree
from dora_rl.types import REWARD_MAX, Finish, Version
from dora_rl.user_code import load_object, one_line, require

ARGUMENTS = ("base_url", "api_key", "session_id", "row", "seed", "variables")


class Agent(Environment):
    """`agent` is `path/to/file.py:function` or `package.module:function`."""

    opens = True

    def __init__(self, agent: str) -> None:
        self._function = load_object(agent, Path("."), section="env", key=KEY)
        self._names = _accepted(self._function, agent)
        self._episode: Episode  # from `reset` on
        self._at_close = ExitStack()

    async def reset(self, row: Row, seed: int) -> Observation:
        assert self.text is not None, "the host gives every environment the run's tokenizer"
        server = endpoint(self.text)
        self._episode = server.open(row.token_ids)
        self._at_close.callback(server.close, self._episode)
        known = {
            "base_url": server.url,
            "api_key": self._episode.key,
            "session_id": self._episode.id,
            "row": row,
            "seed": seed,
            "variables": variables_of(server.url, self._episode.key),
        }
        self._run({name: known[name] for name in self._names})
        return await self._next()

    async def step(self, turn: Turn) -> Observation:
        await self._episode.answer(turn)
        return await self._next()

    def close(self) -> None:
        self._at_close.close()

    async def _next(self) -> Observation:
        """What the agent does next: another request, or its end."""
        episode = self._episode
        call = await episode.next_call()
        if call is not None:
            branch, new_ids = episode.tree.place(call.history)
            return Observation(token_ids=new_ids, branch=branch)
        if not episode.num_turns:
            raise RuntimeError("the agent ended without a single request")
        if episode.turn_rewards is None:
            return Observation(reward=episode.reward, done=True)
        return Observation(turn_rewards=episode.rewards_of_turns(), done=True)

    def _run(self, arguments: dict[str, Any]) -> None:
        if inspect.iscoroutinefunction(self._function):
            task = asyncio.create_task(self._run_async(arguments))
            self._at_close.callback(task.cancel)
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
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
            self._ended(None, error)

    def _run_thread(self, loop: asyncio.AbstractEventLoop, arguments: dict[str, Any]) -> None:
        ended: tuple[object, BaseException | None]
        try:
            ended = self._function(**arguments), None
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it may raise anything
            ended = None, error
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, *ended)

    def _ended(self, value: object, error: BaseException | None) -> None:
        episode = self._episode
        if error is not None:
            episode.fail(f"the agent failed: {one_line(error)}", error)
        elif _is_reward(value):
            episode.end(reward=float(value))  # type: ignore[arg-type]
        elif isinstance(value, (list, tuple)) and all(map(_is_reward, value)):
            episode.end(turn_rewards=tuple(map(float, value)))
        elif value is None:
            episode.end()
        else:
            what = "not a finite number, a list of them (one for each turn) or None"
            episode.fail(f"the agent returned {value!r}, {what}")


def _is_reward(value: object) -> bool:
    return isinstance(value, (int, float)) and abs(value) <= REWARD_MAX


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


def variables_of(url: str, key: str) -> dict[str, str]:
    """What the official clients read from the environment of their process."""
    return {
        "OPENAI_BASE_URL": url,
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
        "ANTHROPIC_API_KEY": key,
    }


CONNECTIONS_MAX = 1 << 16  # agents are the user's own; the episodes are what limits them
ORDER_S_MAX = 10.0  # for a request that came before another, the first time
AGENT_S_MAX = 600.0  # for a request that an agent has begun, or an answer that it has not read
MODEL = "policy"  # what the endpoint calls it; agents may write any name


class Call:
    """One request of an agent: what the policy is to read, and its turn once it is there."""

    def __init__(self, episode: Episode, messages: Sequence[Message], turn: ChatTurn) -> None:
        self._episode, self._turn, self.messages = episode, turn, tuple(messages)
        self.history = turn.prompt_ids
        self.answer: asyncio.Future[Turn] = asyncio.get_running_loop().create_future()
        self.number = 0  # of its turn

    @property
    def prompts(self) -> Sequence[tuple[int, ...]]:
        return [self.history]

    @property
    def version(self) -> Version:
        return self._episode.version

    @property
    def session(self) -> dict[str, Any]:
        said = {"id": self._episode.id, "continued": self._turn.continued, "turn": self.number}
        return said | ({"restarted_because": self._turn.why} if self._turn.why else {})

    async def pieces(self) -> AsyncIterator[Piece]:
        """All of the turn at once: an episode is asked when its turn is complete."""
        written = await self.answer
        self._episode.read.add(self.number)
        yield Piece(
            0,
            written.token_ids,
            written.logprobs,
            finish=Finish.STOP if written.stopped else Finish.LENGTH,
        )

    def replied(self, reply: Message) -> None:
        self._episode.remember(self, reply)

    def close(self) -> None:
        """The client waits no longer: a request that the policy has not been asked is dropped, and
        the turn of one that it has been is trained like any other."""
        self._episode.drop(self)


class Episode:
    """The agent's side of one trajectory: its requests, its end, and the tree of what was read and
    written. Requests wait until the turn before them is there."""

    def __init__(self, name: str, prompt_ids: tuple[int, ...]) -> None:
        self.id, self.key = name, secrets.token_urlsafe(18)
        self.version: Version = -1
        self.tree = Tree(prompt_ids)
        self.pasts: list[Conversation] = []  # as each turn that was read left it
        self.num_turns = 0
        self.read: set[int] = set()  # turns that clients have been given, by number
        self.reward: float | None = None
        self.turn_rewards: tuple[float, ...] | None = None
        self._waiting: list[Call] = []
        self._asked: Call | None = None  # the one whose turn the policy writes
        self._failure: Exception | None = None
        self._ended = False
        self._changed = asyncio.Event()

    # -- the agent --------------------------------------------------------------------------------

    def past_of(self, messages: Sequence[Message]) -> Conversation:
        """The state that the messages go on from: the longest, and of equal ones the newest. An
        empty one where there is none."""
        fitting = [past for past in self.pasts if past.around_reply(messages) is not None]
        return max(reversed(fitting), key=lambda past: len(past.messages), default=Conversation())

    def begin(self, call: Call) -> Call:
        if self._ended:
            raise ended_already()
        self._waiting.append(call)
        self._changed.set()
        return call

    def drop(self, call: Call) -> None:
        if call in self._waiting:
            self._waiting.remove(call)

    def remember(self, call: Call, reply: Message) -> None:
        """The agent has read a turn, and may go on from it."""
        written = call.answer.result()
        past = Conversation()
        turn = ChatTurn(call.messages, call.history, call.history, continued=False)
        past.add(turn, written.token_ids, written.logprobs, reply)
        self.pasts.append(past)

    def fail(self, reason: str, cause: BaseException | None = None) -> None:
        self._failure = RuntimeError(reason)
        self._failure.__cause__ = cause  # whoever raises it shows where the agent did
        self._changed.set()

    def end(
        self, reward: float | None = None, turn_rewards: tuple[float, ...] | None = None
    ) -> None:
        """The agent has ended. A reward that was POSTed holds where it returned none."""
        self.reward = self.reward if reward is None else reward
        self.turn_rewards, self._ended = turn_rewards, True
        self._changed.set()

    def rewards_of_turns(self) -> tuple[float, ...]:
        """One for each turn. Those whose clients had gone have none, where the agent gave one for
        each answer that it got."""
        given, num_turns = self.turn_rewards or (), self.num_turns
        if len(given) == num_turns:
            return given
        if len(given) != len(self.read):
            raise RuntimeError(
                f"the agent returned {len(given)} rewards for {num_turns} turns; give one for each "
                "answer that it got, in that order"
            )
        by_number = dict(zip(sorted(self.read), given, strict=True))
        return tuple(by_number.get(number, 0.0) for number in range(1, num_turns + 1))

    # -- the policy -------------------------------------------------------------------------------

    async def next_call(self) -> Call | None:
        """The request that the policy answers next; None: there are no more. Those that nobody
        waits for when the agent ends are none."""
        while self._failure is None and not self._ended and not self._waiting:
            self._changed.clear()
            await self._changed.wait()
        if self._failure is not None:
            raise self._failure
        self._asked = None if self._ended else self._waiting.pop(0)
        return self._asked

    async def answer(self, turn: Turn) -> None:
        """The policy has written a turn: for the request that it was asked last, or where the agent
        is run again, for the one that was asked then."""
        assert self._asked is not None, "an episode without a request has no turn"
        call = await self._asked_then(turn.read_ids) if turn.read_ids else self._asked
        history = turn.read_ids or call.history
        self.tree.grow(*self.tree.place(history), turn.token_ids)
        self.num_turns += 1
        self.version, call.history, call.number = turn.version, history, self.num_turns
        if not call.answer.done():
            call.answer.set_result(turn)

    async def _asked_then(self, history: tuple[int, ...]) -> Call:
        """The request with this history. Where several are made side by side they may come in
        another order than the first time; an agent that asks for something else is answered what
        it was then."""
        assert self._asked is not None
        self._waiting.insert(0, self._asked)
        found: Call | None = None
        with suppress(TimeoutError):
            async with asyncio.timeout(ORDER_S_MAX):
                while found is None:
                    same = (call for call in self._waiting if call.history == history)
                    found = next(same, None)
                    if found is None:
                        if self._ended or self._failure is not None:
                            break
                        self._changed.clear()
                        await self._changed.wait()
        # Where none is left its client has gone, and nobody reads the turn.
        found = found or next(iter(self._waiting), self._asked)
        self.drop(found)
        return found

    def close(self) -> None:
        """Nobody answers any more."""
        self._ended = True
        for call in [*self._waiting, *([self._asked] if self._asked is not None else [])]:
            if not call.answer.done():
                call.answer.set_exception(ended_already())
                call.answer.exception()


def ended_already() -> ApiError:
    return ApiError(410, "the episode has ended", code="ended")


def _refuse(*problems: tuple[object, str, str]) -> None:
    """A request that has one of these: what it says, and in which field."""
    for is_there, text, field in problems:
        if is_there:
            raise bad_request(text, field)


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
        from dora_rl.chat.http import BACKLOG, Bodies, HttpLimits, http_server, tcp_socket

        sock = tcp_socket()
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
        episode = Episode(f"episode-{self._num_opened}", prompt_ids)
        self._episodes[episode.id] = episode
        self._keys[episode.key] = episode.id
        return episode

    def close(self, episode: Episode) -> None:
        if self._episodes.pop(episode.id, None) is not None:
            del self._keys[episode.key]
            episode.close()

    # -- the service ------------------------------------------------------------------------------

    def healthy(self) -> bool:
        return True

    def models(self) -> list[dict[str, Any]]:
        return [{"id": MODEL, "object": "model", "created": 0, "owned_by": "dora-rl"}]

    async def chat(self, ask: Ask) -> Call:
        top = ask.params.logprobs_top_n
        _refuse(
            (ask.num_samples != 1, "an episode goes on with one reply: 'n' must be 1", "n"),
            (top, "'top_logprobs' is not there while training", "top_logprobs"),
        )
        episode = self._get(ask.session_id or "")
        options = self._text.template_options | ask.template_options
        past = episode.past_of(ask.messages)
        turn = await next_turn(past, ask, options, self.texts, self._text.stop_ids)
        return episode.begin(Call(episode, ask.messages, turn))

    async def complete(self, ask: Ask) -> Call:
        one = ask.num_samples == len(ask.prompts) == 1
        _refuse(
            (not one, "an episode goes on with one reply: give one prompt, 'n' = 1", "n"),
            (ask.params.logprobs_top_n, "'logprobs' must be 0 while training", "logprobs"),
            (ask.echo, "'echo' must be false while training", "echo"),
        )
        (prompt,) = ask.prompts
        episode = self._get(ask.session_id or "")
        return episode.begin(Call(episode, (), ChatTurn((), prompt, prompt, continued=False)))

    # Of sessions, `owner` is not looked at: the key names one, so nobody can ask for another's.

    def open_session(self, session_id: str | None, owner: str) -> dict[str, Any]:
        raise bad_request(f"the key stands for the session already (not {session_id!r})")

    def read_session(self, session_id: str, owner: str) -> dict[str, Any]:
        pasts = self._get(session_id).pasts
        messages = pasts[-1].messages if pasts else []
        return {"id": session_id, "object": "session", "messages": messages}

    async def end_session(
        self, session_id: str, owner: str, reward: float | None
    ) -> dict[str, Any]:
        """The reward of the episode, which ends when the agent does."""
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
