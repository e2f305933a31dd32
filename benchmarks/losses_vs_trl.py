"""Compare our objectives with TRL's own loss code on the same model and batch.

A real `GRPOTrainer` of TRL 1.16 and our learner get the same tiny model, the same padded or packed
responses (with tool-written holes), the same old log-probs and advantages. Compared are the loss
and the gradient of every parameter. Prints a table, writes JSON, and says so and exits with 0 if
TRL is not installed.

    python benchmarks/losses_vs_trl.py [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import random
import sys
import tempfile
from pathlib import Path

import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.meters import Meters
from dora_rl.trainer.passes import policy_pass
from dora_rl.trainer.policy.model import load_policy

VOCAB, LENGTH_MAX = 40, 24
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-5

CASES: dict[str, tuple[AlgorithmConfig, dict[str, object]]] = {
    "grpo": (AlgorithmConfig(loss="grpo"), {"loss_type": "grpo"}),
    "grpo + kl k3": (
        AlgorithmConfig(loss="grpo", kl_coef=0.1),
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": False},
    ),
    "grpo + weighted kl k3": (
        AlgorithmConfig(loss="grpo", kl_coef=0.1, kl_ratio_weighted=True),
        {"loss_type": "grpo", "beta": 0.1, "use_bias_correction_kl": True},
    ),
    "grpo + two-sided clip": (
        AlgorithmConfig(loss="grpo", dual_clip=1.5),
        {"loss_type": "grpo", "delta": 1.5},
    ),
    "dr_grpo": (
        AlgorithmConfig(loss="dr_grpo", constant_tokens=LENGTH_MAX),
        {"loss_type": "dr_grpo"},
    ),
    "dapo": (AlgorithmConfig(loss="dapo"), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        AlgorithmConfig(loss="gspo"),
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
    "cispo": (AlgorithmConfig(loss="cispo"), {"loss_type": "cispo", "epsilon_high": 5.0}),
}


def make_model(directory: Path) -> None:
    """A tiny Qwen3 and a word-level tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=128,
        initializer_range=0.15,
        tie_word_embeddings=False,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=2,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    words = {"<pad>": 0, "</s>": 1, "<s>": 2, **{f"w{i}": i for i in range(3, VOCAB)}}
    raw = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    tokenizer.save_pretrained(directory)


def make_documents(seed: int) -> tuple[list[Document], list[int], list[list[int]]]:
    """Random responses: documents, prompt lengths and loss masks."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    documents, prompts, masks = [], [], []
    for _ in range(8):
        start, n = rng.randint(2, 6), rng.randint(3, LENGTH_MAX)
        mask = [1] + [int(rng.random() < 0.8) for _ in range(n - 1)]
        place = torch.tensor(mask, dtype=torch.bool).nonzero().squeeze(-1)
        count = place.shape[0]
        ids = torch.randint(3, VOCAB, (start + n,), generator=generator)
        old = torch.randn(count, generator=generator) * 0.4
        advantage = torch.full((count,), rng.gauss(0, 1))
        d = Document(ids, place + start - 1, old, 0.0, 0, advantages=advantage)
        d.ref_logprobs = old + 0.3 * torch.randn(count, generator=generator)
        documents.append(d)
        prompts.append(start)
        masks.append(mask)
    return documents, prompts, masks


def centre_on_policy(directory: Path, documents: list[Document]) -> None:
    """Old and reference log-probs scattered around the model's own, so that some ratios clip."""
    policy = load_policy(directory, TrainerConfig(device="cpu"))
    pack = collate(documents, torch.device("cpu"))
    with torch.no_grad():
        scores = policy(pack.token_ids_P, pack.layout, pack.rows_T, pack.target_T)
    for d, own in zip(documents, pack.split(scores.logprobs_T), strict=True):
        assert d.ref_logprobs is not None
        d.ref_logprobs = own + d.ref_logprobs
        d.rollout_logprobs = own + d.rollout_logprobs
        d.old_logprobs = d.rollout_logprobs


def our_gradient(
    directory: Path, documents: list[Document], options: AlgorithmConfig
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients through our packed decoder."""
    policy = load_policy(directory, TrainerConfig(device="cpu"))
    # TRL has no dual clip unless it is asked for one (`delta`).
    objective = resolve(options.model_copy(update={"dual_clip": options.dual_clip or 0.0}))
    pack = collate(documents, torch.device("cpu"))
    total = policy_pass(policy, pack, objective, Meters(torch.device("cpu")), step=0)
    den = objective.denominator(pack.num_trained, len(documents))
    grads = {n: p.grad / den for n, p in policy.named_parameters() if p.grad is not None}
    return float(total) / den, grads


def padded(documents: list[Document], prompts: list[int], masks: list[list[int]]) -> dict:
    """The same batch as TRL wants it: prompts padded left, completions right."""
    rows = len(documents)
    wide = max(prompts)
    long = max(len(m) for m in masks)
    zeros = {k: torch.zeros(rows, wide, dtype=torch.int64) for k in ("prompt_ids", "prompt_mask")}
    for k in ("completion_ids", "completion_mask", "tool_mask"):
        zeros[k] = torch.zeros(rows, long, dtype=torch.int64)
    old, ref = torch.zeros(rows, long), torch.zeros(rows, long)
    for i, (d, start, mask) in enumerate(zip(documents, prompts, masks, strict=True)):
        n = len(mask)
        zeros["prompt_ids"][i, wide - start :] = d.token_ids[:start]
        zeros["prompt_mask"][i, wide - start :] = 1
        zeros["completion_ids"][i, :n] = d.token_ids[start:]
        zeros["completion_mask"][i, :n] = 1
        zeros["tool_mask"][i, :n] = torch.tensor(mask)
        place = d.rows - (start - 1)
        assert d.old_logprobs is not None and d.ref_logprobs is not None
        old[i, place], ref[i, place] = d.old_logprobs, d.ref_logprobs
    return {
        **zeros,
        "advantages": torch.stack([d.advantages[0] for d in documents]),
        "old_per_token_logps": old,
        "ref_per_token_logps": ref,
        "num_items_in_batch": zeros["tool_mask"].sum(),
    }


def trl_gradient(
    directory: Path, batch: dict, settings: dict[str, object], scratch: Path
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients from a real GRPOTrainer's `_compute_loss`."""
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig, GRPOTrainer

    config = GRPOConfig(
        output_dir=str(scratch),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=LENGTH_MAX,
        report_to="none",
        disable_tqdm=True,
        **{"beta": 0.0, "epsilon": 0.2, **settings},  # type: ignore[arg-type]
    )
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    trainer = GRPOTrainer(
        model=model,
        args=config,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        train_dataset=Dataset.from_dict({"prompt": ["w3 w4"] * 8}),
        processing_class=AutoTokenizer.from_pretrained(directory),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    grads = {n: p.grad for n, p in trainer.model.named_parameters() if p.grad is not None}
    return float(loss.detach()), grads


def compare(directory: Path, name: str, scratch: Path) -> dict[str, float | str | bool]:
    """One row of the table: the largest differences over three random batches."""
    options, settings = CASES[name]
    row: dict[str, float | str | bool] = {"case": name, "loss_diff_max": 0.0, "grad_diff_max": 0.0}
    scale = 0.0
    for seed in range(3):
        documents, prompts, masks = make_documents(seed)
        centre_on_policy(directory, documents)
        ours, our_grads = our_gradient(directory, documents, options)
        with contextlib.redirect_stdout(io.StringIO()):
            theirs, their_grads = trl_gradient(
                directory, padded(documents, prompts, masks), settings, scratch
            )
        assert our_grads.keys() == their_grads.keys()
        row["loss_diff_max"] = max(float(row["loss_diff_max"]), abs(ours - theirs))
        for key, grad in our_grads.items():
            diff = float((grad - their_grads[key]).abs().max())
            row["grad_diff_max"] = max(float(row["grad_diff_max"]), diff)
            scale = max(scale, float(their_grads[key].abs().max()))
        row["loss"] = theirs
    row["grad_max"] = scale
    row["equal"] = float(row["loss_diff_max"]) < LOSS_TOLERANCE and float(
        row["grad_diff_max"]
    ) < GRADIENT_TOLERANCE * max(1.0, scale)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    if importlib.util.find_spec("trl") is None:
        print("TRL is not installed; nothing compared (pip install 'trl==1.16.*' datasets)")
        return 0
    import trl

    torch.set_num_threads(1)
    print(f"TRL {trl.__version__}, torch {torch.__version__}, float32, CPU")
    print(f"{'objective':<24}{'loss (TRL)':>12}{'loss diff':>12}{'grad max':>12}{'grad diff':>12}")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        make_model(directory)
        for name in CASES:
            row = compare(directory, name, Path(folder) / "scratch")
            rows.append(row)
            print(
                f"{name:<24}{row['loss']:>12.6f}{row['loss_diff_max']:>12.2e}"
                f"{row['grad_max']:>12.4f}{row['grad_diff_max']:>12.2e}"
                f"{'' if row['equal'] else '  DIFFERS'}"
            )
    if args.json:
        args.json.write_text(json.dumps({"trl": trl.__version__, "rows": rows}, indent=2) + "\n")
    return 0 if all(r["equal"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
