"""The client of a served teacher against a real HTTP server: which numbers are taken, and which
answers are failures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dora_rl.histories import ROOT
from dora_rl.rewards.endpoint import EndpointFailed
from dora_rl.rewards.teacher import ServedTeacher
from dora_rl.setup.token_ids import check_served
from dora_rl.types import Branch, UserError
from tests.kit.served_teacher import Answer, right, teacher


def arrays(prompt: list[int], ids: list[int], mask: list[int]) -> tuple[Any, ...]:
    return np.array(prompt, np.int32), np.array(ids, np.int32), np.array(mask, np.uint8)


def test_each_token_of_a_response_has_its_own_log_prob() -> None:
    with teacher(right) as section:
        served = ServedTeacher(section)
        found = served.sample_logprobs(*arrays([9, 8], [1, 2, 3], [1, 0, 1]))
    assert found.tolist() == pytest.approx([-1.05, -2.05, -3.05])


def test_a_history_that_forked_is_asked_for_row_by_row() -> None:
    """Turns of 2, 1 and 3 tokens: the first goes on to the third, the second is a branch."""
    ids, mask = [1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 1, 0, 1, 0, 0, 1, 1, 1]
    branches = (ROOT, Branch(2, 0, 0), Branch(4, 0, 2))
    with teacher(right) as section:
        served = ServedTeacher(section)
        found = served.sample_logprobs(*arrays([10, 11], ids, mask), branches)
    texts = [9, 9, 4, 4, 9, 9, 9, 9, 9]  # the tokens of the row that each belongs to
    wanted = [-token - length / 100 for token, length in zip(ids, texts, strict=True)]
    assert found.tolist() == pytest.approx(wanted)


def changed(**values: Any) -> Answer:
    def answer(ids: list[int]) -> dict[str, Any]:
        whole = right(ids)
        return whole | {
            name: value(ids, whole) if callable(value) else value for name, value in values.items()
        }

    return answer


def without_last(ids: list[int], whole: dict[str, Any]) -> dict[str, Any]:
    return whole["logprobs"] | {"token_logprobs": whole["logprobs"]["token_logprobs"][:-1]}


def with_hole(ids: list[int], whole: dict[str, Any]) -> dict[str, Any]:
    told = without_last(ids, whole)
    return told | {"token_logprobs": [*told["token_logprobs"], None]}


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        (changed(prompt_token_ids=[1, 2]), "read other tokens than it was given"),
        (changed(logprobs=without_last), "read other tokens than it was given"),
        (changed(logprobs=with_hole), "left log-probs of the text out"),
        (changed(logprobs=None), "no completion.*try 2 of 2"),
    ],
)
def test_what_is_no_answer_is_a_failure_with_its_cause(answer: Answer, line: str) -> None:
    with teacher(answer) as section:
        (failed,) = ServedTeacher(section).several([(*arrays([9, 8], [1, 2, 3], [1, 1, 1]), ())])
    assert isinstance(failed, EndpointFailed)
    with pytest.raises(EndpointFailed, match=line):
        raise failed


def test_the_start_names_the_token_that_differs() -> None:
    words = {1: "<1>", 2: "two", 3: "<3>"}
    with teacher(right) as section:
        check_served(section, [1, 3], lambda ids: words[ids[0]])
        with pytest.raises(UserError, match="token 2 is '<2>' to the teacher and 'two' to"):
            check_served(section, [1, 2, 3], lambda ids: words[ids[0]])
    with pytest.raises(UserError, match="cannot reach the teacher"):
        check_served(section, [1, 2, 3], lambda ids: words[ids[0]])
