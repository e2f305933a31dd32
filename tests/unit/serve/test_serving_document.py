"""docs/serving.md does what it says: its Python runs against a server, its commands exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from types import SimpleNamespace

import pytest

from tests.kit.places import MODEL, ROOT

pytest.importorskip("openai")
from dora_rl.cli import build_parser
from dora_rl.config import EnvConfig
from dora_rl.envs.host import load_environments
from tests.unit.serve.serving import serving

TEXT = (ROOT / "docs" / "serving.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def test_python():
    found = blocks("python")
    assert len(found) >= 3
    scope: dict[str, object] = {}
    with serving(MODEL) as running:
        for number, block in enumerate(found):
            block = block.replace("http://127.0.0.1:8000/v1", running.server.url)
            exec(compile(block, f"serving.md block {number}", "exec"), scope)
        row = SimpleNamespace(prompt="03:271\n", answer="637")
        reward = scope["agent"](running.server.url, "none", row)  # type: ignore[operator]
        assert reward in (0.0, 0.25, 1.0)


def test_toml(tmp_path, monkeypatch):
    (found,) = blocks("toml")
    (agent,) = [block for block in blocks("python") if "def agent" in block]
    (tmp_path / "my_agent.py").write_text(agent)
    monkeypatch.chdir(tmp_path)
    config = EnvConfig.model_validate(tomllib.loads(found)["env"])
    assert list(load_environments(config)) == ["agent"]


def test_commands_and_options():
    parser, parsers = build_parser()
    commands = [line for block in blocks("bash") for line in block.splitlines()]
    assert len(commands) >= 2
    for line in commands:
        words = shlex.split(line, comments=True)
        assert words[0] == "dora-rl"
        parser.parse_args(words[1:])
    known = {*parsers["serve"].option_names(), "--resume"}
    assert set(re.findall(r"(?<!-)--[a-z][a-z-]+", TEXT)) <= known
