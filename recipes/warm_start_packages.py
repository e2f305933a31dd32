"""Make the tiny models that the recipes of other packages' environments begin with.

    python recipes/warm_start_packages.py textarena --out models/textarena

Plays the recipe's environment with a player that knows the rules and is often wrong on purpose, and
imitates it, with the loss on what the player wrote. The tokenizer has the words of these episodes,
and digits one by one. Plain torch and transformers, as `warm_start.py`, whose sizes and training
these are. Invariant: never sees a held-out prompt.
"""

from __future__ import annotations

import argparse
import re
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from warm_start import CHAT_TEMPLATE, EOS, EOS_ID, IGNORED, PAD, Row, imitate, make_model, save

from dora_rl.envs.base import Row as Asked
from dora_rl.envs.base import Turn
from dora_rl.envs.packages import Rows, TextArena, named

RECIPES = Path(__file__).parent
WORDS = r" ?[A-Za-z]+|\d|\s|[^\w\s]|_"
TOKENS_MAX = 512
Piece = tuple[str, bool]
"""A text of an episode, and whether the player wrote it."""


def wrong_sum(answer: str, rng: Random) -> str:
    return str(int(answer) + rng.choice([-2, -1, 1, 2]))


def answers(row: dict[str, Any], flaw: float, rng: Random) -> Iterator[Piece]:
    """One answer to a question of reasoning-gym."""
    yield row["prompt"], False
    yield wrong_sum(row["answer"], rng) if rng.random() < flaw else row["answer"], True


def tagged(row: dict[str, Any], flaw: float, rng: Random) -> Iterator[Piece]:
    """One answer in tags to messages; the right one is worked out from the question."""
    yield "".join(message["content"] for message in row["prompt"]), False
    left = re.search(r": (.*) =", row["prompt"][-1]["content"])
    assert left is not None
    answer = str(sum(int(sign + digits) for sign, digits in re.findall(r"(-? ?)(\d+)", left[1].replace("- ", "-"))))
    said = wrong_sum(answer, rng) if rng.random() < flaw else answer
    yield f"<answer>{said}</answer>", True


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
    secret, tried = rng.randint(1, 15), set[int]()
    yield row["prompt"] + "01-15\n", False
    for _ in range(4):
        guess = rng.choice([n for n in range(1, 16) if n not in tried])
        tried.add(guess)
        said = "?" if rng.random() < flaw else f"{guess:02d}"
        yield said, True
        if guess == secret or said == "?":
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
    words = sorted({word for text in texts for word in re.findall(WORDS, text)} | set("0123456789"))
    vocab = {word: index for index, word in enumerate((PAD, EOS, "<unk>", *words))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(WORDS), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=EOS,
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=TOKENS_MAX,
        clean_up_tokenization_spaces=False,
    )


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
    parser.add_argument("--episodes", type=int, default=12_000)
    parser.add_argument("--flawed", type=float, default=0.25, help="share of flawed episodes")
    parser.add_argument("--flaw", type=float, default=0.6, help="how often they are wrong")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    start_s = time.perf_counter()
    (environment,) = tomllib.loads((RECIPES / f"{args.name}.toml").read_text())["env"]["environments"]
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
