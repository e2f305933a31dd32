"""Make the tiny models that the recipes of other packages' environments begin with.

    python recipes/warm_start_packages.py textarena --out runs/models/textarena

Plays the recipe's environment with a player that knows the rules and is often wrong on purpose, and
imitates it, with the loss on what the player wrote. The tokenizer has the common words of these
episodes, and single characters. Plain torch and transformers; sizes and training are those of
`warm_start.py`. Invariant: never sees a held-out prompt.
"""

from __future__ import annotations

import argparse
import re
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from warm_start import (
    EOS,
    EOS_ID,
    IGNORED,
    PAD,
    UNKNOWN,
    Row,
    imitate,
    make_model,
    save,
    wrapped,
)

from dora_rl.envs.base import Row as Asked
from dora_rl.envs.base import Turn
from dora_rl.envs.packages import Rows, TextArena, named

RECIPES = Path(__file__).parent
WORDS = r" ?[A-Za-z]+|\d|\s|[^\w\s]|_"
TOKENS_MAX = 512
Piece = tuple[str, bool]
"""A text of an episode, and whether the player wrote it."""


def spelled(question: str, flaw: float, rng: Random) -> str:
    """The last word backward, or two of its letters exchanged."""
    letters = list(question.split()[-1][::-1])
    if rng.random() < flaw:
        place = rng.randrange(len(letters) - 1)
        letters[place : place + 2] = reversed(letters[place : place + 2])
    return "".join(letters)


def answers(row: dict[str, Any], flaw: float, rng: Random) -> Iterator[Piece]:
    """One answer to a question of reasoning-gym."""
    yield row["prompt"], False
    yield spelled(row["prompt"], flaw, rng), True


def tagged(row: dict[str, Any], flaw: float, rng: Random) -> Iterator[Piece]:
    """One answer to messages, sometimes without its tags."""
    yield "".join(message["content"] for message in row["prompt"]), False
    word = spelled(row["prompt"][-1]["content"], flaw / 2, rng)
    yield (word if rng.random() < flaw / 2 else f"<answer>{word}</answer>"), True


def arena(row: dict[str, Any], game: TextArena, flaw: float, rng: Random) -> Iterator[Piece]:
    """Guesses anywhere that was not tried, and sometimes no number at all."""
    game.reset(Asked(row["prompt"], row["prompt"], columns=row), 0)
    yield row["prompt"], False
    tried: set[int] = set()
    while True:
        guess = rng.choice([n for n in range(1, 16) if n not in tried])
        tried.add(guess)
        said = "[Player]" if rng.random() < flaw else f"[{guess}]"
        yield said, True
        answer = game.step(Turn(said))
        if answer.done:
            return
        yield str(answer.text), False


def guesses(row: dict[str, Any], flaw: float, rng: Random) -> Iterator[Piece]:
    """The server's game, played without the server."""
    secret, tried = rng.randint(1, 7), set[int]()
    yield row["prompt"] + "1-7\n", False
    for number in range(3):
        guess = rng.choice([n for n in range(1, 8) if n not in tried])
        tried.add(guess)
        said = "?" if rng.random() < flaw else str(guess)
        yield said, True
        if guess == secret or said == "?" or number == 2:
            return
        yield "<\n" if secret < guess else ">\n", False


def player(name: str, environment: dict[str, Any]) -> Callable[..., Iterator[Piece]]:
    if name == "textarena":
        kind = named(environment["name"])
        assert kind is not None
        game = kind(**environment["options"])
        return lambda row, flaw, rng: arena(row, game, flaw, rng)
    return {"reasoning_gym": answers, "verifiers": tagged, "openenv": guesses}[name]


def make_tokenizer(texts: Sequence[str]) -> PreTrainedTokenizerFast:
    """Words that every tenth text has are tokens; others are spelled."""
    known = Counter(word for text in texts for word in set(re.findall(WORDS, text)))
    words = {word for word, count in known.items() if 10 * count >= len(texts)}
    words |= {char for text in texts for char in text} | set("0123456789")
    vocab = {word: index for index, word in enumerate((PAD, EOS, UNKNOWN, *sorted(words)))}
    core = Tokenizer(
        models.WordPiece(vocab, unk_token=UNKNOWN, continuing_subword_prefix="")  # pyright: ignore
    )
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    return wrapped(core, TOKENS_MAX)


def encode(tokenizer: PreTrainedTokenizerFast, pieces: Sequence[Piece]) -> Row:
    """Labels are what the player wrote, each turn with the end of sequence."""
    ids: list[int] = []
    labels: list[int] = []
    for text, is_player in pieces:
        found = list(tokenizer.backend_tokenizer.encode(text).ids)
        found += [EOS_ID] if is_player else []
        ids += found
        labels += found if is_player else [IGNORED] * len(found)
    return ids, labels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=["reasoning_gym", "textarena", "verifiers", "openenv"])
    parser.add_argument("--out", type=Path, required=True, help="directory of the model")
    parser.add_argument("--episodes", type=int, default=16_000)
    parser.add_argument("--flawed", type=float, default=0.25, help="share of flawed episodes")
    parser.add_argument("--flaw", type=float, default=0.6, help="how often they are wrong")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    start_s = time.perf_counter()
    (environment,) = tomllib.loads((RECIPES / f"{args.name}.toml").read_text())["env"][
        "environments"
    ]
    rows = Rows(environment["name"], environment["options"])
    play, shown = player(args.name, environment), list[list[Piece]]()
    for index in range(args.episodes):
        rng = Random(f"packages/{index}")
        flaw = args.flaw if index >= args.episodes * (1 - args.flawed) else 0.0
        shown.append(list(play(rows.row(1, index, "train"), flaw, rng)))
    tokenizer = make_tokenizer([text for pieces in shown for text, _ in pieces])
    model = make_model(len(tokenizer), tokens_max=TOKENS_MAX)
    imitate(model, [encode(tokenizer, pieces) for pieces in shown], args.lr, seed=0)
    save(model, tokenizer, args.out)
    print(f"{len(tokenizer)} words, {time.perf_counter() - start_s:.0f} s, in {args.out}")


if __name__ == "__main__":
    main()
