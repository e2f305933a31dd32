"""What `dora-rl check` shows of the data and the reward: before a run, what it would read and how.

Reads the rows; starts nothing and writes nothing.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.data.prompts import PromptSource
from dora_rl.rewards.base import build
from dora_rl.types import UserError

PROMPT_CHARS_MAX = 2_000


@dataclass(slots=True)
class DataCheck:
    """What was found; `problems` are lines for the user."""

    evaluation: list[str] = field(default_factory=list[str])  # a line for each source
    first_prompt: str = ""  # as the model reads it
    first_prompt_tokens: int = 0
    first_answer: str | None = None
    rewards: list[str] = field(default_factory=list[str])
    problems: list[str] = field(default_factory=list[str])

    def lines(self) -> list[str]:
        shown = self.first_prompt[:PROMPT_CHARS_MAX]
        left_out = len(self.first_prompt) - len(shown)
        more = [f"  | ... {left_out} characters more"] if left_out else []
        return [
            *self.evaluation,
            *self.rewards,
            f"the first training prompt as the model reads it, {self.first_prompt_tokens} tokens:",
            *(f"  | {line}" for line in shown.split("\n")),
            *more,
            f"its answer: {'none' if self.first_answer is None else repr(self.first_answer)}",
        ]


def check_data(
    config: RunConfig, train: PromptSource, evaluation: PromptSource | None
) -> DataCheck:
    first = train.prompt(0)
    found = DataCheck(
        first_prompt=first.text,
        first_prompt_tokens=len(first.token_ids),
        first_answer=first.answer,
        evaluation=_describe_evaluation(config, evaluation),
    )
    if config.reward.functions:
        with closing(build(config.reward, Path("."))) as reward:
            found.rewards = reward.describe()
            needing = reward.needing_answer()
        found.problems = _unanswered(needing, train, evaluation)
    return found


def check_answers(config: RunConfig, train: PromptSource, evaluation: PromptSource | None) -> None:
    """Refuse rows without an answer where a reward needs one, with the line of `check`."""
    problems = check_data(config, train, evaluation).problems
    if problems:
        raise UserError(problems[0])


def _unanswered(
    needing: list[str], train: PromptSource, evaluation: PromptSource | None
) -> list[str]:
    problems: list[str] = []
    for name, source in (("train", train), ("eval", evaluation)):
        missing = source.without_answer() if source is not None and needing else None
        if missing is not None and missing.num:
            problems.append(
                f"data.{name}: {missing.num} of {missing.num_looked} rows have no answer, and "
                f"{', '.join(needing)} needs one; the first is {missing.first}; fill them in, "
                "leave them out, or set answer_column"
            )
    return problems


def _describe_evaluation(config: RunConfig, evaluation: PromptSource | None) -> list[str]:
    if evaluation is None:
        return ["no evaluation: data.eval is empty"]
    section, there = config.evaluation, evaluation.num_prompts
    used = section.num_prompts if there is None else min(there, section.num_prompts)
    every = f", every {section.every_steps} steps" if section.every_steps else ""
    return [
        *(f"evaluation: {line}" for line in evaluation.describe()),
        f"evaluation of the first {used} prompts, 1 greedy and {section.num_samples} sampled "
        f"answers each, before the first step and after the last{every}",
    ]
