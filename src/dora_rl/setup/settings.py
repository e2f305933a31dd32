"""From a configuration file to a resolved run: TOML, overrides, checks, and the core's numbers.

Every mistake is one line that names the key and, for a misspelt one, the nearest that exists.
"""

from __future__ import annotations

import difflib
import json
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from dora_rl.config import AlgorithmConfig, DataConfig, DataSource, RunConfig
from dora_rl.config.running import RENAMED
from dora_rl.config.section import explain
from dora_rl.core.params import Deadlines, MoveCost, Params
from dora_rl.model.directory import read_spec
from dora_rl.types import UserError


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file (or a run's config.json) and put `a.b=c` overrides in."""
    data = read_config(path)
    for override in overrides:
        _override(data, override)
    return resolve(data, str(path))


def read_config(path: Path) -> dict[str, Any]:
    """The sections of a file, with today's names of their keys; nothing else is checked."""
    if path.is_dir():
        inside = path / "config.json"
        hint = f"; give {inside}" if inside.is_file() else ""
        raise UserError(f"{path} is a folder, not a configuration{hint}")
    if not path.is_file():
        raise UserError(f"configuration {path} does not exist")
    try:
        text = path.read_text()
        data = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a configuration has sections; this is a {type(data).__name__}")
    for key in RENAMED:
        section, _, name = key.partition(".")
        if isinstance(data.get(section), dict) and name in data[section]:
            new = todays_name(key, str(path)).partition(".")[2]
            if new in data[section]:
                raise UserError(f"{path}: {key} and {RENAMED[key]} are the same key; keep one")
            data[section][new] = data[section].pop(name)
    return data


def resolve(data: dict[str, Any], where: str) -> RunConfig:
    """Check every key and value."""
    _check_keys(RunConfig, data, where, "")
    try:
        config = RunConfig.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{where}: {explain(RunConfig, error)}") from None
    if config.model.trust_remote_code:  # asked for once, it holds for tokenizer and learner
        config = config.changed("trainer", trust_remote_code=True)
    core_params(config)
    return config


def todays_name(key: str, where: str) -> str:
    """The key itself, or what it is called now, with one line that says so."""
    if key in RENAMED:
        print(f"dora-rl: warning: {where}: {key} is now {RENAMED[key]}", file=sys.stderr)
    return RENAMED.get(key, key)


def _override(data: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or "." not in key:
        raise UserError(f"override {override!r}: write section.key=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, last = todays_name(key.strip(), "override").split(".")
    for section in sections:
        data = data.setdefault(section, {})
        if not isinstance(data, dict):
            raise UserError(f"override {override!r}: {section} is not a section")
    if sections == ["data"] and last in ("train", "eval"):
        value = _keep_columns(data.get(last), value)
    data[last] = value


def _keep_columns(before: object, paths: object) -> object:
    """Other files for `data.train` or `data.eval` are read as the recipe says of its own.

    Only where the file's entries agree on how: columns, mark, chat and environment.
    """
    entries = before if isinstance(before, list) else [before]
    given = paths if isinstance(paths, list) else [paths]
    if not given or not all(isinstance(path, str) for path in given):
        return paths
    own = ("path", "name", "weight", "options", "subset")
    kept = [
        {k: v for k, v in entry.items() if k not in own} if isinstance(entry, dict) else {}
        for entry in entries
    ]
    alike = all(other == kept[0] for other in kept)
    return [{**kept[0], "path": path} for path in given] if alike else paths


def _check_keys(kind: type[BaseModel], data: dict[str, Any], where: str, prefix: str) -> None:
    for key, value in data.items():
        if key not in kind.model_fields:
            near = difflib.get_close_matches(key, kind.model_fields, n=1)
            known = f"there are {', '.join(kind.model_fields)}"
            hint = f"did you mean {prefix}{near[0]}?" if near else known
            if kind is DataConfig and key in DataSource.model_fields:
                hint = f"it is a key of an entry of data.train: {{ path = …, {key} = … }}"
            raise UserError(f"{where}: unknown key {prefix}{key}; {hint}")
        inner = kind.model_fields[key].annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            if not isinstance(value, dict):
                raise UserError(f"{where}: {prefix}{key} is a section, not a value")
            _check_keys(inner, value, where, f"{prefix}{key}.")


def core_params(config: RunConfig) -> Params:
    """What the core is told of a run."""
    o = config.orchestration
    params = Params(
        mode=o.mode,
        max_staleness=o.max_staleness,
        batch_groups=o.batch_groups,
        group_size=config.rollout.num_samples,
        num_steps=o.num_steps,
        inflight_groups=o.inflight_groups or max(1, 3 * o.batch_groups // 2),
        ready_max=o.ready_max or max(1, o.max_staleness) * o.batch_groups,
        samples_min=o.samples_min or samples_enough(config.rollout.num_samples),
        updates_per_step=config.trainer.updates_per_step,
        freshness=o.freshness == "auto",
        **_pools(config.data),
        streaming=o.streaming,
        kv_moves=o.kv_moves,
        repartition=o.repartition,
        level_running=o.level_running,
        filter_equal=o.filter_equal,
        filtered_max=o.filtered_max,
        failed_share_max=o.failed_share_max,
        attempts_max=o.attempts_max,
        losses_max=o.losses_max,
        clear_tokens=max(64, 2 * config.rollout.journal_steps),
        group_failures_max=o.attempts_max,
        trainer_losses_max=o.trainer_losses_max,
        # Finding a prompt that kills takes losses of its own.
        instance_losses_max=max(o.instance_losses_max, 4 * o.attempts_max)
        if o.instance_losses_max
        else 0,
        load_failures_max=o.load_failures_max,
        durable_behind=1,
        oversample=o.oversample,
        fill_older_max=o.fill_older_max,
        rebalance_period_s=o.rebalance_period_s,
        cost=move_cost(config),
        deadlines=Deadlines(
            report_s=o.report_timeout_s,
            load_s=o.load_timeout_s,
            move_s=o.move_timeout_s,
            # The pool answers for every sample it was given; only its queue may be long.
            score_s=max(3600.0, 100 * config.reward.timeout_s),
            trainer_s=o.trainer_timeout_s,
            progress_s=o.progress_timeout_s,
        ),
    )
    params.validate()
    return params


def _pools(data: DataConfig) -> dict[str, Any]:
    """The curriculum's part."""
    if data.curriculum == "off":
        return {}
    weights = [source.weight for source in data.train] or [1.0]
    by_row = data.curriculum == "rows"
    return {
        "pools": data.curriculum_pools * (1 if by_row else len(weights)),
        "pool_weights": () if by_row else tuple(weight / max(weights) for weight in weights),
        "pool_share_min": data.curriculum_share_min,
        # One group of a row says much of it, one of a pool little.
        "pool_recent": 2 if by_row else 8,
    }


def samples_enough(group_size: int) -> int:
    """Half of a group, and at least two: with fewer there is nothing to compare.

    >>> [samples_enough(size) for size in (1, 2, 3, 4, 8)]
    [1, 2, 2, 2, 4]
    """
    return min(group_size, max(2, -(-group_size // 2)))


def learner_algorithm(config: RunConfig) -> AlgorithmConfig:
    """[algorithm] as the learner gets it: its log-probs at the temperature that was sampled with.

    A greedy choice has none of its own; the engine reports its log-prob at temperature 1.
    """
    own, rollout = config.algorithm.temperature, config.rollout.temperature
    return config.algorithm.model_copy(update={"temperature": own or rollout or 1.0})


def move_cost(config: RunConfig) -> MoveCost:
    """What moving a request costs between processes of one machine, for this model.

    Either way the request's description travels through the controller; the KV cache goes through
    a file in shared memory. Prefilling is bound by arithmetic, on a GPU far faster than on a core.
    """
    try:
        spec = read_spec(config.model.path)
    except UserError:
        return MoveCost()  # `prepare` says what is wrong with the model
    weights = spec.num_layers * spec.hidden * (4 * spec.hidden + 3 * spec.intermediate)
    flops_per_s = 5.0e9 if config.runtime.device in ("cpu", "auto") else 1.0e14
    device = config.runtime.device
    routing = config.records_routing(device)
    return MoveCost(
        kv_bytes_per_token=float(spec.kv_token_bytes(4 if device == "cpu" else 2, routing)),
        link_bytes_per_s=1.0e9,
        move_overhead_s=0.001,
        prefill_tokens_per_s=flops_per_s / (2.0 * weights),
    )


def is_recomputable(config: RunConfig) -> bool:
    """Where the engine draws from a part of the vocabulary its log-probs are those of the part."""
    rollout = config.rollout
    return not rollout.top_k and rollout.top_p == 1.0 and not rollout.min_p
