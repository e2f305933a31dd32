"""What the figures of a run mean: one definition each, for console, metrics.jsonl, summary.json and
dashboard. docs/operating.md says the same in words. Pure functions of counts and seconds.

    tokens trained   tokens that the policy wrote (loss mask 1) in the samples of committed steps;
                     neither prompts nor what an environment wrote
    start-up         from the start of the program until the first request or group is given out
    training time    from there to the last commit: the sum of `time/step`
    tokens/s         tokens trained over training time; of a step: over the last `WINDOW_STEPS`
    idle             one minus the busy time, as the workers measure it, over training time
    device idle      share of training time without a kernel on the GPU, as the driver counts it
    CPU not used     one minus the CPU time of all processes of the run over (time x cores)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

WINDOW_STEPS = 10


def tokens_written(num_tokens: int, turns: Sequence[tuple[int, int, int]]) -> int:
    """Of a response, those of the policy. `turns`: (begin, end, 1 where the policy wrote).

    >>> tokens_written(9, [(0, 4, 1), (4, 7, 0), (7, 9, 1)]), tokens_written(9, [])
    (6, 9)
    """
    return sum(end - begin for begin, end, mask in turns if mask) if turns else num_tokens


def tokens_of_line(line: dict[str, float]) -> int:
    """Tokens trained in a step, by its line of metrics.jsonl. Lines of older releases have only
    the mean length, in which what environments wrote is not told apart."""
    if "tokens_trained" in line:
        return int(line["tokens_trained"])
    return round(line["response_length/mean"] * line["num_samples"])


def tokens_per_s(tokens: Iterable[float], seconds: Iterable[float]) -> float | None:
    """None where no time has passed."""
    lasted = sum(seconds)
    return sum(tokens) / lasted if lasted > 0 else None


def smoothed_rates(tokens: Sequence[float], seconds: Sequence[float]) -> list[float | None]:
    """Tokens/s of each step: over it and those before it, `WINDOW_STEPS` at most.

    >>> smoothed_rates([100, 300], [1, 3])
    [100.0, 100.0]
    """
    windows = [slice(max(0, end - WINDOW_STEPS), end) for end in range(1, len(tokens) + 1)]
    return [tokens_per_s(tokens[window], seconds[window]) for window in windows]


def idle_ratio(busy_s: Sequence[float], lasted_s: float) -> float | None:
    """The mean over workers; None where nobody measured or no time has passed.

    >>> idle_ratio([1.0, 3.0], 4.0)
    0.5
    """
    lasted_s *= len(busy_s)
    return max(0.0, 1 - sum(busy_s) / lasted_s) if lasted_s > 0 else None


def rollout_busy_s(busy_s: dict[str, float]) -> list[float]:
    """Of the instances, among the busy times of all workers."""
    return [busy for name, busy in busy_s.items() if not name.startswith("learner")]


def trainer_busy_s(busy_s: dict[str, float]) -> list[float]:
    """Of the learner; its first rank speaks for all."""
    return [busy_s["learner"]] if "learner" in busy_s else []
