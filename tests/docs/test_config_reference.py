"""docs/config.md is what the types say today, and says something about every key."""

from __future__ import annotations

from typing import Literal

import pytest
from pydantic import BaseModel, Field

from dora_rl.config import ModelConfig, RunConfig
from tests.docs.config_reference import entries_of, kind_of, reference, texts_of
from tests.kit.places import ROOT

SECTIONS = list(RunConfig.model_fields)


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_is_described(section: str) -> None:
    kind = RunConfig.model_fields[section].annotation
    assert isinstance(kind, type) and issubclass(kind, BaseModel)
    for table in (kind, *entries_of(kind)):
        said = texts_of(table)
        silent = [key for key in table.model_fields if not said.get(key)]
        assert not silent, f"[{section}] write a text below {silent} of {table.__name__}"


class Example(BaseModel):
    """A section."""

    first: int = Field(default=1, ge=0)
    """What it is,
    in two lines."""
    # A heading.
    second: Literal["a", "b"] = "a"
    """Below it."""
    third: tuple[str, ...] = Field(
        default=(),
    )
    """Below all of it."""
    fourth: float | None = Field(default=None, gt=0, le=1)


def test_the_texts_below_keys_become_descriptions() -> None:
    assert texts_of(Example) == {
        "first": "What it is, in two lines.",
        "second": "Below it.",
        "third": "Below all of it.",
    }


def test_every_description_is_whole_sentences() -> None:
    kinds = [type(getattr(RunConfig(model=ModelConfig(path="x")), s)) for s in SECTIONS]
    tables = [table for kind in kinds for table in (kind, *entries_of(kind))]
    for key, text in ((key, text) for table in tables for key, text in texts_of(table).items()):
        assert text[0].isupper() or text[0] == "`", (key, text)
        assert text.endswith("."), (key, text)


def test_kinds_in_words() -> None:
    kinds = [kind_of(field) for field in Example.model_fields.values()]
    assert kinds == ["integer ≥ 0", "`a` | `b`", "list of string", "number > 0 ≤ 1"]
