"""Response lengths: the shapes they claim, the limits they keep, one-line errors for bad files."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from dora_rl.data.lengths import Empirical, LengthModel, LogNormal, Pareto, mean_of, uniforms
from dora_rl.types import UserError

GRID = (np.arange(20_000) + 0.5) / 20_000


@pytest.mark.parametrize(
    "model",
    [
        LogNormal(300, 1.2, 4096),
        LogNormal(5, 3.0, 64, tokens_min=2),
        Pareto(1.3, 64, 8192),
        Empirical((1, 5, 9)),
    ],
)
def test_lengths_keep_their_limits_and_grow_with_the_draw(model: LengthModel) -> None:
    lengths = model.draw(GRID)
    low, high = getattr(model, "tokens_min", 1), getattr(model, "tokens_max", 9)
    assert low <= lengths.min() and lengths.max() <= high
    assert (np.diff(lengths) >= 0).all(), "a quantile function does not fall"


def test_log_normal_has_the_quantiles_of_a_normal_distribution_of_logarithms() -> None:
    lengths = np.log(LogNormal(5e6, 1.5, 10**12).draw(GRID).astype(np.float64))
    assert np.median(lengths) == pytest.approx(math.log(5e6), abs=1e-3)
    for share, sigmas in ((0.8413447, 1), (0.9772499, 2), (0.0013499, -3)):
        quantile = float(np.interp(share, GRID, lengths))
        assert quantile == pytest.approx(math.log(5e6) + sigmas * 1.5, abs=0.01)


@pytest.mark.parametrize(("mean", "sigma"), [(2400, 1.3), (5_000, 1.6)])
def test_log_normal_with_a_mean_has_that_mean_after_cutting(mean: float, sigma: float) -> None:
    model = LogNormal.with_mean(mean, sigma, 30_720)
    assert mean_of(model) == pytest.approx(mean, rel=0.02)


def test_pareto_has_the_tail_it_claims() -> None:
    lengths = Pareto(1.5, 100, 10**9).draw(GRID)
    for times in (2, 4, 8):
        assert (lengths > 100 * times).mean() == pytest.approx(times**-1.5, rel=0.02)


def test_empirical_draws_what_was_observed_in_proportion(tmp_path: Path) -> None:
    path = tmp_path / "lengths.txt"
    path.write_text("7\n\n3\n3\n900\n")
    model = Empirical.from_file(path, tokens_max=500)
    values, counts = np.unique(model.draw(GRID), return_counts=True)
    assert dict(zip(values.tolist(), counts.tolist(), strict=True)) == {
        3: 10_000,
        7: 5_000,
        500: 5_000,
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "does not exist"),
        ("", "is empty"),
        ("\n \n", "is empty"),
        ("12\nmany\n", "line 2: 'many'"),
        ("0\n", "line 1: '0'"),
        ("-4\n", "line 1: '-4'"),
        ("1.5\n", "line 1: '1.5'"),
    ],
)
def test_a_bad_length_file_is_one_clear_line(tmp_path: Path, text: str | None, says: str) -> None:
    path = tmp_path / "lengths.txt"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError) as caught:
        Empirical.from_file(path, tokens_max=100)
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_draws_depend_on_seed_and_prompt_only() -> None:
    first = uniforms(7, 3, 16)
    assert (first == uniforms(7, 3, 16)).all()
    assert (first[:4] == uniforms(7, 3, 4)).all(), "a larger group begins with the same lengths"
    assert not (first == uniforms(8, 3, 16)).any() and not (first == uniforms(7, 4, 16)).any()
    assert first.min() >= 0 and first.max() < 1
