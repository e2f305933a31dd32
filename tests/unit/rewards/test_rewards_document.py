"""docs/rewards.md does what it says: its Python runs, its TOML is a valid section."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from dora_rl.config import RewardConfig
from dora_rl.rewards.sandbox.box import Sandbox

TEXT = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_python(sandbox: Sandbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    found = blocks("python")
    assert len(found) >= 6
    for number, block in enumerate(found):
        exec(compile(block, f"rewards.md block {number}", "exec"), scope)


def test_toml() -> None:
    found = blocks("toml")
    assert len(found) >= 3
    for block in found:
        assert RewardConfig.model_validate(tomllib.loads(block)["reward"]).functions


def test_every_built_in_and_its_options_are_documented() -> None:
    import inspect

    from dora_rl.rewards import builtin, mathematics
    from dora_rl.rewards.code import CodeReward
    from dora_rl.rewards.judge import JudgeReward
    from dora_rl.rewards.model import ModelReward

    makers = {
        **builtin.SIMPLE,
        "math": mathematics.math,
        "code": CodeReward,
        "judge": JudgeReward,
        "model": ModelReward,
    }
    for name, maker in makers.items():
        assert f"`{name}`" in TEXT
        for option in inspect.signature(maker).parameters.values():
            if option.kind is option.KEYWORD_ONLY:
                assert f"`{option.name}`" in TEXT, (name, option.name)
