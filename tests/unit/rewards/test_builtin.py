"""Built-in rewards that look at text, and the weighted sum over rewards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import CachedReward, ScoreError, ScoreItem, build, load_reward
from dora_rl.types import UserError


def item(completion: str, answer: str | None = None, num_tokens: int = 0, finish: str = "stop"):
    return ScoreItem("p", "p", completion, (0,) * num_tokens, answer, {}, finish)


def one(name: str, scored: ScoreItem, **options: Any) -> float | ScoreError:
    return load_reward(name, options=options).score([scored])[0]


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        ("Paris", {}, 1.0),
        (" Paris\n", {}, 1.0),
        ("paris", {}, 0.0),
        ("paris", {"ignore_case": True}, 1.0),
        ("It is <a>London</a> no <a>Paris</a>", {"extract": "<a>(.*?)</a>"}, 1.0),
        ("It is <a>Paris</a> no <a>London</a>", {"extract": "<a>(.*?)</a>"}, 0.0),
        ("Paris", {"extract": "<a>(.*?)</a>", "miss": -1.0}, -1.0),
    ],
)
def test_exact(completion: str, options: dict[str, Any], expected: float) -> None:
    assert one("exact", item(completion, "Paris"), **options) == expected


def test_exact_abstains_without_an_answer() -> None:
    score = one("exact", item("Paris"))
    assert isinstance(score, ScoreError) and score.abstained


@pytest.mark.parametrize(
    ("completion", "options", "expected"),
    [
        ("a1b", {"pattern": r"\d"}, 1.0),
        ("ab", {"pattern": r"\d", "miss": -0.5}, -0.5),
        ("a1b", {"pattern": r"\d", "full": True}, 0.0),
        ("the answer: a+b.", {"pattern": "answer: {answer}"}, 1.0),  # taken literally
        ("the answer: aab.", {"pattern": "answer: {answer}"}, 0.0),
    ],
)
def test_regex(completion: str, options: dict[str, Any], expected: float) -> None:
    assert one("regex", item(completion, "a+b"), **options) == expected


@pytest.mark.parametrize(
    ("completion", "plain", "partial"),
    [
        ("<think>x</think><answer>y</answer>", 1.0, 1.0),
        ("\n<think>x\n</think>\n<answer>y</answer>\n", 1.0, 1.0),
        ("<think>x</think> so <answer>y</answer>", 0.0, 0.75),
        ("<answer>y</answer><think>x</think>", 0.0, 0.75),
        ("<think>x</think><answer>y</answer><answer>y</answer>", 0.0, 0.5),
        ("<think>x", 0.0, 0.0),
    ],
)
def test_format(completion: str, plain: float, partial: float) -> None:
    assert one("format", item(completion)) == plain
    assert one("format", item(completion), partial=True) == partial


@pytest.mark.parametrize(
    ("num_tokens", "expected"), [(5, -0.5), (10, 0.0), (80, 0.0), (90, -0.5), (100, -1), (101, -1)]
)
def test_length(num_tokens: int, expected: float) -> None:
    options = {"tokens_max": 100, "buffer_tokens": 20, "tokens_min": 10}
    assert one("length", item("", num_tokens=num_tokens), **options) == expected


def test_length_unfinished() -> None:
    assert one("length", item("", finish="length"), tokens_max=9, unfinished=-0.3) == -0.3


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        ("The answer is 1/2.", r"\frac12", 1.0),
        (r"$\sqrt{8}$", r"2\sqrt{2}", 1.0),
        ("1,234", "1234", 1.0),
        (r"First I had 3. But it is \boxed{4}.", "4", 1.0),
        ("41", "42", 0.0),
        (r"\boxed{(1, 2)}", "(2, 1)", 0.0),
        ("Paris", "Paris", 1.0),
        (r"nonsense \frac{{{", "3", 0.0),
        ("", "3", 0.0),
    ],
)
def test_math(completion: str, answer: str, expected: float) -> None:
    pytest.importorskip("math_verify")
    assert one("math", item(completion, answer)) == expected


def test_endless_mathematics_is_wrong() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward("math", options={"timeout_s": 0.3, "miss": -0.1})
    assert reward.score([item(r"\boxed{9^{9^{9}}}", "5"), item("5", "5")]) == [-0.1, 1.0]


def test_math_in_a_thread_and_where_told() -> None:
    pytest.importorskip("math_verify")
    reward = load_reward("math", options={"extract": "<answer>(.*?)</answer>"})
    found: list[float | ScoreError] = []
    rows = [item(r"7 <answer>\frac{1}{2}</answer>", "0.5"), item("0.5", "0.5")]
    thread = threading.Thread(target=lambda: found.extend(reward.score(rows)))
    thread.start()
    thread.join()
    assert found == [1.0, 0.0]


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("exact", {"extrakt": "x"}, "no option 'extrakt'; its options are extract"),
        ("regex", {}, "option 'pattern' is not set"),
        ("regex", {"pattern": "("}, "no regular expression"),
        ("length", {"tokens_max": 1, "buffer_tokens": 2}, "tokens_min"),
        ("length", {"tokens_max": "x"}, "an option is wrong"),
        ("format", {"tags": []}, "tags"),
        ("judge", {"url": "x", "model": "m"}, "http"),
        ("judge", {"model": "m"}, "'url' is not set"),
        ("code", {"limits": 3}, "no option 'limits'"),
    ],
)
def test_wrong_options_are_one_line(name: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says) as error:
        load_reward(name, options=options)
    assert "\n" not in str(error.value)


def write(directory: Path, text: str) -> Path:
    (directory / "mine.py").write_text(text)
    return directory


def test_weighted_sum_and_parts(tmp_path: Path) -> None:
    base = write(tmp_path, "def half(completion, answer):\n    return 0.5\n")
    functions = [
        {"name": "exact", "weight": 2.0, "label": "right"},
        {"name": "mine.py:half", "weight": -1.0},
    ]
    reward = build(RewardConfig.model_validate({"functions": functions}), base)
    assert reward.score([item("a", "a"), item("b", "a")]) == [1.5, -0.5]
    assert reward.score_parts([item("a", "a")])[0].parts == {"right": 1.0, "mine.py:half": 0.5}


def test_abstaining_and_failing(tmp_path: Path) -> None:
    base = write(
        tmp_path,
        "def some(completions, **_):\n"
        "    return [None if c == 'skip' else 1 / (c != 'bad') for c in completions]\n",
    )
    config = RewardConfig.model_validate({"functions": ["exact", "mine.py:some"]})
    fine, skipped, failed = build(config, base).score(
        [item("a", "a"), item("skip", "skip"), item("bad", "bad")]
    )
    assert (fine, skipped) == (2.0, 1.0)
    assert isinstance(failed, ScoreError) and failed.reason.startswith("reward mine.py:some raised")
    (nothing,) = build(config, base).score([item("skip")])
    assert isinstance(nothing, ScoreError) and "no function gave a score" in nothing.reason


def test_cache_counts_equal_samples_once_and_forgets_failures(tmp_path: Path) -> None:
    base = write(
        tmp_path,
        "calls = []\n"
        "def count(completion):\n"
        "    calls.append(completion)\n"
        "    return 1 / len(completion)\n",
    )
    entry = {"name": "mine.py:count", "cache": True}
    reward = build(RewardConfig.model_validate({"functions": [entry]}), base)
    cached = reward.rewards[0]
    assert isinstance(cached, CachedReward)
    assert reward.score([item("ab"), item("ab"), item("abcd")]) == [0.5, 0.5, 0.25]
    assert reward.score([item("ab")]) == [0.5] and cached.num_hits == 2
    assert reward.score([item("ab", "other answer")]) == [0.5] and cached.num_hits == 2
    for _ in range(2):
        assert isinstance(reward.score([item("")])[0], ScoreError)
    assert cached.num_hits == 2


def test_cache_is_bounded(tmp_path: Path) -> None:
    base = write(tmp_path, "def f(completion):\n    return 1.0\n")
    reward = CachedReward(load_reward("mine.py:f", base), entries_max=2)
    reward.score([item(c) for c in "abc"])
    reward.score([item("a")])
    assert reward.num_hits == 0
    reward.score([item("c")])
    assert reward.num_hits == 1


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({}, "no function"),
        ({"functions": ["exact", "exact"]}, "two functions are called 'exact'"),
        ({"functions": ["absent.py:f"]}, "does not exist"),
    ],
)
def test_wrong_sections(section: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        build(RewardConfig.model_validate(section), tmp_path)
