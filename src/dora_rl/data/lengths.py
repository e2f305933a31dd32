"""How long responses are: log-normal, Pareto or an empirical file, cut at a maximum.

A length is a pure function of (seed, prompt, sample), so every mode meets the same responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dora_rl.types import UserError

_SAMPLES = 200_000  # for the moments of a truncated distribution


class LengthModel(Protocol):
    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]: ...


@dataclass(frozen=True, slots=True)
class LogNormal:
    """exp(N(ln median, sigma)), cut at `tokens_max`."""

    median: float
    sigma: float
    tokens_max: int
    tokens_min: int = 1

    @staticmethod
    def with_mean(mean: float, sigma: float, tokens_max: int) -> LogNormal:
        """The median for which the mean after cutting is `mean`."""
        factors = np.exp(sigma * _normal_quantile(_grid()))
        low, high = 1.0, mean
        for _ in range(50):
            middle = (low + high) / 2
            cut = np.clip(middle * factors, 1, tokens_max).astype(np.int64)
            low, high = (middle, high) if cut.mean() < mean else (low, middle)
        return LogNormal(low, sigma, tokens_max)

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        lengths = np.exp(math.log(self.median) + self.sigma * _normal_quantile(uniform))
        return np.clip(lengths, self.tokens_min, self.tokens_max).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Pareto:
    """P(length > x) = (tokens_min / x) ** alpha, cut at `tokens_max`."""

    alpha: float
    tokens_min: int
    tokens_max: int

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        lengths = self.tokens_min * (1 - uniform) ** (-1 / self.alpha)
        return np.clip(lengths, self.tokens_min, self.tokens_max).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Drawn from a list of observed lengths."""

    lengths: tuple[int, ...]

    @staticmethod
    def from_file(path: Path, tokens_max: int) -> Empirical:
        """One length per line."""
        if not path.is_file():
            raise UserError(f"length file {path} does not exist")
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise UserError(f"cannot read the length file {path}: {error.strerror}") from error
        except UnicodeDecodeError:
            raise UserError(
                f"length file {path} is not text; it needs one length per line"
            ) from None
        given = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
        if not given:
            raise UserError(f"length file {path} is empty; it needs one length per line")
        for number, text in given.items():
            if not text.isdigit() or int(text) < 1:
                raise UserError(f"{path} line {number}: {text!r} is not a positive length")
        return Empirical(tuple(sorted(min(int(text), tokens_max) for text in given.values())))

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.array(self.lengths)[(uniform * len(self.lengths)).astype(np.int64)]


def mean_of(model: LengthModel) -> float:
    """Mean length, by quantiles (no randomness)."""
    return float(model.draw(_grid()).mean())


def _grid() -> NDArray[np.float64]:
    return (np.arange(_SAMPLES) + 0.5) / _SAMPLES


def uniforms(seed: int, prompt: int, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers that depend on (seed, prompt) only."""
    philox = np.random.Philox(key=[seed & (2**64 - 1), prompt])
    return np.random.Generator(philox).random(count)


def _normal_quantile(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse of the normal distribution."""
    return np.vectorize(NormalDist().inv_cdf, [float])(np.clip(uniform, 1e-12, 1 - 1e-12))
