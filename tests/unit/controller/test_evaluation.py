"""Evaluations: what failed is never a score, the tail is the same prompts, pass@k a probability."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from dora_rl.commands.progress import evaluation_line
from dora_rl.config import EvaluationConfig
from dora_rl.controller.evaluation import ATTEMPTS_MAX, Evaluations
from dora_rl.controller.scoring import Answer as Scored
from dora_rl.controller.scoring import ScoringPool
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.envs.base import Row
from dora_rl.envs.host import Answer
from dora_rl.model.directory import read_spec
from dora_rl.observe.eval_figures import (
    Figures,
    Sheet,
    TailPrompts,
    best_evaluated,
    curves,
    figures,
    has_failed,
)
from dora_rl.types import Finish, Prompt, RequestId, SamplingParams, Trajectory, UserError
from dora_rl.workers.evaluator import EvalTurns, evaluate
from dora_rl.workers.messages import (
    Alive,
    EvalPrompt,
    Evaluated,
    Message,
    Ready,
    Reward,
)
from tests.kit.fakes import FakeWorkers
from tests.kit.places import MODEL

SECTION = EvaluationConfig(num_samples=2)


class FakeScoring:
    """Scores as told: a number, or the reason why there is none."""

    names = ("reward0",)

    def __init__(self, score: Any) -> None:
        self._score = score

    def submit(self, prompt: Prompt, sample: Trajectory, answer: Scored) -> None:
        assert sample.text == "text"
        found = self._score(prompt)
        answer(Reward(error=found) if isinstance(found, str) else Reward(found))


class Stand:
    """Evaluations of a few prompts, and what came of them."""

    def __init__(self, score: Any, num_prompts: int = 10, path: Path | None = None, **more: Any):
        self.prompts = [Prompt(i, (i,), str(i)) for i in range(num_prompts)]
        self.workers, self.done = FakeWorkers(), dict[int, Figures]()
        self.evaluations = Evaluations(
            self.workers,
            cast(ScoringPool, FakeScoring(score)),
            self.prompts,
            SECTION.model_copy(update=more),
            TailPrompts(self.prompts, path),
            lambda ids: "text",
            self.done.__setitem__,
            {},
            {0: "a", 1: "b"},
        )
        self.evaluations.start()
        self.hear(Ready())

    def hear(self, message: Message) -> None:
        self.evaluations.hear(self.workers.workers["evaluator"], message)

    def answer(self, lengths: list[int] | None = None, failure: str = "") -> None:
        lengths = lengths or [3] * len(self.prompts)
        finish = Finish.ERROR if failure else Finish.STOP
        answers = tuple(
            Trajectory(
                RequestId(prompt, sample), 0, [1] * num, [0.0] * num, [1] * num, finish,
                error=failure,
            )
            for prompt, length in enumerate(lengths)
            for sample, num in enumerate((length, 1, 1))
        )  # fmt: skip
        self.hear(Evaluated(0, answers))


@pytest.mark.parametrize("where", ["reward", "environment"])
def test_an_evaluation_whose_user_code_raises_has_no_score(where: str) -> None:
    stand = Stand(lambda prompt: "reward f raised ValueError: boom")
    stand.evaluations.ask(0)
    stand.answer(failure="" if where == "reward" else "the environment game failed: boom")
    found = stand.done[0]
    assert found["greedy"] is None and found["sampled"] is None and found["tail_greedy"] is None
    assert found["num_failed"] == found["num_answers"] == 30
    assert has_failed(found)
    line = evaluation_line({"version": 0, **{f"eval/{k}": v for k, v in found.items()}})
    assert line.startswith("evaluation of version 0  failed: 30 of 30 answers failed: ")
    assert "boom" in line and "0.000" not in line


def test_few_failures_are_counted_beside_a_score_over_the_rest() -> None:
    stand = Stand(lambda prompt: "raised" if prompt.index == 3 else 1.0)
    stand.evaluations.ask(4)
    stand.answer()
    found = stand.done[4]
    assert found["greedy"] == found["sampled"] == found["pass_at_k"] == 1.0
    assert found["num_failed"] == 3 and not has_failed(found)
    line = evaluation_line({"version": 4, **{f"eval/{k}": v for k, v in found.items()}})
    assert "greedy 1.000" in line and "(3 of 30 answers failed: raised)" in line


def test_the_limit_is_a_setting() -> None:
    stand = Stand(lambda prompt: "raised" if prompt.index == 3 else 1.0, failed_share_max=0.09)
    stand.evaluations.ask(4)
    stand.answer()
    assert has_failed(stand.done[4])


def test_an_evaluator_that_keeps_dying_is_reported_and_the_next_version_goes_on() -> None:
    stand = Stand(lambda prompt: 1.0)
    stand.evaluations.ask(0)
    stand.evaluations.ask(5)
    for _ in range(ATTEMPTS_MAX):
        assert stand.evaluations.running == 0
        stand.evaluations.lost()
        stand.hear(Ready())
    assert has_failed(stand.done[0]) and "the evaluator ended" in str(stand.done[0]["failure"])
    assert stand.evaluations.running == 5
    stand.evaluations.give_up()
    assert has_failed(stand.done[5]) and stand.evaluations.idle


def test_weights_are_pinned_until_the_score_is_known() -> None:
    stand = Stand(lambda prompt: 1.0)
    stand.evaluations.ask(2)
    stand.hear(Alive())
    assert stand.evaluations.pins() == {2}
    stand.answer()
    assert stand.evaluations.pins() == set()


class BrokenTurns:
    """Environments that fail at the second prompt; the first one gives 0.5."""

    cut_reward = 0.0
    num_open = 0

    def __init__(self) -> None:
        self._asked: list[Trajectory] = []

    def begin(self, prompts: object) -> None:
        del prompts

    def opens(self, prompt: int) -> bool:
        return False

    def ask(self, trajectory: Trajectory) -> None:
        self._asked.append(trajectory)
        self.num_open += 1

    def take(self, wait_s: float) -> list[tuple[RequestId, Answer]]:
        asked, self._asked, self.num_open = self._asked, [], 0
        return [
            (t.request, Answer(error="boom") if t.request.group else Answer(done=True, reward=0.5))
            for t in asked
        ]

    def end(self) -> None:
        pass


def test_the_evaluator_says_which_answers_failed() -> None:
    options = EngineOptions(num_blocks=64, seqs_max=4, step_tokens_max=64)
    engine = Engine(read_spec(str(MODEL)), options)
    engine.load(0, MODEL)
    params, turns = SamplingParams(tokens_max=4), cast(EvalTurns, BrokenTurns())
    prompts = [EvalPrompt(Row("", token_ids=ids)) for ids in ((1, 2), (1, 3))]
    answers = evaluate(engine, 0, prompts, 1, params, turns=turns)
    good, bad = answers[:2], answers[2:]
    assert [(one.reward, one.failure) for one in good] == [(0.5, ""), (0.5, "")]
    assert [(one.reward, one.failure) for one in bad] == [(None, "boom"), (None, "boom")]


def test_the_tail_is_the_same_prompts_in_every_evaluation_and_after_a_resume(
    tmp_path: Path,
) -> None:
    path = tmp_path / "evaluation.json"
    stand = Stand(lambda prompt: float(prompt.index == 7), path=path)
    stand.evaluations.ask(0)
    stand.answer([50 if i == 7 else 5 for i in range(10)])
    assert stand.done[0]["tail_greedy"] == 1.0
    stand.evaluations.ask(3)
    stand.answer([50 if i == 2 else 5 for i in range(10)])  # another one is longest now
    assert stand.done[3]["tail_greedy"] == 1.0
    assert json.loads(path.read_text())["tail"] == [7]
    again = Stand(lambda prompt: float(prompt.index == 7), path=path)
    again.evaluations.ask(6)
    again.answer([50 if i == 1 else 5 for i in range(10)])
    assert again.done[6]["tail_greedy"] == 1.0
    # Other prompts have another tail.
    other = Stand(lambda prompt: float(prompt.index == 1), num_prompts=9, path=path)
    other.evaluations.ask(9)
    other.answer([50 if i == 1 else 5 for i in range(9)])
    assert other.done[9]["tail_greedy"] == 1.0


def test_a_failed_evaluation_does_not_choose_the_tail(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    stand = Stand(lambda prompt: "raised", path=path)
    stand.evaluations.ask(0)
    stand.answer()
    assert not path.exists()


def test_a_difficulty_of_every_row_decides_the_tail() -> None:
    hard = [Prompt(i, (i,), columns={"difficulty": -i}) for i in range(10)]
    assert TailPrompts(hard, None).indexes == [0]
    mixed = [*hard[:9], Prompt(9, (9,))]
    assert TailPrompts(mixed, None).indexes is None  # by length, when there are answers


def test_pass_at_k_is_a_probability_whatever_the_rewards_are() -> None:
    sheets = [
        Sheet(Prompt(0, ()), greedy=2.0, sampled=[2.5, 0.0, 0.4, 0.0]),
        Sheet(Prompt(1, ()), greedy=0.3, sampled=[0.9, 0.5, 0.2, 0.1]),
    ]
    found = figures(sheets, None, EvaluationConfig(num_samples=4))
    assert found["pass_at_k"] == 0.5 and found["best_of_k"] == pytest.approx((2.5 + 0.9) / 2)
    half = figures(sheets, None, EvaluationConfig(num_samples=4, success_min=0.5))
    assert half["pass_at_k"] == 1.0
    curve = curves(sheets, 1.0)
    assert [curve[f"pass@{j}"] for j in (1, 2, 4)] == pytest.approx([0.125, 0.25, 0.5])
    assert curve["best@1"] == pytest.approx((2.9 / 4 + 1.7 / 4) / 2)
    assert curve["best@4"] == pytest.approx(1.7)


def test_the_best_version_is_chosen_among_those_with_a_score() -> None:
    found: dict[int, Figures] = {
        0: {"greedy": 0.2, "sampled": 0.9},
        5: {"greedy": None, "sampled": None, "num_failed": 9.0},
        10: {"greedy": 0.7},
        15: {"greedy": 0.7},
        20: {"greedy": 0.1},
    }
    assert best_evaluated(found, "eval/greedy", is_max=True) == (15, "eval/greedy", 0.7)
    assert best_evaluated(found, "eval/greedy", is_max=False) == (20, "eval/greedy", 0.1)
    assert best_evaluated(found, "eval/tail_greedy", is_max=True) == (0, "eval/sampled", 0.9)
    assert best_evaluated({5: found[5]}, "eval/greedy", is_max=True) is None


def test_an_evaluator_that_keeps_ending_says_why() -> None:
    stand = Stand(lambda prompt: 1.0)
    stand.evaluations.ask(4)
    for _ in range(ATTEMPTS_MAX):
        stand.evaluations.lost("out of memory on the GPU: 2.00 GiB more were wanted")
        stand.hear(Ready())
    assert "out of memory on the GPU" in str(stand.done[4])


@pytest.mark.parametrize("text", ["", "[]", '{"tail": 7}', '{"tail": ["x"]}'])
def test_a_damaged_tail_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "evaluation.json").write_text(text)
    prompts = [Prompt(0, (1,), "a"), Prompt(1, (2,), "b")]
    with pytest.raises(UserError, match=r"evaluation\.json is damaged; restore it, or delete it"):
        TailPrompts(prompts, tmp_path / "evaluation.json")
