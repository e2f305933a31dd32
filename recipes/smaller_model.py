"""Make a student for distillation: a smaller model of a teacher's family, with its tokenizer.

    python recipes/smaller_model.py recipes/models/tiny --out recipes/models/tinier --layers 1 \
        --hidden 64 --heads 2

Weights are random; every token id means what it means to the teacher. The same seed gives the same
weights on the same release of torch.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

# All of a directory that is not the model: the tokenizer and its templates.
TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab*", "merges.txt", "chat_template*")


def make_student(teacher: Path, out: Path, layers: int, hidden: int, heads: int, seed: int) -> int:
    """The number of its parameters."""
    config = AutoConfig.from_pretrained(teacher)
    config.intermediate_size = max(16, config.intermediate_size * hidden // config.hidden_size)
    config.num_hidden_layers, config.hidden_size = layers, hidden
    config.num_attention_heads = config.num_key_value_heads = heads
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(out)
    for pattern in TOKENIZER:
        for path in teacher.glob(pattern):
            shutil.copy(path, out / path.name)
    if (generation := teacher / "generation_config.json").is_file():
        shutil.copy(generation, out / generation.name)
    return model.num_parameters()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("teacher", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--hidden", type=int, required=True)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shape = (args.layers, args.hidden, args.heads, args.seed)
    num_params = make_student(args.teacher, args.out, *shape)
    print(f"{args.out}: {num_params:,} parameters")


if __name__ == "__main__":
    main()
