"""Small stand-ins for what the recipes name: a random Qwen3 with a chat template, and data."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<pad>", "<eos>", "<unk>")


def make_model(out: Path) -> Path:
    """Qwen3 with two layers and printable ASCII as its vocabulary."""
    characters = [chr(code) for code in range(32, 127)] + ["\n"]
    vocab = {token: index for index, token in enumerate((*SPECIAL, *characters))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
    )
    config = Qwen3Config(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(out)
    tokenizer.save_pretrained(out)
    return out


def make_data(folder: Path, name: str = "") -> tuple[Path, Path]:
    """Sums as jsonl: training rows and, disjoint from them, held-out ones; for some recipes in the
    form of the data that they name."""
    paths = folder / "train.jsonl", folder / "test.jsonl"
    for path, numbers in zip(paths, (range(16), range(16, 20)), strict=True):
        rows = [_row(n, name) for n in numbers]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return paths


def _row(number: int, name: str) -> dict[str, str]:
    asked, answer = f"What is {number} + 1?", str(number + 1)
    if name.startswith("gsm8k"):
        return {"question": asked, "answer": f"{number} and one more.\n#### {answer}"}
    return {"prompt": asked, "answer": answer}


def stand_in(folder: Path, name: str = "") -> list[str]:
    """Overrides that bring a recipe down to a few seconds on one core."""
    model = make_model(folder / "model")
    train, test = make_data(folder, name)
    small = {
        "model.path": f'"{model}"',
        "data.train": f'["{train}"]',
        "data.eval": f'["{test}"]',
        "reward.num_workers": 1,
        "rollout.num_samples": 2,
        "rollout.tokens_max": 12,
        "rollout.seqs_max": 8,
        "rollout.step_tokens_max": 512,
        "rollout.kv_bytes_max": 8 << 20,
        "rollout.dtype": '"float32"',
        "orchestration.num_steps": 2,
        "orchestration.batch_groups": 2,
        "orchestration.inflight_groups": 3,
        # A random model earns the same reward everywhere; filtering would never end.
        "orchestration.filter_equal": "false",
        "trainer.pack_tokens": 512,
        "trainer.threads": 1,
        "checkpoint.every_steps": 1,
        "evaluation.every_steps": 0,
        "evaluation.num_prompts": 2,
        "evaluation.num_samples": 1,
        "runtime.device": '"cpu"',
        "runtime.run_dir": f'"{folder / "run"}"',
    }
    return [f"{key}={value}" for key, value in small.items()]
