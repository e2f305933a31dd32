"""docs/agents.md does what it says: its Python runs, its TOML is a valid run, its keys exist."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from dora_rl.config import EnvConfig, EnvironmentEntry, RunConfig
from dora_rl.envs.host import load_environments
from tests.kit.places import ROOT

TEXT = (ROOT / "docs" / "agents.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return tmp_path


def test_python_and_toml(in_folder: Path) -> None:
    found = blocks("python")
    assert len(found) == 3
    (in_folder / "bring.py").write_text(found[0])
    assert len(found[1].splitlines()) < 30, "an environment in under 30 lines"
    scope: dict[str, object] = {}
    for number, block in enumerate(found):
        exec(compile(block, f"agents.md block {number}", "exec"), scope)
    sections = [tomllib.loads(block) for block in blocks("toml")]
    assert len(sections) == 5
    for section in sections:
        config = RunConfig.model_validate({"model": {"path": "x"}, **section})
        packages = [entry.name.partition(":")[0] for entry in config.env.environments]
        if "reasoning_gym" in packages and find_spec("reasoning_gym") is None:
            continue  # not among the tools of development; tests/packages has it
        assert load_environments(config.env, in_folder)


def test_every_key_is_documented() -> None:
    entry = set(EnvironmentEntry.model_fields) - {"name", "options"}
    for name in entry:
        assert f"`environments[].{name}`" in TEXT, name
    for name in set(EnvConfig.model_fields) - {"environments"}:
        assert f"`{name}`" in TEXT, name
