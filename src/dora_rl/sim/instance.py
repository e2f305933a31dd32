"""One simulated rollout instance: continuous batching as a fluid.

All requests that decode on an instance gain tokens at the same pace, one per decode step, so one
counter serves them all: a request ends when the counter reaches the value fixed at its arrival.
The step time grows with the KV cache; between two changes of the batch it is integrated exactly.

    counter   decode steps so far (a real number)      debt_s   prefill time still to be paid
"""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

from dora_rl.sim.hardware import RolloutCost
from dora_rl.types import InstanceId, RequestId, Segment, Version


@dataclass(slots=True)
class SimRequest:
    """One sample as the engine sees it. `done` of `total` response tokens are decoded."""

    id: RequestId
    epoch: int
    version: Version
    prompt_tokens: int
    total: int
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
        if self.kills_at is not None:
            return max(self.done, min(self.total, self.kills_at))
        return self.total

    @property
    def context(self) -> float:
        return self.prompt_tokens + self.done


class SimInstance:
    """Decodes what it is given, under the versions it holds."""

    def __init__(self, name: InstanceId, cost: RolloutCost, now: float) -> None:
        self.name = name
        self.cost = cost
        self.loaded: dict[Version, None] = {}  # versions whose weights are here
        self.held: dict[Version, int] = {}  # requests decoding per version
        self.running: dict[RequestId, SimRequest] = {}
        self.parked: dict[RequestId, SimRequest] = {}
        self.leaving: dict[RequestId, SimRequest] = {}
        self.awake = True
        self.announced = False  # the controller knows of it
        self.frozen = False  # hangs: reports nothing, does nothing
        self.stalled = False  # reports, and decodes nothing
        self.speed = 1.0
        self.counter = 0.0
        self.kv = 0.0
        self.debt_s = 0.0
        self.busy_s = 0.0
        self.slot_s = 0.0
        self.at = now
        self.turn = 0  # raised at every change, so that stale wake-ups are recognised
        self._ends: list[tuple[float, RequestId, int]] = []
        self._base_s = cost.step_base_s()
        self._request_s = cost.engine.host_s_per_request
        self._kv_s = cost.kv_s_per_token()
        self._flops_s = cost.flops_s_per_request()

    def _pace(self) -> tuple[float, float]:
        """Seconds of the next step, and by how much each further step is longer."""
        n = len(self.running)
        weights = sum(self.cost.weights_s(count) for count in self.held.values())
        moving = weights + self._kv_s * self.kv
        slope = self._kv_s * n
        computing = self._flops_s * n
        if computing > moving:
            moving, slope = computing, 0.0
        scale = self.cost.stall(n) / self.speed
        return scale * (self._base_s + self._request_s * n + moving), scale * slope

    def advance(self, now: float) -> None:
        """Bring the counters up to now."""
        elapsed, self.at = now - self.at, now
        idle = not self.running or not self.awake or self.frozen or self.stalled
        if elapsed <= 0 or idle:
            return
        self.busy_s += elapsed
        self.slot_s += elapsed * len(self.running)
        paid = min(self.debt_s, elapsed)
        self.debt_s -= paid
        elapsed -= paid
        if elapsed > 0:
            pace, slope = self._pace()
            if slope > 1e-15:
                steps = (math.sqrt(pace * pace + 2 * slope * elapsed) - pace) / slope
            else:
                steps = elapsed / pace
            self.counter += steps
            self.kv += steps * len(self.running)

    def next_end_s(self) -> float | None:
        """Seconds until the next request is complete, if nothing changes."""
        while self._ends:
            ends_at, rid, epoch = self._ends[0]
            request = self.running.get(rid)
            if request is not None and request.epoch == epoch and request.ends_at == ends_at:
                break
            heapq.heappop(self._ends)
        if not self._ends or not self.awake or self.frozen or self.stalled:
            return None
        steps = max(0.0, self._ends[0][0] - self.counter)
        pace, slope = self._pace()
        return self.debt_s + steps * pace + 0.5 * slope * steps * steps

    def pop_ended(self) -> list[SimRequest]:
        """Requests whose last token has been decoded."""
        ended: list[SimRequest] = []
        while self._ends and self._ends[0][0] <= self.counter + 1e-6:
            ends_at, rid, epoch = heapq.heappop(self._ends)
            request = self.running.get(rid)
            if request is not None and request.epoch == epoch and request.ends_at == ends_at:
                self.remove(request)
                request.done = request.last
                ended.append(request)
        return ended

    def refuses(self, version: Version) -> str | None:
        """A request is decoded under its own version or not at all."""
        if version not in self.loaded:
            return f"{self.name} does not hold version {version}"
        return None

    def unload(self, version: Version) -> None:
        """As strict as the real engine: weights go only when nothing decodes under them."""
        assert version in self.loaded, f"{self.name} unloads version {version}, not held"
        users = [tuple(rid) for rid, r in self.running.items() if r.version == version]
        assert not users, f"{self.name} unloads version {version} with requests {users}"
        del self.loaded[version]

    def add(self, request: SimRequest) -> None:
        request.ends_at = self.counter + request.last - request.done
        if request.still:
            request.ends_at = math.inf
        request.added_at = self.at
        self.running[request.id] = request
        self.held[request.version] = self.held.get(request.version, 0) + 1
        self.kv += request.context
        if not request.still:
            heapq.heappush(self._ends, (request.ends_at, request.id, request.epoch))

    def remove(self, request: SimRequest) -> None:
        """Take a request off the batch, its progress brought up to date."""
        del self.running[request.id]
        request.done = self._done(request)
        self.held[request.version] -= 1
        if not self.held[request.version]:
            del self.held[request.version]
        self.kv -= request.context
        if not self.running:
            self.kv = 0.0

    def progress_of(self, request: SimRequest) -> float:
        return self._done(request) if request.id in self.running else request.done

    def _done(self, request: SimRequest) -> float:
        if request.still:
            return request.done
        return request.last - max(0.0, request.ends_at - self.counter)

    def prefill(self, num_tokens: float) -> None:
        self.debt_s += num_tokens * self._flops_s / self.speed
