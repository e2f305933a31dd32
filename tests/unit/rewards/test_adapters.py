"""Functions in the four forms run unchanged; what fits none of them is told in one line."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import ScoreError, ScoreItem, load_reward
from dora_rl.rewards.function import Form, FunctionReward
from dora_rl.types import UserError

STYLES = Path(__file__).parent / "styles"
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]


def item(
    completion: str,
    answer: str | None = None,
    *,
    prompt: str | list[dict[str, Any]] = "What is 2 + 2?",
    **columns: object,
) -> ScoreItem:
    return ScoreItem(prompt, "…", completion, tuple(range(len(completion))), answer, dict(columns))


def score(style: str, name: str, *items: ScoreItem, **options: Any) -> list[float | ScoreError]:
    return load_reward(f"{style}_style.py:{name}", STYLES, options=options).score(items)


def form_of(function: Callable[..., Any]) -> Form:
    return FunctionReward("f", function).form


class TestTrl:
    def test_ids_and_columns(self) -> None:
        assert score("trl", "longer_is_better", item("ab"), item("abcd")) == [2.0, 4.0]
        rows = [item(r"\boxed{4}", ground_truth="4"), item(r"\boxed{5}", ground_truth="4")]
        assert score("trl", "boxed_answer", *rows) == [1.0, 0.0]

    def test_completions_alone_and_instances(self) -> None:
        assert score("trl", "number_of_characters", item("ab"), item("")) == [2.0, 0.0]
        assert score("trl", "accuracy", item("it is 4", "4"), item("5", "4")) == [1.0, -1.0]

    def test_the_gold_answer_has_all_its_usual_names(self) -> None:
        assert score("trl", "boxed_answer", item(r"\boxed{4}", "4")) == [1.0]

    def test_conversations_are_messages(self) -> None:
        good = item("<think>a</think><answer>b</answer>", prompt=CHAT)
        assert score("trl", "think_then_answer", good, item("b", prompt=CHAT)) == [1.0, 0.0]
        assert score("trl", "logs_too", item("4", "4", prompt=CHAT)) == [1.0]

    def test_none_abstains(self) -> None:
        math, code = score("trl", "only_math", item("4", task="math"), item("4", task="code"))
        assert math == 1.0
        assert isinstance(code, ScoreError) and code.abstained

    def test_asynchronous(self) -> None:
        assert score("trl", "slow_service", item("x"), item("")) == [1.0, 0.0]

    def test_one_bad_sample_costs_only_itself(self) -> None:
        def f(completions: list[str], **_: object) -> list[float]:
            return [1.0 / len(completion) for completion in completions]

        good, bad, also = FunctionReward("f", f).score([item("ab"), item(""), item("abcd")])
        assert (good, also) == (0.5, 0.25)
        assert isinstance(bad, ScoreError) and "ZeroDivisionError" in bad.reason

    @pytest.mark.parametrize("result", [[1.0], 1.0, "ab", {"a": 1, "b": 2}, None])
    def test_wrong_results(self, result: object) -> None:
        scores = FunctionReward("f", lambda completions, **_: result).score([item("a"), item("b")])
        if result == [1.0]:  # right for each sample alone
            assert scores == [1.0, 1.0]
        else:
            assert all(isinstance(score, ScoreError) for score in scores)


class TestVerl:
    def test_dictionary_and_data_source(self) -> None:
        row = {"data_source": "openai/gsm8k", "reward_model": {"ground_truth": "72"}}
        rows = [item("so #### 72", **row), item("so #### 7", **row)]
        assert score("verl", "compute_score", *rows) == [1.0, 0.0]

    def test_extra_info_and_failure(self) -> None:
        good, bad = score(
            "verl",
            "compute_score",
            item("x", data_source="else", extra_info={"split": "test"}),
            item("x", data_source="else"),
        )
        assert good == 0.5
        assert isinstance(bad, ScoreError) and "NotImplementedError" in bad.reason

    def test_keyword_arguments_from_options(self) -> None:
        assert score("verl", "my_reward_fn", item("x" * 50)) == [0.5]
        assert score("verl", "length_score", item("x" * 50)) == [0.5]
        assert score("verl", "length_score", item("x" * 50), scale=10) == [5.0]
        assert score("verl", "plain_number", item("#### 3", "3"), score=2.0) == [2.0]

    def test_asynchronous(self) -> None:
        assert score("verl", "from_a_service", item("x", extra_info={"index": 3})) == [3.0]


class TestVerifiers:
    def test_messages_whatever_the_prompt_is(self) -> None:
        rows = [item("it is 4", "4"), item("it is 5", "4"), item("4", "4", prompt=CHAT)]
        assert score("verifiers", "correct_answer", *rows) == [1.0, 0.0, 1.0]
        assert score("verifiers", "contains", *rows) == [1.0, 0.0, 1.0]
        assert score("verifiers", "short", item("x" * 600)) == [0.5]

    def test_all_arguments_by_name(self) -> None:
        row = item("4", "4", info='{"difficulty": 3}')
        assert score("verifiers", "asks_for_everything", row) == [3.0]
        assert score("verifiers", "uses_state", row) == [1.0]

    def test_a_task_column_and_an_object_that_is_not_there(self) -> None:
        rows = [item("4", "4", task="sums"), item("5", "4", task="sums")]
        assert score("verifiers", "exact_match", *rows) == [1.0, 0.0]
        reward = load_reward("verifiers_style.py:with_a_parser", STYLES)
        assert reward.missing(["prompt", "answer"]) == ["parser"]
        (told,) = reward.score([item("4", "4")])
        assert isinstance(told, ScoreError) and "'parser'" in told.reason

    def test_annotated_string(self) -> None:
        def f(prompt: str, completion: str, answer: str) -> float:
            return float(completion == answer and prompt.startswith("What"))

        assert FunctionReward("f", f).score([item("4", "4")]) == [1.0]


class TestPlain:
    def test_the_built_in_task(self) -> None:
        reward = load_reward("dora_rl.data.chains:reward")
        assert reward.score([item("=637", "637"), item("=63", "637")]) == [1.0, 0.0]

    def test_string_also_for_conversations(self) -> None:
        reward = FunctionReward("f", lambda completion, answer: float(completion == answer))
        assert reward.score([item("4", "4", prompt=CHAT)]) == [1.0]

    def test_no_answer_is_told(self) -> None:
        (missing,) = FunctionReward("f", lambda completion, answer: 1.0).score([item("4")])
        assert isinstance(missing, ScoreError) and "'answer'" in missing.reason


class TestChoice:
    def test_by_signature(self) -> None:
        assert form_of(lambda prompts, completions, **kwargs: 0) is Form.TRL
        assert form_of(lambda completions_ids, **kwargs: 0) is Form.TRL
        assert form_of(lambda data_source, solution_str, ground_truth: 0) is Form.VERL
        assert form_of(lambda solution_str, ground_truth: 0) is Form.VERL
        assert form_of(lambda completion, answer, state: 0) is Form.VERIFIERS
        assert form_of(lambda prompt, completion: 0) is Form.VERIFIERS
        assert form_of(lambda completion, answer: 0) is Form.PLAIN
        assert form_of(lambda completion, answer, margin=2: 0) is Form.PLAIN
        assert form_of(lambda completion: completion[0]["content"]) is Form.VERIFIERS

    def test_annotation_decides_before_the_code(self) -> None:
        def text(completion: str, answer: str) -> float:
            return float("content" in completion)

        def messages(completion: list[dict[str, str]], answer: str) -> float:
            return float(bool(completion))

        assert (form_of(text), form_of(messages)) == (Form.PLAIN, Form.VERIFIERS)

    def test_instances_and_partials(self) -> None:
        class Judge:
            async def __call__(self, completion: str, answer: str) -> float:
                return 1.0

        reward = FunctionReward("f", Judge())
        assert reward.score([item("a", "a")]) == [1.0]

    def test_form_overrides(self) -> None:
        reward = FunctionReward("f", lambda completion, answer: len(completion), form="verifiers")
        assert reward.score([item("abc", "a")]) == [1.0]  # one message

    def test_hint_where_the_guess_was_wrong(self) -> None:
        key = "con" + "tent"

        def f(completion: Any, answer: str) -> float:
            return float(completion[0][key] == answer)

        f.__annotations__.clear()
        (wrong,) = FunctionReward("f", f).score([item("abc", "a")])
        assert isinstance(wrong, ScoreError) and 'form = "verifiers"' in wrong.reason

    @pytest.mark.parametrize(
        "function",
        [
            lambda response, target: 0,
            lambda: 0,
            lambda x: 0,
            lambda *args: 0,
            lambda text, **kwargs: 0,
            lambda completion, /, answer: 0,
            max,
        ],
    )
    def test_none_fits(self, function: Callable[..., Any]) -> None:
        with pytest.raises(UserError) as error:
            FunctionReward("mine.py:f", function)
        assert "mine.py:f" in str(error.value) and "\n" not in str(error.value)
        for form in ("TRL", "verl", "verifiers", "plain"):
            assert f"[{form}]" in str(error.value)

    def test_a_batch_form_of_verl_is_refused(self) -> None:
        with pytest.raises(UserError, match="of_a_batch"):
            load_reward("verl_style.py:of_a_batch", STYLES)

    def test_missing_columns_are_known_before_the_first_sample(self) -> None:
        reward = load_reward("trl_style.py:only_math", STYLES)
        assert reward.missing(["prompt", "answer"]) == ["task"]
        assert reward.missing(["task"]) == []
        (told,) = reward.score([item("4", level=1)])
        assert isinstance(told, ScoreError) and "'task'" in told.reason and "level" in told.reason


class TestLoading:
    @pytest.mark.parametrize(
        ("spec", "says"),
        [
            ("absent.py:f", "does not exist"),
            ("trl_style.py:absent", "there is no 'absent' in it"),
            ("no.such.package:f", "ModuleNotFoundError"),
            ("trl_style.py:re", "is a module"),
            ("broken.py:f", "SyntaxError"),
            ("raises.py:f", "RuntimeError: at import"),
            ("exakt", "did you mean 'exact'"),
        ],
    )
    def test_errors_are_one_line(self, spec: str, says: str, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text("def f(:")
        (tmp_path / "raises.py").write_text("raise RuntimeError('at import')")
        (tmp_path / "trl_style.py").write_text((STYLES / "trl_style.py").read_text())
        with pytest.raises(UserError, match=says) as error:
            load_reward(spec, tmp_path)
        assert "\n" not in str(error.value)

    def test_files_with_neighbours_and_dataclasses(self, tmp_path: Path) -> None:
        (tmp_path / "neighbour_of_reward.py").write_text("VALUE = 3.0")
        (tmp_path / "mine.py").write_text(
            "from __future__ import annotations\n"
            "from dataclasses import dataclass\n"
            "import neighbour_of_reward\n"
            "@dataclass\nclass P:\n    x: float\n"
            "def f(completion, answer):\n    return P(neighbour_of_reward.VALUE).x\n"
        )
        assert load_reward("mine.py:f", tmp_path).score([item("a", "b")]) == [3.0]

    def test_a_class_is_refused(self) -> None:
        with pytest.raises(UserError, match="is a class"):
            load_reward("dora_rl.types:Prompt")

    def test_unknown_option(self) -> None:
        with pytest.raises(UserError, match="no argument 'sclae'"):
            load_reward("verl_style.py:length_score", STYLES, options={"sclae": 1})


class TestLimits:
    FAST = RewardConfig(timeout_s=0.2, retry_wait_s=0.0)

    def test_endless_loop_ends_that_sample_only(self) -> None:
        def f(completion: str) -> float:
            while completion == "hang":
                with suppress(Exception):  # must not swallow the interruption
                    pass
            return 1.0

        hung, fine = FunctionReward("f", f, limits=self.FAST).score([item("hang"), item("x")])
        assert isinstance(hung, ScoreError) and "timeout_s" in hung.reason
        assert fine == 1.0

    def test_endless_wait_ends_that_sample_only(self) -> None:
        async def f(completion: str) -> float:
            await asyncio.sleep(60 if completion == "hang" else 0)
            return 1.0

        hung, fine = FunctionReward("f", f, limits=self.FAST).score([item("hang"), item("x")])
        assert isinstance(hung, ScoreError) and "timeout_s" in hung.reason
        assert fine == 1.0

    def test_inside_a_running_loop(self) -> None:
        async def f(completion: str) -> float:
            return 1.0

        async def caller() -> list[float | ScoreError]:
            return FunctionReward("f", f).score([item("x")])

        assert asyncio.run(caller()) == [1.0]

    def test_retries_of_asynchronous_functions(self) -> None:
        tries: list[str] = []

        async def f(completion: str) -> float:
            tries.append(completion)
            if len(tries) < 3:
                raise ConnectionError("busy")
            return 1.0

        assert FunctionReward("f", f, limits=self.FAST).score([item("x")]) == [1.0]
        assert len(tries) == 3

    def test_synchronous_functions_are_tried_once_unless_told(self) -> None:
        tries: list[str] = []

        def f(completion: str) -> float:
            tries.append(completion)
            raise ConnectionError("busy")

        FunctionReward("f", f, limits=self.FAST).score([item("x")])
        assert len(tries) == 1
        FunctionReward("f", f, limits=RewardConfig(attempts=2, retry_wait_s=0)).score([item("x")])
        assert len(tries) == 3

    @pytest.mark.parametrize(
        "value", [float("nan"), float("inf"), 1e39, 10**400, None, "1.0", [], object()]
    )
    def test_no_finite_number(self, value: object) -> None:
        (wrong,) = FunctionReward("f", lambda completion: value).score([item("x")])
        assert isinstance(wrong, ScoreError) and wrong.reason.startswith("returned")


def test_what_a_row_has_not_is_said_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def f(completion, answer): return 0.0\n")
    (found,) = load_reward("mine.py:f", tmp_path).score([item("4")])
    assert "needs 'answer', and this row has none (it has: completion)" in str(found)
