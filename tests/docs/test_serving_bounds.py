"""docs/serving.md has the bounds that the code has."""

from __future__ import annotations

import pytest

from tests.kit.places import ROOT

pytest.importorskip("starlette")
from dora_rl.chat.bounds import FIELDS
from tests.docs.serving_bounds import BLOCK, fields, limits, updated

PAGE = (ROOT / "docs" / "serving.md").read_text()


def test_the_page_is_up_to_date() -> None:
    assert BLOCK.findall(PAGE) == [fields(), limits()], "run `make docs`"
    assert updated(PAGE) == PAGE


def test_every_field_has_its_row() -> None:
    assert all(f"| `{one.name}` |" in fields() for one in FIELDS)


def test_an_older_page_is_noticed() -> None:
    older = PAGE.replace("whole number from 1 to 128", "whole number from 1 to 99")
    assert older != PAGE and updated(older) == PAGE
