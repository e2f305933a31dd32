"""Make the tiny model that the environment recipes begin with: the calculator and the game.

    python recipes/warm_start_tools.py --out recipes/models/tiny_tools

Imitates whole episodes of both environments, with the loss on the policy's turns only. The later
ones are flawed on purpose: players guess the answer instead of using the calculator, and guess
anywhere in the range instead of halving it. Plain torch and transformers, as `warm_start.py`, whose
model this is with a few more characters. Invariant: never sees a held-out problem.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import PreTrainedTokenizerFast
from warm_start import EOS_ID, IGNORED, Row, imitate, make_model, make_tokenizer, save

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


def encode(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[Piece]) -> Row:
    """Labels are the policy's tokens; behind an answer comes the end of sequence."""
    ids: list[int] = []
    labels: list[int] = []
    for piece in pieces:
        found = list(tokenizer.backend_tokenizer.encode(piece.text).ids)
        if piece.policy and piece.text.startswith("="):
            found.append(EOS_ID)
        ids += found
        labels += found if piece.policy else [IGNORED] * len(found)
    return ids, labels


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
    # The first 16 ids are those of the quick start's model.
    tokenizer = make_tokenizer(TOKENS_MAX, MORE)
    model = make_model(len(tokenizer), tokens_max=TOKENS_MAX)
    shown = episodes(args.seed, args.episodes, args.flawed, args.games)
    rows = [encode(tokenizer, pieces) for pieces in shown]
    imitate(model, rows, args.lr, args.seed)
    save(model, tokenizer, args.out)
    num_parameters = sum(p.numel() for p in model.parameters())
    print(f"{num_parameters} parameters, {time.perf_counter() - start_s:.0f} s, in {args.out}")


if __name__ == "__main__":
    main()
