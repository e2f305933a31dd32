"""The supervised warm start: learns, masks prompts, names bad rows, writes a loadable model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from dora_rl.config import TrainerConfig
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.policy.model import load_policy
from dora_rl.trainer.sft import SftOptions, SftProgress, encode_row, run_sft
from dora_rl.types import UserError
from tests.kit.trainer_cases import changed, write_tiny_model
from tests.unit.trainer.foreign_families import write_family

TRAINER = TrainerConfig(lr=1e-2, device="cpu", pack_tokens=64)


class Letters:
    """a is 2, b is 3, ...; 1 ends a sequence. Messages are written as their letters."""

    eos_token_id = 1

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Sequence[int]:
        return [ord(c) - ord("a") + 2 for c in text]

    def apply_chat_template(self, conversation: Any, **options: Any) -> Any:
        return "".join(m["content"] for m in conversation)


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(r) for r in rows) + "\n\n")
    return path


def test_it_learns_and_writes_a_model(model_dir: Path, tmp_path: Path) -> None:
    rows = [{"prompt": p, "completion": p[::-1]} for p in ("abc", "de", "f", "ghij")] * 8
    data = write_rows(tmp_path / "demos.jsonl", [*rows, {"prompt": "a" * 200, "completion": "b"}])
    seen: list[SftProgress] = []
    out = tmp_path / "out"
    result = run_sft(
        model_dir,
        [data],
        out,
        SftOptions(epochs=12, batch_examples=8, eval_examples=8),
        TRAINER,
        seen.append,
        Letters(),
    )
    assert result.num_examples == 24 and result.num_too_long == 1
    assert result.num_updates == len(seen) == 36 and result.num_skipped == 0
    assert result.eval_first is not None and result.eval_last is not None
    assert result.eval_last < 0.3 < 1.0 < result.eval_first
    assert seen[-1].loss == result.loss_last < 0.3
    policy = load_policy(out, TRAINER)
    ids = torch.tensor([*Letters().encode("abc"), *Letters().encode("cba"), 1])
    with torch.no_grad():
        scores = policy(ids, Layout([7], ids.device), torch.arange(2, 6), ids[3:])
    assert scores.logprobs_T.exp().min() > 0.5
    assert (out / "tokenizer.json").is_file()
    with pytest.raises(UserError, match="not empty"):
        run_sft(model_dir, [data], out, SftOptions(), TRAINER, None, Letters())


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model", "llama")
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "ab", "completion": "c"}] * 5)
    results = []
    for name in ("one", "two"):
        options = SftOptions(epochs=2, batch_examples=2)
        run_sft(model, [data], tmp_path / name, options, TRAINER, None, Letters())
        results.append((tmp_path / name / "model.safetensors").read_bytes())
    assert results[0] == results[1]


@pytest.mark.parametrize("eval_examples", [0, 1])
def test_a_demonstration_longer_than_a_pack_has_one_of_its_own(
    model_dir: Path, tmp_path: Path, eval_examples: int
) -> None:
    rows = [{"prompt": "ab", "completion": "c" * n} for n in (90, 3, 60, 1, 100)]
    data = write_rows(tmp_path / "d.jsonl", rows)
    options = SftOptions(epochs=1, batch_examples=5, eval_examples=eval_examples)
    losses = []
    for pack_tokens in (8, 1000):
        trainer = changed(TRAINER, pack_tokens=pack_tokens)
        out = tmp_path / str(pack_tokens)
        result = run_sft(model_dir, [data], out, options, trainer, None, Letters())
        assert result.num_updates == 1 and result.num_examples == 5 - eval_examples
        losses.append(result.loss_first)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_a_model_run_by_transformers_learns_and_is_written(tmp_path: Path) -> None:
    model = write_family(tmp_path / "model", "gemma2")
    data = write_rows(tmp_path / "d.jsonl", [{"prompt": "ab", "completion": "cdef"}] * 8)
    out = tmp_path / "out"
    trainer = changed(TRAINER, lr=3e-2, compute_dtype="bfloat16")
    options = SftOptions(epochs=10, batch_examples=8, dtype="float32")
    result = run_sft(model, [data], out, options, trainer, None, Letters())
    assert result.loss_last < 0.5 * result.loss_first
    ids = torch.tensor([[*Letters().encode("abcdef"), 1]])
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out, attn_implementation="eager")
        table = theirs(ids[:, :-1]).logits[0].log_softmax(-1)
    loss = -table.gather(-1, ids[0, 1:, None])[1:].mean()
    assert float(loss) < result.loss_first
    with pytest.raises(UserError, match=r"\(type 'bert'\) cannot be trained"):
        bert = write_family(tmp_path / "bert", "bert")
        run_sft(bert, [data], tmp_path / "none", options, trainer, None, Letters())


def test_rows_are_encoded_as_the_rollout_does() -> None:
    tok = Letters()
    row = encode_row({"prompt": "ab", "completion": "c"}, tok, "f:1", True)
    assert row.token_ids.tolist() == [2, 3, 4, 1] and row.rows.tolist() == [1, 2]
    messages = [{"role": "user", "content": "ab"}]
    row = encode_row({"prompt": messages, "response": "c"}, tok, "f:1", False)
    assert row.token_ids.tolist() == [2, 3, 4] and row.rows.tolist() == [1]
    answer = [{"role": "assistant", "content": "cd"}]
    row = encode_row({"prompt": messages, "completion": answer}, tok, "f:1", True)
    assert row.token_ids.tolist() == [2, 3, 4, 5] and row.rows.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "demos.jsonl:1: not valid JSON"),
        ("[1]", "must be an object"),
        ('{"prompt": "a"}', "needs 'prompt' and 'completion'"),
        ('{"prompt": "a", "completion": 3}', "must be a string"),
        ('{"prompt": "", "completion": "b"}', "at least one token"),
    ],
)
def test_bad_rows_are_named(model_dir: Path, tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "demos.jsonl"
    path.write_text(line)
    with pytest.raises(UserError, match=message):
        run_sft(model_dir, [path], tmp_path / "out", SftOptions(), TRAINER, None, Letters())
    with pytest.raises(UserError, match="no such file"):
        run_sft(
            model_dir, [tmp_path / "x"], tmp_path / "out", SftOptions(), TRAINER, None, Letters()
        )
