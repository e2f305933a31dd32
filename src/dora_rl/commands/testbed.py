"""What `sim` and `plan` simulate: a preset, or the testbed of a configuration or a run; and
`--set key=value`.

`max_staleness=3`, `device.nic_bytes_per_s=25e9`, `lengths=pareto:1.2,64,30720`: fields of the
preset, checked one by one. An unknown key is an error that names the nearest one; a value of the
wrong kind or sign names its key.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from dora_rl.data.lengths import Empirical, LengthModel, LogNormal, Pareto, mean_of
from dora_rl.sim.of_config import preset_of_path
from dora_rl.sim.presets import PRESETS, Preset, preset_named, scaled
from dora_rl.types import UserError
from dora_rl.user_code import hint, require

_WORKERS_MAX = 8


def preset_of(args: argparse.Namespace) -> Preset:
    """The preset as the arguments want it, checked."""
    preset = scaled(_named(args.preset), args.gpus, args.batch_scale)
    if args.steps is not None:
        preset = replace(preset, num_steps=args.steps)
    preset = apply(preset, args.settings)
    preset = replace(
        preset,
        kv_moves=preset.kv_moves and not args.no_kv_moves,
        repartition=preset.repartition and not args.no_repartition,
        streaming=preset.streaming and not args.no_streaming,
    )
    preset.validate()
    require(
        (
            preset.num_devices % preset.tensor_parallel == 0,
            f"{preset.name} builds instances of {preset.tensor_parallel} GPUs; --gpus must be a "
            f"multiple of that, not {preset.num_devices}",
        )
    )
    return preset


def _named(name: str) -> Preset:
    """A preset, or the testbed that a configuration or a run makes."""
    path = Path(name)
    if name in PRESETS or not (path.exists() or "/" in name or path.suffix in (".toml", ".json")):
        return preset_named(name)
    preset, said = preset_of_path(path)
    print(said, file=sys.stderr)
    return preset


def workers_of(args: argparse.Namespace) -> int:
    return args.jobs or min(_WORKERS_MAX, len(os.sched_getaffinity(0)))


_MAY_BE_ZERO = {
    "max_staleness",
    "warmup_steps",
    "prompt_tokens",
    "reward_s",
    "environment_s",
    "report_s",
    "engine.host_s",
    "engine.launch_s",
    "engine.host_s_per_request",
    "engine.allreduce_s",
    "engine.activation_bytes",
    "engine.load_overhead_s",
    "engine.move_overhead_s",
    "engine.sleep_wake_s",
    "engine.draft_row_s",
    "engine.draft_share",
    "trainer.balanced",
    "trainer.update_s",
    "trainer.publish_s",
    "model.attention_width",
    "model.kv_bytes_per_token_override",
}
_AT_MOST_ONE = {
    "engine.memory_share",
    "efficiency.decode_bandwidth",
    "efficiency.training",
    "efficiency.prefill",
    "efficiency.network",
    "trainer.balanced",
}
_LENGTH_FORMS = "lognormal:MEAN,SIGMA,MAX | pareto:ALPHA,MIN,MAX | file:PATH"


def apply(preset: Preset, settings: Sequence[str]) -> Preset:
    """The preset with every `key=value` put in."""
    for setting in settings:
        key, sign, text = setting.partition("=")
        require((sign, f"--set {setting!r}: write key=value"))
        preset = _put(preset, key.strip(), text.strip())
    return preset


def keys_of(preset: Preset) -> dict[str, Any]:
    """Every key that can be set, with its present value."""
    keys: dict[str, Any] = {}
    for field in fields(preset):
        value = getattr(preset, field.name)
        nested = fields(value) if field.name != "lengths" and is_dataclass(value) else ()
        keys |= {f"{field.name}.{one.name}": getattr(value, one.name) for one in nested}
        keys |= {} if nested else {field.name: value}
    return {key: value for key, value in keys.items() if key.split(".")[-1] != "name"}


def _put(preset: Preset, key: str, text: str) -> Preset:
    keys = keys_of(preset)
    require((key in keys, f"--set: unknown key {key!r}{hint(key, keys)}"))
    if key == "lengths":
        return replace(preset, lengths=parse_lengths(text, preset.lengths))
    value = _checked(key, _parse(key, text, keys[key]))
    outer, dot, inner = key.partition(".")
    if not dot:
        return replace(preset, **{key: value})
    return replace(preset, **{outer: replace(getattr(preset, outer), **{inner: value})})


def _parse(key: str, text: str, present: Any) -> Any:
    if isinstance(present, bool):
        require((text.lower() in ("true", "false"), f"--set {key}: {text!r} is not true or false"))
        return text.lower() == "true"
    return _number(f"--set {key}", text, int if isinstance(present, int) else float)


def _number(where: str, text: str, kind: type[int] | type[float]) -> Any:
    try:
        value = kind(text)
    except ValueError:
        name = "a whole number" if kind is int else "a number"
        raise UserError(f"{where}: {text!r} is not {name}") from None
    require((math.isfinite(value), f"{where}: {text!r} is not finite"))
    return value


def _checked(key: str, value: Any) -> Any:
    zero_is_fine = key in _MAY_BE_ZERO or isinstance(value, bool)
    bound = "0 or more" if zero_is_fine else "positive"
    require(
        (value > 0 or (value == 0 and zero_is_fine), f"--set {key}: must be {bound}, not {value}"),
        (
            key not in _AT_MOST_ONE or value <= 1,
            f"--set {key}: must be at most 1, not {value}",
        ),
        (
            key != "oversample" or value >= 1,
            f"--set oversample: must be at least 1, not {value}",
        ),
    )
    return value


def parse_lengths(text: str, present: LengthModel) -> LengthModel:
    """A length model from its short form."""
    form, _, rest = text.partition(":")
    if form == "file":
        # Observed lengths, cut where the preset cuts its own.
        return Empirical.from_file(Path(rest), getattr(present, "tokens_max", 2**31))
    near, parts = hint(form, ("lognormal", "pareto", "file")), rest.split(",")
    require(
        (form in ("lognormal", "pareto"), f"--set lengths: unknown form {form!r}{near}"),
        (len(parts) == 3, f"--set lengths: {text!r} is not {_LENGTH_FORMS}"),
    )
    where = "--set lengths"
    first, second = (_number(where, part, float) for part in parts[:2])
    tokens_max = _number(where, parts[2], int)
    is_pareto = form == "pareto"
    require(
        (
            first > 0 and second > 0 and tokens_max >= 1,
            f"--set lengths: the three numbers of {text!r} must be positive",
        ),
        (
            not is_pareto or 1 <= second <= tokens_max,
            f"--set lengths: MIN must be from 1 to MAX, not {parts[1]}",
        ),
        (
            is_pareto or first < tokens_max,
            f"--set lengths: MEAN ({parts[0]}) must be less than MAX ({parts[2]})",
        ),
    )
    if is_pareto:
        return Pareto(first, int(second), tokens_max)
    model = LogNormal.with_mean(first, second, tokens_max)
    require(
        (
            mean_of(model) >= 0.99 * first,
            f"--set lengths: cut at {parts[2]}, the mean cannot be {parts[0]}",
        )
    )
    return model
