"""How many devices generate and how many train: the search for a split.

Throughput has one peak over the split (too few generate, or too few train), and the share of a
step in which only rollout works falls as devices move to rollout. So both the best split and the
one with a given rollout-only share are found by narrowing the gaps between a few first guesses,
laid around the split at which decoding and training would take equally long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dora_rl.data.lengths import mean_of
from dora_rl.sim.flows import Flow, Job
from dora_rl.sim.presets import Preset, world_spec
from dora_rl.sim.run import ModeResult
from dora_rl.types import Mode

_CHOICES_MAX = 32
_REACH = 0.12  # of the choices, on both sides of the first guess


def splits_of(preset: Preset) -> list[int]:
    """Numbers of rollout devices worth trying: whole instances, at most about 32 of them."""
    tensor = preset.tensor_parallel
    every = list(range(tensor, preset.num_devices - tensor + 1, tensor))
    stride = -(-len(every) // _CHOICES_MAX)
    return every[stride - 1 :: stride]


def balanced_split(preset: Preset) -> int:
    """Where full decode slots and the trainer need the same time for a step; a guess, no run."""
    choices = splits_of(preset)
    spec = world_spec(preset, Mode.MULTI_VERSION, 0, choices[0])
    _, instance, cost = spec.instances[0]
    context, slots = instance.kv_tokens_max / instance.slots_max, instance.slots_max
    per_request_s = cost.engine.host_s_per_request + cost.flops_s_per_request()
    per_request_s += context * cost.kv_s_per_token()
    decode_s = cost.step_base_s() + cost.weights_s(slots) + slots * per_request_s
    num_trajectories = preset.batch_groups * preset.group_size
    response = mean_of(preset.lengths)

    def step_s(split: int) -> float:
        train = replace(spec.train, num_devices=preset.num_devices - split)
        tokens = num_trajectories * (preset.prompt_tokens + response)
        rollout_s = (
            num_trajectories * response * decode_s / slots / (split / preset.tensor_parallel)
        )
        return max(rollout_s, tokens / train.tokens_per_s() + train.update_s())

    return min(choices, key=step_s)


def search_split(
    choices: Sequence[int], guess: int, job_of: Callable[[int], Job], share: float | None = None
) -> Flow[dict[int, ModeResult]]:
    """Try splits until the best, and the one nearest to `share`, has no untried neighbour."""
    tried: dict[int, ModeResult] = {}
    places = _first(len(choices), choices.index(guess))
    while places:
        results = yield [job_of(choices[place]) for place in places]
        tried.update(zip(places, results, strict=True))
        wanted = _around_best(tried, len(choices))
        if share is not None:
            wanted |= _around_share(tried, len(choices), share)
        places = sorted(wanted - set(tried))
    return {choices[place]: tried[place] for place in sorted(tried)}


def _first(count: int, guess: int) -> list[int]:
    reach = max(1, round(_REACH * count))
    return sorted({max(0, guess - reach), guess, min(count - 1, guess + reach)})


def _around_best(tried: dict[int, ModeResult], count: int) -> set[int]:
    """Midpoints of the gaps on both sides of the best place so far."""
    best = max(tried, key=lambda place: (tried[place].tokens_per_s, -place))
    below = max((place for place in tried if place < best), default=-1)
    above = min((place for place in tried if place > best), default=count)
    return _middle(below, best) | _middle(best, above)


def _around_share(tried: dict[int, ModeResult], count: int, share: float) -> set[int]:
    """The midpoint of the gap in which the rollout-only share passes `share`."""
    more = [place for place in tried if tried[place].rollout_only_share >= share]
    below = max(more, default=-1)
    above = min((place for place in tried if place > below), default=count)
    return _middle(below, above)


def _middle(low: int, high: int) -> set[int]:
    return {(low + high) // 2} if high - low > 1 else set()


def best_of(tried: dict[int, ModeResult], num: int = 1) -> list[int]:
    """The splits with the highest throughput, best first; of equals the one that trains more."""
    return sorted(tried, key=lambda split: (-tried[split].tokens_per_s, split))[:num]


def nearest_to(tried: dict[int, ModeResult], share: float, num: int = 1) -> list[int]:
    """The splits whose rollout-only share is nearest to `share`, nearest first."""
    return sorted(tried, key=lambda s: (abs(tried[s].rollout_only_share - share), s))[:num]
