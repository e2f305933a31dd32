"""The soak can fail: deliberate bugs, put in from here, are each caught within 200 seeds."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from dora_rl.core import (
    admission,
    batching,
    curriculum,
    faults,
    ledger,
    orchestrate,
    params,
    placement,
    resume,
    state,
    step,
    suspects,
    window,
)
from dora_rl.core import events as ev
from dora_rl.core.actions import RetireVersion, Unload
from dora_rl.core.state import GENERATING, Phase
from dora_rl.sim import fleet, soak
from dora_rl.types import Mode

Patch = Callable[[pytest.MonkeyPatch], None]
SEEDS_MAX = 200


def everywhere(patch: pytest.MonkeyPatch, name: str, value: Any) -> None:
    """Replace a function in its home and wherever it was imported by name."""
    for module in (admission, batching, faults, ledger, orchestrate, placement, resume, step):
        if hasattr(module, name):
            patch.setattr(module, name, value)


def handler(patch: pytest.MonkeyPatch, kind: type, value: Any) -> None:
    """Replace what an event is handled by."""
    patch.setitem(step.HANDLERS, kind, value)


def no_version_check_at_decode(patch: pytest.MonkeyPatch) -> None:
    """Requests go to any instance, and the engine decodes them under whatever it has."""

    def any_instance(st: Any, live: Any) -> Any:
        for inst in st.instances.values():
            if inst.awake and inst.slots_free > 0:
                inst.held.setdefault(live.version, state.Held())
                return inst
        return None

    everywhere(patch, "best_holder", any_instance)
    patch.setattr(fleet.SimInstance, "refuses", lambda self, version: None)


def admission_without_the_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(window.Bound, "may_admit", lambda self, untaken, version: True)


def taking_without_the_bound(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(window.Bound, "may_take", lambda self, untaken, version: self.free > 0)
    patch.setattr(window.Bound, "holds", lambda self, untaken: True)  # and no run-time check


def request_lost_in_a_migration(patch: pytest.MonkeyPatch) -> None:
    def forget(st: Any, event: Any, now: float, out: Any) -> None:
        request = ledger.current(st, event.request, event.epoch)
        if request is not None and request.phase is Phase.MOVING:
            placement.end_move(st, request)
            request.instance = request.dest = None

    handler(patch, ev.Moved, forget)


def double_consume(patch: pytest.MonkeyPatch) -> None:
    original = batching.take_group

    def twice(st: Any, group: Any) -> None:
        original(st, group)
        if group.id % 5 == 0 and len(st.batch.groups) < st.params.batch_groups:
            st.batch.groups.append(group.id)

    patch.setattr(batching, "take_group", twice)


def window_slid_early(patch: pytest.MonkeyPatch) -> None:
    def retire(st: Any, out: Any) -> None:
        for live in list(st.versions.values()):
            if live.version != st.newest and not live.num_active:
                for name in list(live.holders):
                    orchestrate.unload(st, st.instances[name], live.version, out)
                out.append(RetireVersion(live.version))
                live.unended or st.versions.pop(live.version)

    everywhere(patch, "retire_finished", retire)


def flip_with_running_requests(patch: pytest.MonkeyPatch) -> None:
    def unload(st: Any, inst: Any, version: int, out: Any) -> None:
        inst.held.pop(version, None)
        inst.leaving.pop(version, None)
        if version in st.versions:
            st.versions[version].holders.pop(inst.id, None)
        out.append(Unload(inst.id, version))

    everywhere(patch, "drain", lambda *args: None)
    patch.setattr(orchestrate, "unload", unload)
    patch.setattr(orchestrate, "_unneeded", lambda st, inst: next(iter(inst.held), None))


def log_entry_skipped_on_resume(patch: pytest.MonkeyPatch) -> None:
    original = soak.recover_lines

    def skipping(lines: list[bytes]) -> Any:
        kept = lines[:-2] + lines[-1:] if len(lines) > 3 else lines
        found = original(kept)
        number = original(lines)
        assert found is not None and number is not None
        return found[0], number[1], number[2]

    patch.setattr(soak, "recover_lines", skipping)


def old_epochs_accepted(patch: pytest.MonkeyPatch) -> None:
    def current(st: Any, rid: Any, epoch: int) -> Any:
        request = st.request(rid)
        return request if request is not None and request.phase in GENERATING else None

    everywhere(patch, "current", current)


def commit_taken_twice(patch: pytest.MonkeyPatch) -> None:
    original = batching.on_committed

    def again(st: Any, event: Any, now: float, out: Any) -> None:
        original(st, replace(event, step=st.committed), now, out)

    patch.setattr(faults, "on_committed", again)
    handler(patch, ev.StepCommitted, again)


def lost_instance_keeps_its_requests(patch: pytest.MonkeyPatch) -> None:
    original = faults.lose_instance

    def losing(st: Any, name: str, out: Any, **options: Any) -> None:
        inst = st.instances.get(name)
        if inst is not None and inst.parked:
            inst.parked.clear()
        original(st, name, out, **options)

    everywhere(patch, "lose_instance", losing)


def nonsense_reward_accepted(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ledger.math, "isfinite", lambda value: True)


def new_bound_in_force_at_once(patch: pytest.MonkeyPatch) -> None:
    def adopt(st: Any, out: Any) -> None:
        if st.target is not None:
            st.params, st.policy, st.target = st.target, params.policy_of(st.target), None
            bound = st.bound
            out.append(batching.InForce(st.filling, bound.max_staleness, bound.batch))

    everywhere(patch, "adopt_target", adopt)


def slow_groups_dropped(patch: pytest.MonkeyPatch) -> None:
    original = params.policy_of

    def dropping(of: Any) -> Any:
        policy = original(of)
        if of.mode is Mode.MULTI_VERSION:
            return replace(policy, surplus_at_close=True)
        return policy

    for module in (state, batching, params):
        patch.setattr(module, "policy_of", dropping)


def nothing_fed_again_after_a_learner_restart(patch: pytest.MonkeyPatch) -> None:
    def joined(st: Any, event: Any, now: float, out: Any) -> None:
        st.learner.alive = True

    handler(patch, ev.LearnerJoined, joined)


def nothing_fed_ahead_is_fed_again(patch: pytest.MonkeyPatch) -> None:
    """A new learner gets the groups of its step again, and of the next only what is new."""
    original = faults.on_learner_joined

    def joined(st: Any, event: Any, now: float, out: Any) -> None:
        ahead = st.batches.get(event.version + 1)
        num_fed = ahead.num_fed if ahead is not None else 0
        original(st, event, now, out)
        if ahead is not None:
            ahead.num_fed = num_fed

    handler(patch, ev.LearnerJoined, joined)


def fed_ahead_of_an_open_step(patch: pytest.MonkeyPatch) -> None:
    """A learner that came back gets groups of the next step before those of its own."""
    original = batching.feed

    def early(st: Any, now: float, out: Any) -> None:
        ahead = st.batches.get(st.committed + 1)
        if ahead is not None and st.learner.alive:
            batching._feed_groups(st, ahead, out)
        original(st, now, out)

    patch.setattr(batching, "feed", early)


def sealed_version_trained_again(patch: pytest.MonkeyPatch) -> None:
    original = faults.on_learner_joined

    def joined(st: Any, event: Any, now: float, out: Any) -> None:
        original(st, replace(event, version=st.committed, optimizer_version=st.committed), now, out)

    handler(patch, ev.LearnerJoined, joined)


def parked_request_forgotten(patch: pytest.MonkeyPatch) -> None:
    original = placement.park

    def forgetting(st: Any, request: Any, out: Any) -> None:
        original(st, request, out)
        st.versions[request.version].pending.popleft()

    everywhere(patch, "park", forgetting)


def parked_without_an_order(patch: pytest.MonkeyPatch) -> None:
    """The core counts it as parked, the instance goes on decoding it."""
    original = placement.park
    everywhere(patch, "park", lambda st, request, out: original(st, request, []))


def every_loss_is_an_attempt(patch: pytest.MonkeyPatch) -> None:
    """Whoever is lost with an instance is charged for it, alone or not."""

    def charge(st: Any, request: Any, company: int, why: str, out: Any) -> None:
        ledger.retry(st, request, why, out)

    patch.setattr(faults, "lost_with", charge)


def progress_is_not_noticed(patch: pytest.MonkeyPatch) -> None:
    """And one loss alone is enough to be found guilty."""
    handler(patch, ev.Continued, lambda *args: None)
    original = suspects.lost_with

    def strict(st: Any, request: Any, company: int, why: str, out: Any) -> None:
        request.alone_losses = max(request.alone_losses, st.params.attempts_max - 1)
        original(st, request, company, why, out)

    patch.setattr(faults, "lost_with", strict)


def suspects_are_tried_among_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(suspects, "_drain_all", lambda *args: None)
    original = suspects.isolate

    def at_once(st: Any, live: Any, now: float, out: Any) -> None:
        for inst in st.instances.values():
            if inst.isolating is not None and inst.load < inst.slots_max:
                inst.isolating = None
        original(st, live, now, out)

    patch.setattr(suspects, "isolate", at_once)


def killers_are_never_found(patch: pytest.MonkeyPatch) -> None:
    original = suspects.lost_with

    def forgetting(st: Any, request: Any, company: int, why: str, out: Any) -> None:
        request.alone_losses = 0
        original(st, request, company, why, out)

    patch.setattr(faults, "lost_with", forgetting)


def poison_comes_back_for_ever(patch: pytest.MonkeyPatch) -> None:
    def again(st: Any, group: Any, reason: str, out: Any, *, kills: bool) -> None:
        st.reissue.append(group.prompt)

    everywhere(patch, "prompt_failed", again)


def set_aside_at_the_first_failure(patch: pytest.MonkeyPatch) -> None:
    original = ledger.prompt_failed

    def at_once(st: Any, group: Any, reason: str, out: Any, *, kills: bool) -> None:
        if st.params.group_failures_max:
            st.failures[group.prompt] = st.params.group_failures_max - 1
        original(st, group, reason, out, kills=kills)

    everywhere(patch, "prompt_failed", at_once)


def issued_after_it_was_set_aside(patch: pytest.MonkeyPatch) -> None:
    original = ledger.prompt_failed

    def and_again(st: Any, group: Any, reason: str, out: Any, *, kills: bool) -> None:
        original(st, group, reason, out, kills=kills)
        if group.prompt in st.set_aside:
            st.reissue.append(group.prompt)

    everywhere(patch, "prompt_failed", and_again)


def an_instance_that_stalls_is_believed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(faults, "_break_stalls", lambda *args: False)


def late_messages_believed(patch: pytest.MonkeyPatch) -> None:
    """Whatever incarnation speaks."""
    patch.setattr(step, "is_late", lambda st, event: False)


def answers_to_earlier_loads_believed(patch: pytest.MonkeyPatch) -> None:
    original = orchestrate.on_loaded

    def any_attempt(st: Any, event: Any, now: float, out: Any) -> None:
        original(st, replace(event, attempt=-1), now, out)

    handler(patch, ev.Loaded, any_attempt)


def held_back_without_a_floor(patch: pytest.MonkeyPatch) -> None:
    """Freshness control counts the step in training as something that may wait."""
    patch.setattr(admission, "may_issue", lambda outstanding, batch, ahead: outstanding < ahead)


def a_prompt_of_a_pool_is_left_out(patch: pytest.MonkeyPatch) -> None:
    original = ledger.draw

    def skipping(pools: Any, params: Any) -> int:
        place = original(pools, params)
        return original(pools, params) if place == params.pools else place

    patch.setattr(ledger, "draw", skipping)


def a_pool_that_tells_nothing_is_never_drawn(patch: pytest.MonkeyPatch) -> None:
    original = curriculum.note

    def spent(pools: Any, params: Any, prompt: int, *, told: bool) -> None:
        original(pools, params, prompt, told=told)
        if not told:
            pools.pools[prompt % params.pools].credit = -50.0

    patch.setattr(ledger, "note", spent)


MUTANTS: list[Patch] = [
    a_prompt_of_a_pool_is_left_out,
    a_pool_that_tells_nothing_is_never_drawn,
    held_back_without_a_floor,
    late_messages_believed,
    answers_to_earlier_loads_believed,
    no_version_check_at_decode,
    admission_without_the_bound,
    taking_without_the_bound,
    request_lost_in_a_migration,
    double_consume,
    window_slid_early,
    flip_with_running_requests,
    log_entry_skipped_on_resume,
    old_epochs_accepted,
    commit_taken_twice,
    lost_instance_keeps_its_requests,
    nonsense_reward_accepted,
    new_bound_in_force_at_once,
    slow_groups_dropped,
    nothing_fed_again_after_a_learner_restart,
    nothing_fed_ahead_is_fed_again,
    fed_ahead_of_an_open_step,
    sealed_version_trained_again,
    parked_request_forgotten,
    parked_without_an_order,
    every_loss_is_an_attempt,
    progress_is_not_noticed,
    suspects_are_tried_among_others,
    killers_are_never_found,
    poison_comes_back_for_ever,
    set_aside_at_the_first_failure,
    issued_after_it_was_set_aside,
    an_instance_that_stalls_is_believed,
]


@pytest.mark.full
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_mutant_is_caught(mutant: Patch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "LIVENESS_S", 6_000.0)  # enough for every seed as it should be
    with monkeypatch.context() as patch:
        mutant(patch)
        caught = next((seed for seed in range(SEEDS_MAX) if soak.run_seed(seed)), None)
    assert caught is not None, f"{mutant.__name__} survived {SEEDS_MAX} seeds"
    assert soak.run_seed(caught) is None, f"seed {caught} fails without {mutant.__name__} too"
    print(f"{mutant.__name__} was caught by seed {caught}")
