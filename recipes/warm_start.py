"""Make the tiny model that the quick start begins with: tokenizer, demonstrations, warm start.

    python recipes/warm_start.py --out recipes/models/tiny

Imitates demonstrations of the chains task, the last of them flawed on purpose, so that the skill
is there but half of the answers are guesses: something for reinforcement learning to sharpen. Plain
torch and transformers; never uses the learner or the engine of dora_rl, and never sees a held-out
problem. Invariant: the same seed gives the same demonstrations and the same tokenizer; weights may
differ in rounding between machines, which is why the result is shipped.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

import torch
from chain_demonstrations import (
    ALPHABET,
    Demonstration,
    Flaws,
    demonstrations,
    response_tokens_max,
)
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dora_rl.data import chains
from dora_rl.data.chains import ChainSpec, Split

PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
PAD_ID, EOS_ID = 0, 1
# A conversation is the plain text of its messages: the task knows no roles.
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKENS_PER_BATCH = 2048
NUM_PROMPTS = 1000  # held-out ones, to report the accuracy
IGNORED = -100  # the label that cross_entropy leaves out

Row: TypeAlias = tuple[list[int], list[int]]  # token ids and labels


def wrapped(core: Tokenizer, tokens_max: int) -> PreTrainedTokenizerFast:
    """As a model directory has it."""
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=tokens_max,
        clean_up_tokenization_spaces=False,
    )


def make_tokenizer(tokens_max: int, more: str = "") -> PreTrainedTokenizerFast:
    """One token per character. Ids: <pad> 0, <eos> 1, the alphabet in its order, <unk> 15, more."""
    tokens = (PAD, EOS, *ALPHABET, UNKNOWN, *more)
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return wrapped(core, tokens_max)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """The tokenizer under the class name that transformers 4 knows too, for engines that still
    use it."""
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, eos_token_id=EOS_ID, do_sample=True
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    path = out / "tokenizer_config.json"
    written = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    path.write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")


def make_model(vocab_size: int, tokens_max: int) -> Qwen3ForCausalLM:
    """Qwen3 with 0.4 M parameters; sizes are multiples of 16, kind to CPU and GPU kernels."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=tokens_max,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        pad_token_id=PAD_ID,
        eos_token_id=EOS_ID,
        bos_token_id=None,
        dtype="float32",
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, demo: Demonstration) -> Row:
    """The demonstration with the end of sequence; the prompt has no labels."""
    ids = [*tokenizer.backend_tokenizer.encode(demo.prompt + demo.response).ids, EOS_ID]
    num_prompt = len(demo.prompt)
    return ids, [IGNORED] * num_prompt + ids[num_prompt:]


def batches(rows: Sequence[Row], generator: torch.Generator) -> list[list[Row]]:
    """Rows of like length together, TOKENS_PER_BATCH a batch, in an order that keeps the phases.

    Rows are sorted within windows of 2,000, so the flawed demonstrations still come last.
    """
    found: list[list[Row]] = []
    for start in range(0, len(rows), 2000):
        window = sorted(rows[start : start + 2000], key=lambda row: len(row[0]))
        here: list[list[Row]] = [[]]
        for row in window:
            if (len(here[-1]) + 1) * len(row[0]) > TOKENS_PER_BATCH:
                here.append([])
            here[-1].append(row)
        order = torch.randperm(len(here), generator=generator).tolist()
        found.extend(here[index] for index in order)
    return found


def loss_of(model: Qwen3ForCausalLM, batch: list[Row]) -> torch.Tensor:
    """Mean cross entropy of the labels. Right padding needs no mask: it is causal."""
    length = max(len(ids) for ids, _ in batch)
    ids_BT = torch.zeros(len(batch), length, dtype=torch.long)
    labels_BT = torch.full((len(batch), length), IGNORED)
    for index, (ids, labels) in enumerate(batch):
        ids_BT[index, : len(ids)] = torch.tensor(ids)
        labels_BT[index, : len(ids)] = torch.tensor(labels)
    logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
    return cross_entropy(
        logits_BTV.flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=IGNORED
    )


def imitate(model: Qwen3ForCausalLM, rows: Sequence[Row], lr: float, seed: int) -> None:
    """One pass over the rows: AdamW, linear warm-up, cosine down to a tenth."""
    plan = batches(rows, torch.Generator().manual_seed(seed))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.01, foreach=True
    )
    model.train()
    for index, batch in enumerate(plan):
        progress = index / len(plan)
        scale = min(1.0, progress / 0.03, 0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = lr * max(scale, 1e-3)
        loss = loss_of(model, batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if index % 100 == 0 or index + 1 == len(plan):
            print(f"batch {index + 1}/{len(plan)} loss {loss.item():.4f}", flush=True)


@torch.inference_mode()
def respond(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    texts: Sequence[str],
    tokens_max: int,
    temperature: float,
) -> list[str]:
    """One response to each prompt (all of one length), greedy at temperature 0."""
    ids_BT = tokenizer(list(texts), return_tensors="pt")["input_ids"]
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    out_BT = model.generate(  # pyright: ignore[reportAttributeAccessIssue]
        ids_BT,
        attention_mask=torch.ones_like(ids_BT),
        max_new_tokens=tokens_max,
        **(sampling if temperature > 0 else {"do_sample": False}),
    )
    return tokenizer.batch_decode(out_BT[:, ids_BT.shape[1] :], skip_special_tokens=True)


def accuracy(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    spec: ChainSpec,
    temperature: float,
) -> dict[str, float]:
    """Held-out accuracy, of all prompts and of the tenth with the most steps, and lengths."""
    problems = [chains.problem_at(spec, Split.HELDOUT, 0, index) for index in range(NUM_PROMPTS)]
    # A batch lasts as long as its longest row, so like chains go together.
    problems.sort(key=lambda problem: problem.num_steps)
    model.eval()
    texts: list[str] = []
    for start in range(0, NUM_PROMPTS, 100):
        prompts = [problem.text for problem in problems[start : start + 100]]
        tokens_max = response_tokens_max(spec) + 8
        texts.extend(respond(model, tokenizer, prompts, tokens_max, temperature))
    right = [chains.reward(text, p.answer) for text, p in zip(texts, problems, strict=True)]
    lengths = sorted(len(text) + 1 for text in texts)
    tenth = right[-(NUM_PROMPTS // 10) :]
    return {
        "accuracy": sum(right) / NUM_PROMPTS,
        "accuracy_longest_tenth": sum(tenth) / len(tenth),
        "length_median": lengths[NUM_PROMPTS // 2],
        "length_p99": lengths[NUM_PROMPTS * 99 // 100],
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--demonstrations", type=int, default=40_000)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    spec, start_s = ChainSpec(), time.perf_counter()
    tokenizer = make_tokenizer(tokens_max=512)
    model = make_model(len(tokenizer), tokens_max=512)
    demos = list(demonstrations(spec, args.seed, args.demonstrations, flaws=Flaws()))
    imitate(model, [encode(tokenizer, demo) for demo in demos], args.lr, args.seed)
    save(model, tokenizer, args.out)
    for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        print(name, json.dumps(accuracy(model, tokenizer, spec, temperature)))
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {time.perf_counter() - start_s:.0f} s, in {args.out}")


if __name__ == "__main__":
    main()
