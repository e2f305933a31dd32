"""The cluster as Ray gives it: hosts, placement groups, actors. The only module that imports Ray.

Ray is asked for four things: which hosts are alive, a reservation of devices on one of them, a
process there, and the news of its end. A worker is one actor whose single call lasts as long as the
worker; restarts are ours (`recovery`), never Ray's, because a worker's life is part of the log's
story. Messages, weights and KV do not go through Ray: see docs/cluster.md for what was measured.

Whoever imports this module has called `kinds.authenticate` first: Ray reads how to authenticate
when it is imported.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from dora_rl.config import RunConfig
from dora_rl.types import UserError
from dora_rl.user_code import leave_out
from dora_rl.workers.worker import read_setup, serve
from dora_rl.worlds.hosts import Host, Task

LOOK_S = 1.0
OBJECT_STORE_BYTES = 200 << 20  # nothing of ours goes through it
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class WorkerActor:
    """One worker of a run, for as long as it lives."""

    def run(self, setup: str, directory: str) -> None:
        if os.path.isdir(directory):
            os.chdir(directory)  # relative paths of the configuration mean the same here
        leave_out(directory)
        parsed = read_setup(setup)
        threads = parsed.config.runtime.threads
        os.environ |= ENVIRONMENT | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
        serve(parsed)


class RayTask:
    """Implements `hosts.Task`."""

    def __init__(self, actor: Any, ended: Any, group: PlacementGroup | None) -> None:
        self._actor, self._ended, self._group = actor, ended, group

    def wait(self) -> str:
        try:
            ray.get(self._ended)
            return ""
        except RayError as error:
            return str(error)
        finally:
            self.kill()

    def kill(self) -> None:
        """Ask Ray to end it and give its devices back; does not wait."""
        if ray.is_initialized():
            ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)


class RayCluster:
    """Implements `cluster.Cluster`."""

    def __init__(self, address: str, num_cpus: int) -> None:
        self._own = not address
        options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
        if self._own:
            options |= {"num_cpus": num_cpus, "include_dashboard": False}
            options |= {"object_store_memory": OBJECT_STORE_BYTES}
        else:
            options["address"] = address
        try:
            ray.init(**options)
        except (RayError, ConnectionError, RuntimeError, ValueError) as error:
            raise UserError(f"runtime.address: no Ray cluster at {address!r}: {error}") from None
        head_id = ray.get_runtime_context().get_node_id()
        self._closed = False
        self._hosts = _alive()
        self.head = next(host for host in self._hosts if host.id == head_id)
        threading.Thread(target=self._look, daemon=True).start()

    def hosts(self) -> Sequence[Host]:
        """As of the last look; the controller never waits for Ray to answer."""
        return self._hosts

    def _look(self) -> None:
        while not self._closed:
            time.sleep(LOOK_S)
            try:
                self._hosts = _alive()
            except (RayError, ConnectionError):
                continue  # Ray's head is away for a moment; what runs goes on

    def launch(self, host: Host, demand: Mapping[str, float], setup: str) -> Task:
        """Reserve devices on the host, start an actor there, hand it its setup."""
        group, restarts = None, {"max_restarts": 0, "max_task_retries": 0}
        cores = {"num_cpus": demand.get("CPU", 0.0), "num_gpus": demand.get("GPU", 0.0)}
        if any(demand.values()):
            bundle = {**demand, f"node:{host.ip}": 0.001}
            group = placement_group([bundle], strategy="STRICT_PACK")
            strategy: Any = PlacementGroupSchedulingStrategy(group, 0)
        else:
            strategy = NodeAffinitySchedulingStrategy(host.id, soft=False)
        made = ray.remote(WorkerActor).options(scheduling_strategy=strategy, **cores, **restarts)
        actor: Any = made.remote()  # its methods have a `remote` that no type tells of
        return RayTask(actor, actor.run.remote(setup, os.getcwd()), group)

    def close(self) -> None:
        self._closed = True
        ray.shutdown()


def _alive() -> list[Host]:
    return [
        Host(node["NodeID"], node["NodeManagerAddress"], node["Resources"])
        for node in ray.nodes()
        if node["Alive"]
    ]


def open_cluster(config: RunConfig) -> RayCluster:
    """The cluster a run asks for: at `runtime.address`, else one of its own on this machine."""
    resources, rollout = config.resources, config.rollout
    threads = rollout.num_instances * rollout.threads * resources.devices_per_instance
    return RayCluster(
        config.runtime.address, max(os.cpu_count() or 1, threads + resources.learner_ranks)
    )
