"""How every run begins, from the command line and from a program: checks, preparation, opening.

Whatever can be refused is refused before anything is written into the run directory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.run import Run
from dora_rl.controller.run_dir import (
    check_run_dir,
    check_same_data,
    check_same_run,
    make_run_dir,
)
from dora_rl.setup.hub import with_local_model
from dora_rl.setup.prepare import Prepared, check_answers, prepare
from dora_rl.workers.fork_server import ForkServer
from dora_rl.workers.pool import begin_server
from dora_rl.worlds.kinds import check_kind, open_run


@dataclass(frozen=True, slots=True)
class Start:
    """A run that can begin; the process that its workers are forked from is warm."""

    prepared: Prepared
    server: ForkServer | None
    resume: bool

    def open(self) -> Run:
        run_dir = Path(self.prepared.config.runtime.run_dir)
        make_run_dir(run_dir)
        check_same_data(self.prepared.train, run_dir)
        return open_run(self.prepared, resume=self.resume, server=self.server)


@contextlib.contextmanager
def starting(config: RunConfig, *, resume: bool, warm: bool = True) -> Iterator[Start]:
    """While this lasts the run may be opened and run. `warm` false: it is only looked at."""
    run_dir = Path(config.runtime.run_dir)
    check_kind(config)
    check_run_dir(run_dir, resume=resume)
    config = with_local_model(config)
    if resume:
        check_same_run(config, run_dir)
    # It imports for the workers while the run is prepared.
    server = begin_server(config) if warm else None
    try:
        prepared = prepare(config)
        prepared.check_memory()
        if not resume:  # a run of an older release, which did not look, goes on
            check_answers(prepared.config, prepared.train, prepared.evaluation)
        yield Start(prepared, server, resume)
    finally:
        if server is not None:
            server.close()
