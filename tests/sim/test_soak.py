"""Fifty seeds of the soak in every test run; `make soak SEEDS=2000` runs the rest."""

import pytest

from dora_rl.sim.soak import run_seed


@pytest.mark.parametrize("first", range(0, 50, 10))
def test_soak_seeds(first: int) -> None:
    for seed in range(first, first + 10):
        failure = run_seed(seed)
        assert failure is None, f"replay: make soak SEEDS=1 SEED0={seed}\n{failure}"
