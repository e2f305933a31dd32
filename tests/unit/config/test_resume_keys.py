"""Every key of the configuration says whether it may change on resume, and is held to it."""

from __future__ import annotations

import json
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from dora_rl.config import RunConfig
from dora_rl.config.on_resume import FINGERPRINTED, RULES, OnResume
from dora_rl.controller.run_dir import (
    check_run_dir,
    check_same_run,
    config_digest,
    write_config,
)
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.observe.eventlog import FileLog
from dora_rl.types import UserError

BASE = {
    "model": {"path": "here"},
    "reward": {"functions": [{"name": "exact"}, {"name": "length", "weight": 0.1}]},
    "env": {"environments": ["calculator"]},
    "data": {"train": ["train.jsonl"], "eval": ["eval.jsonl"]},
}


def keys_of(kind: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """All keys, those of tables in lists too."""
    for name, field in kind.model_fields.items():
        key, inner = f"{prefix}{name}", field.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from keys_of(inner, f"{key}.")
            continue
        yield key
        for entry in typing.get_args(inner):
            if isinstance(entry, type) and issubclass(entry, BaseModel):
                yield from keys_of(entry, f"{key}[].")


def test_every_key_has_a_rule_and_every_rule_a_key() -> None:
    keys = set(keys_of(RunConfig))
    silent = sorted(keys - RULES.keys())
    assert not silent, f"say in config/on_resume.py whether these may change: {silent}"
    assert not RULES.keys() - keys, "rules for keys that do not exist"


def changed(value: Any) -> Any:
    """Another value, whether or not a run could use it."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case list():
            return [*value, "more"]
        case dict():
            return value | {"more": 1}
        case _:
            return f"{value} and another"


def leaf(data: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The table that holds a key, and its name there; of lists the first entry."""
    *parts, name = key.split(".")
    for part in parts:
        data = data[part.removesuffix("[]")][0] if part.endswith("[]") else data[part]
    return data, name


def accepts(old: RunConfig, new: dict[str, Any], run_dir: Path) -> str | None:
    """None, or the line that refuses."""
    write_config(old, run_dir)
    try:
        check_same_run(RunConfig.model_construct(**_built(new)), run_dir)
    except UserError as error:
        return str(error)
    return None


def _built(data: dict[str, Any]) -> dict[str, Any]:
    """Sections without their checks: a changed value need not make sense to be told apart."""
    found: dict[str, Any] = {}
    for name, field in RunConfig.model_fields.items():
        assert isinstance(field.annotation, type)
        found[name] = field.annotation.model_construct(**data[name])
    return found


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("key", sorted(RULES))
def test_a_changed_key_is_refused_if_it_is_fixed(key: str, tmp_path: Path) -> None:
    old = RunConfig.model_validate(BASE)
    if key.startswith(FINGERPRINTED):
        return  # compared row by row, when the data are open
    data = old.model_dump(mode="json")
    if key in ("reward.functions", "env.environments", "data.eval"):
        section, name = key.split(".")
        data[section][name] = [*data[section][name], data[section][name][0] | {"label": "x"}]
    else:
        table, name = leaf(data, key)
        table[name] = changed(table[name])
    refused = accepts(old, data, tmp_path)
    if RULES[key] is not OnResume.FIXED:
        assert refused is None
        return
    assert refused is not None and "cannot become" in refused and "start a new run" in refused
    assert refused.startswith(key.replace("[]", "[0]")) or key.endswith(
        ("functions", "ments", "eval")
    )


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"rollout": {"temperature": 0.7}}, "rollout.temperature was 1.0 and cannot become 0.7"),
        ({"rollout": {"tokens_max": 64}}, "rollout.tokens_max was 256 and cannot become 64"),
        ({"algorithm": {"loss": "gspo"}}, "algorithm.loss was 'grpo' and cannot become 'gspo'"),
        (
            {"reward": {"functions": [{"name": "math"}]}},
            "reward.functions[0].name was 'exact' and cannot become 'math'",
        ),
    ],
)
def test_what_would_make_a_response_half_of_each_is_named(
    changes: dict[str, Any], line: str, tmp_path: Path
) -> None:
    write_config(RunConfig.model_validate(BASE), tmp_path)
    with pytest.raises(UserError) as refused:
        check_same_run(RunConfig.model_validate(BASE | changes), tmp_path)
    assert str(refused.value).startswith(line)


def test_a_run_of_a_release_without_a_key_goes_on_with_its_default(tmp_path: Path) -> None:
    config = RunConfig.model_validate(BASE)
    (tmp_path / "config.json").write_text(config.model_dump_json(exclude={"algorithm": {"loss"}}))
    check_same_run(config, tmp_path)
    other = RunConfig.model_validate(BASE | {"algorithm": {"loss": "gspo"}})
    with pytest.raises(UserError, match=r"algorithm\.loss was 'grpo'"):
        check_same_run(other, tmp_path)


def test_a_run_of_a_release_without_a_key_of_its_rows_goes_on(tmp_path: Path) -> None:
    """Within a list nobody fills in defaults: what says nothing now is as it was."""
    config = RunConfig.model_validate(BASE)
    text = config.model_dump(mode="json")
    del text["data"]["eval"][0]["answer_after"]
    (tmp_path / "config.json").write_text(json.dumps(text))
    check_same_run(config, tmp_path)
    rows = {"path": "eval.jsonl", "answer_after": "####"}
    other = RunConfig.model_validate(BASE | {"data": {"train": ["train.jsonl"], "eval": [rows]}})
    with pytest.raises(UserError, match=r"answer_after was absent and cannot become '####'"):
        check_same_run(other, tmp_path)


def test_a_config_that_the_log_does_not_know_is_refused(tmp_path: Path) -> None:
    """Damaged in a way that is still JSON, or edited: what would be compared is not what was."""
    config = RunConfig.model_validate(BASE)
    write_config(config, tmp_path)
    log = FileLog.create(tmp_path / "events")
    log.append(0.0, ev.Started(Params(), config=config_digest(config)), [])
    log.close()
    check_same_run(config, tmp_path)
    path = tmp_path / "config.json"
    path.write_text(path.read_text().replace('"lr"', '"lR"'))
    with pytest.raises(UserError, match=r"config\.json is not what the run was begun with"):
        check_same_run(config, tmp_path)
    path.write_text(path.read_text()[:100])
    with pytest.raises(UserError, match=r"config\.json is damaged; restore it, or delete it"):
        check_same_run(config, tmp_path)


@pytest.mark.parametrize("resume", [True, False])
def test_a_run_whose_log_is_gone_is_neither_resumed_nor_begun_over(
    tmp_path: Path, resume: bool
) -> None:
    (tmp_path / "weights" / "00000003").mkdir(parents=True)
    with pytest.raises(UserError, match=r"events is gone and .*weights is there; restore it"):
        check_run_dir(tmp_path, resume=resume)
