"""The storage shards of a cluster, as its controller uses them: started, heard, told."""

from __future__ import annotations

from dora_rl.controller.files import RunFiles
from dora_rl.controller.loop import Control
from dora_rl.controller.world import Notify
from dora_rl.core.state import Phase
from dora_rl.data.prompts import PromptSource
from dora_rl.store.samples import SampleIndex, shard_of
from dora_rl.types import GroupId, StepIndex, UserError
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import Worker, Workers
from dora_rl.worlds.hosts import Host


class Shards:
    """All on the head node, beside the run directory. Implements `Service`."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        index: SampleIndex,
        workers: Workers,
        head: Host,
        train: PromptSource,
        notify: Notify,
    ) -> None:
        self._control, self._files, self._index = control, files, index
        self._workers, self._head, self._train, self._notify = workers, head, train, notify
        self._names = [f"storage{number}" for number in range(len(index.addresses))]
        self._unwritten: dict[tuple[StepIndex, GroupId], msg.Trained] = {}
        index.on_drop = lambda group: workers.send(self._name_of(group), msg.Forget(group))

    @property
    def is_ready(self) -> bool:
        return all(self._index.addresses)

    def _name_of(self, group: GroupId) -> str:
        return self._names[shard_of(group, len(self._names))]

    def start(self) -> None:
        for number, name in enumerate(self._names):
            self._workers.start("storage", name, {"shard": number})

    # -- what they say ----------------------------------------------------------------------------

    def hear(self, worker: Worker, message: msg.Message) -> None:
        match message:
            case msg.Serving(port, groups):
                self._is_up(worker.name, f"tcp://{self._head.ip}:{port}", groups)
            case msg.Stored():
                self._stored(message)
            case msg.Wrote(step, group):
                self._unwritten.pop((step, group), None)
            case _:
                pass  # it is alive

    def _is_up(self, name: str, address: str, has: tuple[GroupId, ...]) -> None:
        """A shard is there (again): tell it what it missed, and everybody where it is."""
        self._index.addresses[self._names.index(name)] = address
        for (_, group), due in list(self._unwritten.items()):
            if self._name_of(group) == name:
                self._workers.send(name, due)
        for group in has:
            if group not in self._control.state.groups:
                self._workers.send(name, msg.Forget(group))
        for worker in list(self._workers.workers.values()) if self.is_ready else ():
            if worker.role == "instance":
                self._workers.send(worker.name, msg.Shards(tuple(self._index.addresses)))

    def _stored(self, message: msg.Stored) -> None:
        """As `Finished` on one machine; the row is where it belongs already."""
        event, control = message.event, self._control
        if not control.is_generating(event.request, event.epoch):
            return
        self._files.records.totals.tokens_generated += message.num_generated
        version = control.state.groups[event.request.group].version
        self._index.add_stored(message, version)
        control.handle(event)

    def lost(self, name: str) -> None:
        self._index.addresses[self._names.index(name)] = ""
        if not self._workers.closing:
            self._workers.restart(name)

    def fatal(self, worker: Worker, reason: str) -> None:
        """What is wrong on the head node from the start ends the run."""
        if not worker.joined:
            raise UserError(f"{worker.name}: {reason}")
        self._notify(f"{worker.name}: {reason}")

    # -- what they are told -----------------------------------------------------------------------

    def write_rollouts(self, step: StepIndex) -> None:
        """Lines of rollouts.jsonl are written while the learner computes: before its commit."""
        state = self._control.state
        for gid in state.batches[step].groups:
            group = state.groups[gid]
            scored = tuple(r.id.sample for r in group.requests if r.phase is Phase.SCORED)
            prompt = self._train.prompt(group.prompt)
            due = self._index.lines_due(step, gid, group.version, scored, prompt)
            self._unwritten[step, gid] = due
            self._workers.send(self._name_of(gid), due)
        for name in self._names:  # the loss of this host takes no row that the shards have now
            self._workers.send(name, msg.Sync())
