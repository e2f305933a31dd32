"""The shipped recipes on cards of several sizes, from the shapes of the models alone.

The table is what the plan chooses by itself; a change of the plan shows here.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from dora_rl.config import RunConfig
from dora_rl.setup.devices import Card
from dora_rl.setup.layout import plan_layout
from dora_rl.setup.memory import GB, MemoryPlan
from dora_rl.setup.plan import memory_problems, plan_run, planned
from tests.kit.places import ROOT
from tests.unit.setup import memory_program

SHAPES = memory_program.load().SHAPES


def plan_recipe(
    folder: Path, name: str, size_gb: float, recipe: str = "gsm8k_1.5b"
) -> tuple[MemoryPlan, list[str]]:
    """The recipe as it is, but for the model, which is on the command line."""
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    data = tomllib.loads((ROOT / "recipes" / f"{recipe}.toml").read_text())
    data["model"]["path"] = str(folder)
    config = RunConfig.model_validate(data)
    size = int(size_gb * GB)
    cards = {"0": Card(size, size)}
    layout = plan_layout(config, "cuda", tuple(cards))
    plan = plan_run(config, layout, cards)
    assert plan is not None
    print("\n".join(plan.table()))
    return plan.devices[0].memory, memory_problems(config, planned(layout, plan))


# Model, recipe, GB: checkpointing, tokens of a pack at least, resident versions, GB of KV at least.
CHOSEN = [
    ("1.5b", "gsm8k_1.5b", 150, "none", 16_384, 3, 28.0),
    ("1.5b", "gsm8k_1.5b", 140, "none", 16_384, 3, 15.0),
    ("1.5b", "gsm8k_1.5b", 80, "layer", 32_768, 3, 14.5),
    ("1.5b", "gsm8k_1.5b", 48, "layer", 4_096, 2, 2.5),
    ("1.5b", "gsm8k_1.5b", 40, "layer", 2_048, 1, 0.8),
    ("0.6b", "gsm8k_1.5b", 140, "none", 16_384, 3, 45.0),
    ("0.6b", "gsm8k_1.5b", 80, "layer", 32_768, 3, 30.0),
    ("0.6b", "gsm8k_1.5b", 40, "layer", 16_384, 3, 10.0),
    ("0.6b", "gsm8k_1.5b", 24, "layer", 8_192, 2, 3.0),
    ("135m", "gsm8k_1.5b", 140, "none", 32_768, 3, 20.0),
    ("135m", "gsm8k_1.5b", 80, "none", 32_768, 3, 20.0),
    ("135m", "gsm8k_1.5b", 40, "none", 16_384, 3, 10.0),
    ("135m", "gsm8k_135m", 24, "layer", 32_768, 3, 5.0),
    ("135m", "gsm8k_135m", 12, "layer", 4_096, 3, 1.0),
    ("1.5b", "gsm8k_1.5b_lora", 80, "layer", 32_768, 3, 20.0),
    ("1.5b", "gsm8k_1.5b_lora", 24, "layer", 8_192, 3, 2.5),
]


@pytest.mark.parametrize(("name", "recipe", "size", "how", "pack", "versions", "kv"), CHOSEN)
def test_a_recipe_is_planned_without_edits(
    tmp_path: Path, name: str, recipe: str, size: int, how: str, pack: int, versions: int, kv: float
) -> None:
    plan, problems = plan_recipe(tmp_path, name, size, recipe)
    assert plan.fits and problems == [] and plan.planned_bytes <= size * GB * 0.97 + 1
    assert (plan.checkpointing, plan.versions_max) == (how, versions)
    assert plan.pack_tokens >= pack and plan.kv_bytes >= kv * GB


def test_a_card_that_is_too_small_says_what_to_do(tmp_path: Path) -> None:
    plan, (line,) = plan_recipe(tmp_path, "1.5b", 24)
    assert not plan.fits and "trainer.lora_rank=32" in line


def test_less_memory_never_buys_more(tmp_path: Path) -> None:
    """The order of cost: what the plan gives up stays given up on smaller cards."""
    sizes = (150, 120, 100, 80, 64, 48, 44, 40)
    plans = [plan_recipe(tmp_path, "1.5b", size)[0] for size in sizes]
    assert all(plan.fits for plan in plans)
    versions = [plan.versions_max for plan in plans]
    assert versions == sorted(versions, reverse=True)
    kept = [plan.checkpointing == "none" for plan in plans]
    assert kept == sorted(kept, reverse=True)


def test_fewer_are_decoded_at_once_where_the_cache_is_small(tmp_path: Path) -> None:
    """A row of logits for each request that the cache has no room for would be wasted."""
    assert plan_recipe(tmp_path, "1.5b", 150)[0].num_requests == 768
    small = plan_recipe(tmp_path, "1.5b", 40)[0]
    assert 64 <= small.num_requests < 768
    assert small.evaluator_requests == 32 and small.evaluator_step_tokens == 512
