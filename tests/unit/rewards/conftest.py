"""Fixtures of the reward tests: one sandbox for all, or a reason why there is none."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.types import UserError


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        made = Sandbox()
    except UserError as error:
        pytest.skip(str(error))
    yield made
    made.close()
