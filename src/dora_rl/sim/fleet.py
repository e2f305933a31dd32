"""The simulated rollout fleet behind the `Generator` port.

Performs orders after the time they take and posts events, as the real instances do. Faults come in
through `Faults`, whose answers are all "no" in an undisturbed run.

An instance is continuous batching as a fluid. All requests that decode on it gain tokens at the
same pace, one per decode step, so one counter serves them all: a request ends when the counter
reaches the value fixed at its arrival. The step time grows with the KV cache; between two changes
of the batch it is integrated exactly.

    counter   tokens per request so far (a real number)   debt_s   prefill time still to be paid
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from typing import TypeAlias

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.ports import FleetAction
from dora_rl.sim.clock import VirtualClock
from dora_rl.sim.faults import Faults
from dora_rl.sim.hardware import Draft, RolloutCost
from dora_rl.types import Finish, InstanceId, RequestId, Segment, Version


@dataclass(slots=True)
class SimRequest:
    """One sample as the engine sees it. `done` of `total` response tokens are decoded."""

    id: RequestId
    epoch: int
    version: Version
    prompt_tokens: int
    total: int
    _: KW_ONLY
    kills_at: int | None = None  # decoding this token ends the instance's process
    still: bool = False  # the instance does nothing for it
    done: float = 0.0
    ends_at: float = 0.0  # counter value at which it is complete
    added_at: float = 0.0
    segments: list[Segment] = field(default_factory=list[Segment])

    def continue_under(self, version: Version) -> None:
        """Record which version decodes from here on."""
        if not self.segments or self.segments[-1].version != version:
            self.segments.append(Segment(int(self.done), version))
        self.version = version

    @property
    def last(self) -> float:
        """The token after which something happens."""
        kills_at = self.total if self.kills_at is None else self.kills_at
        return max(self.done, min(self.total, kills_at))

    @property
    def context(self) -> float:
        return self.prompt_tokens + self.done


@dataclass(eq=False)
class SimInstance:
    """Decodes what it is given, under the versions it holds. `at`: the counters are of then."""

    name: InstanceId
    cost: RolloutCost
    at: float
    loaded: dict[Version, None] = field(default_factory=dict[Version, None])  # its weights are here
    held: dict[Version, int] = field(default_factory=dict[Version, int])  # requests decoding
    running: dict[RequestId, SimRequest] = field(default_factory=dict[RequestId, SimRequest])
    parked: dict[RequestId, SimRequest] = field(default_factory=dict[RequestId, SimRequest])
    leaving: dict[RequestId, SimRequest] = field(default_factory=dict[RequestId, SimRequest])
    awake: bool = True
    announced: bool = False  # the controller knows of it
    frozen: bool = False  # hangs: reports nothing, does nothing
    stalled: bool = False  # reports, and decodes nothing
    speed: float = 1.0
    counter: float = 0.0
    kv: float = 0.0
    debt_s: float = 0.0
    busy_s: float = 0.0
    slot_s: float = 0.0
    turn: int = 0  # raised at every change, so that stale wake-ups are recognised

    def __post_init__(self) -> None:
        self._ends: list[tuple[float, RequestId, int]] = []
        self._base_s = self.cost.step_base_s()
        self._kv_s = self.cost.kv_s_per_token()
        self._flops_s = self.cost.flops_s_per_request()
        self._drafts = self.cost.drafts()

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next token, and by how much each further one is longer. With speculation a
        step gives more than one; the drafts are as long as is quickest for this batch."""
        return min(map(self._pace_with, self._drafts))

    def _pace_with(self, draft: Draft) -> tuple[float, float]:
        n, tokens = len(self.running), self.cost.tokens_of(draft)
        rows = draft.rows
        weights = sum(self.cost.weights_s(math.ceil(n * rows)) for n in self.held.values())
        moving, slope = weights + self._kv_s * self.kv, self._kv_s * n
        if self._flops_s * n * rows > moving:
            moving, slope = self._flops_s * n * rows, 0.0
        scale = self.cost.stall(n) / self.speed / tokens
        return scale * (self._base_s + self.cost.rows_s(draft) * n + moving), scale * slope

    def _stands(self) -> bool:
        return not self.running or not self.awake or self.frozen or self.stalled

    def advance(self, now: float) -> None:
        """Bring the counters up to now."""
        elapsed, self.at = now - self.at, now
        if elapsed <= 0 or self._stands():
            return
        self.busy_s += elapsed
        self.slot_s += elapsed * len(self.running)
        paid = min(self.debt_s, elapsed)
        self.debt_s -= paid
        elapsed -= paid
        if elapsed > 0:
            pace, slope = self._pace()
            steps = elapsed / pace
            if slope > 1e-15:
                steps = (math.sqrt(pace * pace + 2 * slope * elapsed) - pace) / slope
            self.counter += steps
            self.kv += steps * len(self.running)

    def _first_end(self) -> SimRequest | None:
        """The request that ends first; entries that no longer hold are dropped."""
        while self._ends:
            ends_at, rid, epoch = self._ends[0]
            request = self.running.get(rid)
            if request is not None and request.epoch == epoch and request.ends_at == ends_at:
                return request
            heapq.heappop(self._ends)
        return None

    def next_end_s(self) -> float | None:
        """Seconds until the next request is complete, if nothing changes."""
        if (first := self._first_end()) is None or self._stands():
            return None
        steps = max(0.0, first.ends_at - self.counter)
        pace, slope = self._pace()
        return self.debt_s + steps * pace + 0.5 * slope * steps * steps

    def pop_ended(self) -> list[SimRequest]:
        """Requests whose last token has been decoded."""
        ended: list[SimRequest] = []
        while (first := self._first_end()) and first.ends_at <= self.counter + 1e-6:
            self.remove(first)
            first.done = first.last
            ended.append(first)
        return ended

    def refuses(self, version: Version) -> str | None:
        """A request is decoded under its own version or not at all."""
        return None if version in self.loaded else f"{self.name} does not hold version {version}"

    def unload(self, version: Version) -> None:
        """As strict as the real engine: weights go only when nothing decodes under them."""
        assert version in self.loaded, f"{self.name} unloads version {version}, not held"
        users = [tuple(rid) for rid, r in self.running.items() if r.version == version]
        assert not users, f"{self.name} unloads version {version} with requests {users}"
        del self.loaded[version]

    def add(self, request: SimRequest) -> None:
        request.ends_at = self.counter + request.last - request.done
        request.added_at = self.at
        self.running[request.id] = request
        self.held[request.version] = self.held.get(request.version, 0) + 1
        self.kv += request.context
        if not request.still:
            heapq.heappush(self._ends, (request.ends_at, request.id, request.epoch))

    def remove(self, request: SimRequest) -> None:
        """Take a request off the batch, its progress brought up to date."""
        request.done = self.progress_of(request)
        del self.running[request.id]
        self.held[request.version] -= 1
        if not self.held[request.version]:
            del self.held[request.version]
        self.kv -= request.context
        if not self.running:
            self.kv = 0.0

    def progress_of(self, request: SimRequest) -> float:
        stands = request.still or request.id not in self.running
        return request.done if stands else request.last - max(0.0, request.ends_at - self.counter)

    def prefill(self, num_tokens: float) -> None:
        self.debt_s += num_tokens * self._flops_s / self.speed


STILL_S = 2.0  # without a token: named in the reports
JOURNAL_TOKENS = 32  # a durable journal is written every so many
Post = Callable[[ev.Event, Callable[[], bool]], None]
"""Send an event to the controller; it arrives only if the predicate still holds then."""
Task = Callable[[int, int], tuple[int, int]]
"""(prompt, sample) -> (prompt tokens, response tokens)."""
Journal: TypeAlias = dict[RequestId, tuple[int, tuple[Segment, ...]]]


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
    kv_bytes_moved: float = 0.0
    move_s: float = 0.0
    load_s: float = 0.0
    prefill_tokens_again: float = 0.0
    aborted_tokens: float = 0.0


@dataclass(eq=False)
class Fleet:
    """All instances of a simulated run, and the journals of their requests."""

    clock: VirtualClock
    post: Post
    task: Task
    faults: Faults
    report_s: float
    instances: dict[InstanceId, SimInstance] = field(default_factory=dict[InstanceId, SimInstance])
    lives: dict[InstanceId, int] = field(default_factory=dict[InstanceId, int])
    specs: dict[InstanceId, tuple[InstanceSpec, RolloutCost]] = field(
        default_factory=dict[InstanceId, tuple[InstanceSpec, RolloutCost]]
    )
    journal: Journal = field(default_factory=Journal)
    # The payload that the table would hold.
    finished: dict[RequestId, SimRequest] = field(default_factory=dict[RequestId, SimRequest])
    stats: FleetStats = field(default_factory=FleetStats)
    on_busy: Callable[[SimInstance], None] = lambda instance: None

    def join(self, name: InstanceId, spec: InstanceSpec, cost: RolloutCost) -> None:
        self.specs[name] = (spec, cost)
        self.lives[name] = life = self.lives.get(name, -1) + 1
        self.instances[name] = instance = SimInstance(name, cost, self.clock.now())

        def heard() -> bool:  # orders to the life before it do not reach this one
            instance.announced = True
            return True

        self.post(ev.InstanceJoined(name, **asdict(spec), life=life), heard)
        if self.report_s:
            self.clock.after(self.report_s, lambda: self._report(instance))

    def rejoin(self, name: InstanceId) -> None:
        if name not in self.instances:
            self.join(name, *self.specs[name])

    def tell(self, name: InstanceId, event: ev.FromInstance) -> None:
        """A message that says which incarnation speaks; it may come when that is long gone."""
        self.post(replace(event, incarnation=self.lives[name]), lambda: True)

    def die(self, name: InstanceId) -> None:
        """The process is gone, with all it held in memory."""
        instance = self.instances.pop(name)
        instance.advance(self.clock.now())
        instance.turn += 1
        for request in [*instance.running.values(), *instance.leaving.values()]:
            self._keep_journal(request, instance.progress_of(request))
        for request in instance.parked.values():
            self.journal[request.id] = (int(request.done), tuple(request.segments))

    def _restart_later(self, name: InstanceId) -> None:
        self.clock.after(self.faults.restart_s(), lambda: self.rejoin(name))

    def _report(self, instance: SimInstance) -> None:
        if self.instances.get(instance.name) is not instance:
            return
        if not instance.frozen:
            now = self.clock.now()
            instance.advance(now)
            seen = (int(instance.counter), int(instance.kv), instance.speed)
            still = (r for r in instance.running.values() if r.still)
            long = tuple(r.id for r in still if now - r.added_at >= STILL_S)
            self.tell(instance.name, ev.InstanceReport(instance.name, *seen, still=long))
        self.clock.after(self.report_s, lambda: self._report(instance))

    def do(self, action: FleetAction) -> None:
        match action:
            case act.Restart():
                if action.instance in self.instances:
                    self.die(action.instance)
                self._restart_later(action.instance)
            case act.Move():
                self._move(action)
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
                self._abort(instance, action)
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

    def _is_refused(
        self, instance: SimInstance, version: Version, rid: RequestId, epoch: int
    ) -> bool:
        """A request is decoded under its own version or not at all; the controller is told."""
        if (refusal := instance.refuses(version)) is not None:
            self.tell(instance.name, ev.SampleFailed(rid, epoch, instance.name, refusal))
        return refusal is not None

    def _dispatch(self, instance: SimInstance, action: act.Dispatch) -> None:
        shared = False
        for sample, epoch in zip(action.samples, action.epochs, strict=True):
            rid = RequestId(action.group, sample)
            if self._is_refused(instance, action.version, rid, epoch):
                continue
            prompt_tokens, total = self.task(action.prompt, sample)
            kills_at = self.faults.kills_at(action.prompt, sample)
            still, version = self.faults.stands_still(), action.version
            request = SimRequest(
                rid, epoch, version, prompt_tokens, total, kills_at=kills_at, still=still
            )
            if action.resume:
                done, segments = self.journal.get(rid, (0, ()))
                if done:
                    # The controller reads journals; its word has no incarnation but the epoch.
                    self.post(ev.Continued(rid, epoch, done), lambda: True)
                request.done = float(min(done, total - 1))
                request.segments = list(segments)
                self._prefill_again(instance, request)
            elif not shared:
                instance.prefill(prompt_tokens)  # the samples of a group share their prompt
                shared = True
            request.continue_under(action.version)
            instance.add(request)

    def _unpark(self, instance: SimInstance, action: act.Unpark | act.Reversion) -> None:
        request = instance.parked.get(action.request) or instance.running.get(action.request)
        if request is None or request.epoch != action.epoch:
            return
        if self._is_refused(instance, action.version, request.id, action.epoch):
            return
        if instance.parked.pop(request.id, None) is None:
            instance.remove(request)
        if action.version == request.version:
            instance.debt_s += instance.cost.spill_s(request.context)
        else:
            self._prefill_again(instance, request)
        request.continue_under(action.version)
        instance.add(request)

    def _prefill_again(self, instance: SimInstance, request: SimRequest) -> None:
        self.stats.prefill_tokens_again += request.context
        instance.prefill(request.context)

    def _abort(self, instance: SimInstance, action: act.Abort) -> None:
        for place in (instance.running, instance.parked, instance.leaving):
            if (request := place.get(action.request)) is None or request.epoch != action.epoch:
                continue
            if place is instance.running:
                instance.remove(request)
                self.stats.aborted_tokens += request.done
            else:
                del place[request.id]
            self._keep_journal(request, request.done)

    def _keep_journal(self, request: SimRequest, done: float) -> None:
        """What a durable journal, written every few tokens, would still have."""
        kept = int(done) // JOURNAL_TOKENS * JOURNAL_TOKENS
        self.journal[request.id] = (kept, tuple(request.segments))

    def _load(self, instance: SimInstance, action: act.Load) -> None:
        delay = instance.cost.load_s()
        self.stats.load_s += delay
        reason = self.faults.load_fails()
        name, version, attempt = instance.name, action.version, action.attempt

        def done() -> None:
            if self.instances.get(name) is not instance or instance.frozen:
                return
            if reason is not None:
                self.tell(name, ev.LoadFailed(name, version, reason, attempt=attempt))
                return
            instance.advance(self.clock.now())
            instance.loaded[version] = None
            self.tell(name, ev.Loaded(name, version, attempt=attempt))
            self.schedule(instance)

        self.clock.after(delay, done)

    def _move(self, action: act.Move) -> None:
        """The source keeps the request until the destination has it."""
        if (src := self.instances.get(action.src)) is None or src.frozen:
            return
        src.advance(self.clock.now())
        request = src.running.get(action.request) or src.parked.get(action.request)
        if request is None or request.epoch != action.epoch:
            return  # it ended before the order came; its end is on the way
        was_parked = src.parked.pop(request.id, None) is not None
        if not was_parked:
            src.remove(request)
        src.leaving[request.id] = request
        self.schedule(src)
        delay = src.cost.move_s(request.context if action.how is act.How.KV else 0)
        fault = self.faults.move_fails()
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
        fault = fault or self._obstacle(action, request)
        if fault is not None:
            self._move_failed(action, src, request, was_parked, fault)
            return
        del src.leaving[request.id]
        dst = self.instances[action.dst]
        dst.advance(self.clock.now())
        context, num_bytes = request.context, 0
        if action.how is act.How.KV:
            num_bytes = int(context * dst.cost.model.kv_bytes_per_token)
            self.stats.kv_bytes_moved += num_bytes
            self.stats.move_s += dst.cost.move_s(context)
        else:
            self._prefill_again(dst, request)
        self.stats.num_moves += 1
        dst.add(request)
        who = (request.id, request.epoch, src.name, dst.name)
        self.tell(dst.name, ev.Moved(*who, num_bytes, int(context), attempt=action.attempt))
        self.schedule(dst)

    def _obstacle(self, action: act.Move, request: SimRequest) -> str | None:
        if (dst := self.instances.get(action.dst)) is None or dst.frozen or not dst.announced:
            return "destination gone"
        same = request.version == action.version
        return dst.refuses(action.version) or (None if same else "version mismatch")

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
            self._keep_journal(request, request.done)
        who = (request.id, request.epoch, src.name, action.dst)
        self.tell(src.name, ev.MoveFailed(*who, kept, why, attempt=action.attempt))

    def schedule(self, instance: SimInstance) -> None:
        """Wake up when the next request of this instance is complete."""
        self.on_busy(instance)
        instance.turn += 1
        delay, turn = instance.next_end_s(), instance.turn

        def wake() -> None:
            if instance.turn == turn and self.instances.get(instance.name) is instance:
                instance.advance(self.clock.now())
                self._end(instance, instance.pop_ended())

        if delay is not None:
            self.clock.after(delay, wake)

    def _end(self, instance: SimInstance, ended: list[SimRequest]) -> None:
        for request in [r for r in ended if r.done >= r.total]:
            self._finish(instance, request)
        killers = [r for r in ended if r.done < r.total]
        if not killers:
            self.schedule(instance)
            return
        instance.add(killers[0])  # it ends the process that decodes it
        self.die(instance.name)
        self.tell(instance.name, ev.InstanceLost(instance.name, "its process ended"))
        self._restart_later(instance.name)

    def _finish(self, instance: SimInstance, request: SimRequest) -> None:
        who, reason = (request.id, request.epoch, instance.name), self.faults.sample_fails()
        if reason is not None:
            self._keep_journal(request, request.done)
            self.tell(instance.name, ev.SampleFailed(*who, reason))
            return
        self.finished[request.id] = request
        self.tell(
            instance.name,
            ev.SampleFinished(*who, request.total, Finish.STOP, tuple(request.segments)),
        )
