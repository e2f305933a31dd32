"""docs/config.md is what the types say today, and says something about every key."""

from __future__ import annotations

from typing import Literal

import pytest
from document_blocks import ROOT
from pydantic import BaseModel, Field

from dora_rl.commands.config_reference import comments_of, entries_of, kind_of, reference
from dora_rl.config import RunConfig


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "config.md").read_text() == reference(), "run `make docs`"


@pytest.mark.parametrize("section", RunConfig.model_fields)
def test_every_key_is_described(section: str) -> None:
    kind = RunConfig.model_fields[section].annotation
    assert isinstance(kind, type) and issubclass(kind, BaseModel)
    for table in (kind, *entries_of(kind)):
        said = comments_of(table)
        silent = [key for key in table.model_fields if not said.get(key)]
        assert not silent, f"[{section}] write a comment at {silent} of {table.__name__}"


class Example(BaseModel):
    """A section."""

    # What it is,
    # in two lines.
    first: int = Field(default=1, ge=0)
    # -- a heading
    second: Literal["a", "b"] = "a"  # beside it
    third: tuple[str, ...] = Field(
        default=(),
    )  # behind it
    fourth: float | None = Field(default=None, gt=0, le=1)


def test_comments_become_descriptions() -> None:
    assert comments_of(Example) == {
        "first": "What it is, in two lines.",
        "second": "beside it",
        "third": "behind it",
        "fourth": "",
    }


def test_kinds_in_words() -> None:
    kinds = [kind_of(field) for field in Example.model_fields.values()]
    assert kinds == ["integer ≥ 0", "`a` | `b`", "list of string", "number > 0 ≤ 1"]
