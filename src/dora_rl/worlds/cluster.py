"""A run on several hosts: the controller of one machine, with other hands.

The loop, the core and everything that is written are those of any run. The run directory is on the
controller's host, the head node, and so are the learner's first rank and the evaluator; instances
and rewards are wherever there is room. Rows and journal lines of instances go to storage shards,
beside the run directory; the controller hears what it decides by.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.build import build_run
from dora_rl.controller.loop import Control
from dora_rl.controller.run import Run
from dora_rl.controller.run_dir import RunFiles, RunLock
from dora_rl.controller.world import Notify, World
from dora_rl.setup.layout import Layout
from dora_rl.setup.prepare import Prepared
from dora_rl.store.samples import SampleIndex
from dora_rl.types import StepIndex, UserError
from dora_rl.workers.pool import WorkerPool
from dora_rl.worlds.hosts import Cluster, HostProcesses, about_host, check_room, demand_of
from dora_rl.worlds.services import Relays, Shards


def open_on_cluster(prepared: Prepared, cluster: Cluster, *, resume: bool) -> Run:
    config, layout, notify = prepared.config, prepared.layout, Notify()
    if config.runtime.device == "auto":
        on_gpus = any(host.resources.get("GPU") for host in cluster.hosts())
        layout = replace(layout, device="cuda" if on_gpus else "cpu")
    check_room(config, layout, cluster)
    run_dir = Path(config.runtime.run_dir)
    lock = RunLock(run_dir)
    index = SampleIndex(run_dir / "table.log", config.resources.storage_shards)
    files = RunFiles(config, layout.weights_root, lock, index, notify, resume=resume)
    root, head = layout.weights_root, cluster.head
    hosts = HostProcesses(
        run_dir.resolve(),
        cluster,
        lambda role, name: demand_of(config, layout, role, name),
        lambda host: about_host(host, head, root, files.lineage, index.addresses),
        config.runtime.bind_address,
    )
    first = files.journals.next_incarnation()
    pool = WorkerPool(config, run_dir.resolve(), hosts, first_incarnation=first)
    control = Control(files.state)
    shards = Shards(control, files, index, pool, cluster.head, prepared.train, notify)
    world = ClusterWorld(config, layout, control, pool, hosts, shards, notify)
    prepared = replace(prepared, layout=layout)
    return build_run(prepared, files, control, pool, world, notify)


class ClusterWorld(World):
    """Workers on many hosts, and those that serve them."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        control: Control,
        pool: WorkerPool,
        hosts: HostProcesses,
        shards: Shards,
        notify: Notify,
    ) -> None:
        self._config, self._layout, self._control = config, layout, control
        self._pool, self._hosts, self._shards = pool, hosts, shards
        self.carrier = self._relays = Relays(pool, hosts, notify)
        self._relays.is_head_ready = lambda: shards.is_ready
        self.services = {"relay": self._relays, "storage": shards}

    def begin(self, read: Callable[[], None]) -> None:
        """Relays are started, and shards: nobody else can work without."""
        self._relays.tick()
        self._shards.start()
        until = time.monotonic() + self._config.orchestration.load_timeout_s
        while not self._shards.is_ready:
            if time.monotonic() > until:
                where = self._config.runtime.run_dir
                raise UserError(f"the storage shards did not start; see {where}/logs")
            read()

    def tick(self) -> None:
        """A host that has room gets an instance more, up to the configured number."""
        self._relays.tick()
        names = [w.name for w in self._pool.workers.values() if w.role == "instance"]
        is_full = len(names) >= self._config.resources.instances_max or self._hosts.num_waiting()
        if self._control.stop is not None or is_full:
            return
        name = f"instance{len(names)}"
        if self._hosts.has_room("instance", name):
            self._pool.start("instance", name, self._layout.instance_extra(name))

    def step_closed(self, step: StepIndex) -> None:
        self._shards.write_rollouts(step)

    def close(self) -> None:
        self._hosts.cluster.close()
