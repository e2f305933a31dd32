"""Make the tiny model that the environment recipes begin with: the calculator and the game.

    python recipes/warm_start_tools.py --out recipes/models/tiny_tools

Imitates whole episodes of both environments, with the loss on the policy's turns only. The later
ones are flawed on purpose: players guess the answer instead of using the calculator, and guess
anywhere in the range instead of halving it. Plain torch and transformers, as `warm_start.py`, whose
model this is with a few more characters. Invariant: never sees a held-out problem.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch.nn.functional import cross_entropy
from transformers import GenerationConfig, PreTrainedTokenizerFast
from warm_start import (
    CHAT_TEMPLATE,
    EOS,
    EOS_ID,
    IGNORED,
    PAD,
    PAD_ID,
    TOKENS_PER_BATCH,
    UNKNOWN,
    make_model,
    save_tokenizer,
)

from dora_rl.data.chains import ALPHABET
from dora_rl.envs.calculator import Expression, Expressions
from dora_rl.envs.guess import Games

MORE = "+-*?<>!"  # behind the ids of the quick start's model
TOKENS_MAX = 256


@dataclass(frozen=True)
class Piece:
    """A text of an episode; `policy` if the policy wrote it, and the loss is taken there."""

    text: str
    policy: bool


@dataclass(frozen=True)
class Flaws:
    """How often a player guesses instead of calculating, by the last digit of the prompt, so that
    the greedy policy does so too; how often a call is copied wrongly; how often a player of the
    game guesses anywhere in the range."""

    hasty_digit_min: int = 4
    guess_prob_hasty: float = 0.75
    guess_prob_calm: float = 0.25
    slip_prob: float = 0.02
    anywhere_prob: float = 0.9


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character; the first 16 ids are those of the quick start's model."""
    tokens = (PAD, EOS, *ALPHABET, UNKNOWN, *MORE)
    vocab = {token: index for index, token in enumerate(tokens)}
    core = Tokenizer(models.WordLevel(vocab, unk_token=UNKNOWN))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        model_max_length=TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )


def calculation(expression: Expression, flaws: Flaws | None, rng: Random) -> list[Piece]:
    """One episode with the calculator."""
    pieces = [Piece(expression.text + "\n", False)]
    if flaws is not None:
        hasty = int(expression.text[-1]) >= flaws.hasty_digit_min
        if rng.random() < (flaws.guess_prob_hasty if hasty else flaws.guess_prob_calm):
            return [*pieces, Piece(f"={int(rng.random() * 300)}", True)]
    for left, sign, right, result in expression.results():
        if flaws is not None and rng.random() < flaws.slip_prob:
            right = int(rng.random() * 100)
        pieces += [Piece(f"{left}{sign}{right}?", True), Piece(f"{result}\n", False)]
    return [*pieces, Piece(f"={expression.answer}", True)]


def game(row: dict[str, object], flaws: Flaws | None, rng: Random) -> list[Piece]:
    """One game, to the last guess."""
    prompt, secret = str(row["prompt"]), int(str(row["answer"]))
    low, high = int(prompt[:2]), int(prompt[3:5])
    pieces = [Piece(prompt, False)]
    for _ in range(int(str(row["guesses"]))):
        anywhere = flaws is not None and rng.random() < flaws.anywhere_prob
        guess = low + int(rng.random() * (high - low + 1)) if anywhere else (low + high) // 2
        pieces.append(Piece(f"{guess:02d}?", True))
        if guess == secret:
            break
        low, high = (low, guess - 1) if secret < guess else (guess + 1, high)
        pieces.append(Piece("<\n" if secret < guess else ">\n", False))
    return pieces[:-1] if not pieces[-1].policy else pieces


def episodes(
    seed: int, num_total: int, flawed_frac: float, game_frac: float
) -> Iterator[list[Piece]]:
    """First the clean ones, then the flawed share."""
    expressions, games = Expressions(), Games()
    for index in range(num_total):
        rng = Random(f"tools/demonstrations/{seed}/{index}")
        flaws = Flaws() if index >= num_total * (1 - flawed_frac) else None
        if rng.random() < game_frac:
            # Nobody shows how to halve: that is left to reinforcement learning.
            yield game(games.row(seed + 1, index, "train"), Flaws(), rng)
        else:
            yield calculation(expressions.expression(seed + 1, index, "train"), flaws, rng)


def encode(
    tokenizer: PreTrainedTokenizerFast, pieces: Sequence[Piece]
) -> tuple[list[int], list[int]]:
    """Ids and labels; an episode that ends with an answer ends with the end of sequence."""
    ids: list[int] = []
    labels: list[int] = []
    for piece in pieces:
        found = list(tokenizer.backend_tokenizer.encode(piece.text).ids)
        if piece.policy and piece.text.startswith("="):
            found.append(EOS_ID)
        ids += found
        labels += found if piece.policy else [IGNORED] * len(found)
    return ids, labels


def batches(rows: list[tuple[list[int], list[int]]], generator: torch.Generator) -> list[list]:
    """Rows of like length together, in an order that keeps clean before flawed."""
    found: list[list] = []
    for start in range(0, len(rows), 2000):
        window = sorted(rows[start : start + 2000], key=lambda row: len(row[0]))
        here: list[list] = [[]]
        for row in window:
            if (len(here[-1]) + 1) * len(row[0]) > TOKENS_PER_BATCH:
                here.append([])
            here[-1].append(row)
        order = torch.randperm(len(here), generator=generator).tolist()
        found.extend(here[index] for index in order)
    return found


def loss_of(model: torch.nn.Module, batch: Sequence[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross entropy of the policy's tokens. Right padding needs no mask: it is causal."""
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


def imitate(model: torch.nn.Module, plan: list[list], lr: float) -> None:
    """One pass: AdamW, linear warm-up, cosine down to a tenth."""
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=40_000)
    parser.add_argument("--flawed", type=float, default=0.3, help="share of flawed episodes")
    parser.add_argument("--games", type=float, default=0.3, help="share of games")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    start_s = time.perf_counter()
    tokenizer = make_tokenizer()
    model = make_model(len(tokenizer), tokens_max=TOKENS_MAX)
    shown = episodes(args.seed, args.episodes, args.flawed, args.games)
    rows = [encode(tokenizer, pieces) for pieces in shown]
    imitate(model, batches(rows, torch.Generator().manual_seed(args.seed)), args.lr)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD_ID, eos_token_id=EOS_ID, do_sample=True
    )
    model.save_pretrained(args.out)
    save_tokenizer(tokenizer, args.out)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {time.perf_counter() - start_s:.0f} s, in {args.out}")


if __name__ == "__main__":
    main()
