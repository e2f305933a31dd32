"""Pages for users of other frameworks: every key of ours that they name exists."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from dora_rl.api.words import KNOWN_AS
from dora_rl.config import RunConfig
from tests.docs.document_blocks import prose
from tests.kit.places import ROOT

PAGES = [ROOT / "docs" / f"{name}.md" for name in ("coming_from_trl", "coming_from_verl", "python")]
KEY = re.compile(r"`(\w+(?:\[\])?(?:(?:\.|__)\w+(?:\[\])?)+)(?:=[^`]*)?`")


def is_key(kind: type[BaseModel], parts: list[str]) -> bool:
    """`data.train[].prompt_column` leads through the tables of a list."""
    name, rest = parts[0].removesuffix("[]"), parts[1:]
    if name not in kind.model_fields:
        return False
    inner: list[object] = [kind.model_fields[name].annotation]
    for one in inner:
        inner += get_args(one)
    tables = [one for one in inner if isinstance(one, type) and issubclass(one, BaseModel)]
    return any(is_key(table, rest) for table in tables) if rest else True


def our_keys(page: Path) -> list[str]:
    """Of a table the second column, of other lines whatever begins with one of our sections."""
    found: list[str] = []
    for line in prose(page.read_text()).splitlines():
        text = line.split(" | ", 2)[1] if line.startswith("| `") and " | " in line else line
        if line.startswith("|") and not line.startswith("| `"):
            continue
        found += KEY.findall(text)
    sections = {*RunConfig.model_fields}
    return [key for key in found if re.split(r"\.|__", key)[0] in sections]


def wrong_keys(text_keys: list[str]) -> list[str]:
    return [key for key in text_keys if not is_key(RunConfig, re.split(r"\.|__", key))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_key_of_ours_exists(page: Path) -> None:
    keys = our_keys(page)
    assert wrong_keys(keys) == []
    assert len(keys) > (30 if page.stem.startswith("coming") else 0)


FIRST = re.compile(r"`([\w.]+)`")
TABLE = [
    line.split(" | ", 2)[:2]
    for page in PAGES[:2]
    for line in page.read_text().splitlines()
    if line.startswith("| `")
]
THEIRS = [(name.split(".")[-1], ours) for first, ours in TABLE for name in FIRST.findall(first)]
ARGUMENTS = {"data": "data.train", "eval_data": "data.eval", "run_dir": "runtime.run_dir"}


@pytest.mark.parametrize("name", KNOWN_AS)
def test_keywords_of_others_are_called_what_the_pages_call_them(name: str) -> None:
    """Those that the example of a page names, and those of its tables."""
    meant = KNOWN_AS[name]
    key = ARGUMENTS.get(meant, meant.replace("__", "."))
    told = [ours for theirs, ours in THEIRS if theirs == name]
    if told:
        assert any(f"`{key}`" in ours for ours in told)
    else:
        assert name in {"train_dataset", "reward_funcs", "eval_dataset"}
    assert meant in {"data", "eval_data", "reward", "run_dir"} or not wrong_keys([key])


def test_a_wrong_key_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| `lr` | `trainer.learning`, `data.train[].colum` |\n`rollout.tokens_max=3`\n")
    assert our_keys(page) == ["trainer.learning", "data.train[].colum", "rollout.tokens_max"]
    assert wrong_keys(our_keys(page)) == ["trainer.learning", "data.train[].colum"]
