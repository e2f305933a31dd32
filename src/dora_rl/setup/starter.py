"""A commented configuration to begin with, made for a model directory and a file of data.

    print(starter_text("models/Qwen3-0.6B", "gsm8k/train.jsonl"))

It looks at both: which columns are prompt and answer, whether prompts need the chat template, how
long prompts are and how much context is left. Invariant: `dora-rl check` accepts what it writes, as
far as this machine has the room. Writes nothing itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from dora_rl.config import DataConfig, DataSource
from dora_rl.data.columns import PROMPT_COLUMNS, columns_of
from dora_rl.data.prompts import PromptSource, open_prompts
from dora_rl.data.rows import open_rows
from dora_rl.model.directory import read_spec
from dora_rl.setup.hub import local_model
from dora_rl.setup.learner_check import check_model_files
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import UserError

ROWS_LOOKED = 200
RESPONSE_TOKENS = 1024
_NUMBER = re.compile(r"\s*[-+$]?[\d,]*\.?\d+%?\s*")


@dataclass(frozen=True, slots=True)
class _Found:
    """What the configuration depends on."""

    source: dict[str, str]
    chat: str
    prompt_max: int
    longest: int
    tokens_max: int
    num_rows: int | None
    reward: str
    why: str  # this reward


def starter_text(model: str, data: str, run_dir: str = "runs/first") -> str:
    found = _look(model, data)
    source = ", ".join(f"{key} = {_text(value)}" for key, value in found.source.items())
    rows = "endless" if found.num_rows is None else f"{found.num_rows} rows"
    return f"""\
# Made by  dora-rl init {model} {data}
#     dora-rl check FILE     what this run would do on this machine
#     dora-rl train FILE     any key can be set behind it: trainer.lr=1e-5
# docs/config.md describes every key; those that are left out have their defaults.

[model]
path = {_text(model)}

[data]
# {rows}; prompts of up to {found.longest} tokens among those looked at.
train = [{{ {source} }}]
# Held-out prompts in the same form. Without them nothing is evaluated.
# eval = [{{ path = "held_out.jsonl" }}]
prompt_tokens_max = {found.prompt_max}   # longer prompts are left out and counted
chat = {_text(found.chat)}   # what goes through the chat template: auto, always or never
# system_prompt = "Reason step by step."

[reward]
# {found.why}
# A function of yours: "path/to/file.py:name", with the arguments of TRL, verl or verifiers.
functions = [{found.reward}]

[rollout]
num_samples = 8                # responses to each prompt: a group
tokens_max = {found.tokens_max:<18}# of one response
# num_instances = 2            # engines; on a CPU a core each

[algorithm]
loss = "grpo"

[orchestration]
mode = "multi_version"         # or sync, one_step_off, partial, replication
max_staleness = 2              # K: how many versions a response may lie behind
num_steps = 100
batch_groups = 16              # prompts of one step; 128 responses

[trainer]
lr = 1e-6                      # for all weights; LoRA takes about ten times as much
# lora_rank = 16

[checkpoint]
every_steps = 10
keep = 2

[evaluation]
every_steps = 10
num_prompts = 200

[runtime]
run_dir = {_text(run_dir)}
"""


def _look(model: str, data: str) -> _Found:
    directory = Path(local_model(model))
    check_model_files(directory)
    tokenizer = open_tokenizer(directory, False)
    context = min(read_spec(directory).context_max, 32_768)
    first = open_rows(DataSource(path=data), split="train", seed=0, base_dir=Path(".")).row(0)
    columns = columns_of(first)
    _check_prompt(first, columns, data)
    prompt_max = min(1024, context // 2)
    source = {"path": data, **columns}
    is_text = isinstance(first[columns.get("prompt_column", "prompt")], str)
    chat = "always" if is_text and getattr(tokenizer, "chat_template", None) else "auto"
    section = DataConfig(
        train=(DataSource(**source),),  # pyright: ignore[reportArgumentType]
        chat=chat,  # pyright: ignore[reportArgumentType]
        prompt_tokens_max=prompt_max,
    )
    prompts = open_prompts(section, tokenizer)
    looked = list(islice(prompts.once(ROWS_LOOKED), ROWS_LOOKED))
    longest = max(len(prompt.token_ids) for prompt in looked)
    tokens_max = min(RESPONSE_TOKENS, context - prompt_max)
    reward, why = _reward(prompts, [prompt.answer for prompt in looked], tokens_max)
    return _Found(source, chat, prompt_max, longest, tokens_max, prompts.num_prompts, reward, why)


def _check_prompt(row: Mapping[str, Any], columns: Mapping[str, str], data: str) -> None:
    if columns.get("prompt_column", "prompt") not in row:
        raise UserError(
            f"{data}: none of its columns ({', '.join(map(str, row))}) is a prompt that is known "
            f"by name ({', '.join(PROMPT_COLUMNS)}); rename it, or write the configuration by hand "
            "with prompt_column"
        )


def _reward(prompts: PromptSource, answers: list[str | None], tokens_max: int) -> tuple[str, str]:
    """A built-in reward that can score these rows, and why this one."""
    if prompts.without_answer().num:
        short = f'{{ name = "length", options = {{ tokens_max = {tokens_max // 2} }} }}'
        return short, "Some rows have no answer: this asks for short responses and nothing else."
    if not all(_NUMBER.fullmatch(answer or "") for answer in answers):
        return '"exact"', "The answers are texts: 1 where a response is the answer, 0 elsewhere."
    if find_spec("math_verify") is None:
        pattern = r"[-+]?\\d[\\d,.]*"
        last = f'{{ name = "exact", options = {{ extract = "{pattern}" }} }}'
        return last, "The answers are numbers: 1 where a response has the answer as its last one."
    return '"math"', "The answers are numbers: 1 where a response ends with an equal one."


def _text(value: str) -> str:
    """As TOML writes it."""
    return json.dumps(value, ensure_ascii=False)
