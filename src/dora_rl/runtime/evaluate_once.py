"""One evaluation outside a run: load some weights, answer held-out prompts, score, add up.

The same engine, sampling and rewards as in training; the answers of a version do not depend on
when or where it is evaluated. Never writes anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.rewards.base import Reward, ScoreError, ScoreItem, build
from dora_rl.runtime.evaluation import Sheet, figures
from dora_rl.runtime.run_models import FoundModel
from dora_rl.types import Prompt, UserError


def evaluate_once(
    config: RunConfig, model: FoundModel, *, num_prompts: int, num_samples: int
) -> dict[str, float]:
    """Greedy and sampled means, the hardest tenth, lengths, and pass@1 to pass@k."""
    import torch

    from dora_rl.data.prompts import open_prompts
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.models import read_spec
    from dora_rl.engine.options import EngineOptions
    from dora_rl.runtime.eval_turns import EvalTurns
    from dora_rl.runtime.eval_worker import evaluate
    from dora_rl.runtime.prepare import open_tokenizer
    from dora_rl.runtime.turns import row_of

    torch.set_num_threads(max(1, config.rollout.threads))
    tokenizer = open_tokenizer(model.directory, config.model.trust_remote_code)
    if not config.data.eval:
        raise UserError("data.eval is empty; add data.eval=FILE to say what to evaluate on")
    prompts = list(open_prompts(config.data, tokenizer, "eval").once(num_prompts))[:num_prompts]
    device = config.runtime.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    options: dict[str, Any] = config.rollout.engine_options(device, 1)
    options["versions_max"] = 1
    decode = tokenizer.decode if config.rollout.stop_strings else None
    engine = Engine(read_spec(model.directory), EngineOptions(**options), decode)
    engine.load(model.version, model.source)
    ids = [prompt.token_ids for prompt in prompts]
    params = config.rollout.sampling_params()
    turns = EvalTurns(config, Path(".")) if config.env.environments else None
    if turns is not None:
        turns.begin([{**row_of(prompt), "env": prompt.env} for prompt in prompts])
    answers = evaluate(engine, model.version, ids, num_samples, params, turns=turns)
    sheets = [
        Sheet(prompt, greedy_tokens=len(answer["greedy"]))
        for prompt, answer in zip(prompts, answers, strict=True)
    ]
    texts = [
        [
            tokenizer.decode(tokens, skip_special_tokens=True)
            for tokens in (answer["greedy"], *answer["sampled"])
        ]
        for answer in answers
    ]
    failed = _score(config, sheets, texts, answers)
    return figures(sheets) | pass_at(sheets) | {"num_unscored": float(failed)}


def _score(
    config: RunConfig,
    sheets: Sequence[Sheet],
    texts: list[list[str]],
    answers: list[dict[str, Any]],
) -> int:
    """Fill the sheets in; an answer that cannot be scored counts as wrong and is counted."""
    reward = build(config.reward, Path(".")) if config.reward.functions else None
    if reward is None and not config.env.environments:
        raise UserError("reward.functions is empty; give path/to/file.py:name or a built-in")
    failed = 0
    try:
        for sheet, completions, answer in zip(sheets, texts, answers, strict=True):
            tokens = (answer["greedy"], *answer["sampled"])
            items = [_item(sheet.prompt, t, i) for t, i in zip(completions, tokens, strict=True)]
            values = [
                known if known is not None else _score_one(reward, item)
                for known, item in zip(answer["rewards"], items, strict=True)
            ]
            failed += sum(value is None for value in values)
            sheet.greedy, *sheet.sampled = [value or 0.0 for value in values]
    finally:
        if reward is not None:
            reward.close()
    return failed


def _score_one(reward: Reward | None, item: ScoreItem) -> float | None:
    score = reward.score([item])[0] if reward is not None else None
    return None if score is None or isinstance(score, ScoreError) else float(score)


def _item(prompt: Prompt, completion: str, token_ids: Sequence[int]) -> ScoreItem:
    return ScoreItem(
        prompt=prompt.columns.get("prompt", prompt.text),  # type: ignore[arg-type]
        prompt_text=prompt.text,
        completion=completion,
        completion_ids=tuple(token_ids),
        answer=prompt.answer,
        columns=prompt.columns,
    )


def pass_at(sheets: Sequence[Sheet]) -> dict[str, float]:
    """pass@1, 2, 4 … and k, unbiased: the expected best of j among the n sampled rewards.

    >>> pass_at([Sheet(Prompt(0, ()), sampled=[0.0, 1.0])])
    {'pass@1': 0.5, 'pass@2': 1.0}
    """
    num = len(sheets[0].sampled)
    counts = sorted({1 << i for i in range(num.bit_length()) if 1 << i <= num} | {num})
    return {
        f"pass@{j}": sum(_best_of(sorted(s.sampled), j) for s in sheets) / len(sheets)
        for j in counts
    }


def _best_of(rewards: list[float], count: int) -> float:
    """Mean of the maximum over all subsets of `count` rewards, given in order."""
    num = len(rewards)
    return sum(rewards[i] * comb(i, count - 1) / comb(num, count) for i in range(count - 1, num))
