"""A run on one machine: controller, instances, learner, rewards and evaluator as processes."""

from __future__ import annotations

from pathlib import Path

from dora_rl.controller.build import build_run
from dora_rl.controller.files import RunFiles
from dora_rl.controller.lock import RunLock
from dora_rl.controller.loop import Control
from dora_rl.controller.run import Run
from dora_rl.controller.world import Notify, OneHost
from dora_rl.setup.prepare import Prepared
from dora_rl.store.samples import Samples
from dora_rl.workers.fork_server import ForkServer
from dora_rl.workers.pool import LocalProcesses, WorkerPool


def open_local(prepared: Prepared, *, resume: bool, server: ForkServer | None = None) -> Run:
    config, notify = prepared.config, Notify()
    run_dir = Path(config.runtime.run_dir)
    lock = RunLock(run_dir)
    samples = Samples(run_dir / "table.log")
    root = prepared.layout.weights_root
    files = RunFiles(config, root, lock, samples, notify, resume=resume)
    first = files.journals.next_life()
    processes = LocalProcesses(run_dir, (lock.fd,), server)
    pool = WorkerPool(config, run_dir, processes, first_incarnation=first)
    return build_run(prepared, files, Control(files.state), pool, OneHost(), notify)
