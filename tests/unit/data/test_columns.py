"""The columns of a row, by the names that the field uses."""

from __future__ import annotations

from typing import Any

import pytest

from dora_rl.data.columns import answer_column, columns_of

MESSAGES = [{"role": "user", "content": "1+1?"}]


@pytest.mark.parametrize(
    ("row", "found", "answer"),
    [
        ({"prompt": "a", "answer": "b"}, {}, "answer"),
        (
            {"question": "a", "answer": "so\n#### 1,000"},
            {"prompt_column": "question", "answer_after": "####"},
            "answer",
        ),
        ({"problem": "a", "solution": "b"}, {"prompt_column": "problem"}, "solution"),
        ({"messages": MESSAGES}, {"prompt_column": "messages"}, ""),
        (
            {"prompt": MESSAGES, "reward_model": {"ground_truth": "2"}},
            {},
            "reward_model.ground_truth",
        ),
        ({"prompt": "a", "target": "b"}, {"answer_column": "target"}, "target"),
        ({"prompt": "a", "answer": None, "output": "b"}, {"answer_column": "output"}, "output"),
        ({"prompt": "", "query": "a"}, {"prompt_column": "query"}, ""),
        ({"other": 1}, {}, ""),
    ],
)
def test_columns(row: dict[str, Any], found: dict[str, str], answer: str) -> None:
    assert columns_of(row) == found
    assert answer_column(row) == answer
