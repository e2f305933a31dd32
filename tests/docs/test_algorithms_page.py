"""docs/algorithms.md lists every loss, advantage, aggregation, correction and KL, as they are."""

from __future__ import annotations

import pytest

from dora_rl.trainer.losses.recipes import (
    ADVANTAGES,
    AGGREGATIONS,
    CORRECTIONS,
    KL_ESTIMATORS,
    OLD_LOGPROBS,
    RECIPES,
)
from tests.kit.places import ROOT

TEXT = (ROOT / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_is_in_the_table_as_it_is(name: str) -> None:
    recipe = RECIPES[name]
    (row,) = [line for line in TEXT.splitlines() if line.startswith(f"| `{name}` |")]
    assert f"`{recipe.advantage}`" in row
    if recipe.constant_tokens == 1:
        assert "sum per sequence" in row
    else:
        assert f"`{recipe.aggregation}`" in row
    clips = [cell for cell in row.split("|") if " / " in cell]
    if clips:
        low, high = clips[0].split(",")[0].split(" / ")
        assert (float(low), float(high)) == (recipe.clip_low, recipe.clip_high)
    cap = [float(cell.partition("cap ")[2]) for cell in row.split("|") if "cap " in cell]
    assert cap == ([recipe.dual_clip] if recipe.dual_clip else [])
    if recipe.behaviour_ratio_max:
        assert f"`behaviour_ratio_max` ({recipe.behaviour_ratio_max:g})" in TEXT
    for correction in recipe.corrections:
        assert f"`{correction}`" in row


def test_nothing_is_left_out() -> None:
    names = [*ADVANTAGES, *AGGREGATIONS, *CORRECTIONS, *KL_ESTIMATORS, *OLD_LOGPROBS]
    assert [name for name in names if f"`{name}`" not in TEXT] == []
