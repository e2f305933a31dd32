"""The pages of the repository and the code blocks in them, as values.

Reads text only; never runs a block. The conventions a page keeps are in CONTRIBUTING.md:

    ```bash, python, toml, json …    run by tests/docs, in the order of the page
    ```text, or no language          what a program prints, a tree, a drawing: not code
    <!-- needs: gpu -->              above a block: not run here (gpu, cluster, network, long)
    # mine.py                        first line of a block: it is saved as this file
    <!-- given: runs/quickstart -->  anywhere in a page: it begins with a short finished run there
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tests.kit.places import ROOT

NEEDS = ("gpu", "cluster", "network", "long")
CODE = ("bash", "python", "toml", "json", "yaml")
SHOWN = ("", "text")

_NEEDS = re.compile(r"<!-- needs: (.*?) -->\s*$")
_GIVEN = re.compile(r"^<!-- given: (\S+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^( *)(`{3,})(.*)$")
_SAVED = re.compile(r"^# ([\w./-]+\.(?:py|toml|json|jsonl|yaml))\b")


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block: `Block("README.md", 11, "bash", "make test", ("long",))`."""

    page: str
    line: int
    language: str
    text: str
    needs: tuple[str, ...] = ()

    @property
    def place(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_code(self) -> bool:
        return self.language not in SHOWN

    @property
    def saved_as(self) -> str:
        """The file this block is the text of, or nothing."""
        found = _SAVED.match(self.text)
        return found.group(1) if found else ""


def pages() -> list[Path]:
    """Every page a reader may follow."""
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "ARCHITECTURE.md")]
    return [*top, ROOT / "recipes" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks_of(path: Path) -> list[Block]:
    return parse(shown(path), path.read_text())


def given_runs(text: str) -> list[str]:
    """Run directories that a page expects to find."""
    return _GIVEN.findall(text)


def parse(page: str, text: str) -> list[Block]:
    """Fenced blocks in order. A fence ends with as many backticks as it began with."""
    found: list[Block] = []
    lines = text.splitlines()
    number = 0
    while number < len(lines):
        fence = _FENCE.match(lines[number])
        if not fence:
            number += 1
            continue
        indent, ticks, info = fence.groups()
        end = number + 1
        while end < len(lines) and lines[end].strip() != ticks:
            end += 1
        assert end < len(lines), f"{page}:{number + 1}: this fence is never closed"
        body = "\n".join(line.removeprefix(indent) for line in lines[number + 1 : end]) + "\n"
        needs = _needs_above(lines, number)
        found.append(Block(page, number + 1, info.strip(), body, needs))
        number = end + 1
    return found


def prose(text: str) -> str:
    """A page without its fenced blocks."""
    kept: list[str] = []
    ticks = ""
    for line in text.splitlines():
        fence = _FENCE.match(line)
        if ticks:
            ticks = "" if line.strip() == ticks else ticks
        elif fence:
            ticks = fence.group(2)
        else:
            kept.append(line)
    return "\n".join(kept)


def _needs_above(lines: list[str], number: int) -> tuple[str, ...]:
    above = number - 1
    while above >= 0 and not lines[above].strip():
        above -= 1
    found = _NEEDS.match(lines[above].strip()) if above >= 0 else None
    return tuple(re.split(r"[,\s]+", found.group(1).strip())) if found else ()
