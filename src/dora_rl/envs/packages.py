"""Environments of other packages, as these are on PyPI: `PACKAGE:NAME` in `env.environments`.

    verifiers:NAME       an environment of verifiers: prompts, tools, turns, rewards and stops
    reasoning_gym:NAME   a dataset of reasoning-gym: one turn, scored by the dataset
    textarena:ID         a game of textarena; the policy is player 0
    openenv:URL          an OpenEnv server, by its generic client

Only adapts: what is asked, answered and scored is the package's. `Rows` makes the prompts of a run
from the same name and options. Invariants: a row is a function of (seed, index, split); an episode
is one of (row, turns), so that it can be taken again. Held-out items of reasoning-gym are no
training items; held-out games have other seeds. A package that is missing is one line that says how
to install it.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.metadata
import json
import random
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, ClassVar

from dora_rl.envs.agent import AGENT_S_MAX, Agent
from dora_rl.envs.base import Environment, Message, Observation, Row, Turn
from dora_rl.types import UserError
from dora_rl.user_code import hint, load_object, one_line, require

TEST_SPLITS = ("test", "eval", "validation", "heldout")
HELDOUT_ONE_IN = 10  # items of a reasoning-gym dataset
GAME_SEEDS = 1 << 31
INSTALL = {
    "verifiers": "pip install 'dora-rl[verifiers]'",
    "reasoning_gym": "pip install 'dora-rl[envs]'",
    "textarena": "pip install 'dora-rl[envs]'",
    "openenv": "pip install 'dora-rl[openenv]' and pip install --no-deps openenv==0.10.0",
}


def package(name: str, module: str = "") -> Any:
    """A module of the package, or one line."""
    try:
        return importlib.import_module(module or name)
    except ImportError as error:
        raise UserError(
            f"env: {name}: cannot import {module or name} ({one_line(error)}); {INSTALL[name]}"
        ) from error


class Packaged(Environment):
    """One name of a package; `options` are those of the configuration."""

    of: ClassVar[str] = ""  # what stands behind the colon

    def __init__(self, **options: Any) -> None:
        self.options = options
        self._templated = False

    @classmethod
    def row(cls, options: Mapping[str, Any], seed: int, index: int, split: str) -> dict[str, Any]:
        """The row at a place of the stream."""
        raise NotImplementedError

    def say(self, text: str) -> str | list[Message]:
        """An observation: through the chat template if the prompt went through it."""
        return [{"role": "user", "content": text}] if self._templated else text

    def begin(self, row: Row) -> None:
        self._templated = isinstance(row.prompt, list) or row.text != row.prompt


def named(name: str) -> type[Packaged] | None:
    """The class that `PACKAGE:NAME` means; None: it is of no package."""
    prefix, _, rest = name.partition(":")
    kind = PACKAGES.get(prefix)
    return type(kind.__name__, (kind,), {"of": rest}) if kind is not None and rest else None


class Rows:
    """The prompts of an environment, for `data.train`."""

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        kind = named(name)
        if kind is None:
            raise UserError(f"data: {name!r} is of no package{hint(name, PACKAGES)}")
        self._kind, self._options = kind, dict(options or {})

    def row(self, seed: int, index: int, split: str) -> dict[str, Any]:
        return self._kind.row(self._options, seed, index, split)


def draw(*parts: object) -> int:
    """A number below `GAME_SEEDS`."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little") % GAME_SEEDS


# -- reasoning-gym ---------------------------------------------------------------------------------


class ReasoningGym(Packaged):
    """One turn. Text in <answer> tags is the answer; without tags all of it is."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        dataset(self.of, _frozen(options))

    @classmethod
    def row(cls, options: Mapping[str, Any], seed: int, index: int, split: str) -> dict[str, Any]:
        """Drawn until one is of the split, which is a hash of the question."""
        items = dataset(cls.of, _frozen(options))
        for attempt in range(100 * HELDOUT_ONE_IN):
            number = draw("item", seed, index, attempt) % len(items)
            item = items[number]
            heldout = draw("split", item["question"]) % HELDOUT_ONE_IN == 0
            if heldout == (split in TEST_SPLITS):
                return {"prompt": item["question"], "answer": str(item["answer"]), "item": number}
        raise UserError(f"data: reasoning_gym:{cls.of} has no item for the split {split}")

    def reset(self, row: Row, seed: int) -> None:
        self._items = dataset(self.of, _frozen(self.options))
        self._item = self._items[int(row.columns["item"])]

    def step(self, turn: Turn) -> Observation:
        utils = package("reasoning_gym", "reasoning_gym.utils")
        tagged = "<answer>" in turn.text
        answer = utils.extract_answer(turn.text) if tagged else turn.text.strip()
        return Observation(reward=float(self._items.score_answer(answer, self._item)), done=True)


@lru_cache
def dataset(name: str, options: str) -> Any:
    """Made once in a process. Its seed is fixed unless given: which item is asked is the row's."""
    gym = package("reasoning_gym")
    known = importlib.import_module("reasoning_gym.factory").DATASETS
    if name not in known:
        raise UserError(f"env: reasoning_gym has no dataset {name!r}{hint(name, known)}")
    try:
        return gym.create_dataset(name, **({"seed": 0, "size": 10_000} | json.loads(options)))
    except (TypeError, AssertionError, ValueError) as error:
        raise UserError(
            f"env: reasoning_gym:{name} does not take {options} ({one_line(error)})"
        ) from (error)


def _frozen(options: Mapping[str, Any]) -> str:
    return json.dumps(options, sort_keys=True)


# -- textarena -------------------------------------------------------------------------------------


class TextArena(Packaged):
    """A game. `num_players` more than one needs an `opponent`, `path/to/file.py:function`, which
    is given what the others see and returns what they do. Other options are the game's.

    Games draw from the one generator of `random`: each episode has a state of its own for it.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._players = options.pop("num_players", 1)
        name = options.pop("opponent", "")
        if self._players > 1 and not name:
            raise UserError(f"env: textarena:{self.of} has other players; give options.opponent")
        self._opponent = (
            load_object(name, Path("."), section="env", key="opponent") if name else None
        )
        self._seen = ""
        with _ONE_GAME:
            self._game = game(self.of, _frozen(options))

    @classmethod
    def row(cls, options: Mapping[str, Any], seed: int, index: int, split: str) -> dict[str, Any]:
        heldout = split in TEST_SPLITS
        number = draw("game", cls.of, seed, index) // 2 * 2 + heldout
        return {"prompt": cls(**options).start(number), "game": number}

    def start(self, number: int) -> str:
        """What player 0 reads first."""
        self._random = random.Random(number).getstate()
        with self._drawing():
            self._game.reset(num_players=self._players, seed=number)
            return self._look() or ""

    def reset(self, row: Row, seed: int) -> None:
        self.begin(row)
        if self.start(int(row.columns["game"])) != row.prompt:
            raise RuntimeError(f"textarena:{self.of} begins otherwise with the same seed")

    def step(self, turn: Turn) -> Observation:
        with self._drawing():
            done, _ = self._game.step(action=turn.text)
            said = None if done else self._look()
            if said is None:
                rewards, _ = self._game.close()
                return Observation(reward=float((rewards or {}).get(0, 0.0)), done=True)
        return Observation(self.say(said or "\n"))  # some wrappers do not tell of a wrong move

    def _look(self) -> str | None:
        """What is new to player 0, after the others have moved; None if that ended the game."""
        while True:
            player, text = self._game.get_observation()
            if not isinstance(text, str):  # a game without a wrapper
                text = self._seen + "".join(f"\n{message}" for _, message, _ in text)
            if player == 0:
                new = text.removeprefix(self._seen)
                self._seen = text
                return new
            assert self._opponent is not None
            done, _ = self._game.step(action=str(self._opponent(text)))
            if done:
                return None

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        with _ONE_GAME:
            outside = random.getstate()
            random.setstate(self._random)
            try:
                yield
            finally:
                self._random = random.getstate()
                random.setstate(outside)


_ONE_GAME = threading.RLock()  # at a time: what games share is not made for threads


def game(name: str, options: str) -> Any:
    arena = package("textarena")
    known = importlib.import_module("textarena.envs.registration").ENV_REGISTRY
    if name not in known:
        raise UserError(f"env: textarena has no game {name!r}{hint(name, known)}")
    try:
        return arena.make(name, **json.loads(options))
    except (TypeError, ValueError, LookupError, ImportError) as error:
        raise UserError(f"env: textarena:{name} cannot be made ({one_line(error)})") from error


# -- verifiers -------------------------------------------------------------------------------------


class Verifiers(Packaged):
    """Its own loop of turns, tools and rewards, which asks the endpoint of `agent`. The name is
    what `verifiers.load_environment` takes, or `package.module:Class`, or `path/to/file.py` with a
    function `load_environment`."""

    opens = True

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        loaded(self.of, _frozen(options))
        self._agent = Agent(f"{__name__}:play_verifiers")

    @classmethod
    def row(cls, options: Mapping[str, Any], seed: int, index: int, split: str) -> dict[str, Any]:
        rows = examples(cls.of, _frozen(options), split in TEST_SPLITS)
        epoch, offset = divmod(index, len(rows))
        number = order(len(rows), seed, epoch)[offset]
        about = {"name": cls.of, "options": _frozen(options), "split": split, "row": number}
        return {"prompt": rows[number]["prompt"], "verifiers": about}

    async def reset(self, row: Row, seed: int) -> Observation:
        self._agent.text = self.text
        return await self._agent.reset(row, seed)

    async def step(self, turn: Turn) -> Observation:
        return await self._agent.step(turn)

    def close(self) -> None:
        self._agent.close()


async def play_verifiers(base_url: str, api_key: str, row: Row) -> float:
    """One rollout of the package against the endpoint."""
    about = row.columns["verifiers"]
    environment = loaded(about["name"], about["options"])
    rows = examples(about["name"], about["options"], about["split"] in TEST_SPLITS)
    clients = package("verifiers", "verifiers.clients.openai_chat_completions_client")
    client = clients.OpenAIChatCompletionsClient(_client(base_url).with_options(api_key=api_key))
    played = await environment.run_rollout(dict(rows[about["row"]]), client, "policy", {})
    # An answer that is empty is the policy's, and is worth what the rubric says.
    if (error := played.get("error")) and error.get("error") != "EmptyModelResponseError":
        raise RuntimeError(f"verifiers:{about['name']}: {error}")
    return float(played["reward"])


@lru_cache(maxsize=8)
def _client(base_url: str) -> Any:
    """One of an endpoint, and so of an event loop: to make one takes longer than to ask it."""
    openai = package("verifiers", "openai")
    # Hundreds may ask at once, and an answer takes as long as its turn.
    options = {"max_retries": 0, "timeout": AGENT_S_MAX}
    return openai.AsyncOpenAI(base_url=base_url, api_key="of the episode", **options)


@lru_cache
def loaded(name: str, options: str) -> Any:
    """An environment of verifiers, made once in a process."""
    package("verifiers", "verifiers.envs.environment")
    arguments = json.loads(options)
    try:
        with _no_handlers():
            if name.endswith(".py") or ":" in name:
                spec = name if ":" in name else f"{name}:load_environment"
                made = load_object(spec, Path("."), section="env", key="env.environments")
                found = made(**arguments)
            else:
                found = package("verifiers").load_environment(name, **arguments)
    except UserError:
        raise
    except Exception as error:
        # The environment's code may raise anything.
        raise UserError(f"env: verifiers:{name} cannot be loaded ({one_line(error)})") from error
    if found.requires_group_rollouts:
        raise UserError(f"env: verifiers:{name} scores groups; only single rollouts can be scored")
    return found


@contextmanager
def _no_handlers() -> Iterator[None]:
    """The package takes the signals of a process over, which are the run's, and only can in the
    main thread."""
    taken = signal.signal
    signal.signal = lambda *_: None  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        signal.signal = taken


@lru_cache
def examples(name: str, options: str, heldout: bool) -> Any:
    environment = loaded(name, options)
    return environment.get_eval_dataset() if heldout else environment.get_dataset()


@lru_cache(maxsize=4)
def order(size: int, seed: int, epoch: int) -> list[int]:
    numbers = list(range(size))
    random.Random(draw("order", seed, epoch)).shuffle(numbers)
    return numbers


# -- OpenEnv ---------------------------------------------------------------------------------------


class OpenEnv(Packaged):
    """A server, asked over its socket. `prompt` is what the policy reads before the first
    observation; a turn is the field `action` of an action, or all of it if it is JSON; of an
    observation the field `text` is shown, or all of it as JSON if there is none."""

    opens = True

    def __init__(self, prompt: str = "", action: str = "message", text: str = "message") -> None:
        super().__init__()
        require(
            (prompt.strip(), f"env: openenv:{self.of}: give options.prompt, which comes first"),
            (
                self.of.startswith(("http://", "https://", "ws://", "wss://")),
                f"env: openenv:{self.of}: give the URL of a server, http://HOST:PORT",
            ),
        )
        self._action, self._text = action, text
        self._client = package("openenv", "openenv.core.generic_client").GenericEnvClient(
            base_url=self.of
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def row(cls, options: Mapping[str, Any], seed: int, index: int, split: str) -> dict[str, Any]:
        number = draw("server", seed, index) // 2 * 2 + (split in TEST_SPLITS)
        return {"prompt": options.get("prompt", ""), "seed": number}

    async def reset(self, row: Row, seed: int) -> Observation:
        self.begin(row)
        self._loop = asyncio.get_running_loop()
        try:
            result = await self._client.reset(seed=int(row.columns["seed"]))
        except (OSError, TimeoutError) as error:
            raise RuntimeError(f"no OpenEnv server answers at {self.of}") from error
        return self._read(result)

    async def step(self, turn: Turn) -> Observation:
        return self._read(await self._client.step(self._act(turn.text)))

    def close(self) -> None:
        if self._loop is not None and self._loop.is_running():
            asyncio.run_coroutine_threadsafe(_close(self._client), self._loop)

    def _act(self, text: str) -> dict[str, Any]:
        try:
            whole = json.loads(text)
        except ValueError:
            whole = None
        return whole if isinstance(whole, dict) else {self._action: text}

    def _read(self, result: Any) -> Observation:
        seen = result.observation
        text = seen.get(self._text)
        shown = text if isinstance(text, str) else json.dumps(seen, sort_keys=True)
        return Observation(self.say(shown), reward=result.reward, done=bool(result.done))


async def _close(client: Any) -> None:
    await client.close()


PACKAGES: dict[str, type[Packaged]] = {
    "verifiers": Verifiers,
    "reasoning_gym": ReasoningGym,
    "textarena": TextArena,
    "openenv": OpenEnv,
}
