"""Fixtures of the reward tests: one sandbox for all, or a reason why there is none."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.types import UserError
from tests.unit.rewards.as_user import OwnBox, UsersBox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    try:
        made = Sandbox()
    except UserError as error:
        pytest.skip(str(error))
    yield made
    made.close()


@pytest.fixture(scope="session", params=["as_started", "as_another_user"])
def box(request: pytest.FixtureRequest) -> Iterator[OwnBox | UsersBox]:
    """The sandbox as whoever runs the tests has it, and, where that is root, as a user has it."""
    if request.param == "as_started":
        try:
            made = OwnBox()
        except UserError as error:
            pytest.skip(str(error))
        yield made
        made.close()
        return
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    other = UsersBox()
    if other.problem:
        other.close()
        pytest.skip(other.problem)
    yield other
    other.close()
