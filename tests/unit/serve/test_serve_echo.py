"""`echo` of completions: the log-probs of a given text, which a teacher is asked for."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
import torch

from dora_rl.config import TrainerConfig
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.policy.model import load_policy
from tests.kit.places import MODEL
from tests.unit.serve.serving import Serving, serving

PROMPTS = [[6, 3, 12, 11, 4, 1, 5, 5], [2, 3]]


@pytest.fixture(scope="module")
def served() -> Iterator[Serving]:
    with serving() as one:
        yield one


def in_the_learner(ids: list[int]) -> list[float]:
    """Of each token after the first, by the learner's own decoder."""
    policy, token_ids = load_policy(MODEL, TrainerConfig(device="cpu")), torch.tensor(ids)
    rows = torch.arange(len(ids) - 1)
    with torch.no_grad():
        scores = policy(token_ids, Layout([len(ids)], rows.device), rows, token_ids[1:])
    return scores.logprobs_T.tolist()


def test_log_probs_of_a_prompt_are_those_of_the_learner(served: Serving) -> None:
    answer = served.client().completions.create(
        model="tiny",
        prompt=PROMPTS,
        max_tokens=0,
        logprobs=0,
        echo=True,
        extra_body={"return_token_ids": True},
    )
    for ids, choice in zip(PROMPTS, answer.choices, strict=True):
        assert choice.logprobs is not None and choice.logprobs.token_logprobs is not None
        first, *rest = choice.logprobs.token_logprobs
        assert first is None and rest == pytest.approx(in_the_learner(ids), abs=1e-4)
        assert choice.model_extra is not None and choice.model_extra["token_ids"] == ids
        assert len(choice.logprobs.tokens or ()) == len(ids)
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (10, 0)


def test_what_is_drawn_after_an_echo_is_what_is_drawn_without(served: Serving) -> None:
    def greedy(echo: bool) -> tuple[str, list[int]]:
        (choice,) = (
            served.client()
            .completions.create(
                model="tiny",
                prompt=PROMPTS[0],
                max_tokens=6,
                temperature=0,
                echo=echo,
                extra_body={"return_token_ids": True},
            )
            .choices
        )
        assert choice.model_extra is not None
        return choice.text, choice.model_extra["token_ids"]

    (text, ids), (whole, all_ids) = greedy(False), greedy(True)
    assert all_ids == PROMPTS[0] + ids and whole.endswith(text) and len(whole) > len(text)


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ({"max_tokens": 0}, "'max_tokens' must be at least 1 without 'echo'"),
        ({"echo": True, "stream": True}, "'echo' and 'stream' do not go together"),
        ({"echo": True, "stop": "a"}, "'echo' and 'stop' do not go together"),
        ({"echo": True, "max_tokens": 0, "prompt": [3]}, "a prompt of one token"),
    ],
)
def test_what_cannot_be_echoed_is_refused(served: Serving, wrong: dict, line: str) -> None:
    with pytest.raises(openai.BadRequestError, match=line):
        served.client().completions.create(**({"model": "tiny", "prompt": [3, 4]} | wrong))
