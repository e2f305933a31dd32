"""The workers of a cluster that serve the others: a relay on each host, and the storage shards.

Weights and KV between hosts: which relay pulls what from whom. No byte passes through here. A
version is pulled once per host, from the host of the donor that the core named, else from the host
that passes it on to the fewest (the learner's host among them), so that hosts that load at the same
time form a chain and the learner's host sends the version once.

Shards are started, heard and told here; they are on the head node, beside the run directory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from dora_rl.controller.loop import Control
from dora_rl.controller.run_dir import RunFiles
from dora_rl.controller.world import Carrier, Notify
from dora_rl.core import actions as act
from dora_rl.core.state import Phase
from dora_rl.data.prompts import PromptSource
from dora_rl.io.connection import tcp
from dora_rl.store.samples import SampleIndex, shard_of
from dora_rl.types import GroupId, InstanceId, StepIndex, UserError, Version
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import Worker, WorkerPool, Workers
from dora_rl.worlds.hosts import Host, HostProcesses

SILENT_S_MAX = 5.0  # a relay that says nothing for so long is on a host that is cut off
STARTS_MAX = 5
HOSTS_S = 1.0  # between two looks at the cluster


@dataclass(slots=True)
class Site:
    """A host and its relay, as the controller knows them."""

    host: Host
    name: str
    address: str = ""
    heard_s: float = 0.0
    num_starts: int = 0  # in a row that came to nothing
    wanted: set[Version] = field(default_factory=set[Version])
    there: set[Version] = field(default_factory=set[Version])


class Relays(Carrier):
    """One relay per host. Implements `Service` too."""

    def __init__(self, pool: WorkerPool, hosts: HostProcesses, notify: Notify) -> None:
        self._pool, self._hosts, self._notify = pool, hosts, notify
        self._head = hosts.cluster.head
        self.sites: dict[str, Site] = {}
        self._feeds: dict[Version, dict[str, int]] = {}  # per version and host: sent on to how many
        self._looked_s = 0.0
        self.is_head_ready: Callable[[], bool] = lambda: True
        hosts.usable = self.usable

    def tick(self) -> None:
        """New hosts get a relay, lost ones are forgotten, waiting workers are placed."""
        now = time.monotonic()
        if now - self._looked_s >= HOSTS_S:
            self._looked_s = now
            self._look()
        self._hosts.place_waiting()

    def _look(self) -> None:
        hosts = {host.id: host for host in self._hosts.cluster.hosts()}
        for gone in [site for site in self.sites.values() if site.host.id not in hosts]:
            self._forget(gone)
        for host in hosts.values():
            if host.id not in self.sites:
                site = Site(host, f"depot-{host.id[:12]}")  # as its log has always been named
                self.sites[host.id] = site
                self._pool.start("relay", site.name, {"host": host.id})

    def _forget(self, site: Site) -> None:
        del self.sites[site.host.id]
        for feeds in self._feeds.values():
            feeds.pop(site.host.id, None)
        self._pool.dismiss(site.name)

    def usable(self) -> list[Host]:
        """Hosts that may get workers: their relay is heard, and the head node is ready."""
        head = self.sites.get(self._head.id)
        if head is None or not head.address or not self.is_head_ready():
            return []
        return [
            site.host
            for site in self.sites.values()
            if site.address and (site.host.id == self._head.id or self._is_heard(site))
        ]

    def _is_heard(self, site: Site) -> bool:
        return time.monotonic() - site.heard_s < SILENT_S_MAX

    # -- what relays say --------------------------------------------------------------------------

    def site_named(self, name: str) -> Site | None:
        return next((site for site in self.sites.values() if site.name == name), None)

    def hear(self, worker: Worker, message: msg.Message) -> None:
        site = self.site_named(worker.name)
        if site is None:
            return
        site.heard_s = time.monotonic()
        match message:
            case msg.Serving(port, versions):
                site.address = tcp(site.host.ip, port)
                site.there, site.num_starts = set(versions), 0
                self._ask_again()
            case msg.Fetched(version):
                site.there.add(version)

    def fatal(self, worker: Worker, reason: str) -> None:
        """A host elsewhere is done without."""
        self._notify(f"{worker.name}: {reason}")

    def lost(self, name: str) -> None:
        """A relay ended. On a host that is still there it is started again."""
        site = self.site_named(name)
        if site is None or self._pool.closing:
            return
        site.address, site.there = "", set()
        site.num_starts += 1
        if site.num_starts < STARTS_MAX:  # else the host gets no worker while it is as it is
            self._pool.restart(name)

    def _ask_again(self) -> None:
        """A relay is new: whoever waits for a version may have to ask it, or be asked again."""
        for site in self.sites.values():
            for version in site.wanted - site.there:
                self._fetch(site, version, None)

    # -- the carrier ------------------------------------------------------------------------------

    def load(self, action: act.Load) -> None:
        host = self._hosts.host_of(action.instance)
        site = self.sites.get(host.id) if host is not None else None
        if site is None or site.host.id == self._head.id or action.version in site.wanted:
            return
        site.wanted.add(action.version)
        donor = self._hosts.host_of(action.donor) if action.donor is not None else None
        self._fetch(site, action.version, donor)

    def _fetch(self, site: Site, version: Version, donor: Host | None) -> None:
        sources = self.sources(site, version, donor)
        self._pool.send(site.name, msg.Fetch(version, tuple(other.address for other in sources)))

    def sources(self, site: Site, version: Version, donor: Host | None) -> list[Site]:
        """The donor's host or the one that feeds the fewest, then the learner's."""
        feeds = self._feeds.setdefault(version, {self._head.id: 0})
        head = self.sites[self._head.id]
        candidates = [
            other
            for other in (self.sites.get(host) for host in feeds)
            if other is not None
            and other is not site
            and other.address
            and (other is head or self._is_heard(other))
        ]
        named = [other for other in candidates if donor is not None and other.host.id == donor.id]
        first = named or candidates
        best = min(first, key=lambda other: feeds[other.host.id], default=head)
        feeds[best.host.id] = feeds.get(best.host.id, 0) + 1
        feeds.setdefault(site.host.id, 0)
        return [best] if best is head else [best, head]

    def exported(self, export: msg.Exported, src: InstanceId) -> msg.Exported:
        here, there = self._hosts.host_of(src), self._hosts.host_of(export.dst)
        if here is None or there is None or here.id == there.id or here.id not in self.sites:
            return export
        return replace(export, relay=self.sites[here.id].address)

    def retire(self, versions: Collection[Version]) -> None:
        if not versions:
            return
        for version in versions:
            self._feeds.pop(version, None)
        for site in self.sites.values():
            site.wanted -= set(versions)
            site.there -= set(versions)
            if site.host.id != self._head.id:
                self._pool.send(site.name, msg.Retire(tuple(sorted(versions))))


# -- storage shards --------------------------------------------------------------------------------


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
                self._is_up(worker.name, tcp(self._head.ip, port), groups)
            case msg.Stored():
                self._stored(message)
            case msg.Wrote(step, group):
                self._unwritten.pop((step, group), None)

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
