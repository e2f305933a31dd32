"""docs/serving.md does what it says: its Python runs against a server, its commands exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

pytest.importorskip("openai")
from serving import MODEL, serving

from dora_rl.cli import build_parser

TEXT = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()


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
