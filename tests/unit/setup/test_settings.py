"""From a configuration to the core's numbers: what a run decides about faults."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.core.params import Params
from dora_rl.setup.settings import core_params, load_config, resolve
from dora_rl.types import UserError


def params_of(**orchestration: Any) -> Params:
    data = {"model": {"path": "nowhere"}, "rollout": {"num_samples": 8, "journal_steps": 50}}
    return core_params(resolve(data | {"orchestration": orchestration}, "here"))


def test_a_group_trains_with_half_of_its_samples_unless_told_otherwise() -> None:
    """In the core, and in older logs, 0 means all; the configuration's 0 means half."""
    assert params_of().samples_min == params_of().samples_needed == 4
    assert params_of(samples_min=8).samples_min == 8
    assert Params(group_size=8).samples_needed == 8


def test_every_rule_about_faults_that_repeat_is_on() -> None:
    params = params_of()
    limits = ("losses_max", "group_failures_max", "trainer_losses_max", "load_failures_max")
    assert all(getattr(params, name) > 0 for name in (*limits, "instance_losses_max"))
    assert params.deadlines.progress_s > params.deadlines.report_s
    assert params.group_failures_max == params.attempts_max
    assert params.clear_tokens >= 50, "what was gained alone is in the journal"


@pytest.mark.parametrize("attempts_max", [4, 100])
def test_a_killer_is_found_before_its_losses_stop_the_run(attempts_max: int) -> None:
    params = params_of(attempts_max=attempts_max)
    assert params.instance_losses_max > params.losses_max + 10 + params.attempts_max
    assert params_of(attempts_max=attempts_max, instance_losses_max=0).instance_losses_max == 0


def test_a_configuration_that_is_no_table_is_refused_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(UserError, match="has sections; this is a list"):
        load_config(tmp_path / "config.json")


def test_a_folder_is_no_configuration(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"is a folder, not a configuration$"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"not a configuration; give .*/config\.json$"):
        load_config(tmp_path)
