"""An environment of verifiers in a file of its own: says the word back until it is right."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        said = messages[-1].content
        if said == state["answer"]:
            state["final_env_response"] = [{"role": "user", "content": "0"}]
            return state["final_env_response"]
        return [{"role": "user", "content": f"={said}:"}]


async def found(state: Any, answer: str) -> float:
    return 1.0 / len(state["trajectory"]) if answer == last(state) else 0.0


def last(state: Any) -> str:
    if not state["trajectory"]:
        return ""
    return state["trajectory"][-1]["completion"][-1].content


def load_environment(turns: int = 3) -> vf.Environment:
    rows = [{"question": f"{n}:", "answer": str(n)} for n in range(1, 10)]
    return Echo(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[found]), max_turns=turns)
