"""The Python of docs/tinker.md, as it stands there, with the SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.docs.document_blocks import blocks_of
from tests.kit.places import ROOT
from tests.kit.tinker_server import tinker_server

pytestmark = pytest.mark.tinker


def test_the_blocks_of_the_page_run(tmp_path: Path) -> None:
    blocks = [
        block for block in blocks_of(ROOT / "docs" / "tinker.md") if block.language == "python"
    ]
    assert len(blocks) == 2
    scope: dict[str, Any] = {}
    with tinker_server(tmp_path) as served:
        for block in blocks:
            text = block.text.replace("http://127.0.0.1:8010", served.server.url)
            exec(compile(text, block.place, "exec"), scope)
        assert scope["again"].get_info().lora_rank == 8
        scope["client"].close("success").result()
