"""Which functions a run that stopped asks to mend, and where."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from dora_rl.api.settings import settle
from dora_rl.api.words import mending
from tests.kit.places import MODEL
from tests.unit.api.test_carry import importable


@pytest.mark.parametrize(
    ("reason", "says"),
    [
        ("reward lambda raised KeyError: 1", "lambda_1 in {file}"),
        ("3 of 3 prompts failed; reward failed raised ValueError", "failed in {file}"),
        ("reward importable raised ValueError", f"importable in module {importable.__module__}"),
        ("20 of 20 prompts failed, more than orchestration.failed_share_max allows", ""),
        ("reward failed_too raised ValueError", ""),
        (None, "lambda_1 in {file} and failed in {file} and importable in module"),
    ],
)
def test_the_functions_to_mend(tmp_path: Path, reason: str | None, says: str) -> None:
    def failed(completion: str, by: float) -> float:
        return by

    rewards = [lambda completion: 1.0, partial(failed, by=1.0), "format", importable]
    arguments = {"model": MODEL, "reward": rewards, "run_dir": tmp_path / "run"}
    config, given = settle(arguments, None, {})
    given.put_down()
    (file,) = (tmp_path / "run" / "given").iterdir()
    found = mending(config, reason)
    assert found.startswith("mend " + says.format(file=file)) if says else found == ""
