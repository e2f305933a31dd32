"""Rubric functions as users of verifiers write them. Knows nothing of dora-rl."""


async def correct_answer(completion, answer) -> float:
    response = completion[-1]["content"]
    return 1.0 if answer in response else 0.0


def contains(completion, answer):
    return 1.0 if answer in completion[-1]["content"] else 0.0


async def short(completion) -> float:
    return 1.0 if len(completion[-1]["content"]) < 500 else 0.5


def asks_for_everything(prompt, completion, answer, state, info):
    assert prompt[-1]["role"] == "user" and completion[0]["role"] == "assistant"
    assert state["prompt"] == prompt and state["completion"] == completion
    assert state["answer"] == answer
    return float(info["difficulty"])


async def uses_state(state, **kwargs) -> float:
    assert kwargs["completion"] == state["completion"]
    return float(len(state["completion"][-1]["content"]))


async def exact_match(task: str, completion: list[dict], answer: str) -> float:
    """`task` is a column; annotations as in their types."""
    return float(task == "sums" and completion[-1]["content"].strip() == answer)


def with_a_parser(parser, completion, answer) -> float:
    """Asks for an object that only a rubric has."""
    return float(parser.parse_answer(completion) == answer)
