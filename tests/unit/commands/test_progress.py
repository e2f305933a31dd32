"""What a command says on its way never holds up the work."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest

from dora_rl.commands.progress import showing_runs
from tests.unit.sim.sim_results import made_result


class Closed(io.StringIO):
    """A pipe that nobody reads any more."""

    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("stream", [io.StringIO(), Closed()])
def test_a_simulation_that_is_told_of_goes_on_whether_anybody_reads_or_not(
    stream: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = None
    monkeypatch.setattr(sys, "stderr", stream)
    with showing_runs(["plan"]) as see:  # a SystemExit here would end the pool's own thread
        see("plan", job, made_result())
    if not isinstance(stream, Closed):
        assert stream.getvalue().startswith("plan: 4 + 4: ")
