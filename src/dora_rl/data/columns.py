"""Which columns of a row are the prompt and the answer, by the names that the field uses."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dora_rl.data.prompts import ANSWER_COLUMNS

PROMPT_COLUMNS = ("prompt", "question", "problem", "instruction", "query", "messages", "input")
MORE_ANSWERS = ("target", "final_answer", "expected_answer", "gold", "output", "response")
_MARK = re.compile(r"^####\s", re.MULTILINE)


def columns_of(row: Mapping[str, Any]) -> dict[str, str]:
    """The keys of a data source (`config.DataSource`) that differ from their defaults.

    >>> columns_of({"question": "1+1?", "answer": "one and one\\n#### 2"})
    {'prompt_column': 'question', 'answer_after': '####'}
    """
    found: dict[str, str] = {}
    prompt = next((name for name in PROMPT_COLUMNS if _is_prompt(row.get(name))), "prompt")
    if prompt != "prompt":
        found["prompt_column"] = prompt
    answer = answer_column(row)
    if answer in MORE_ANSWERS:
        found["answer_column"] = answer
    text = row.get(answer)
    if isinstance(text, str) and _MARK.search(text):
        found["answer_after"] = "####"
    return found


def answer_column(row: Mapping[str, Any]) -> str:
    """The column that holds the answer; empty: there is none."""
    nested = row.get("reward_model")
    inside = isinstance(nested, Mapping) and nested.get("ground_truth") is not None
    there = {name for name, value in row.items() if value is not None}
    there |= {"reward_model.ground_truth"} if inside else set()
    return next((name for name in (*ANSWER_COLUMNS, *MORE_ANSWERS) if name in there), "")


def _is_prompt(value: Any) -> bool:
    """A text, or messages."""
    if isinstance(value, (list, tuple)) and value:
        return all(isinstance(one, Mapping) and "role" in one for one in value)
    return isinstance(value, str) and bool(value.strip())
