"""Rows of messages: the assistant's tokens are trained, as the tokenizer's own template says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dora_rl.config import TrainerConfig
from dora_rl.trainer.demonstrations import encode_row
from dora_rl.trainer.documents import Document
from dora_rl.trainer.sft import SftOptions, run_sft
from dora_rl.types import UserError
from tests.kit.places import MODEL

MARKED = (
    "{% if tools %}<|im_start|>system\n{{ tools | length }} tools<|im_end|>\n{% endif %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
UNMARKED = MARKED.replace("{% generation %}", "").replace("{% endgeneration %}", "")
# As Qwen3 does: the thoughts of earlier turns are left out.
FORGETFUL = UNMARKED.replace(
    "{{ m.content }}<|im_end|>{{ '\n' }}{% else",
    "{{ m.content if loop.last else m.content.split('</think>')[-1] }}<|im_end|>{{ '\n' }}{% else",
)


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: number for number, letter in enumerate(letters)}
    specials = ["<|im_start|>", "<|im_end|>"]
    vocab |= {special: len(vocab) + number for number, special in enumerate(specials)}
    bytes_ = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=bytes_,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = template
    return made


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


TURNS = [
    said("system", "Be brief."),
    said("user", "1+1?"),
    said("assistant", "2"),
    said("user", "sure?"),
    said("tool", "yes"),
    said("assistant", "yes, 2"),
]


def trained(document: Document, tokenizer: Any) -> str:
    return tokenizer.decode(document.token_ids[document.rows + 1])


@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "f"}}]])
def test_only_the_assistant_is_trained(tools: list[Any] | None) -> None:
    """With and without marks in the template, the mask is the one that transformers gives."""
    marked, unmarked = tokenizer_with(MARKED), tokenizer_with(UNMARKED)
    row = {"messages": TURNS} | ({"tools": tools} if tools else {})
    there = marked.apply_chat_template(
        TURNS, tools=tools, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    for tokenizer in (marked, unmarked):
        document = encode_row(row, tokenizer, "f:1", True)
        assert document.token_ids.tolist() == there["input_ids"]
        mask = [0] * document.num_tokens
        for place in (document.rows + 1).tolist():
            mask[place] = 1
        assert mask == there["assistant_masks"]
        assert trained(document, tokenizer) == "2<|im_end|>yes, 2<|im_end|>"


def test_a_template_that_forgets_is_refused_where_it_matters() -> None:
    tokenizer = tokenizer_with(FORGETFUL)
    document = encode_row({"messages": TURNS}, tokenizer, "f:1", True)
    assert trained(document, tokenizer) == "2<|im_end|>yes, 2<|im_end|>"
    thinking = [*TURNS[:2], said("assistant", "<think>so</think>2"), *TURNS[3:]]
    with pytest.raises(UserError, match="f:7: the chat template renders message 2 differently"):
        encode_row({"messages": thinking}, tokenizer, "f:7", True)
    last = thinking[:3]
    document = encode_row({"messages": last}, tokenizer, "f:1", True)
    assert trained(document, tokenizer) == "<think>so</think>2<|im_end|>"


@pytest.mark.parametrize(
    ("messages", "template", "says"),
    [
        ([], UNMARKED, "must be a list of messages"),
        (["text"], UNMARKED, "must be a list of messages"),
        (TURNS[:2], UNMARKED, "no message is the assistant's"),
        (TURNS[2:], UNMARKED, "the first message is the assistant's"),
        (TURNS, "", "need a chat template"),
        (TURNS, MARKED.replace("== 'assistant'", "== 'x'"), "marks nothing of it"),
        (TURNS, "{{ raise_exception('no system') }}", r"f:1: .*refuses the messages \(no system"),
        (TURNS, "{{ raise_exception('no') }}" + MARKED, r"f:1: .*refuses the messages \(no"),
    ],
)
def test_rows_that_cannot_be_used(messages: list[Any], template: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        encode_row({"messages": messages}, tokenizer_with(template), "f:1", True)


def test_it_is_learned(tmp_path: Path) -> None:
    """With the shipped model and its own tokenizer."""
    rows = [
        {"messages": [said("user", f"{n * 7919 % 997:03d}:"), said("assistant", "111")]}
        for n in range(32)
    ]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    trainer = TrainerConfig(lr=1e-2, device="cpu", pack_tokens=512)
    options = SftOptions(epochs=10, batch_examples=8)
    result = run_sft(MODEL, [data], tmp_path / "out", options, trainer)
    assert result.loss_last < 0.2 < 1.0 < result.loss_first
