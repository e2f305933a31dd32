"""Hand-made corruptions of an honest event log, one or more per promise.

Each takes an honest multi-version log apart and returns it with the promise that is broken and
the name that the audit must say.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit import Promise
from dora_rl.observe.eventlog import Entry
from dora_rl.types import RequestId, Segment

Corrupted = tuple[list[Entry], Promise, str]


def find(entries: list[Entry], kind: type, nth: int = 0) -> tuple[int, int, Any]:
    """Entry place, action place and the nth action of this kind."""
    seen = 0
    for place, entry in enumerate(entries):
        for inner, action in enumerate(entry.actions):
            if isinstance(action, kind):
                if seen == nth:
                    return place, inner, action
                seen += 1
    raise AssertionError(f"no {kind.__name__} number {nth} in the log")


def find_event(entries: list[Entry], kind: type, nth: int = 0) -> tuple[int, Any]:
    places = [place for place, entry in enumerate(entries) if isinstance(entry.event, kind)]
    return places[nth], entries[places[nth]].event


def with_actions(entries: list[Entry], place: int, actions: list[act.Action]) -> list[Entry]:
    changed = list(entries)
    changed[place] = replace(entries[place], actions=actions)
    return changed


def edit(entries: list[Entry], place: int, inner: int, *new: act.Action) -> list[Entry]:
    """Put `new` in place of one action."""
    actions = list(entries[place].actions)
    actions[inner : inner + 1] = new
    return with_actions(entries, place, actions)


def add_action(entries: list[Entry], place: int, *new: act.Action) -> list[Entry]:
    return with_actions(entries, place, [*entries[place].actions, *new])


def with_event(entries: list[Entry], place: int, event: ev.Event) -> list[Entry]:
    changed = list(entries)
    changed[place] = replace(entries[place], event=event)
    return changed


def segment_of_another_version(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.SampleFinished, 20)
    (segment,) = event.segments
    other = replace(event, segments=(Segment(0, segment.version + 1),))
    return with_event(entries, place, other), Promise.C1, f"group {event.request.group}"


def trajectory_of_two_versions(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.SampleFinished, 20)
    other = replace(event, segments=(*event.segments, Segment(3, event.segments[0].version)))
    return with_event(entries, place, other), Promise.C1, f"group {event.request.group}"


def dispatched_under_another_version(entries: list[Entry]) -> Corrupted:
    later = [a for a in all_of(entries, act.Dispatch) if a.version > 0]
    nth = all_of(entries, act.Dispatch).index(later[0])
    place, inner, action = find(entries, act.Dispatch, nth)
    other = replace(action, version=action.version - 1)
    return edit(entries, place, inner, other), Promise.C1, f"group {action.group}"


def dispatched_without_the_weights(entries: list[Entry]) -> Corrupted:
    """The load that made the first dispatch possible never happened."""
    _, _, action = find(entries, act.Dispatch)
    loads = [
        place
        for place, entry in enumerate(entries)
        if isinstance(entry.event, ev.Loaded)
        and (entry.event.instance, entry.event.version) == (action.instance, action.version)
    ]
    return with_event(entries, loads[0], ev.Tick()), Promise.C1, action.instance


def moved_to_an_instance_without_the_weights(entries: list[Entry]) -> Corrupted:
    """Right after its dispatch a request is sent on to an instance of another version."""
    for nth, action in enumerate(all_of(entries, act.Dispatch)):
        place, _, _ = find(entries, act.Dispatch, nth)
        held_by = holders(entries[: place + 1], action.version)
        others = [name for name in instances(entries) if name not in held_by]
        if action.version > 0 and others:
            request = RequestId(action.group, action.samples[0])
            src, epoch = action.instance, action.epochs[0]
            move = act.Move(request, epoch, action.version, src, others[0], act.How.KV)
            return add_action(entries, place, move), Promise.C1, others[0]
    raise AssertionError("every version is everywhere")


def unloaded_with_running_requests(entries: list[Entry]) -> Corrupted:
    place, _, action = find(entries, act.Dispatch, 5)
    unload = act.Unload(action.instance, action.version)
    return add_action(entries, place, unload), Promise.C1, action.instance


def continued_under_new_weights(entries: list[Entry]) -> Corrupted:
    place, _, action = find(entries, act.Dispatch, 5)
    request = RequestId(action.group, action.samples[0])
    order = act.Reversion(action.instance, request, action.epochs[0], action.version)
    return add_action(entries, place, order), Promise.C1, f"group {action.group}"


def fed_as_another_version(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.Feed, 9)
    other = replace(action, version=action.version + 1)
    return edit(entries, place, inner, other), Promise.C1, f"group {action.group}"


def ended_twice(entries: list[Entry]) -> Corrupted:
    place, _, action = find(entries, act.EndGroup, 5)
    return add_action(entries, place + 3, action), Promise.C2, f"group {action.group}"


def never_ended(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.EndGroup, 5)
    return edit(entries, place, inner), Promise.C2, f"group {action.group}"


def issued_and_forgotten(entries: list[Entry]) -> Corrupted:
    place, _, action = find(entries, act.IssueGroup, 3)
    lost = replace(action, group=900, prompt=900)
    return add_action(entries, place, lost), Promise.C2, "group 900"


def issued_twice(entries: list[Entry]) -> Corrupted:
    place, _, action = find(entries, act.IssueGroup, 3)
    return add_action(entries, place + 1, action), Promise.C2, f"group {action.group}"


def prompt_issued_twice(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.IssueGroup, 3)
    other = replace(action, prompt=0)
    return edit(entries, place, inner, other), Promise.PROMPTS, f"group {action.group}"


def dropped_as_surplus(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.EndGroup, 5)
    other = replace(action, end=act.End.SURPLUS, step=None, reason="too long")
    return edit(entries, place, inner, other), Promise.C2, f"group {action.group}"


def filtered_by_nobodys_rule(entries: list[Entry]) -> Corrupted:
    place, _, issued = find(entries, act.IssueGroup, 3)
    group, version = issued.group, issued.version
    end = act.EndGroup(group, version, act.End.FILTERED, None, "dull")
    return add_action(entries, place, end), Promise.C2, f"group {group}"


def failed_without_a_reason(entries: list[Entry]) -> Corrupted:
    place, _, issued = find(entries, act.IssueGroup, 3)
    group, version = issued.group, issued.version
    end = act.EndGroup(group, version, act.End.FAILED, None, "")
    return add_action(entries, place, end), Promise.C2, f"group {group}"


def trained_unscored(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.Scored, 7)
    return with_event(entries, place, ev.Tick()), Promise.C2, f"group {event.request.group}"


def trained_with_a_reward_that_is_no_number(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.Scored, 7)
    other = replace(event, reward=float("nan"))
    return with_event(entries, place, other), Promise.C2, f"group {event.request.group}"


def trained_without_generation(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.SampleFinished, 7)
    return with_event(entries, place, ev.Tick()), Promise.C2, f"group {event.request.group}"


def finished_by_a_lost_epoch(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.SampleFinished, 7)
    other = replace(event, epoch=event.epoch + 1)
    return with_event(entries, place, other), Promise.C2, f"group {event.request.group}"


def fed_with_a_sample_missing(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.Feed, 9)
    other = replace(action, samples=action.samples[:-1])
    return edit(entries, place, inner, other), Promise.C2, f"group {action.group}"


def dispatched_twice(entries: list[Entry]) -> Corrupted:
    place, _, action = find(entries, act.Dispatch, 5)
    return add_action(entries, place, action), Promise.C2, f"group {action.group}"


def trained_too_stale(entries: list[Entry]) -> Corrupted:
    """The user asked for K = 1; the log is that of a run with K = 2."""
    params = entries[0].event.params  # type: ignore[union-attr]
    changed = with_event(entries, 0, ev.Started(replace(params, max_staleness=1)))
    changed = with_actions(changed, 0, [act.InForce(0, 1, params.batch_groups)])
    issued = {a.group: a.version for a in all_of(entries, act.IssueGroup)}
    late = next(a for a in all_of(entries, act.EndGroup) if a.step - issued[a.group] == 2)
    return changed, Promise.C3, f"group {late.group}"


def another_k_in_force_than_asked(entries: list[Entry]) -> Corrupted:
    batch = entries[0].event.params.batch_groups  # type: ignore[union-attr]
    return with_actions(entries, 0, [act.InForce(0, 5, batch)]), Promise.C3, "step 0"


def one_admission_too_many(entries: list[Entry]) -> Corrupted:
    """Admission stopped at the bound; one more group on the newest version breaks it."""
    place, _, action = find(entries, act.IssueGroup, 11)  # the bound allows 12 at step 0
    issued = [a for a in entries[place].actions if isinstance(a, act.IssueGroup)]
    assert issued[-1].group == 11 and action.version == 0
    extra = act.IssueGroup(901, 901, 0, action.step)
    return add_action(entries, place, extra), Promise.C3, "group 901"


def admitted_on_a_due_version(entries: list[Entry]) -> Corrupted:
    """A group of the newest version was in truth issued on one that is due in this step."""
    retired: set[int] = set()
    for place, entry in enumerate(entries):
        for inner, action in enumerate(entry.actions):
            if isinstance(action, act.RetireVersion):
                retired.add(action.version)
            elif isinstance(action, act.IssueGroup):
                due = action.step - 2
                if 0 <= due < action.version and due not in retired:
                    changed = edit(entries, place, inner, replace(action, version=due))
                    return changed, Promise.C3, f"group {action.group}"
    raise AssertionError("no step of the log has a due version")


def batch_one_short(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.CloseStep, 2)
    other = replace(action, groups=action.groups[:-1])
    return edit(entries, place, inner, other), Promise.BATCH, f"step {action.step}"


def batch_one_over(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.CloseStep, 2)
    other = replace(action, groups=(*action.groups, 99))
    return edit(entries, place, inner, other), Promise.BATCH, f"step {action.step}"


def group_in_two_batches(entries: list[Entry]) -> Corrupted:
    """Step 3 is fed a group that step 2 trains already."""
    _, _, earlier = find(entries, act.CloseStep, 2)
    place, inner, action = find(entries, act.Feed, 3 * 4)
    other = replace(action, group=earlier.groups[0])
    return edit(entries, place, inner, other), Promise.BATCH, f"group {earlier.groups[0]}"


def group_twice_in_one_batch(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.Feed, 9)
    return edit(entries, place, inner, action, action), Promise.BATCH, f"group {action.group}"


def step_committed_twice(entries: list[Entry]) -> Corrupted:
    place, event = find_event(entries, ev.StepCommitted, 2)
    again = replace(entries[place], event=replace(event, checksum="other weights"))
    changed = [*entries[: place + 1], again, *entries[place + 1 :]]
    changed = [replace(entry, number=n) for n, entry in enumerate(changed)]
    return changed, Promise.BATCH, f"step {event.step}"


def steps_out_of_order(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.CloseStep, 2)
    other = replace(action, step=action.step + 1)
    return edit(entries, place, inner, other), Promise.BATCH, f"step {action.step + 1}"


def trained_outside_its_batch(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.EndGroup, 5)
    other = replace(action, step=action.step + 1)
    return edit(entries, place, inner, other), Promise.BATCH, f"group {action.group}"


def updates_of_unequal_size(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.Feed, 9)
    other = replace(action, update=1 - action.update)
    return edit(entries, place, inner, other), Promise.BATCH, f"step {action.step}"


def ended_a_step_early(entries: list[Entry]) -> Corrupted:
    params = entries[0].event.params  # type: ignore[union-attr]
    longer = ev.Started(replace(params, num_steps=params.num_steps + 1))
    return with_event(entries, 0, longer), Promise.BATCH, "step 6"


def retired_early(entries: list[Entry]) -> Corrupted:
    place, _ = find_event(entries, ev.StepCommitted)
    retire = act.RetireVersion(0)
    return add_action(entries, place, retire), Promise.VERSIONS, "version 0"


def used_before_its_publication(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.IssueGroup, 3)
    other = replace(action, version=1)
    return edit(entries, place, inner, other), Promise.VERSIONS, f"group {action.group}"


def loaded_from_a_peer_without_it(entries: list[Entry]) -> Corrupted:
    place, inner, action = find(entries, act.Load)
    donor = next(name for name in instances(entries) if name != action.instance)
    changed = edit(entries, place, inner, replace(action, donor=donor))
    return changed, Promise.VERSIONS, action.instance


def learner_of_another_run(entries: list[Entry]) -> Corrupted:
    place, _ = find_event(entries, ev.LearnerJoined)
    return with_event(entries, place, ev.LearnerJoined(7, 7)), Promise.VERSIONS, "version 7"


def entry_skipped(entries: list[Entry]) -> Corrupted:
    return [*entries[:40], *entries[41:]], Promise.LOG, "entry 40"


def acted_after_the_stop(entries: list[Entry]) -> Corrupted:
    number = len(entries)
    late = Entry(number, entries[-1].now, ev.Tick(), [act.RetireVersion(6)])
    return [*entries, late], Promise.LOG, f"entry {number}"


def all_of(entries: list[Entry], kind: type) -> list[Any]:
    return [action for entry in entries for action in entry.actions if isinstance(action, kind)]


def instances(entries: list[Entry]) -> list[str]:
    return [e.event.instance for e in entries if isinstance(e.event, ev.InstanceJoined)]


def holders(entries: list[Entry], version: int) -> set[str]:
    held: set[str] = set()
    for entry in entries:
        if isinstance(entry.event, ev.Loaded) and entry.event.version == version:
            held.add(entry.event.instance)
        for action in entry.actions:
            if isinstance(action, act.Unload) and action.version == version:
                held.discard(action.instance)
    return held


CORRUPTIONS: list[Callable[[list[Entry]], Corrupted]] = [
    segment_of_another_version,
    trajectory_of_two_versions,
    dispatched_under_another_version,
    dispatched_without_the_weights,
    moved_to_an_instance_without_the_weights,
    unloaded_with_running_requests,
    continued_under_new_weights,
    fed_as_another_version,
    ended_twice,
    never_ended,
    issued_and_forgotten,
    issued_twice,
    prompt_issued_twice,
    dropped_as_surplus,
    filtered_by_nobodys_rule,
    failed_without_a_reason,
    trained_unscored,
    trained_with_a_reward_that_is_no_number,
    trained_without_generation,
    finished_by_a_lost_epoch,
    fed_with_a_sample_missing,
    dispatched_twice,
    trained_too_stale,
    another_k_in_force_than_asked,
    one_admission_too_many,
    admitted_on_a_due_version,
    batch_one_short,
    batch_one_over,
    group_in_two_batches,
    group_twice_in_one_batch,
    step_committed_twice,
    steps_out_of_order,
    trained_outside_its_batch,
    updates_of_unequal_size,
    ended_a_step_early,
    retired_early,
    used_before_its_publication,
    loaded_from_a_peer_without_it,
    learner_of_another_run,
    entry_skipped,
    acted_after_the_stop,
]
