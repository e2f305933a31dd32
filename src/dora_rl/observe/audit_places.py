"""The auditor of places: which instance holds which version, and where every request is.

C1 from the outside: a request is dispatched, moved and unparked only onto an instance that has
loaded its version and still holds it, and no version is unloaded (and no instance put to sleep)
with requests running on it. Late messages are told apart by the request's epoch, as their
definition says.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit_books import C1, C2, PROMPTS, VERSIONS, Checker
from dora_rl.types import InstanceId, Mode, RequestId, Version


@dataclass(slots=True)
class Place:
    """`dest` is set while the request moves; `parked` while it only keeps its KV here."""

    epoch: int
    version: Version
    instance: InstanceId
    dest: InstanceId | None = None
    parked: bool = False


@dataclass(slots=True)
class InstanceRecord:
    """`requests` are those that run here, leave, arrive or are parked."""

    slots_max: int
    life: int = 0
    awake: bool = True
    loading: Version | None = None
    held: set[Version] = field(default_factory=set[Version])
    requests: dict[RequestId, Place] = field(default_factory=dict[RequestId, Place])


@dataclass(eq=False)
class PlaceAudit(Checker):
    """Follows every request from its dispatch to its end, and every version's residency."""

    instances: dict[InstanceId, InstanceRecord] = field(
        default_factory=dict[InstanceId, InstanceRecord]
    )
    places: dict[RequestId, Place] = field(default_factory=dict[RequestId, Place])

    # Instances.

    def on_joined(self, event: ev.InstanceJoined) -> None:
        known = self.instances.get(event.instance)
        if known is not None and known.life == event.life:
            return  # the same message again
        self._lose(event.instance)
        held = {v for v in event.versions if v not in self.books.retired}
        self.instances[event.instance] = InstanceRecord(event.slots_max, event.life, held=held)

    def on_lost(self, event: ev.InstanceLost | act.Restart) -> None:
        self._lose(event.instance)

    def on_resumed(self, _event: ev.Resumed) -> None:
        for name in list(self.instances):
            self._lose(name, blame=False)  # a restart of the whole run is nobody's fault

    def _lose(self, name: InstanceId, *, blame: bool = True) -> None:
        if (instance := self.instances.pop(name, None)) is None:
            return
        running = [r for r, place in instance.requests.items() if not place.parked]
        for request in instance.requests:
            if blame:
                self._note_loss(request, name, alone=running == [request])
            self._remove(request)

    def _note_loss(
        self, request: RequestId, cause: str, *, final: bool = False, alone: bool = False
    ) -> None:
        """Evidence, should its group end as failed one day."""
        if (sample := self.books.sample(request)) is not None:
            sample.num_alone += alone
            sample.lose(cause, self.books.params.attempts_max, final=final)

    def on_load(self, action: act.Load) -> None:
        instance = self._instance(action.instance, f"load version {action.version}")
        if instance is None:
            return
        instance.loading = action.version
        self.check(
            action.version <= self.books.committed and action.version not in self.books.retired,
            VERSIONS,
            action.instance,
            f"loads version {action.version}, which is not live",
        )
        if action.donor is not None:
            donor = self.instances.get(action.donor)
            self.check(
                donor is not None and action.version in donor.held,
                VERSIONS,
                action.instance,
                f"loads from {action.donor}, which does not hold it",
            )

    def on_load_end(self, event: ev.Loaded | ev.LoadFailed) -> None:
        instance = self.instances.get(event.instance)
        if instance is None or instance.loading != event.version:
            return
        instance.loading = None
        if isinstance(event, ev.Loaded):
            instance.held.add(event.version)
            # An instance says what it loaded: the same everywhere, and what was committed.
            told, known = event.checksum, self.books.weights
            self.check(
                not told or known.setdefault(event.version, told) == told,
                VERSIONS,
                event.instance,
                f"loaded other weights as version {event.version} than were published",
            )

    def on_unload(self, action: act.Unload) -> None:
        instance = self._instance(action.instance, f"unload version {action.version}")
        if instance is None:
            return
        self.check(
            action.version in instance.held,
            VERSIONS,
            action.instance,
            f"unloads version {action.version} it does not hold",
        )
        running = [r for r, p in self._running(action.instance) if p.version == action.version]
        self.check(
            not running,
            C1,
            action.instance,
            f"unloads version {action.version} with requests on it: {_groups(running)}",
        )
        instance.held.discard(action.version)

    def on_sleep(self, action: act.Sleep) -> None:
        if (instance := self._instance(action.instance, "sleep")) is None:
            return
        running = [
            request
            for request, place in instance.requests.items()
            if place.instance == action.instance and not place.parked and place.dest is None
        ]
        self.check(
            not running,
            VERSIONS,
            action.instance,
            f"sleeps with running requests: {_groups(running)}",
        )
        instance.awake = False

    def on_wake(self, action: act.Wake) -> None:
        if (instance := self._instance(action.instance, "wake")) is not None:
            instance.awake = True

    # Requests.

    def on_dispatch(self, action: act.Dispatch) -> None:
        instance = self._instance(action.instance, f"start group {action.group}")
        record = self.books.live.get(action.group)
        self.check(
            record is not None, C2, f"group {action.group}", "dispatched and is not outstanding"
        )
        if instance is None or record is None:
            return
        self.check(
            action.prompt == record.prompt,
            PROMPTS,
            f"group {action.group}",
            f"dispatched with prompt {action.prompt}, issued with {record.prompt}",
        )
        self._check_version(action.group, action.version)
        self._check_holds(action.instance, instance, action.group, action.version)
        for sample, epoch in zip(action.samples, action.epochs, strict=False):
            request = RequestId(action.group, sample)
            if sample >= len(record.samples):
                self.add(C2, f"group {action.group}", f"has no sample {sample}")
                continue
            known = record.samples[sample]
            if request in self.places or epoch <= known.epoch or known.asked >= 0:
                self.add(
                    C2,
                    f"group {action.group}",
                    f"sample {sample} is dispatched again, epoch {epoch}",
                )
                self._remove(request)
            known.epoch = epoch
            self.places[request] = place = Place(epoch, action.version, action.instance)
            instance.requests[request] = place
        self._check_slots(action.instance, instance)

    def on_move(self, action: act.Move) -> None:
        src = self._instance(action.src, f"hand over group {action.request.group}")
        dst = self._instance(action.dst, f"take over group {action.request.group}")
        place = self._placed(action.request, action.epoch, action.src)
        if src is None or dst is None or place is None:
            return
        self._check_version(action.request.group, action.version)
        self._check_holds(action.dst, dst, action.request.group, action.version)
        place.dest = action.dst
        dst.requests[action.request] = place
        self._check_slots(action.dst, dst)

    def on_moved(self, event: ev.Moved) -> None:
        if (place := self._moving(event)) is None:
            return
        self.books.figures.migrations += 1
        self.books.figures.kv_bytes_moved += event.num_bytes
        self.instances[place.instance].requests.pop(event.request, None)
        place.instance, place.dest, place.parked = event.dst, None, False

    def on_move_failed(self, event: ev.MoveFailed) -> None:
        if (place := self._moving(event)) is None:
            return
        if event.kept:
            self.instances[event.dst].requests.pop(event.request, None)
            place.dest = None
        else:
            self._note_loss(event.request, event.reason)
            self._remove(event.request)

    def _moving(self, event: ev.Moved | ev.MoveFailed) -> Place | None:
        """Where the request is, if this is about the move that was ordered."""
        place = self.places.get(event.request)
        same = place is not None and (place.epoch, place.dest) == (event.epoch, event.dst)
        return place if same else None

    def on_park(self, action: act.Park) -> None:
        if (place := self._placed(action.request, action.epoch, action.instance)) is not None:
            place.parked = True

    def on_reversion(self, action: act.Reversion) -> None:
        self.check(
            self.books.params.mode is Mode.PARTIAL,
            C1,
            f"group {action.request.group}",
            "continued under another version, which only partial may do",
        )

    def on_continue(self, action: act.Unpark | act.Reversion) -> None:
        place = self._placed(action.request, action.epoch, action.instance)
        instance = self.instances.get(action.instance)
        if place is None or instance is None:
            return
        if isinstance(action, act.Unpark):
            self._check_version(action.request.group, action.version)
        self._check_holds(action.instance, instance, action.request.group, action.version)
        place.version, place.parked = action.version, False
        self._check_slots(action.instance, instance)

    def on_abort(self, action: act.Abort) -> None:
        place = self.places.get(action.request)
        if place is not None and place.epoch == action.epoch:
            if place.dest is not None or isinstance(self.findings.event, ev.Tick):
                self._note_loss(action.request, "no progress")
            self._remove(action.request)

    def on_finished(self, event: ev.SampleFinished) -> None:
        if (place := self.places.get(event.request)) is None or place.epoch != event.epoch:
            return
        if event.instance not in (place.instance, place.dest):
            self.add(
                C2,
                f"group {event.request.group}",
                f"sample {event.request.sample} finished on {event.instance}, where it is not",
            )
        self.findings.finished = event.request
        pure = len(event.segments) == 1 and event.segments[0].version == place.version
        if not pure and self.books.params.mode is not Mode.PARTIAL:
            self._note_loss(event.request, "decoded under another version", final=True)
        self._remove(event.request)

    def on_failed(self, event: ev.SampleFailed) -> None:
        if (place := self.places.get(event.request)) is not None and place.epoch == event.epoch:
            self._note_loss(event.request, event.reason, final=event.final)
            self._remove(event.request)

    def on_end(self, action: act.EndGroup) -> None:
        record = self.books.live.get(action.group)
        for sample in range(len(record.samples) if record is not None else 0):
            if self._remove(RequestId(action.group, sample)):
                self.add(C2, f"group {action.group}", f"ended while sample {sample} runs")

    def _remove(self, request: RequestId) -> bool:
        """Whether it was anywhere."""
        place = self.places.pop(request, None)
        for name in (place.instance, place.dest) if place is not None else ():
            if name in self.instances:
                self.instances[name].requests.pop(request, None)
        return place is not None

    # Checks.

    def _instance(self, name: InstanceId, what: str) -> InstanceRecord | None:
        instance = self.instances.get(name)
        self.check(
            instance is not None, VERSIONS, name, f"is to {what}, and there is no such instance"
        )
        return instance

    def _running(self, name: InstanceId) -> list[tuple[RequestId, Place]]:
        """What runs there, leaves or arrives; what is parked there only keeps its KV."""
        placed = self.instances[name].requests.items()
        return [(r, place) for r, place in placed if not (place.parked and place.instance == name)]

    def _placed(self, request: RequestId, epoch: int, where: InstanceId) -> Place | None:
        place = self.places.get(request)
        if place is None or (place.epoch, place.instance, place.dest) != (epoch, where, None):
            self.add(
                C2,
                f"group {request.group}",
                f"sample {request.sample} is ordered on {where}, where it is not",
            )
            return None
        return place

    def _check_version(self, group: int, version: Version) -> None:
        record = self.books.live.get(group)
        self.check(
            version <= self.books.committed,
            VERSIONS,
            f"group {group}",
            f"decodes under version {version} before its publication",
        )
        if record is None or record.version == version:
            return
        self.check(
            self.books.params.mode is Mode.PARTIAL and version >= record.version,
            C1,
            f"group {group}",
            f"issued on version {record.version}, decodes under {version}",
        )

    def _check_holds(
        self, name: InstanceId, instance: InstanceRecord, group: int, version: Version
    ) -> None:
        self.check(
            version in instance.held,
            C1,
            name,
            f"group {group} is sent to it on version {version}, which it does not hold",
        )
        self.check(instance.awake, VERSIONS, name, f"group {group} is sent to it while it sleeps")

    def _check_slots(self, name: InstanceId, instance: InstanceRecord) -> None:
        load = len(self._running(name))
        self.check(
            load <= instance.slots_max,
            VERSIONS,
            name,
            f"has {load} requests for {instance.slots_max} slots",
        )


def _groups(requests: list[RequestId]) -> str:
    return "groups " + ", ".join(str(g) for g in sorted({r.group for r in requests})[:5])
