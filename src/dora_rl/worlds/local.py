"""A run on one machine: controller, instances, learner, rewards and evaluator as processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dora_rl.controller.build import build_run
from dora_rl.controller.loop import Control
from dora_rl.controller.run import Run
from dora_rl.controller.run_dir import RunFiles, RunLock
from dora_rl.controller.world import Carrier, Notify, World
from dora_rl.setup.prepare import Prepared
from dora_rl.store.samples import Samples
from dora_rl.types import InstanceId
from dora_rl.workers.fork_server import ForkServer
from dora_rl.workers.messages import Exported
from dora_rl.workers.pool import LocalProcesses, WorkerPool, Workers


class SameHost(Carrier):
    """What lies in shared memory is everybody's: a version that is loaded or retired, too."""

    def exported(self, export: Exported, src: InstanceId) -> Exported:
        return export

    def given_up(self, export: Exported) -> None:
        Path(export.path).unlink(missing_ok=True)


class OneHost(World):
    """Nothing but the workers and their controller: nobody is needed by the others, nothing comes
    or goes, and the records write the lines of a step."""

    def __init__(self) -> None:
        self.carrier, self.services = SameHost(), {}


def open_local(prepared: Prepared, *, resume: bool, server: ForkServer | None = None) -> Run:
    def workers_of(files: RunFiles) -> Workers:
        first = files.journals.next_incarnation()
        processes = LocalProcesses(files.run_dir, (files.lock.fd,), server)
        return WorkerPool(prepared.config, files.run_dir, processes, first_incarnation=first)

    return open_on_one_host(prepared, workers_of, resume=resume)


def open_on_one_host(
    prepared: Prepared, workers_of: Callable[[RunFiles], Workers], *, resume: bool
) -> Run:
    """The run directory is locked and read before there are workers."""
    config, notify = prepared.config, Notify()
    run_dir = Path(config.runtime.run_dir)
    lock, samples = RunLock(run_dir), Samples(run_dir / "table.log")
    files = RunFiles(config, prepared.layout.weights_root, lock, samples, notify, resume=resume)
    return build_run(prepared, files, Control(files.state), workers_of(files), OneHost(), notify)
