"""Environments of other packages, with stand-ins that have what is used of them; tests/packages has
the packages themselves."""

from __future__ import annotations

import asyncio
import random
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from dora_rl.config import EnvConfig, RunConfig
from dora_rl.envs import packages
from dora_rl.envs.base import Observation, Row, TurnText
from dora_rl.envs.host import Ask, Host, load_class, load_environments
from dora_rl.envs.packages import Rows
from dora_rl.envs.play import play
from dora_rl.setup.prepare import with_environments
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import RequestId, UserError
from tests.kit.places import MODEL


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    made = ModuleType(name)
    for key, value in members.items():
        setattr(made, key, value)
    monkeypatch.setitem(sys.modules, name, made)


class Doubles:
    """A dataset of reasoning-gym: twice a number."""

    def __init__(self, most: int, size: int, seed: int) -> None:
        assert most > 0, "most must be positive"
        self.most, self.size = most, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        number = index % self.most
        return {"question": f"2*{number}=", "answer": str(2 * number), "metadata": {"n": number}}

    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float:
        return float(answer == str(2 * entry["metadata"]["n"]))


class Nim:
    """A game of textarena: take one or two of a heap that is drawn; who takes the last wins."""

    def __init__(self, most: int = 9) -> None:
        self.most = most

    def reset(self, num_players: int, seed: int | None = None) -> None:
        random.seed(seed)
        self.left, self.players, self.player, self.moves = (
            random.randint(5, self.most),
            num_players,
            0,
            "",
        )
        self.rewards: dict[int, float] | None = None

    def get_observation(self) -> tuple[int, str]:
        return self.player, f"heap of {self.left + sum(map(int, self.moves))}" + "".join(
            f"\ntaken {move}" for move in self.moves
        )

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        move = max(1, min(2, int(action), self.left))
        self.left -= move
        self.moves += str(move)
        random.random()  # a game may draw at any time
        if not self.left:
            self.rewards = {p: float(p == self.player) for p in range(self.players)}
        self.player = (self.player + 1) % self.players
        return not self.left, {}

    def close(self) -> tuple[dict[int, float] | None, dict[str, Any]]:
        return self.rewards, {}


class Server:
    """What the generic client of OpenEnv answers."""

    def __init__(self, base_url: str) -> None:
        self.url, self.closed = base_url, False

    async def reset(self, seed: int) -> Any:
        if "nobody" in self.url:
            raise ConnectionRefusedError
        self.count = 0
        return SimpleNamespace(observation={"message": f"seed {seed}\n"}, reward=None, done=False)

    async def step(self, action: dict[str, Any]) -> Any:
        self.count += 1
        done = self.count == 2
        return SimpleNamespace(observation={"heard": action}, reward=float(done), done=done)

    async def close(self) -> None:
        self.closed = True


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(name: str, **options: Any) -> Doubles:
        return Doubles(**({"most": 50} | options))

    def tagged(text: str) -> str:
        return text.partition("<answer>")[2].partition("</answer>")[0]

    module(monkeypatch, "reasoning_gym", create_dataset=make)
    module(monkeypatch, "reasoning_gym.factory", DATASETS={"doubles": None})
    module(monkeypatch, "reasoning_gym.utils", extract_answer=tagged)
    module(monkeypatch, "textarena", make=lambda name, **options: Nim(**options))
    module(monkeypatch, "textarena.envs.registration", ENV_REGISTRY={"Nim-v0": None})
    module(monkeypatch, "openenv.core.generic_client", GenericEnvClient=Server)
    for cached in (packages.dataset, packages.loaded, packages.examples):
        cached.cache_clear()


def row_of(name: str, options: dict[str, Any] | None = None, index: int = 0) -> Row:
    made = Rows(name, options).row(0, index, "train")
    return Row(made["prompt"], made["prompt"], made.get("answer"), made)


def environment(name: str, **options: Any) -> Any:
    return load_class(name, Path("."))(**options)


def test_a_question_of_reasoning_gym() -> None:
    row = row_of("reasoning_gym:doubles")
    for text, reward in ((row.answer, 1.0), (f"so <answer>{row.answer}</answer>", 1.0), ("x", 0.0)):
        said = play(environment("reasoning_gym:doubles"), row, [text or ""])
        assert said == [Observation(reward=reward, done=True)]


def test_held_out_questions_are_no_training_questions() -> None:
    rows = Rows("reasoning_gym:doubles", {"most": 200})
    train, test = (
        {rows.row(0, index, split)["prompt"] for index in range(300)} for split in ("train", "test")
    )
    assert len(train) > 100 and len(test) > 5 and not train & test
    assert rows.row(0, 7, "train") == rows.row(0, 7, "train") != rows.row(1, 7, "train")


def test_a_game_is_a_function_of_its_row_and_moves() -> None:
    row = row_of("textarena:Nim-v0")
    one = play(environment("textarena:Nim-v0"), row, ["1", "2"])
    random.seed(4)
    assert play(environment("textarena:Nim-v0"), row, ["1", "2"]) == one
    assert [said.text for said in one] == ["\ntaken 1", "\ntaken 2"], "only what is new"
    *_, last = play(environment("textarena:Nim-v0"), row, ["2"] * 9)
    assert last == Observation(reward=1.0, done=True)
    prompts = {row_of("textarena:Nim-v0", index=index).prompt for index in range(20)}
    assert len(prompts) == 5


def test_games_leave_the_generator_of_the_process_alone() -> None:
    random.seed(1)
    expected = random.Random(1).random()
    play(environment("textarena:Nim-v0"), row_of("textarena:Nim-v0"), ["1"])
    assert random.random() == expected


def test_a_game_of_two_has_an_opponent(tmp_path: Path) -> None:
    file = tmp_path / "opponent.py"
    file.write_text("import random\ndef move(text):\n    return str(random.randint(1, 2))\n")
    options = {"num_players": 2, "opponent": f"{file}:move"}
    row = row_of("textarena:Nim-v0", options)
    found = [play(environment("textarena:Nim-v0", **options), row, ["1"] * 9) for _ in range(2)]
    assert found[0] == found[1]
    assert found[0][0].text.count("taken") == 2, "both moves are seen"
    assert found[0][-1].done and found[0][-1].reward in (0.0, 1.0)
    with pytest.raises(UserError, match=r"other players; give options\.opponent"):
        environment("textarena:Nim-v0", num_players=2)


def test_an_openenv_server_is_asked() -> None:
    row = row_of("openenv:http://here", {"prompt": "go\n"})
    opening, first, last = play(
        environment("openenv:http://here", prompt="go\n"), row, ["left", '{"go": 1}']
    )
    assert opening.text == f"seed {row.columns['seed']}\n"
    assert first.text == '{"heard": {"message": "left"}}' and first.reward == 0.0
    assert last.done and last.reward == 1.0
    with pytest.raises(RuntimeError, match="no OpenEnv server answers at http://nob"):
        play(environment("openenv:http://nobody", prompt="go\n"), row, [])


def test_observations_go_through_the_template_if_the_prompt_did() -> None:
    row = row_of("textarena:Nim-v0")
    templated = Row(row.prompt, f"<user>{row.prompt}<assistant>", None, row.columns)
    (said,) = play(environment("textarena:Nim-v0"), templated, ["1"])
    assert said.text == [{"role": "user", "content": "\ntaken 1"}]


class Echo:
    """An environment of verifiers: asks, says what it heard, asks again."""

    requires_group_rollouts = False

    def __init__(self, word: str = "3") -> None:
        self.word = word

    def get_dataset(self) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": f"{n}:"}], "answer": str(n)} for n in "123"]

    get_eval_dataset = get_dataset

    async def run_rollout(
        self, asked: dict[str, Any], client: Any, model: str, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        messages = list(asked["prompt"])
        for _ in range(2):
            answer = await client.chat.completions.create(model=model, messages=messages)
            text = answer.choices[0].message.content
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "\n"}]
        right = [m["content"] for m in messages if m["role"] == "assistant"] == [self.word] * 2
        return {"reward": float(right), "error": None}


def test_verifiers_asks_the_endpoint_and_gives_the_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openai")
    module(monkeypatch, "verifiers.envs.environment")
    module(monkeypatch, "verifiers", load_environment=lambda name, **options: Echo(**options))
    chat = "verifiers.clients.openai_chat_completions_client"
    module(monkeypatch, chat, OpenAIChatCompletionsClient=lambda client: client)
    tokenizer = open_tokenizer(MODEL, False)
    made = Rows("verifiers:echo", {"word": "7"}).row(0, 4, "train")
    start = tuple(tokenizer.encode(made["prompt"][0]["content"]))[:1]
    row = Row(made["prompt"], "", None, made, start)
    config = EnvConfig(environments=[{"name": "verifiers:echo", "options": {"word": "7"}}])

    async def story() -> list[Any]:
        host = Host(load_environments(config), TurnText(tokenizer, {1}))
        tokens: list[int] = []
        mask: list[int] = []
        said: list[Any] = []
        for turn in ("", "7", "7"):
            written = (*tokenizer.encode(turn), 1) if turn else ()
            tokens += written
            mask += [1] * len(written)
            ask = Ask(RequestId(0, 0), "verifiers:echo", row, 0, tuple(tokens), tuple(mask))
            said.append(await host.answer(ask))
            assert not said[-1].error, said[-1].error
            tokens += said[-1].token_ids
            mask += [0] * len(said[-1].token_ids)
        host.close()
        return said

    opening, second, end = asyncio.run(story())
    assert opening.token_ids == tuple(tokenizer.encode(":")), "the rest of its own prompt"
    assert second.token_ids == tuple(tokenizer.encode("\n"))
    assert end.done and end.reward == 1.0


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("reasoning_gym:double", {}, "no dataset 'double'; did you mean 'doubles'?"),
        ("reasoning_gym:doubles", {"most": -1}, "does not take .*most must be positive"),
        ("textarena:Nin-v0", {}, "no game 'Nin-v0'; did you mean 'Nim-v0'?"),
        ("textarena:Nim-v0", {"colour": 1}, "cannot be made .*colour"),
        ("openenv:http://here", {}, r"give options\.prompt"),
        ("openenv:somewhere", {"prompt": "p"}, "give the URL of a server"),
        ("textarena:", {}, "nothing behind the colon"),
    ],
)
def test_a_wrong_name_or_option_is_one_line(name: str, options: dict[str, Any], line: str) -> None:
    config = EnvConfig(environments=[{"name": name, "options": options}])
    with pytest.raises(UserError, match=line):
        load_environments(config)


def test_a_missing_package_is_one_line_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("reasoning_gym", "textarena", "verifiers.envs.environment"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setitem(sys.modules, "openenv.core.generic_client", None)
    for name, extra in (
        ("reasoning_gym:doubles", "envs"),
        ("textarena:Nim-v0", "envs"),
        ("verifiers:echo", "verifiers"),
        ("openenv:http://here", "openenv"),
    ):
        options = {"prompt": "p"} if extra == "openenv" else {}
        config = EnvConfig(environments=[{"name": name, "options": options}])
        with pytest.raises(UserError, match=rf"pip install 'dora-rl\[{extra}\]'"):
            load_environments(config)


def test_a_run_without_data_takes_the_prompts_of_its_environments() -> None:
    names = ["textarena:Nim-v0", {"name": "reasoning_gym:doubles", "weight": 3.0}]
    base = {"model": {"path": "here"}, "env": {"environments": names}}
    data = with_environments(RunConfig.model_validate(base)).data
    assert [(s.env, s.weight) for s in data.train] == [
        ("textarena:Nim-v0", 1.0),
        ("reasoning_gym:doubles", 3.0),
    ]
    assert [s.env for s in data.eval] == [s.env for s in data.train]
    assert not data.check_disjoint, "prompts of games do not tell them apart"
    own = {"data": {"train": [{"path": "mine.jsonl", "env": "textarena:Nim-v0"}]}}
    data = with_environments(RunConfig.model_validate(base | own)).data
    assert [s.path for s in data.train] == ["mine.jsonl"] and data.check_disjoint
