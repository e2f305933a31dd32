"""One evaluation outside a run: load some weights, answer held-out prompts, score, add up.

The same engine, sampling and rewards as in training; the answers of a version do not depend on
when or where it is evaluated. Never writes anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.evaluation import NO_REWARD, sheets_of, write_down
from dora_rl.controller.scoring import item_of
from dora_rl.observe.eval_figures import (
    Figures,
    Sheet,
    TailPrompts,
    curves,
    figures,
    has_failed,
)
from dora_rl.rewards.base import ScoreError, build
from dora_rl.types import Trajectory, UserError
from dora_rl.weights.run_models import FoundModel
from dora_rl.workers.messages import EvalPrompt, Reward


def evaluate_once(
    config: RunConfig,
    model: FoundModel,
    *,
    num_prompts: int,
    num_samples: int,
    tail_file: Path | None = None,
) -> Figures:
    """Greedy and sampled means, the tail, lengths, pass@1 to pass@k, and how much of it failed.

    `tail_file`: where a run keeps which prompts its tail is.
    """
    from dora_rl.data.prompts import open_prompts
    from dora_rl.setup.prepare import choose_device, open_tokenizer
    from dora_rl.workers.environment import row_of
    from dora_rl.workers.evaluator import EvalTurns, evaluate, open_engine

    tokenizer = open_tokenizer(model.directory, config.model.trust_remote_code)
    if not config.data.eval:
        raise UserError("data.eval is empty; add data.eval=FILE to say what to evaluate on")
    prompts = list(open_prompts(config.data, tokenizer, "eval").once(num_prompts))[:num_prompts]
    engine = open_engine(config, model.directory, choose_device(config.runtime.device))
    engine.load(model.version, model.source)
    asked = [EvalPrompt(row_of(prompt), prompt.env) for prompt in prompts]
    params = config.rollout.sampling_params()
    turns = EvalTurns(config, Path(".")) if config.env.environments else None
    answers = evaluate(engine, model.version, asked, num_samples, params, turns=turns)
    for line in engine.notes:
        print(line, file=sys.stderr)
    sheets = sheets_of(prompts, answers)
    _score(config, sheets, answers, lambda ids: tokenizer.decode(ids, skip_special_tokens=True))
    # A single evaluation has no earlier one to take the tail from, except that of a run.
    tail = TailPrompts(prompts, tail_file)
    found = figures(sheets, tail.indexes, config.evaluation)
    return found if has_failed(found) else found | curves(sheets, config.evaluation.success_min)


def _score(
    config: RunConfig,
    sheets: Sequence[Sheet],
    answers: Sequence[Trajectory],
    decode: Callable[[Sequence[int]], str],
) -> None:
    """Fill the sheets in; an answer that cannot be scored has failed, with the reason."""
    functions = build(config.reward, Path(".")) if config.reward.functions else None
    if functions is None and not config.env.environments:
        raise UserError("reward.functions is empty; give path/to/file.py:name or a built-in")
    try:
        for answer in answers:
            sheet, reward = sheets[answer.request.group], Reward(answer.reward, NO_REWARD)
            if answer.failure:
                reward = Reward(error=answer.failure)
            elif answer.reward is None and functions is not None:
                ids = answer.token_ids.tolist()
                item = item_of(sheet.prompt, replace(answer, text=decode(ids)))
                (score,) = functions.score([replace(item, completion_ids=tuple(ids))])
                failed = isinstance(score, ScoreError)
                reward = Reward(error=score.reason) if failed else Reward(score)
            write_down(sheet, answer.request.sample, reward)
    finally:
        if functions is not None:
            functions.close()
