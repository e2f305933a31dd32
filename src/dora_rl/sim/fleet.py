"""The simulated rollout fleet behind the `Generator` port.

Performs orders after the time they take and posts events, as the real instances do. Faults come
in through `Faults`, whose answers are all "no" in an undisturbed run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.ports import FleetAction
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.faults import Faults
from dora_rl.sim.hardware import RolloutCost
from dora_rl.sim.instance import SimInstance, SimRequest
from dora_rl.types import Finish, InstanceId, RequestId, Segment

STILL_S = 2.0  # without a token: named in the reports
Post = Callable[[ev.Event, Callable[[], bool]], None]
"""Send an event to the controller; it arrives only if the predicate still holds then."""
Task = Callable[[int, int], tuple[int, int]]
"""(prompt, sample) -> (prompt tokens, response tokens)."""


@dataclass(frozen=True, slots=True)
class InstanceSpec:
    """How an instance introduces itself."""

    slots_max: int
    resident_max: int
    kv_tokens_max: int
    elastic: bool


@dataclass(slots=True)
class FleetStats:
    num_moves: int = 0
    num_loads: int = 0
    kv_bytes_moved: float = 0.0
    move_s: float = 0.0
    load_s: float = 0.0
    prefill_tokens_again: float = 0.0
    aborted_tokens: float = 0.0


class Fleet:
    """All instances of a simulated run, and the journals of their requests."""

    def __init__(
        self,
        clock: VirtualClock,
        post: Post,
        task: Task,
        faults: Faults,
        *,
        report_s: float,
        journal_tokens: int = 32,
    ) -> None:
        self.clock = clock
        self.post = post
        self.task = task
        self.faults = faults
        self.report_s = report_s
        self.journal_tokens = journal_tokens
        self.instances: dict[InstanceId, SimInstance] = {}
        self.lives: dict[InstanceId, int] = {}
        self.specs: dict[InstanceId, tuple[InstanceSpec, RolloutCost]] = {}
        self.journal: dict[RequestId, tuple[int, tuple[Segment, ...]]] = {}
        self.finished: dict[RequestId, SimRequest] = {}  # the payload that the table would hold
        self.stats = FleetStats()
        self.on_busy: Callable[[SimInstance], None] = lambda instance: None

    def join(self, name: InstanceId, spec: InstanceSpec, cost: RolloutCost) -> None:
        self.specs[name] = (spec, cost)
        self.lives[name] = life = self.lives.get(name, -1) + 1
        instance = SimInstance(name, cost, self.clock.now())
        self.instances[name] = instance
        joined = ev.InstanceJoined(
            name, spec.slots_max, spec.resident_max, spec.kv_tokens_max, spec.elastic, life=life
        )

        def heard() -> bool:  # orders to the life before it do not reach this one
            instance.announced = True
            return True

        self.post(joined, heard)
        if self.report_s:
            self.clock.after(self.report_s, lambda: self._report(instance))

    def tell(self, name: InstanceId, event: ev.FromInstance) -> None:
        """A message that says which incarnation speaks; it may come when that is long gone."""
        self.post(replace(event, incarnation=self.lives[name]), lambda: True)

    def die(self, name: InstanceId) -> None:
        """The process is gone, with all it held in memory."""
        instance = self.instances.pop(name)
        instance.advance(self.clock.now())
        instance.turn += 1
        self._journal(instance)

    def _journal(self, instance: SimInstance) -> None:
        """What a durable journal, written every few tokens, would still have."""
        for request in [*instance.running.values(), *instance.leaving.values()]:
            done = int(instance.progress_of(request)) // self.journal_tokens * self.journal_tokens
            self.journal[request.id] = (done, tuple(request.segments))
        for request in instance.parked.values():
            self.journal[request.id] = (int(request.done), tuple(request.segments))

    def _report(self, instance: SimInstance) -> None:
        if self.instances.get(instance.name) is not instance:
            return
        if not instance.frozen:
            instance.advance(self.clock.now())
            steps, kv, now = int(instance.counter), int(instance.kv), self.clock.now()
            still = tuple(
                rid
                for rid, request in instance.running.items()
                if request.still and now - request.added_at >= STILL_S
            )
            report = ev.InstanceReport(instance.name, steps, kv, instance.speed, still=still)
            self.tell(instance.name, report)
        self.clock.after(self.report_s, lambda: self._report(instance))

    def do(self, action: FleetAction) -> None:
        match action:
            case act.Restart():
                self._restart(action.instance)
                return
            case act.Move():
                self._move(action)
                return
            case _:
                instance = self.instances.get(action.instance)
        if instance is None or instance.frozen or not instance.announced:
            return  # the order reaches nobody
        instance.advance(self.clock.now())
        self._order(instance, action)
        self.schedule(instance)

    def _order(self, instance: SimInstance, action: FleetAction) -> None:
        match action:
            case act.Dispatch():
                self._dispatch(instance, action)
            case act.Load():
                self._load(instance, action)
            case act.Unload():
                instance.unload(action.version)
            case act.Abort():
                self._abort(instance, action.request, action.epoch)
            case act.Park():
                request = instance.running.get(action.request)
                if request is not None and request.epoch == action.epoch:
                    instance.remove(request)
                    instance.parked[request.id] = request
            case act.Unpark() | act.Reversion():
                self._unpark(instance, action)
            case act.Sleep():
                instance.awake = False
            case act.Wake():
                instance.awake = True
                instance.debt_s += instance.cost.engine.sleep_wake_s
            case _:
                raise AssertionError(f"no instance performs {action!r}")

    def _dispatch(self, instance: SimInstance, action: act.Dispatch) -> None:
        shared = False
        for sample, epoch in zip(action.samples, action.epochs, strict=True):
            rid = RequestId(action.group, sample)
            refusal = instance.refuses(action.version)
            if refusal is not None:
                self.tell(instance.name, ev.SampleFailed(rid, epoch, instance.name, refusal))
                continue
            prompt_tokens, total = self.task(action.prompt, sample)
            request = SimRequest(
                rid,
                epoch,
                action.version,
                prompt_tokens,
                total,
                self.faults.kills_at(action.prompt, sample),
                self.faults.stands_still(rid, epoch),
            )
            if action.resume:
                done, segments = self.journal.get(rid, (0, ()))
                if done:
                    # The controller reads journals; its word has no incarnation but the epoch.
                    self.post(ev.Continued(rid, epoch, done), lambda: True)
                request.done = float(min(done, total - 1))
                request.segments = list(segments)
                self.stats.prefill_tokens_again += request.context
                instance.prefill(request.context)
            elif not shared:
                instance.prefill(prompt_tokens)  # the samples of a group share their prompt
                shared = True
            request.continue_under(action.version)
            instance.add(request)

    def _unpark(self, instance: SimInstance, action: act.Unpark | act.Reversion) -> None:
        request = instance.parked.get(action.request) or instance.running.get(action.request)
        if request is None or request.epoch != action.epoch:
            return
        refusal = instance.refuses(action.version)
        if refusal is not None:
            self.tell(
                instance.name, ev.SampleFailed(request.id, action.epoch, instance.name, refusal)
            )
            return
        if request.id in instance.running:
            instance.remove(request)
        else:
            del instance.parked[request.id]
        if action.version == request.version:
            instance.debt_s += instance.cost.spill_s(request.context)
        else:
            self.stats.prefill_tokens_again += request.context
            instance.prefill(request.context)
        request.continue_under(action.version)
        instance.add(request)

    def _abort(self, instance: SimInstance, rid: RequestId, epoch: int) -> None:
        request = instance.running.get(rid)
        if request is not None and request.epoch == epoch:
            instance.remove(request)
            self.stats.aborted_tokens += request.done
            self._keep_journal(request)
        for place in (instance.parked, instance.leaving):
            held = place.get(rid)
            if held is not None and held.epoch == epoch:
                del place[rid]
                self._keep_journal(held)

    def _keep_journal(self, request: SimRequest) -> None:
        done = int(request.done) // self.journal_tokens * self.journal_tokens
        self.journal[request.id] = (done, tuple(request.segments))

    def _load(self, instance: SimInstance, action: act.Load) -> None:
        delay = instance.cost.load_s()
        self.stats.num_loads += 1
        self.stats.load_s += delay
        reason = self.faults.load_fails(action)

        def done() -> None:
            if self.instances.get(instance.name) is not instance or instance.frozen:
                return
            if reason is not None:
                failed = ev.LoadFailed(
                    instance.name, action.version, reason, attempt=action.attempt
                )
                self.tell(instance.name, failed)
                return
            instance.advance(self.clock.now())
            instance.loaded[action.version] = None
            loaded = ev.Loaded(instance.name, action.version, attempt=action.attempt)
            self.tell(instance.name, loaded)
            self.schedule(instance)

        self.clock.after(delay, done)

    def _move(self, action: act.Move) -> None:
        """The source keeps the request until the destination has it."""
        src = self.instances.get(action.src)
        if src is None or src.frozen:
            return
        src.advance(self.clock.now())
        request = src.running.get(action.request) or src.parked.get(action.request)
        if request is None or request.epoch != action.epoch:
            return  # it ended before the order came; its end is on the way
        was_parked = request.id in src.parked
        if was_parked:
            del src.parked[request.id]
        else:
            src.remove(request)
        src.leaving[request.id] = request
        self.schedule(src)
        by_kv = action.how is act.How.KV
        delay = src.cost.move_s(request.context if by_kv else 0)
        fault = self.faults.move_fails(action)
        self.clock.after(delay, lambda: self._arrive(action, src, request, was_parked, fault))

    def _arrive(
        self,
        action: act.Move,
        src: SimInstance,
        request: SimRequest,
        was_parked: bool,
        fault: str | None,
    ) -> None:
        if self.instances.get(src.name) is not src or src.leaving.get(request.id) is not request:
            return  # the source died, or the request was aborted
        dst = self.instances.get(action.dst)
        reachable = dst is not None and not dst.frozen and dst.announced
        if not reachable or dst is None or fault is not None:
            self._move_failed(action, src, request, was_parked, fault or "destination gone")
            return
        refusal = dst.refuses(action.version)
        if refusal is not None or request.version != action.version:
            self._move_failed(action, src, request, was_parked, refusal or "version mismatch")
            return
        del src.leaving[request.id]
        dst.advance(self.clock.now())
        context = request.context
        if action.how is act.How.KV:
            num_bytes = int(context * dst.cost.model.kv_bytes_per_token)
            self.stats.kv_bytes_moved += num_bytes
            self.stats.move_s += dst.cost.move_s(context)
        else:
            num_bytes = 0
            self.stats.prefill_tokens_again += context
            dst.prefill(context)
        self.stats.num_moves += 1
        dst.add(request)
        who = (request.id, request.epoch, src.name, dst.name)
        self.tell(dst.name, ev.Moved(*who, num_bytes, int(context), attempt=action.attempt))
        self.schedule(dst)

    def _move_failed(
        self, action: act.Move, src: SimInstance, request: SimRequest, was_parked: bool, why: str
    ) -> None:
        kept = not why.startswith("lost")
        del src.leaving[request.id]
        if kept and was_parked:
            src.parked[request.id] = request
        elif kept:
            src.advance(self.clock.now())
            src.add(request)
            self.schedule(src)
        else:
            self._keep_journal(request)
        who = (request.id, request.epoch, src.name, action.dst)
        self.tell(src.name, ev.MoveFailed(*who, kept, why, attempt=action.attempt))

    def _restart(self, name: InstanceId) -> None:
        if name in self.instances:
            self.die(name)
        delay = self.faults.restart_s()
        if delay is not None:
            self.clock.after(delay, lambda: self._rejoin(name))

    def _rejoin(self, name: InstanceId) -> None:
        if name not in self.instances:
            self.join(name, *self.specs[name])

    def schedule(self, instance: SimInstance) -> None:
        """Wake up when the next request of this instance is complete."""
        self.on_busy(instance)
        instance.turn += 1
        delay = instance.next_end_s()
        if delay is None:
            return
        turn = instance.turn

        def wake() -> None:
            if instance.turn == turn and self.instances.get(instance.name) is instance:
                instance.advance(self.clock.now())
                ended = instance.pop_ended()
                for request in [r for r in ended if r.done >= r.total]:
                    self._finish(instance, request)
                for request in [r for r in ended if r.done < r.total]:
                    self._kill(instance, request)
                    return
                self.schedule(instance)

        self.clock.after(delay, wake)

    def _kill(self, instance: SimInstance, request: SimRequest) -> None:
        """The request ends the process that decodes it."""
        instance.add(request)
        name = instance.name
        self.die(name)
        self.tell(name, ev.InstanceLost(name, "its process ended"))
        self.clock.after(self.faults.restart_s() or 5.0, lambda: self._rejoin(name))

    def _finish(self, instance: SimInstance, request: SimRequest) -> None:
        reason = self.faults.sample_fails(request.id)
        if reason is not None:
            self._keep_journal(request)
            self.tell(
                instance.name, ev.SampleFailed(request.id, request.epoch, instance.name, reason)
            )
            return
        self.finished[request.id] = request
        segments = tuple(request.segments)
        self.tell(
            instance.name,
            ev.SampleFinished(
                request.id, request.epoch, instance.name, request.total, Finish.STOP, segments
            ),
        )
