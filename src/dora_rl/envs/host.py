"""The live episodes of one process: asked for the answer to a turn, they step and remember.

An `Ask` carries the whole response so far, so whoever is asked can build a lost episode again by
taking its steps (without the injected latency). Asking twice for the same turn gives the same
answer and takes no second step. Never raises for what an environment does: an exception or a
time-out is an `Answer` with an error. Environments are found by name: built-ins,
`package.module:Name` and `path/to/file.py:Name`. Invariants: one episode takes one step at a time;
whatever is wrong with an environment's name, code or options is one `UserError` line before
anything starts.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from dora_rl.config import EnvConfig, EnvironmentEntry
from dora_rl.envs.base import Environment, Observation, Row, TurnText, spans, turns_of
from dora_rl.histories import follows, history_of
from dora_rl.types import REWARD_MAX, Branch, GroupId, RequestId, UserError, Version
from dora_rl.user_code import load_object, one_line, raised, require

THREADS_MAX = 256  # steps of synchronous environments at once


@dataclass(frozen=True, slots=True)
class Ask:
    """What came of a request so far; the newest turn of the policy (if any) wants an answer."""

    request: RequestId
    label: str
    row: Row
    seed: int
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    version: Version = 0
    branches: tuple[Branch, ...] = ()

    @property
    def cuts(self) -> list[int]:
        """Where branches begin."""
        return [branch.start for branch in self.branches]

    def read_by(self, number: int) -> tuple[int, ...]:
        """All that a turn follows; the first one is number 1."""
        start = [at for at, _, mask in spans(self.loss_mask, self.cuts) if mask][number - 1]
        begun = tuple(branch for branch in self.branches if branch.start <= start)
        prompt, ids = np.array(self.row.token_ids, np.int32), np.array(self.token_ids, np.int32)
        return tuple(history_of(prompt, ids[:start], begun).tolist())


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens to append, or the end. `reward` is the sum so far, None where no step gave one;
    `cut`: the episode ends at its limit of turns; `hung`: a thread of this process is stuck."""

    token_ids: tuple[int, ...] = ()
    done: bool = False
    cut: bool = False
    reward: float | None = None
    error: str = ""
    hung: bool = False
    turn_rewards: tuple[float, ...] = ()
    branch: Branch | None = None


@dataclass(slots=True)
class Episode:
    """`last` is the newest answer; before the first turn, what the environment opens with.
    `rewards` are those of the turns, up to the last that was given one."""

    environment: Environment
    last: Answer = field(default_factory=Answer)
    turns: list[tuple[int, ...]] = field(default_factory=list[tuple[int, ...]])
    rewards: list[float] = field(default_factory=list[float])

    def answer(self, **more: Any) -> Answer:
        """With the rewards so far."""
        given = [*self.rewards, *[0.0] * (len(self.turns) - len(self.rewards))]
        reward = sum(given) if self.rewards else None
        return Answer(reward=reward, turn_rewards=tuple(given) if self.rewards else (), **more)

    def give(self, reward: float) -> None:
        """To the newest turn; before the first one, to that."""
        self.rewards += [0.0] * (max(1, len(self.turns)) - len(self.rewards))
        self.rewards[-1] += reward


class StepError(Exception):
    """The environment failed; `hung` if it never came back."""

    def __init__(self, reason: str, *, hung: bool = False) -> None:
        super().__init__(reason)
        self.hung = hung


class Host:
    """Episodes by request. All calls come from one event loop."""

    def __init__(self, environments: Mapping[str, LoadedEnvironment], text: TurnText) -> None:
        self._environments, self._text = environments, text
        self._episodes: dict[GroupId, dict[RequestId, Episode]] = {}
        self._locks: dict[RequestId, asyncio.Lock] = {}
        self._threads = ThreadPoolExecutor(THREADS_MAX, thread_name_prefix="env")
        self._called: set[Future[Any]] = set()

    async def answer(self, ask: Ask) -> Answer:
        async with self._locks.setdefault(ask.request, asyncio.Lock()):
            try:
                return await self._answer(ask)
            except StepError as error:
                self._drop(ask.request)
                return Answer(error=str(error), hung=error.hung)

    async def _answer(self, ask: Ask) -> Answer:
        turns = turns_of(ask.token_ids, ask.loss_mask, ask.cuts)
        known = self._episodes.setdefault(ask.request.group, {})
        episode, rebuilt = known.get(ask.request), False
        if episode is None or episode.turns != turns[: len(episode.turns)]:
            self._drop(ask.request)
            episode = known[ask.request] = await self._reset(ask)
            rebuilt = True
        while len(episode.turns) < len(turns) and not episode.last.done:
            if len(episode.turns) + 1 == len(turns):
                await asyncio.sleep(self._latency_s(ask, len(turns)))
            await self._step(ask, episode, turns[len(episode.turns)], rebuilt=rebuilt)
        branch, response = episode.last.branch, (len(ask.token_ids), ask.branches)
        if branch is not None and not follows(branch, len(ask.row.token_ids), *response):
            raise StepError(f"an observation has the {branch}, which follows nothing that is there")
        return episode.last

    async def _reset(self, ask: Ask) -> Episode:
        loaded = self._environments[ask.label]
        episode = Episode(loaded.make())
        episode.environment.text = self._text
        first = await self._call(loaded, episode.environment.reset, ask.row, ask.seed)
        if loaded.kind.opens:
            episode.last = self._read(episode, first, ())
        return episode

    async def _step(
        self, ask: Ask, episode: Episode, ids: tuple[int, ...], *, rebuilt: bool
    ) -> None:
        loaded, number = self._environments[ask.label], len(episode.turns) + 1
        found = turns_of(ask.logprobs, ask.loss_mask, ask.cuts) if ask.logprobs else []
        turn = replace(
            self._text.read(ids, number),
            logprobs=found[number - 1] if found else (),
            version=ask.version,
            read_ids=ask.read_by(number) if rebuilt else (),
        )
        observation = await self._call(loaded, episode.environment.step, turn)
        episode.turns.append(ids)
        episode.last = self._read(episode, observation, ids)
        if not episode.last.done and number >= loaded.entry.turns_max:
            episode.last = episode.answer(done=True, cut=True)

    def _read(self, episode: Episode, observation: object, after: tuple[int, ...]) -> Answer:
        """What `reset` or, after a turn, `step` gave."""
        if not isinstance(observation, Observation):
            what = f"{'step' if after else 'reset'} returned {type(observation).__name__}"
            raise StepError(f"{what}, not an Observation")
        self._take_rewards(episode, observation)
        if observation.done:
            return episode.answer(done=True)
        try:
            ids = self._text.write(observation, after)
        except Exception as error:
            # A tokenizer or template may raise anything at a text that it does not like.
            raise StepError(f"the observation cannot be encoded ({one_line(error)})") from error
        if not ids and after and observation.branch is None:
            raise StepError("an observation that does not end the episode has no tokens")
        return episode.answer(token_ids=ids, branch=observation.branch)

    def _take_rewards(self, episode: Episode, observation: Observation) -> None:
        """What an observation gives to the newest turn, or to all."""
        of_turns, reward = observation.turn_rewards, observation.reward
        given = [*(of_turns or ()), *(() if reward is None else (reward,))]
        for value in given:
            if not abs(value) <= REWARD_MAX:
                raise StepError(f"the reward of a step is {value}")
        if of_turns is not None:
            if len(of_turns) != len(episode.turns) or reward is not None:
                raise StepError(
                    f"{len(of_turns)} turn_rewards for {len(episode.turns)} turns, and the reward "
                    f"{reward}; give one for each turn and no reward"
                )
            episode.rewards = [float(value) for value in of_turns]
        elif reward is not None:
            episode.give(float(reward))

    async def _call(
        self, loaded: LoadedEnvironment, method: Callable[..., Any], *arguments: Any
    ) -> Any:
        """The user's method, asynchronous or in a thread, within its time."""
        name, limit_s = f"environment {loaded.label}", loaded.entry.timeout_s
        in_thread, limit = not inspect.iscoroutinefunction(method), asyncio.timeout(limit_s)
        try:
            async with limit:
                if in_thread:
                    called = self._threads.submit(method, *arguments)
                    self._called.add(called)
                    called.add_done_callback(self._called.discard)
                    found = await asyncio.wrap_future(called)
                    in_thread = False
                else:
                    found = method(*arguments)
                return await found if isinstance(found, Awaitable) else found
        except (Exception, SystemExit) as error:
            if limit.expired() and isinstance(error, TimeoutError):
                raise StepError(
                    f"the {name} did not answer within {limit_s:g} s", hung=in_thread
                ) from None
            # The user's code may raise anything, a time-out of its own too.
            raise StepError(f"the {name} failed: {raised(name, error)}") from error

    def _latency_s(self, ask: Ask, number: int) -> float:
        """Log-uniform between the two limits, drawn from the seed."""
        low, high = self._environments[ask.label].entry.latency_s
        if high <= 0:
            return 0.0
        draw = Random(f"latency/{ask.seed}/{ask.request.sample}/{number}").random()
        return low * (high / low) ** draw if low > 0 else high * draw

    def forget(self, group: GroupId) -> None:
        """The group has ended."""
        for request in list(self._episodes.get(group, ())):
            self._drop(request)
            self._locks.pop(request, None)
        self._episodes.pop(group, None)

    def _drop(self, request: RequestId) -> None:
        episode = self._episodes.get(request.group, {}).pop(request, None)
        try:
            if episode is not None:
                episode.environment.close()
        except Exception as error:  # noqa: BLE001 - the user's code may raise anything
            print(f"closing an environment: {one_line(error)}", flush=True)

    @property
    def busy(self) -> bool:
        """Whether a thread is still in an environment."""
        return bool(self._called)

    def close(self) -> None:
        for group in list(self._episodes):
            self.forget(group)
        self._threads.shutdown(wait=False, cancel_futures=True)


KEY = "env.environments"
BUILT_IN = {
    "single_turn": "dora_rl.envs.base:SingleTurn",
    "calculator": "dora_rl.envs.calculator:Calculator",
    "guess": "dora_rl.envs.guess:Guess",
    "agent": "dora_rl.envs.agent:Agent",
}


# Environments of other packages: `envs.packages`, which is imported where one is named.
PACKAGED = ("verifiers", "reasoning_gym", "textarena", "openenv")
PACKAGED_ROWS = "dora_rl.envs.packages:Rows"


def packaged(name: str) -> type[Environment]:
    from dora_rl.envs.packages import named

    if (found := named(name)) is None:
        raise UserError(f"env: {name!r} names nothing behind the colon; see docs/agents.md")
    return found


@dataclass(frozen=True, slots=True)
class LoadedEnvironment:
    """One entry of the configuration with its class."""

    label: str
    entry: EnvironmentEntry
    kind: type[Environment]

    def make(self) -> Environment:
        """A fresh one, for one episode."""
        return self.kind(**self.entry.options)


def load_environments(
    config: EnvConfig, base_dir: Path = Path(".")
) -> dict[str, LoadedEnvironment]:
    """All environments of a run by label, each made once to see that its options fit."""
    loaded: dict[str, LoadedEnvironment] = {}
    for entry in config.environments:
        label = entry.label or entry.name
        low, high = entry.latency_s
        require(
            (
                label not in loaded,
                f"env: two environments are called {label}; give one another label",
            ),
            (0 <= low <= high, f"env: latency_s of {label} is {(low, high)}; give [from, to]"),
        )
        loaded[label] = LoadedEnvironment(label, entry, load_class(entry.name, base_dir))
        try:
            loaded[label].make().close()
        except UserError:
            raise
        except Exception as error:
            # The constructor is the user's code, which may raise anything.
            raise UserError(
                f"env: {label} cannot be made with the options {dict(entry.options)} "
                f"({one_line(error)})"
            ) from error
    return loaded


def load_class(name: str, base_dir: Path) -> type[Environment]:
    """The class that a name means; failures are one line."""
    if name.partition(":")[0] in PACKAGED:
        return packaged(name)
    require(
        (
            name in BUILT_IN or ":" in name,
            f"env: no environment {name!r}; give {', '.join(BUILT_IN)}, package.module:Name, "
            f"path/to/file.py:Name, or one of {', '.join(PACKAGED)} with a colon and a name",
        ),
    )
    found = load_object(BUILT_IN.get(name, name), base_dir, section="env", key=KEY)
    is_class = isinstance(found, type)
    require(
        (
            is_class and callable(getattr(found, "step", None)),
            f"env: {name} is not a class with a method step(turn); see docs/agents.md",
        ),
        (
            is_class and issubclass(found, Environment),
            f"env: {name} must derive from dora_rl.envs.base.Environment",
        ),
    )
    return found


def label_of(env: str, loaded: Mapping[str, LoadedEnvironment]) -> str:
    """The environment of a prompt whose source names `env`, or names none and there is one."""
    names = ", ".join(loaded)
    require(
        (
            not env or env in loaded,
            f"data: no environment is called {env!r} "
            f"(env.environments: {names or 'none is configured'})",
        ),
        (
            env or len(loaded) == 1,
            f"data: {len(loaded)} environments and a source without one; set env to one of {names}",
        ),
    )
    return env or next(iter(loaded))
