"""A run on several hosts: the controller of one machine, with other hands.

The loop, the core and everything that is written are those of `local.LocalRun`. The run directory
is on the controller's host, and so are the learner's first rank and the evaluator; instances and
rewards are wherever there is room. Rows and journal lines of instances go to storage shards, beside
the run directory; the controller hears what it decides by.
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.ledger import current
from dora_rl.core.state import Phase
from dora_rl.io.wire import Message, decode_event
from dora_rl.setup.devices import EVALUATOR_SHARE, LEARNER_SHARE
from dora_rl.setup.layout import Layout
from dora_rl.store.sample_index import SampleIndex
from dora_rl.store.samples import Samples
from dora_rl.types import StepIndex, UserError
from dora_rl.weights.carrier import Carrier
from dora_rl.weights.leftovers import transfer_of
from dora_rl.workers.pool import WorkerPool, Envelope
from dora_rl.worlds.relays import RelayCarrier
from dora_rl.worlds.hosts import Cluster, HostPool, Host
from dora_rl.worlds.local import TICK_S, LocalRun


class ClusterRun(LocalRun):
    """One `dora-rl train` on a cluster."""

    def __init__(
        self, config: RunConfig, layout: Layout, *data: Any, cluster: Cluster, resume: bool
    ) -> None:
        self.cluster = cluster
        on_gpus = any(host.resources.get("GPU") for host in cluster.hosts())
        if config.runtime.device == "auto":
            layout = replace(layout, device="cuda" if on_gpus else "cpu")
        super().__init__(config, layout, *data, resume=resume)

    def _hire(self) -> tuple[WorkerPool, Carrier]:
        check_room(self.config, self.layout, self.cluster)
        pool = HostPool(
            self.config,
            self.run_dir.resolve(),
            self.cluster,
            self._demand,
            self._for_host,
            first_incarnation=self.journals.next_life(),
        )
        self.relays = RelayCarrier(pool)
        self.relays.is_head_ready = lambda: self.index.is_ready
        return pool, self.relays

    def _open_samples(self) -> Samples:
        shards = self.config.resources.storage_shards
        self.index = SampleIndex(self.run_dir / "table.log", shards)
        return self.index

    def _demand(self, role: str, name: str) -> Mapping[str, float]:
        return demand_of(self.config, self.layout, role, name)

    def _for_host(self, host: Host) -> dict[str, Any]:
        """What a worker is told of the host it is placed on. Elsewhere the store is a cache."""
        weights = self.layout.weights_root
        at_head = host.id == self.cluster.head.id
        if not at_head:
            # A cache that a lost lineage has left there is never taken for this one's.
            lineage = f"-{self.lineage}" if self.lineage else ""
            weights = weights.with_name(f"{weights.name}@{host.ip}{lineage}")
        return {
            "at_head": at_head,
            "ip": host.ip,
            "storage": list(self.index.addresses),
            "weights_root": str(weights),
            "transfer_root": str(transfer_of(weights)),
        }

    def _start(self) -> None:
        self.carrier.tick()
        self.index.start(self.pool)
        until = time.monotonic() + self.config.orchestration.load_timeout_s
        while not self.index.is_ready:
            if time.monotonic() > until:
                raise UserError(f"the storage shards did not start; see {self.run_dir}/logs")
            with contextlib.suppress(queue.Empty):
                self.read(self.pool.inbox.get(timeout=TICK_S))
        super()._start()

    def _tick(self) -> None:
        super()._tick()
        if self.stop is None:
            self._grow()

    def _grow(self) -> None:
        """A host that has room gets an instance more, up to the configured number."""
        pool = self.pool
        assert isinstance(pool, HostPool)
        names = [worker.name for worker in pool.workers.values() if worker.role == "instance"]
        if len(names) >= self.config.resources.instances_max or pool.num_waiting():
            return
        name = f"instance{len(names)}"
        if pool.has_room("instance", name):
            pool.start("instance", name, self.layout.instance_extra(name))

    # -- what relays and shards say ---------------------------------------------------------------

    def read(self, envelope: Envelope) -> None:
        name, message = envelope.name, envelope.message
        role = name.rstrip("0123456789") if name.startswith("storage") else name.partition("-")[0]
        if role not in ("depot", "storage"):
            super().read(envelope)
        elif not self.pool.current(envelope):
            return
        elif message is None:
            self.relays.lost(name) if role == "depot" else self.index.lost(name)
        elif message.kind in ("fatal", "fault"):
            self._fatal(name, message.body["reason"])
        else:
            self.pool.workers[name].joined = True
            if role == "depot":
                self.relays.hear(name, message)
            else:
                self._hear_storage(name, message)

    def _fatal(self, name: str, reason: str) -> None:
        """What is wrong on the head node from the start ends the run; a host elsewhere is done without."""
        if not self.pool.workers[name].joined and self.pool.workers[name].role == "storage":
            raise UserError(f"{name}: {reason}")
        self.on_wait([f"{name}: {reason}"])

    def _hear_storage(self, name: str, message: Message) -> None:
        body = message.body
        if message.kind == "ready":
            address = f"tcp://{self.cluster.head.ip}:{body['port']}"
            self.index.ready(name, address, body["groups"], self.state.groups)
        elif message.kind == "stored":
            self._stored(message)
        elif message.kind == "wrote":
            self.index.wrote(body["step"], body["group"])

    def _stored(self, message: Message) -> None:
        """As `finished` on one machine; the row is where it belongs already."""
        event = decode_event(message.body["event"])
        assert isinstance(event, ev.SampleFinished)
        if self.stop is not None or current(self.state, event.request, event.epoch) is None:
            return
        self.records.totals.tokens_generated += message.body["meta"]["num_generated"]
        version = self.state.groups[event.request.group].version
        self.index.put_meta(event, version, message.body["meta"])
        self.handle(event)

    def step_closed(self, action: act.CloseStep) -> None:
        """Lines of rollouts.jsonl are written while the learner computes: before its commit."""
        for gid in action.groups:
            group = self.state.groups[gid]
            scored = [r.id.sample for r in group.requests if r.phase is Phase.SCORED]
            prompt = self.train.prompt(group.prompt)
            self.index.closing(action.step, gid, group.version, scored, prompt)
        self.index.sync_shards()

    def _record_step(self, step: StepIndex, metrics: dict[str, float]) -> str:
        if step == self.state.committed:
            self.step_closed(act.CloseStep(step, tuple(self.state.batches[step].groups)))
        return super()._record_step(step, metrics)

    def close(self) -> dict[str, Any]:
        try:
            return super().close()
        finally:
            self.cluster.close()


def demand_of(config: RunConfig, layout: Layout, role: str, name: str) -> dict[str, float]:
    """What a worker takes of its host: whole devices, or cores where there are none.

    Elastic instances sleep while the learner computes, on the same devices: each takes half of one.
    The evaluator shares the device of the first rank.
    """
    resources, gpus = config.resources, layout.device.startswith("cuda")
    elastic = layout.is_elastic(name) if role == "instance" else False
    if role == "evaluator":
        return {"GPU": EVALUATOR_SHARE} if gpus else {}
    if role == "learner":
        share = LEARNER_SHARE if layout.has_elastic else 1.0
        return {"GPU": share - EVALUATOR_SHARE * (name == "learner")} if gpus else {"CPU": 1.0}
    if role != "instance":
        return {}
    if gpus:
        return {"GPU": 0.5 if elastic else float(resources.devices_per_instance)}
    return (
        {} if elastic else {"CPU": float(config.rollout.threads * resources.devices_per_instance)}
    )


def check_room(config: RunConfig, layout: Layout, cluster: Cluster) -> None:
    """The learner's first rank needs room on the controller's host: say so before it waits."""
    demand, head = demand_of(config, layout, "learner", "learner"), cluster.head
    for what, amount in demand.items():
        there = head.resources.get(what, 0.0)
        if there < amount:
            raise UserError(
                f"the learner runs on the controller's host ({head.ip}) and needs {amount:g} "
                f"{what}; the cluster counts {there:g} there: start dora-rl on a host with more"
            )
