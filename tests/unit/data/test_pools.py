"""Pools of a curriculum: every row in one of them, once an epoch, easy ones first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dora_rl.config import DataConfig
from dora_rl.data.prompts import PromptSource, open_data, open_prompts
from dora_rl.types import UserError


class Characters:
    """One token a character."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [ord(char) for char in text]


def source(path: str | Path, part: str = "train", **keys: Any) -> PromptSource:
    config = DataConfig(train=[str(path)], eval=[str(path)], **({"curriculum": "pools"} | keys))
    return open_prompts(config, Characters(), part)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    hard = [5, 1, 4, 1, 3, 2, 2, 9, 6, 5, 0]
    made = [{"prompt": f"p{i}", "answer": "a", "difficulty": d} for i, d in enumerate(hard)]
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def texts(prompts: PromptSource, pool: int, num: int) -> list[str]:
    return [prompts.prompt(pool + k * prompts.num_pools).text for k in range(num)]


@pytest.mark.parametrize("shuffle", [True, False])
def test_each_row_is_in_one_pool_and_comes_once_an_epoch(rows: Path, shuffle: bool) -> None:
    prompts = source(rows, curriculum_pools=3, shuffle=shuffle)
    seen: list[str] = []
    hardest = -1.0
    for pool, size in enumerate((3, 4, 4)):
        first, second = texts(prompts, pool, size), texts(prompts, pool, 2 * size)[size:]
        assert len(set(first)) == size and set(first) == set(second)
        assert shuffle or first == second
        seen += first
        hard = [float(str(prompts.prompt(pool + 3 * k).columns["difficulty"])) for k in range(size)]
        assert min(hard) >= hardest, "the pools go from easy to hard"
        hardest = max(hard)
    assert sorted(seen) == sorted(f"p{i}" for i in range(11))
    assert prompts.prompt(7).index == 7


def test_rows_are_pools_of_their_own(rows: Path) -> None:
    prompts = source(rows, curriculum="rows", curriculum_column="nothing")
    assert prompts.num_pools == 11
    order = [prompts.prompt(i).text for i in range(11)]
    assert sorted(order) == sorted(f"p{i}" for i in range(11))
    assert order != [f"p{i}" for i in range(11)]
    assert order == [prompts.prompt(i).text for i in range(11, 22)], "a place is always its row"


def test_an_endless_source_is_divided_block_by_block() -> None:
    prompts = source("dora_rl.data.tasks:Chains", curriculum_pools=4)
    means: list[float] = []
    seen: set[str] = set()
    for pool in range(4):
        found = [prompts.prompt(pool + 4 * k) for k in range(96)]
        means.append(sum(float(str(p.columns["difficulty"])) for p in found) / 96)
        seen |= {p.text for p in found}
    assert means == sorted(means) and means[3] > 4 * means[0]
    plain = source("dora_rl.data.tasks:Chains", curriculum="off")
    assert seen == {plain.prompt(i).text for i in range(3 * 128)}


def test_every_source_has_pools_of_its_own(rows: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_text(rows.read_text().replace('": "p', '": "q'))
    config = DataConfig(train=[str(rows), str(other)], curriculum="pools", curriculum_pools=2)
    prompts = open_prompts(config, Characters())
    assert prompts.num_pools == 4
    for pool in range(4):
        found = texts(prompts, pool, 40)
        assert all(text.startswith("pq"[pool % 2]) for text in found)
        assert len(set(found)) == (5, 6)[pool // 2]


def test_a_source_that_is_one_pool_needs_no_difficulty(rows: Path) -> None:
    prompts = source(rows, curriculum_pools=1, curriculum_column="nothing")
    assert sorted(texts(prompts, 0, 11)) == sorted(f"p{i}" for i in range(11))


@pytest.mark.parametrize(
    ("keys", "line"),
    [
        ({"curriculum_column": "level"}, r"line 1: 'level' is None, not a number; set data"),
        ({"curriculum_pools": 12}, r"curriculum_pools = 12: .* has 11 rows; give fewer"),
    ],
)
def test_what_cannot_be_divided_is_one_line(rows: Path, keys: dict[str, Any], line: str) -> None:
    with pytest.raises(UserError, match=line):
        source(rows, **keys).prompt(0)


def test_rows_need_one_source_that_ends(rows: Path) -> None:
    with pytest.raises(UserError, match="one source that ends"):
        source("dora_rl.data.tasks:Chains", curriculum="rows")


def test_evaluations_have_no_pools_and_a_fingerprint_tells_them(rows: Path) -> None:
    assert source(rows, "eval", curriculum_pools=3).num_pools == 0
    plain, pools = source(rows, curriculum="off"), source(rows, curriculum_pools=3)
    assert plain.fingerprint() != pools.fingerprint()
    assert not pools.began_with(plain.fingerprint())
    config = DataConfig(train=[str(rows)], curriculum="pools", curriculum_pools=3)
    assert open_data(config, Characters())[1] is None
