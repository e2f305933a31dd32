"""The built-in tasks, played by hand: right and wrong answers, bad calls, disjoint prompts."""

from __future__ import annotations

import pytest

from dora_rl.envs.base import Observation, Row, SingleTurn
from dora_rl.envs.calculator import Calculator, Expressions
from dora_rl.envs.guess import Games, Guess
from dora_rl.envs.play import play

RIGHT, WRONG = Observation(reward=1.0, done=True), Observation(reward=0.0, done=True)


def test_a_calculation() -> None:
    row = Row("47+86-9\n", answer="124")
    said = play(Calculator(), row, ["47+86?", "133-9?", "=124", "never read"])
    assert [one.text for one in said] == ["133\n", "124\n", ""] and said[-1] == RIGHT
    assert play(Calculator(), row, ["=125"]) == [WRONG]


@pytest.mark.parametrize("call", ["9-12?", "999*9?", "4+?", "??", "12345+1?"])
def test_the_tool_refuses_what_it_cannot_do(call: str) -> None:
    assert play(Calculator(), Row("x", answer="1"), [call]) == [Observation("!\n")]


@pytest.mark.parametrize("text", ["", "124", "=", "==124", "=124=124", "47+86"])
def test_what_is_no_answer_ends_without_reward(text: str) -> None:
    assert play(Calculator(), Row("x", answer="124"), [text]) == [WRONG]


def test_every_expression_can_be_worked_out_with_the_tool() -> None:
    source = Expressions()
    for index in range(200):
        row = source.row(0, index, "train")
        calls = [
            f"{left}{sign}{right}?"
            for left, sign, right, _ in source.expression(0, index, "train").results()
        ]
        answer = str(row["answer"])
        said = play(Calculator(), Row(str(row["prompt"]), answer=answer), [*calls, f"={answer}"])
        assert said[-1] == RIGHT and said[-2].text == f"{answer}\n"


def game(answer: int, guesses: int) -> Row:
    return Row("x", answer=str(answer), columns={"guesses": guesses})


def test_halving_always_finds_the_number() -> None:
    for index in range(300):
        row = Games().row(3, index, "train")
        prompt, guesses = str(row["prompt"]), int(str(row["guesses"]))
        low, high = int(prompt[:2]), int(prompt[3:5])
        assert low <= int(str(row["answer"])) <= high
        turns: list[str] = []
        said = [Observation()]
        while not said[-1].done:
            middle = (low + high) // 2
            turns.append(f"{middle:02d}?")
            said = play(Guess(), game(int(str(row["answer"])), guesses), turns)
            low, high = (low, middle - 1) if said[-1].text == "<\n" else (middle + 1, high)
        assert said[-1] == RIGHT


def test_a_game_is_lost_by_its_last_guess_or_by_anything_else() -> None:
    assert play(Guess(), game(7, 2), ["03?", "04?"]) == [Observation(">\n"), WRONG]
    assert play(Guess(), game(7, 2), ["hello"]) == [WRONG]


@pytest.mark.parametrize("source", [Expressions(), Games()])
def test_held_out_prompts_are_others(source: Expressions | Games) -> None:
    train = {source.row(0, index, "train")["prompt"] for index in range(2000)}
    test = {source.row(0, index, "test")["prompt"] for index in range(500)}
    assert not train & test and len(test) > 15


def test_a_single_turn_is_the_trivial_case() -> None:
    assert play(SingleTurn(), Row("x"), ["anything", "more"]) == [Observation(done=True)]
