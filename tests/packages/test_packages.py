"""Environments of verifiers, reasoning-gym, textarena and OpenEnv: the packages as on PyPI."""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import EnvConfig
from dora_rl.envs.base import Observation, Row, TurnText
from dora_rl.envs.host import Ask, Host, load_class, load_environments
from dora_rl.envs.packages import Rows
from dora_rl.envs.play import play
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import RequestId, UserError
from tests.kit.places import MODEL, ROOT
from tests.kit.tiny_runs import tiny_run

pytestmark = pytest.mark.packages

GUESS = {"max_number": 15, "max_turns": 4}
SERVER_S_MAX = 120.0


def row_of(name: str, options: dict[str, Any] | None = None, index: int = 0) -> Row:
    made = Rows(name, options).row(0, index, "train")
    return Row(made["prompt"], made["prompt"], made.get("answer"), made)


def environment(name: str, **options: Any) -> Any:
    return load_class(name, Path("."))(**options)


@pytest.mark.parametrize(
    "name", ["chain_sum", "spell_backward", "number_sorting", "countdown", "knights_knaves", "maze"]
)
def test_datasets_of_reasoning_gym_score_their_own_answers(name: str) -> None:
    for index in range(5):
        row = row_of(f"reasoning_gym:{name}", index=index)
        for text in (row.answer or "", f"Well. <answer>{row.answer}</answer>"):
            (said,) = play(environment(f"reasoning_gym:{name}"), row, [text])
            assert said.done and said.reward == 1.0
        (said,) = play(environment(f"reasoning_gym:{name}"), row, ["no idea"])
        assert said.done and (said.reward or 0.0) < 1.0


@pytest.mark.parametrize("suffix", ["", "-train", "-raw"])
def test_a_game_of_textarena_is_played_and_can_be_taken_again(suffix: str) -> None:
    name = f"textarena:GuessTheNumber-v0{suffix}"
    for index in range(8):
        row, moves, low, high = row_of(name, GUESS, index), [], 1, 15
        assert "between 1 and 15" in str(row.prompt)
        while True:  # by halves
            moves.append(f"[{(low + high) // 2}]")
            random.seed(index)
            *_, last = play(environment(name, **GUESS), row, moves)
            if last.done:
                break
            middle = (low + high) // 2
            low, high = (middle + 1, high) if "higher" in last.text else (low, middle - 1)
        assert last == Observation(reward=1.0, done=True)
    (first,) = play(environment(name, **GUESS), row, ["[16]"])
    assert (
        not first.done and first.text.strip() == ""
        if suffix == "-train"
        else ("invalid move" in first.text)
    )


def test_a_game_of_two_of_textarena(tmp_path: Path) -> None:
    file = tmp_path / "opponent.py"
    file.write_text(
        "import random, re\n"
        "def move(text):\n"
        "    moves = re.findall(r'\\[\\d\\]', text.rsplit('Available', 1)[-1])\n"
        "    return random.choice(moves or ['[0]'])\n"
    )
    options = {"num_players": 2, "opponent": f"{file}:move"}
    row = row_of("textarena:TicTacToe-v0", options)
    moves = [f"[{place}]" for place in (4, 0, 8, 2, 6, 1, 3, 5, 7)]
    games = [play(environment("textarena:TicTacToe-v0", **options), row, moves) for _ in range(2)]
    assert games[0] == games[1] and games[0][-1].done


def episode(name: str, options: dict[str, Any], index: int, replies: list[str]) -> list[Any]:
    """Played as a run does: by token ids, with the tiny model's tokenizer."""
    tokenizer = open_tokenizer(MODEL, False)
    made = Rows(name, options).row(0, index, "train")
    start = tuple(tokenizer.encode(made["prompt"][0]["content"]))[:1]
    row = Row(made["prompt"], "", None, made, start)
    config = EnvConfig(environments=[{"name": name, "options": options}])

    async def story() -> list[Any]:
        host = Host(load_environments(config), TurnText(tokenizer, {1}))
        tokens: list[int] = []
        mask: list[int] = []
        said: list[Any] = []
        for reply in ("", *replies):
            text = reply.strip("\x00")  # nothing but the end of sequence
            written = (*tokenizer.encode(text), 1) if reply else ()
            tokens += written
            mask += [1] * len(written)
            ask = Ask(RequestId(0, 0), name, row, 0, tuple(tokens), tuple(mask))
            said.append(await host.answer(ask))
            assert not said[-1].error, said[-1].error
            tokens += said[-1].token_ids
            mask += [0] * len(said[-1].token_ids)
        host.close()
        return said

    return asyncio.run(story())


def test_turns_stops_and_rewards_of_verifiers() -> None:
    name = f"verifiers:{Path(__file__).parent / 'echo_env.py'}"
    tokenizer = open_tokenizer(MODEL, False)
    answer = str(Rows(name).row(0, 3, "train")["prompt"][0]["content"])[0]
    wrong = "0"
    opening, second, end = episode(name, {}, 3, [wrong, answer])
    assert opening.token_ids == tuple(tokenizer.encode(":"))
    assert second.token_ids == tuple(tokenizer.encode(f"={wrong}:")) and not second.done
    assert end.done and end.reward == 0.5, "found in the second turn"
    *_, end = episode(name, {"turns": 2}, 3, [wrong, wrong])
    assert end.done and end.reward == 0.0, "its own limit of turns"


def test_an_empty_answer_to_verifiers_is_worth_nothing_and_no_failure() -> None:
    *_, end = episode(f"verifiers:{Path(__file__).parent / 'echo_env.py'}", {}, 3, ["\x00"])
    assert end.done and end.reward == 0.0


def test_an_environment_that_verifiers_ships() -> None:
    name = "verifiers:verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
    options = {"gym": "chain_sum", "num_train_examples": 20, "num_eval_examples": 5}
    handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    rows = Rows(name, options)
    assert handlers == (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT))
    first = [rows.row(0, index, "train")["verifiers"]["row"] for index in range(40)]
    assert sorted(first[:20]) == sorted(first[20:]) == list(range(20)), "an epoch has each row once"
    question = rows.row(0, 0, "train")["prompt"][-1]["content"]
    assert question.startswith("State the final answer")


def test_a_verifiers_environment_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UserError, match=r"verifiers:no-such-env cannot be loaded .*no-such-env"):
        environment("verifiers:no-such-env")


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The recipe's server, on a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    program = [sys.executable, str(ROOT / "recipes" / "openenv_server.py"), "--port", str(port)]
    process = subprocess.Popen(program)
    try:
        until = time.monotonic() + SERVER_S_MAX
        while not answers(f"http://127.0.0.1:{port}/health"):
            assert process.poll() is None and time.monotonic() < until, "the server does not start"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5.0):
            return True
    except (urllib.error.URLError, OSError):
        return False


def test_an_openenv_server_is_played(server: str) -> None:
    name, options = f"openenv:{server}", {"prompt": "guess\n"}
    for index in range(4):
        row, moves, low, high = row_of(name, options, index), [], 1, 7
        while True:
            moves.append(f"{(low + high) // 2}")
            opening, *_, last = play(environment(name, **options), row, moves)
            assert opening.text == "1-7\n"
            if last.done:
                break
            middle = (low + high) // 2
            low, high = (middle + 1, high) if last.text == ">\n" else (low, middle - 1)
        assert last.reward == 1.0
    *_, last = play(environment(name, **options), row, ["what"])
    assert last.done and last.reward == 0.0


def test_an_openenv_server_that_is_gone_is_said(server: str) -> None:
    gone = "openenv:http://127.0.0.1:9"
    with pytest.raises(RuntimeError, match="no OpenEnv server answers at http://127"):
        play(environment(gone, prompt="p"), row_of(gone, {"prompt": "p"}), [])


@pytest.mark.parametrize("package", ["reasoning_gym", "textarena", "verifiers", "openenv"])
def test_a_run_takes_prompts_and_rewards_from_the_package(
    package: str, tmp_path: Path, server: str
) -> None:
    gym = "verifiers.envs.integrations.reasoninggym_env:ReasoningGymEnv"
    entry = {
        "reasoning_gym": {"name": "reasoning_gym:spell_backward"},
        "textarena": {"name": "textarena:Blackjack-v0"},
        "verifiers": {
            "name": f"verifiers:{gym}",
            "options": {"gym": "spell_backward", "system_prompt": "0", "num_train_examples": 50},
        },
        "openenv": {"name": f"openenv:{server}", "options": {"prompt": "guess\n"}},
    }[package]
    run = tiny_run(
        tmp_path,
        data__train=[],
        data__check_disjoint=package != "verifiers",
        reward__functions=[],
        env__environments=[entry],
        rollout__tokens_max=8,
        orchestration__num_steps=2,
        evaluation__num_prompts=4,
    )
    run.train()
    report = run.proven()
    assert report.figures.groups_trained == 8
    rows = run.lines("rollouts.jsonl")
    assert len(rows) == 8 * 4 and all(0.0 <= row["reward"] <= 1.0 for row in rows)
