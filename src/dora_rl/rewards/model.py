"""A Hugging Face reward model: sequence classification over prompt and completion.

Imports torch and transformers only when made. Never runs a model directory's own code unless
asked. Invariant: a score does not depend on which other items are in its batch, up to rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dora_rl.config import RewardConfig
from dora_rl.rewards.base import Reward, ScoreError, ScoreItem
from dora_rl.rewards.function import read_score
from dora_rl.types import UserError
from dora_rl.user_code import one_line, require


class ModelReward(Reward):
    """The model's only label, or the probability of `label` where it has several."""

    many = True

    def __init__(
        self,
        limits: RewardConfig,
        base_dir: Path,
        *,
        path: str,
        label: int = 0,
        device: str = "auto",
        dtype: str = "auto",
        batch_items: int = 16,
        tokens_max: int = 4096,
        squash: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        try:
            import torch
            from transformers import AutoModelForSequenceClassification, AutoTokenizer
        except ImportError as error:
            raise UserError(
                "reward: model needs torch and transformers; pip install 'dora-rl[train]'"
            ) from error
        self.name = "model"
        self._torch = torch
        self._label, self._squash = label, squash
        self._batch_items, self._tokens_max = batch_items, tokens_max
        local = base_dir / Path(path).expanduser()
        place = str(local) if local.is_dir() else path
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(
                place, trust_remote_code=trust_remote_code
            )
            self._model: Any = AutoModelForSequenceClassification.from_pretrained(
                place, dtype=dtype, trust_remote_code=trust_remote_code
            )
        except (OSError, ValueError, KeyError) as error:
            raise UserError(
                f"reward: model {place} cannot be loaded ({one_line(error)}); give a directory or "
                f"id of a sequence classification model"
            ) from error
        self._model.to(device).eval()
        if self._tokenizer.pad_token_id is None:
            self._tokenizer.pad_token = self._tokenizer.eos_token
        # The model looks for the last token that is no padding.
        self._model.config.pad_token_id = self._tokenizer.pad_token_id
        num_labels = self._model.config.num_labels
        require(
            (
                0 <= label < num_labels,
                f"reward: model {place} has {num_labels} labels, not one of {label}",
            )
        )

    def score(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        size = self._batch_items
        batches = (items[at : at + size] for at in range(0, len(items), size))
        return [score for batch in batches for score in self._batch(batch)]

    def _batch(self, items: Sequence[ScoreItem]) -> list[float | ScoreError]:
        torch = self._torch
        try:
            batch = self._tokenizer(
                [self._text(item) for item in items],
                padding=True,
                truncation=True,
                max_length=self._tokens_max,
                return_tensors="pt",
            )
            with torch.inference_mode():
                logits = self._model(
                    input_ids=batch["input_ids"].to(self._model.device),
                    attention_mask=batch["attention_mask"].to(self._model.device),
                ).logits.float()
        except (RuntimeError, ValueError, IndexError) as error:
            return [ScoreError(f"raised {one_line(error)}")] * len(items)
        only = logits[:, 0].sigmoid() if self._squash else logits[:, 0]
        values = logits.softmax(-1)[:, self._label] if logits.shape[-1] > 1 else only
        return [read_score(value) for value in values.tolist()]

    def _text(self, item: ScoreItem) -> str:
        """The conversation through the model's own template; text as it stands without one."""
        if self._tokenizer.chat_template is None:
            return item.prompt_text + item.completion
        prompt = item.prompt
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*messages, {"role": "assistant", "content": item.completion}]
        return self._tokenizer.apply_chat_template(messages, tokenize=False)
