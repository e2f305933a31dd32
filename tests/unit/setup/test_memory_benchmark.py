"""`benchmarks/memory.py`: which measured phase stands against which line of the plan."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.engine.tensors.weights import ModelWeights
from dora_rl.model.directory import read_spec
from dora_rl.setup.memory import GB, num_params, slots_params
from tests.unit.setup import memory_program


@pytest.fixture(scope="module")
def bench() -> Any:
    return memory_program.load()


LEARNER = {
    "frozen base": 0,
    "masters": 6 * GB,
    "gradients": 6 * GB,
    "moments": 12 * GB,
    "handover": 3 * GB,
    "pack": 60 * GB,
    "pack, held": 63 * GB,
    "frozen version": 25 * GB,
    "frozen version, held": 26 * GB,
}
ENGINE = {"KV": 10 * GB, "weights and KV": 19 * GB, "work": 21 * GB, "work, held": 22 * GB}


@pytest.mark.parametrize("case", ["135m", "0.6b", "1.5b", "1.5b-lora", "long", "two"])
def test_every_line_of_the_plan_is_measured(bench: Any, case: str, tmp_path: Path) -> None:
    config = bench.configure(case, tmp_path, 0.0)
    plan, device = bench.plan_case(config, 150 * GB)
    assert plan.fits and ("instance1" in device.seats.names) == (case == "two")
    for who in device.seats.names:
        found = {"phases": LEARNER if who == "learner" else ENGINE}
        rows = bench.lines_of(device, who, found, GB // 2)
        assert len(rows) == 1 + sum(line.who == who for line in device.memory.lines)
        assert all(row["measured"] is not None for row in rows)
        assert sum(row["planned"] for row in rows[:-1]) == rows[-1]["planned"]
        by_name = {row["what"].split()[0].rstrip(":"): row["measured"] for row in rows}
        assert by_name["context"] == GB // 2
        if who == "learner":
            pack = by_name.get("a")
            assert by_name.get("the", 3 * GB) == 3 * GB
            assert pack in (36 * GB, 1 * GB) and by_name["all"] == 66.5 * GB
        else:
            assert by_name["graphs"] == 3 * GB and by_name["KV"] == 10 * GB
            assert by_name["all"] == 22.5 * GB


def test_what_failed_or_is_not_known_has_no_figure(bench: Any, tmp_path: Path) -> None:
    config = bench.configure("0.6b", tmp_path, 0.0)
    _, device = bench.plan_case(config, 80 * GB)
    rows = bench.lines_of(device, "learner", {"failed": "out of memory"}, None)
    assert all(row["measured"] is None for row in rows)
    assert bench.shown(rows[0]).endswith("-      -")
    assert bench.has_failed({"fits": True, "workers": {"learner": {"failed": "x"}}})
    assert bench.has_failed({"case": "long", "failed": "not begun"})
    assert not bench.has_failed({"fits": True, "workers": {"learner": {"notes": []}}})


@pytest.mark.parametrize("case", ["1.5b-lora", "0.6b"])
def test_the_cases_for_small_cards_are_planned(bench: Any, case: str, tmp_path: Path) -> None:
    plan, device = bench.plan_case(bench.configure(case, tmp_path, 24.0), 150 * GB)
    assert plan.fits and plan.enforced and device.memory.total_bytes == 24 * GB


@pytest.mark.parametrize(("rank", "slots"), [(32, 3), (8, 2), (64, 5)])
def test_adapters_are_planned_as_an_engine_stacks_them(
    bench: Any, rank: int, slots: int, tmp_path: Path
) -> None:
    spec = read_spec(bench.configure("1.5b-lora", tmp_path, 0.0).model.path)
    weights = ModelWeights(spec, slots, "meta", "bfloat16", rank)
    assert weights.adapters is not None
    held = weights.bytes_per_version + sum(up.nbytes for up in weights.adapters.b.values())
    planned = 2 * (num_params(spec) + slots_params(spec, rank, slots))
    assert held == pytest.approx(planned, rel=1e-3)
