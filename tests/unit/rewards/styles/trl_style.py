"""Reward functions as users of TRL's GRPOTrainer write them. Knows nothing of dora-rl."""

import asyncio
import re


def longer_is_better(completion_ids, **kwargs):
    """Token ids are there too."""
    return [float(len(ids)) for ids in completion_ids]


def boxed_answer(completions, ground_truth, **kwargs):
    """Standard format: completions are strings, a column comes as a list."""
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    given = [match.group(1) if match else "" for match in found]
    return [1.0 if a == b else 0.0 for a, b in zip(given, ground_truth, strict=True)]


def think_then_answer(completions, **kwargs):
    """Conversational format: a completion is a list with one message."""
    pattern = r"^<think>.*?</think><answer>.*?</answer>$"
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(pattern, content) else 0.0 for content in contents]


def only_math(prompts, completions, task, **kwargs):
    """None where the sample is another function's business."""
    return [
        float("4" in completion) if kind == "math" else None
        for _, completion, kind in zip(prompts, completions, task, strict=True)
    ]


def only_code(prompts, completions, task, **kwargs):
    return [
        float("def" in completion) if kind == "code" else None
        for _, completion, kind in zip(prompts, completions, task, strict=True)
    ]


async def slow_service(prompts, completions, **kwargs):
    await asyncio.sleep(0.001)
    return [1.0 if completion else 0.0 for completion in completions]


def logs_too(completions, solution, log_extra=None, **kwargs):
    if log_extra:
        log_extra("solution", solution)
    return [float(c[0]["content"] == s) for c, s in zip(completions, solution, strict=True)]


def number_of_characters(completions, **kwargs):
    """The shortest form: completions alone."""
    return [float(len(completion)) for completion in completions]


class Accuracy:
    """An instance whose class knows how to be called; TRL asks for a name."""

    __name__ = "accuracy"

    def __call__(self, prompts, completions, completion_ids, answer, trainer_state=None, **kwargs):
        assert len(prompts) == len(completions) == len(completion_ids)
        return [
            1.0 if gold in text else -1.0 for text, gold in zip(completions, answer, strict=True)
        ]


accuracy = Accuracy()
