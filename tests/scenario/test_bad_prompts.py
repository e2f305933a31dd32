"""Poison prompts, prompts that kill their engine, and instances that live shorter than a response.

Each run trains all its steps, with nothing but the bad prompts set aside.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.dashboard.watcher import Watcher
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import MemoryLog, encode_entry, replay
from dora_rl.setup.settings import samples_enough
from dora_rl.sim.checkers import Checker
from dora_rl.sim.faults import Faults
from dora_rl.sim.world import World
from dora_rl.types import Mode, RequestId
from tests.kit.simulated_logs import entries_of, small_world

RULES: dict[str, Any] = {"losses_max": 2, "attempts_max": 4, "group_failures_max": 4}
RULES |= {"trainer_losses_max": 3, "instance_losses_max": 30, "load_failures_max": 12}
OLDER: dict[str, Any] = dict.fromkeys(RULES, 0) | {"attempts_max": 4}
Lengths = Callable[[int, int], tuple[int, int]]


@dataclass
class BadPrompts(Faults):
    """Some prompts have a reward that always raises, some end whoever decodes their n-th token."""

    poisoned: frozenset[int] = frozenset()
    killers: dict[int, int] = field(default_factory=dict[int, int])

    def poison(self, prompt: int) -> str | None:
        return "raised KeyError: 'answer'" if prompt in self.poisoned else None

    def kills_at(self, prompt: int, sample: int) -> int | None:
        return self.killers.get(prompt)

    def is_bad(self, prompt: int) -> bool:
        return prompt in self.poisoned or prompt in self.killers


def even(prompt: int, sample: int) -> tuple[int, int]:
    return 16, 400 + 10 * ((prompt * 7 + sample) % 5)


class Story:
    """A small world with these faults, watched by the checkers of the soak."""

    def __init__(
        self,
        faults: BadPrompts,
        lengths: Lengths = even,
        num_instances: int = 0,
        rules: dict[str, Any] = RULES,
        mode: Mode = Mode.MULTI_VERSION,
    ) -> None:
        spec = small_world(mode, **rules).spec
        instances = spec.instances[: num_instances or len(spec.instances)]
        self.log = MemoryLog()
        spec = replace(spec, task=lengths, instances=instances, report_s=1.0)
        self.world = World(spec, faults, self.log)
        self.checker = Checker(self.world, self.log)
        self.checker.is_bad = faults.is_bad
        self.num_deaths = 0

    def live_for(self, seconds: float) -> None:
        """Every instance dies so long after it joined, and comes back five seconds later."""
        self.world.watchers.append(lambda event, actions: self._count_down(event, seconds))

    def _count_down(self, event: ev.Event, seconds: float) -> None:
        if isinstance(event, ev.InstanceJoined):
            instance = self.world.fleet.instances[event.instance]
            self.world.clock.after(seconds, lambda: self._die(event.instance, instance))

    def _die(self, name: str, instance: object) -> None:
        fleet = self.world.fleet
        if fleet.instances.get(name) is instance:
            self.num_deaths += 1
            fleet.die(name)
            fleet.tell(name, ev.InstanceLost(name, "preempted"))
            self.world.clock.after(5.0, lambda: fleet.join(name, *fleet.specs[name]))

    def to_the_end(self) -> None:
        self.world.start()
        assert self.world.run(1e6), "the run does not end"
        stop = self.world.keeper.stop
        assert stop is not None and stop.done, stop
        self.checker.finish()
        report = audit(entries_of(self.world))
        assert report.ok, [str(finding) for finding in report.findings]
        assert set(report.figures.set_aside) == self.checker.set_aside
        assert replay(self.log.entries).ok

    def failed_prompts(self) -> set[int]:
        actions = [action for entry in self.log.entries for action in entry.actions]
        prompts = {a.group: a.prompt for a in actions if isinstance(a, act.IssueGroup)}
        ends = [a for a in actions if isinstance(a, act.EndGroup)]
        return {prompts[end.group] for end in ends if end.end is act.End.FAILED}

    def lives(self) -> Counter[RequestId]:
        """In how many lives of instances each response was made that went on from its journal."""
        events = [entry.event for entry in self.log.entries]
        return Counter(e.request for e in events if isinstance(e, ev.Continued)) + Counter(
            {e.request: 1 for e in events if isinstance(e, ev.Continued)}
        )

    def losses(self) -> int:
        return sum(isinstance(entry.event, ev.InstanceLost) for entry in self.log.entries)


@pytest.mark.parametrize("mode", [Mode.SYNC, Mode.MULTI_VERSION])
@pytest.mark.parametrize("poisoned", [{0}, {2, 5, 11}])
def test_a_poison_prompt_is_set_aside_and_the_run_goes_on(mode: Mode, poisoned: set[int]) -> None:
    story = Story(BadPrompts(poisoned=frozenset(poisoned)), mode=mode)
    story.to_the_end()
    assert story.checker.set_aside == story.failed_prompts() == poisoned


@pytest.mark.parametrize("token", [0, 3, 150])
@pytest.mark.parametrize("num_instances", [1, 0], ids=["one instance", "a few"])
def test_a_prompt_that_kills_its_engine_is_found_and_nobody_fails_with_it(
    token: int, num_instances: int
) -> None:
    story = Story(BadPrompts(killers={2: token}), num_instances=num_instances)
    story.to_the_end()
    assert story.checker.set_aside == story.failed_prompts() == {2}
    assert story.losses() <= 12, "few losses are enough to find it"


def test_instances_that_live_a_minute_finish_responses_of_five() -> None:
    """And no response is failed, or counted against, for its length."""
    story = Story(BadPrompts(), long_ones)
    story.live_for(60.0)
    story.to_the_end()
    assert not story.failed_prompts() and not story.checker.set_aside
    assert max(story.lives().values()) >= 5, "the longest responses outlived several instances"


def long_ones(prompt: int, sample: int) -> tuple[int, int]:
    """Every fourth prompt has responses of about five minutes."""
    return (16, LONG_TOKENS) if prompt % 4 == 0 else even(prompt, sample)


LONG_TOKENS = 120_000


@pytest.mark.parametrize("num_instances", [2, 0])
def test_all_of_it_at_once(num_instances: int) -> None:
    faults = BadPrompts(poisoned=frozenset({3, 10}), killers={6: 0, 9: 70})
    story = Story(faults, long_ones, num_instances)
    story.live_for(60.0)
    story.to_the_end()
    assert story.checker.set_aside == story.failed_prompts() <= {3, 6, 9, 10}
    assert story.checker.set_aside >= {3, 6}


class ShakyRewards(BadPrompts):
    """The reward of every tenth sample raises, whenever it is asked."""

    def score(self, request: RequestId, attempt: int) -> str | None:
        return "raised ValueError" if (request.group * 3 + request.sample * 7) % 10 == 0 else None


@pytest.mark.parametrize("group_size", [2, 4, 8])
def test_a_tenth_of_all_rewards_failing_costs_a_tenth_of_the_samples(
    group_size: int, tmp_path: Path
) -> None:
    rules = RULES | {"group_size": group_size, "samples_min": samples_enough(group_size)}
    story = Story(ShakyRewards(), rules=rules)
    story.to_the_end()
    figures = audit(story.log.entries).figures
    assert not story.checker.set_aside
    if group_size > 2:
        assert not story.failed_prompts(), "no group fails for one sample"
        share = figures.samples_masked / (figures.samples_masked + figures.samples_trained)
        assert 0.05 < share < 0.15
    # Whatever was generated is trained or discarded, in the audit and on the dashboard.
    trained = figures.tokens_trained + figures.discarded_tokens
    ended = {a.group for e in story.log.entries for a in e.actions if isinstance(a, act.EndGroup)}
    finished = [e.event for e in story.log.entries if isinstance(e.event, ev.SampleFinished)]
    assert trained == sum(s.num_tokens for s in finished if s.request.group in ended)
    (tmp_path / "events").mkdir()
    lines = b"".join(map(encode_entry, story.log.entries))
    (tmp_path / "events" / f"{0:012d}.jsonl").write_bytes(lines)
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    promises = json.loads(watcher.document("overview", {}) or "")["promises"]
    assert promises["discarded_tokens"] == figures.discarded_tokens > 0


@pytest.mark.parametrize("lives_s", [0.0, 60.0], ids=["killer", "short lives"])
def test_where_every_loss_is_an_attempt_innocents_fail(lives_s: float) -> None:
    """The stories above can fail: so it was with the rules of older logs."""
    rules = OLDER | {"failed_share_max": 1.0}
    if lives_s:
        story = Story(BadPrompts(), long_ones, rules=rules)
        story.live_for(lives_s)
    else:
        story = Story(BadPrompts(killers={2: 0}), num_instances=1, rules=rules)
    story.world.start()
    story.world.run(5_000.0)
    assert story.failed_prompts() - {2}
