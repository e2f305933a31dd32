"""How long responses are: log-normal, Pareto or an empirical file, cut at a maximum.

A length is a pure function of (seed, prompt, sample), so every mode meets the same responses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
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
            if float(np.clip(middle * factors, 1, tokens_max).astype(np.int64).mean()) < mean:
                low = middle
            else:
                high = middle
        return LogNormal(low, sigma, tokens_max)

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        normal = _normal_quantile(uniform)
        lengths = np.exp(math.log(self.median) + self.sigma * normal)
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
            wanted = "it needs one length per line"
            raise UserError(f"length file {path} is not text; {wanted}") from None
        lengths: list[int] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            if not line.strip().isdigit() or int(line) < 1:
                raise UserError(f"{path} line {number}: {line.strip()!r} is not a positive length")
            lengths.append(min(int(line), tokens_max))
        if not lengths:
            raise UserError(f"length file {path} is empty; it needs one length per line")
        return Empirical(tuple(sorted(lengths)))

    def draw(self, uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        table = np.asarray(self.lengths, dtype=np.int64)
        return table[(uniform * len(table)).astype(np.int64)]


def mean_of(model: LengthModel) -> float:
    """Mean length, by quantiles (no randomness)."""
    return float(model.draw(_grid()).mean())


def _grid() -> NDArray[np.float64]:
    return (np.arange(_SAMPLES) + 0.5) / _SAMPLES


def uniforms(seed: int, prompt: int, count: int) -> NDArray[np.float64]:
    """`count` uniform numbers that depend on (seed, prompt) only."""
    generator = np.random.Generator(np.random.Philox(key=[seed & (2**64 - 1), prompt]))
    return generator.random(count)


def _normal_quantile(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Inverse of the normal distribution (Acklam's rational approximation, error < 1.2e-9)."""
    # fmt: off
    a = (-39.69683028665376, 220.9460984245205, -275.9285104469687,
         138.3577518672690, -30.66479806614716, 2.506628277459239)
    b = (-54.47609879822406, 161.5858368580409, -155.6989798598866,
         66.80131188771972, -13.28068155288572, 1.0)
    c = (-0.007784894002430293, -0.3223964580411365, -2.400758277161838,
         -2.549732539343734, 4.374664141464968, 2.938163982698783)
    # fmt: on
    d = (0.007784695709041462, 0.3224671290700398, 2.445134137142996, 3.754408661907416, 1.0)
    p = np.clip(uniform, 1e-12, 1 - 1e-12)
    tail = np.minimum(p, 1 - p)
    q = np.sqrt(-2 * np.log(tail))
    outer = np.polyval(c, q) / np.polyval(d, q)
    outer = np.where(p < 0.5, outer, -outer)
    r = (p - 0.5) ** 2
    inner = (p - 0.5) * np.polyval(a, r) / np.polyval(b, r)
    return np.where(tail < 0.02425, outer, inner)
