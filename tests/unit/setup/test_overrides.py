"""Other files on the command line are read with the recipe's columns."""

from __future__ import annotations

from pathlib import Path

from dora_rl.config import DataSource
from dora_rl.setup.settings import load_config

RECIPE = """
[model]
path = "m"
[data]
train = [{ path = "a.jsonl", prompt_column = "question", answer_after = "####", name = "mine" }]
eval = [
  { path = "b.jsonl", prompt_column = "question" },
  { path = "c.jsonl", prompt_column = "problem" },
]
[reward]
functions = ["exact"]
"""


def sources(tmp_path: Path, *overrides: str) -> dict[str, list[DataSource]]:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    data = load_config(path, overrides).data
    return {"train": list(data.train), "eval": list(data.eval)}


def test_a_path_keeps_the_columns_of_the_recipe(tmp_path: Path) -> None:
    (source,) = sources(tmp_path, "data.train=other.jsonl")["train"]
    assert (source.path, source.prompt_column, source.answer_after) == (
        "other.jsonl",
        "question",
        "####",
    )
    assert source.name == ""  # the name was of the other file


def test_several_paths_each_keep_them(tmp_path: Path) -> None:
    found = sources(tmp_path, 'data.train=["x.jsonl", "y.jsonl"]')["train"]
    assert [(s.path, s.prompt_column) for s in found] == [
        ("x.jsonl", "question"),
        ("y.jsonl", "question"),
    ]


def test_a_table_says_all_itself(tmp_path: Path) -> None:
    (source,) = sources(tmp_path, 'data.train=[{path = "x.jsonl", prompt_column = "p"}]')["train"]
    assert (source.prompt_column, source.answer_after) == ("p", "")


def test_where_the_recipe_has_several_ways_to_read_none_is_guessed(tmp_path: Path) -> None:
    (source,) = sources(tmp_path, "data.eval=x.jsonl")["eval"]
    assert source.prompt_column == "prompt"
