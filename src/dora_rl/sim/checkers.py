"""Observers that know the ground truth of a simulated run and compare it with the promises.

They share nothing with the core's decisions: they read what the simulated engines really decoded
and what the simulated learner really trained.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.invariants import check_invariants
from dora_rl.observe.eventlog import MemoryLog
from dora_rl.sim.world import World
from dora_rl.types import GroupId, Mode, RequestId


class PromiseBroken(AssertionError):
    """A checker saw a promise broken."""


def require(holds: bool, message: str) -> None:
    if not holds:
        raise PromiseBroken(message)


class Checker:
    """Watches one world from its start to its end."""

    def __init__(self, world: World, log: MemoryLog, *, every: int = 1) -> None:
        self.world = world
        self.log = log
        self.num_read = 0
        self.mode = world.spec.params.mode
        self.every = every
        self.num_events = 0
        self.in_force: tuple[int, int] = (-1, 0)  # K, B
        self.closed: dict[int, tuple[tuple[GroupId, ...], int, int]] = {}
        self.issued: dict[GroupId, act.IssueGroup] = {}
        self.ended: dict[GroupId, act.EndGroup] = {}
        self.set_aside: set[int] = set()
        self.prompts: Counter[int] = Counter()  # groups that were issued of each
        self.failures: Counter[int] = Counter()  # groups, by prompt
        self.is_bad: Callable[[int], bool] = lambda prompt: False
        world.watchers.append(self.see)

    def see(self, event: ev.Event, actions: list[act.Action]) -> None:
        self.num_events += 1
        self._catch_up()
        self._check_engines()
        if (loop := self.world.loop) is not None and self.num_events % self.every == 0:
            check_invariants(loop.state)

    def _catch_up(self) -> None:
        """Read what was logged since; a crash may have come between logging and performing."""
        for entry in self.log.entries[self.num_read :]:
            if isinstance(entry.event, ev.Rewound):  # later batches are filled anew
                kept = [step for step in self.closed if step <= entry.event.version]
                self.closed = {step: self.closed[step] for step in kept}
            for action in entry.actions:
                self._see_action(action)
        self.num_read = len(self.log.entries)

    def _see_action(self, action: act.Action) -> None:
        match action:
            case act.InForce():
                self.in_force = (action.max_staleness, action.batch_groups)
            case act.IssueGroup():
                require(action.group not in self.issued, f"group {action.group} issued twice")
                require(
                    action.prompt not in self.set_aside,
                    f"prompt {action.prompt} was set aside and is issued",
                )
                self.issued[action.group] = action
                self.prompts[action.prompt] += 1
            case act.EndGroup():
                require(action.group not in self.ended, f"group {action.group} ended twice")
                require(action.group in self.issued, f"group {action.group} was never issued")
                require(
                    self.mode is Mode.REPLICATION or action.end is not act.End.SURPLUS,
                    f"C2: group {action.group} was dropped",
                )
                self.ended[action.group] = action
                if action.end is act.End.FAILED:
                    self._check_failed(action)
            case act.SetAside():
                require(
                    self.is_bad(action.prompt),
                    f"prompt {action.prompt} is fine and was set aside: {action.reason}",
                )
                self.set_aside.add(action.prompt)
            case act.CloseStep():
                # A learner that restarts is told again, maybe under a newer K and B.
                self.closed.setdefault(action.step, (action.groups, *self.in_force))

    def _check_failed(self, action: act.EndGroup) -> None:
        """Nobody fails with an instance for what another did, and nobody without end."""
        params, prompt = self.world.spec.params, self.issued[action.group].prompt
        if params.losses_max and "lost" in action.reason:
            require(self.is_bad(prompt), f"group {action.group} is innocent and failed")
        self.failures[prompt] += 1
        failures, limit = self.failures[prompt], params.group_failures_max
        require(not limit or failures <= limit, f"prompt {prompt} failed {failures} times")

    def _check_engines(self) -> None:
        """C1 at the source: nothing is decoded under weights that are not there."""
        for instance in self.world.fleet.instances.values():
            for version in instance.held:
                require(
                    version in instance.loaded,
                    f"C1: {instance.name} decodes version {version} without its weights",
                )
            require(
                len(instance.running) <= self.world.fleet.specs[instance.name][0].slots_max,
                f"{instance.name}: more than its slots",
            )

    def finish(self) -> None:
        """The whole run is over: everything that entered has left, exactly once."""
        self._catch_up()
        trained: dict[GroupId, int] = {}
        for index, step in enumerate(self.world.learner.trained):
            require(step.step == index, f"step {index} was trained out of order")
            groups, staleness_max, batch = self.closed[step.step]
            ids = [group for group, _, _ in step.groups]
            require(sorted(ids) == sorted(groups), f"step {index}: trained other groups")
            require(len(ids) == batch, f"step {index}: {len(ids)} groups, not {batch}")
            for group, version, samples in step.groups:
                require(group not in trained, f"C2: group {group} was trained twice")
                trained[group] = step.step
                stale = step.step - self.issued[group].version
                require(stale <= staleness_max, f"C3: group {group} trained {stale} versions late")
                require(version == self.issued[group].version, f"group {group}: other version")
                self._check_samples(group, samples)
        for group in self.issued:
            require(group in self.ended, f"C2: group {group} never ended")
            require(
                (self.ended[group].end is act.End.TRAINED) == (group in trained),
                f"C2: group {group} ended wrongly",
            )
        require(len(trained) == sum(len(s.groups) for s in self.world.learner.trained), "counts")
        self._check_prompts()

    def _check_prompts(self) -> None:
        """The stream has no holes: of each pool the first prompts were issued, and none twice but
        after a group of it had failed or was lost."""
        pools = max(1, self.world.spec.params.pools)
        num_issued = Counter(prompt % pools for prompt in self.prompts)
        owed = (act.End.FAILED, act.End.LOST)
        again = Counter(self.issued[g].prompt for g, end in self.ended.items() if end.end in owed)
        for prompt, count in self.prompts.items():
            place, pool = divmod(prompt, pools)
            require(place < num_issued[pool], f"prompt {prompt} was issued before its turn")
            require(count <= 1 + again[prompt], f"prompt {prompt} was issued {count} times")

    def _check_samples(self, group: GroupId, samples: tuple[int, ...]) -> None:
        issued = self.issued[group]
        for sample in samples:
            request = self.world.fleet.finished.get(RequestId(group, sample))
            require(request is not None, f"sample {group}.{sample} was trained without its data")
            assert request is not None
            require(
                request.id in self.world.rewards.scored,
                f"sample {group}.{sample} was trained without a reward",
            )
            require(
                request.total == self.world.spec.task(issued.prompt, sample)[1],
                f"sample {group}.{sample} has another prompt's length",
            )
            first = request.segments[0].start
            require(first == 0, f"sample {group}.{sample} lost its first tokens")
            versions = {segment.version for segment in request.segments}
            require(
                self.mode is Mode.PARTIAL or versions == {issued.version},
                f"C1: sample {group}.{sample} of version {issued.version} has {versions}",
            )
