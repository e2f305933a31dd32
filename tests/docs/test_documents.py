"""The pages hold together: every block is classified and sound, every link and path exists."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.document_blocks import CODE, NEEDS, SHOWN, blocks_of, pages, parse, prose, shown
from tests.docs.document_checks import complaints
from tests.docs.document_stand_in import NUM_STEPS_MAX, SHORT, shortened
from tests.kit.places import ROOT

# Commands a reader would type. They stand in a fenced block, or nobody checks them.
TYPED = re.compile(r"^( {4,}|\t)\$? ?(dora-rl|python3?|make|pip|git|bash|curl) ", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
# Files of the repository, and modules as the pages call them (`core/window.py`).
PLACE = re.compile(
    r"`((?:src|tests|benchmarks|docs|recipes)/[\w./-]*\w|(?:\w+/)+\w+\.(?:py|md|toml))`"
)

every_page = pytest.mark.parametrize("page", pages(), ids=shown)


@every_page
def test_every_block_is_classified(page: Path) -> None:
    for block in blocks_of(page):
        assert block.language in CODE + SHOWN, f"{block.place}: language {block.language!r}"
        assert set(block.needs) <= set(NEEDS), f"{block.place}: needs {block.needs}"
        if not block.is_code:
            commands = re.findall(r"^\$? ?(?:dora-rl|pip|make) .*", block.text, re.MULTILINE)
            assert not commands, f"{block.place}: mark it as bash: {commands[0]}"
    typed = TYPED.search(prose(page.read_text()))
    assert not typed, f"{shown(page)}: put it in a fenced block: {typed and typed.group(0)}…"


@every_page
def test_every_block_is_sound(page: Path) -> None:
    """Syntax, and that commands, options, keys, scripts and imported names exist."""
    wrong = [line for block in blocks_of(page) if block.is_code for line in complaints(block)]
    assert not wrong, "\n".join(wrong)


def slug(heading: str) -> str:
    """The anchor of a heading, as GitHub makes it."""
    text = re.sub(r"[^\w\- ]", "", heading.strip().lower().replace("`", ""))
    return text.replace(" ", "-")


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    text = prose(page.read_text())
    for target in LINK.findall(text):
        if re.match(r"^(https?|mailto):", target):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), f"{shown(page)}: {target} leads nowhere"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", prose(there.read_text()), re.MULTILINE)
            assert anchor in map(slug, headings), f"{shown(page)}: no heading {target}"


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    for name in PLACE.findall(prose(page.read_text())):
        beside = [ROOT / name, ROOT / "src" / "dora_rl" / name, page.parent / name]
        assert any(path.exists() for path in beside), f"{shown(page)}: there is no {name}"


def test_every_page_can_be_reached_from_the_first() -> None:
    linked = {
        (page.parent / target.partition("#")[0]).resolve()
        for page in pages()
        for target in LINK.findall(page.read_text())
        if not target.startswith("http")
    }
    assert [shown(page) for page in pages()[1:] if page not in linked] == []


def test_an_extension_is_short() -> None:
    """A loss, an advantage, a reward, an environment, a sink, a family: each in under 30 lines."""
    files = [block for block in blocks_of(ROOT / "docs" / "extending.md") if block.saved_as]
    assert len(files) == 7  # the last compares the new family with transformers
    assert all(block.text.count("\n") < 30 for block in files)


class TestTheChecksThemselves:
    """A check that cannot fail is none."""

    @pytest.mark.parametrize(
        ("language", "text", "says"),
        [
            ("bash", "dora-rl trian x.toml", "did you mean 'train'"),
            ("bash", "dora-rl train x.toml --resumee", "--resume"),
            ("bash", "dora-rl train x.toml trainer.learning=1", "trainer.learning"),
            ("bash", "dora-rl sim small --set stalenes=1", "stalenes"),
            ("bash", "python benchmarks/engine.py --modle x", "--modle"),
            ("bash", "python benchmarks/absent.py", "absent"),
            ("bash", "make sure", "sure"),
            ("bash", "for x in", "syntax error"),
            ("bash", "drao-rl train", "unknown command"),
            ("bash", "X=1 dora-rl audit run | grep x && dora-rl adit run", "adit"),
            ("python", "x = = 1", "invalid syntax"),
            ("python", "from dora_rl.types import Absent", "Absent"),
            ("toml", "[trainer]\nlearning = 1", "trainer.learning"),
            ("toml", "[orchestration]\nmax_staleness = -1", "max_staleness"),
            ("json", "{'a': 1}", "Expecting"),
            ("yaml", "a: [1", "expected"),
        ],
    )
    def test_mistakes_are_found(self, language: str, text: str, says: str) -> None:
        (block,) = parse("page.md", f"```{language}\n{text}\n```\n")
        assert says in "\n".join(complaints(block))

    def test_needs_and_saved_files(self) -> None:
        text = "<!-- needs: gpu, network -->\n\n```bash\nls\n```\n\n```python\n# a.py  mine\n```\n"
        first, second = parse("page.md", text)
        assert first.needs == ("gpu", "network") and second.needs == ()
        assert (first.saved_as, second.saved_as) == ("", "a.py")
        assert (first.line, second.line) == (3, 7)

    def test_runs_are_shortened(self) -> None:
        got = shortened(["train", "x.toml", "orchestration.num_steps=50", "rollout.tokens_max=8"])
        assert f"orchestration.num_steps={NUM_STEPS_MAX}" in got and "rollout.tokens_max=8" in got
        assert len(got) == 2 + len(SHORT)
        assert shortened(["audit", "run"]) == ["audit", "run"]
