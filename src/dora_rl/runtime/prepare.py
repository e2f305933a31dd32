"""Everything that can be wrong is found here, before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.data.prompts import PromptSource, open_data
from dora_rl.engine.models import read_spec
from dora_rl.rewards.base import build
from dora_rl.runtime.layout import Layout, plan_layout
from dora_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run that can start."""

    config: RunConfig
    layout: Layout
    train: PromptSource
    evaluation: PromptSource | None
    decode: Callable[[Sequence[int]], str]

    def describe(self) -> list[str]:
        o, layout = self.config.orchestration, self.layout
        return [
            f"mode {o.mode.value}, K = {o.max_staleness}, {o.num_steps} steps of "
            f"{o.batch_groups} groups x {self.config.rollout.num_samples} samples",
            f"{len(layout.instances)} instances on {layout.device}, up to "
            f"{layout.resident_max} versions each; learner with {layout.learner_threads} threads",
            *self.train.describe(),
            f"run directory {self.config.runtime.run_dir}",
        ]


def prepare(config: RunConfig) -> Prepared:
    """Open model, data and rewards; a mistake in any of them is one line."""
    import torch

    path = Path(config.model.path)
    if not path.is_dir():
        raise UserError(f"model.path: {path} is not a directory with a Hugging Face model")
    read_spec(path)
    tokenizer = open_tokenizer(path, config.model.trust_remote_code)
    train, evaluation = open_data(config.data, tokenizer, ".")
    if not config.reward.functions:
        raise UserError("reward.functions is empty; give path/to/file.py:name or a built-in")
    build(config.reward, Path(".")).close()
    device = config.runtime.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    return Prepared(config, plan_layout(config, device), train, evaluation, decode)


def open_tokenizer(path: Path, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"model.path: no tokenizer in {path} ({first})") from None
