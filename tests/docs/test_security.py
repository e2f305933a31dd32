"""SECURITY.md: every file, configuration key, command and option that it names exists."""

from __future__ import annotations

import re
from typing import get_args

import pytest
from pydantic import BaseModel

from dora_rl.cli import build_parser
from dora_rl.config import RunConfig
from tests.kit.places import ROOT

TEXT = (ROOT / "SECURITY.md").read_text()
WORDS = re.findall(r"`([^`\n]+)`", TEXT)
FILE = re.compile(
    r"(?:[\w.-]+/)*[\w-]+\.(?:py|md|toml)|(?:src|tests|docs|benchmarks|recipes)/[\w/.-]*"
)
SECTIONS = "|".join(RunConfig.model_fields)
KEY = re.compile(rf"(?:{SECTIONS})\.\w+(?:\.\w+)*")
# What a run writes, and what stands for a file of the user's.
NOT_OURS = {"path/to/file.py"}


def test_it_is_a_page_with_what_a_page_of_its_kind_needs() -> None:
    for heading in ("Reporting", "Who is trusted with what", "What can execute code"):
        assert f"## {heading}" in TEXT
    assert "@" not in TEXT, "no address is made up"


@pytest.mark.parametrize("name", sorted({n for w in WORDS for n in FILE.findall(w)} - NOT_OURS))
def test_files_that_are_named_exist(name: str) -> None:
    assert any((place / name).exists() for place in (ROOT, ROOT / "src" / "dora_rl")), name


def test_keys_that_are_named_exist() -> None:
    named = sorted({key for word in WORDS for key in KEY.findall(word)})
    assert len(named) > 8
    assert [key for key in named if not exists(key)] == []


def exists(key: str) -> bool:
    kind: type[BaseModel] | None = RunConfig
    for name in key.split("."):
        if kind is None or name not in kind.model_fields:
            return False
        annotation = kind.model_fields[name].annotation
        inner = [k for k in (annotation, *get_args(annotation)) if is_section(k)]
        kind = inner[0] if inner else None
    return True


def is_section(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def test_a_key_that_is_not_there_would_be_noticed() -> None:
    assert exists("runtime.tls_key") and not exists("runtime.tls_keys")
    assert not exists("runtime.tls_key.more")


def test_commands_and_options_that_are_named_exist() -> None:
    _, parsers = build_parser()
    known = {name: {*parser._option_string_actions} for name, parser in parsers.items()}
    anywhere = set[str]().union(*known.values())
    for word in WORDS:
        command, *more = word.removeprefix("dora-rl ").split()
        options = [part.partition("=")[0] for part in (command, *more) if part.startswith("--")]
        if word.startswith("dora-rl "):
            assert command in known, word
        assert set(options) <= known.get(command, anywhere), word


def test_links_lead_somewhere() -> None:
    headings = re.findall(r"^#+ (.*)$", TEXT, re.MULTILINE)
    own = {heading.lower().replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXT):
        name, _, anchor = target.partition("#")
        if name:
            page = ROOT / name
            assert page.exists(), target
            titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
            there = {title.lower().replace(" ", "-") for title in titles}
        else:
            there = own
        assert not anchor or anchor in there, target
