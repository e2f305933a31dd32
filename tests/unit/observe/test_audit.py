"""The audit passes honest logs and names the culprit in every corrupted one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_logs import resumed_run, small_world, whole_run

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit import AuditReport, Promise, audit, audit_run
from dora_rl.observe.eventlog import Entry, FileLog
from dora_rl.types import Mode, RequestId, Segment


@pytest.fixture(scope="module")
def clean() -> list[Entry]:
    """Multi-version with so much in flight that only the bound limits admission."""
    return whole_run(Mode.MULTI_VERSION, 2, inflight_groups=1_000)


@pytest.fixture(scope="module")
def elastic() -> list[Entry]:
    return whole_run(Mode.PARTIAL)


# Honest logs.


@pytest.mark.parametrize("mode", list(Mode))
@pytest.mark.parametrize("seed", [0, 1])
def test_an_honest_log_has_no_findings(mode: Mode, seed: int) -> None:
    report = audit(whole_run(mode, seed))
    assert report.findings == ()
    figures = report.figures
    assert figures.finished and figures.steps == 6 and figures.batch_sizes == (4,) * 6
    assert figures.groups_trained == 24 and figures.groups_outstanding == 0
    assert figures.groups_issued == figures.groups_trained + figures.groups_discarded
    assert figures.staleness_max <= {"sync": 0, "one_step_off": 1, "replication": 0}.get(mode, 2)


def test_what_the_baselines_give_up_shows_in_the_figures() -> None:
    partial = audit(whole_run(Mode.PARTIAL)).figures
    replication = audit(whole_run(Mode.REPLICATION)).figures
    ours = audit(whole_run(Mode.MULTI_VERSION)).figures
    assert partial.mixed_version_frac > 0 and replication.groups_surplus > 0
    assert (ours.mixed_version_frac, ours.groups_discarded) == (0, 0)
    assert ours.live_versions_max == 3


@pytest.mark.parametrize("mode", list(Mode))
def test_a_run_that_was_killed_and_resumed_has_no_findings(mode: Mode) -> None:
    report = audit(resumed_run(mode))
    assert report.findings == ()
    assert report.figures.num_resumes == 1 and report.figures.finished


@pytest.mark.parametrize(("staleness", "batch"), [(0, 4), (3, 4), (2, 2), (1, 8), (2, 6)])
def test_k_and_b_may_change_on_resume(staleness: int, batch: int) -> None:
    entries = resumed_run(
        Mode.MULTI_VERSION, kill_s=6.0, max_staleness=staleness, batch_groups=batch
    )
    report = audit(entries)
    assert report.findings == ()
    assert report.figures.batch_sizes[-1] == batch


def test_a_run_that_was_cut_off_is_sound_at_every_entry(clean: list[Entry]) -> None:
    for length in range(1, len(clean), 7):
        report = audit(clean[:length])
        assert report.findings == () and not report.figures.finished
    assert audit(clean[: len(clean) // 2]).figures.groups_outstanding > 0


def test_a_run_folder_is_audited_across_segments(tmp_path: Path) -> None:
    log = FileLog.create(tmp_path, entries_per_segment=50, fsync_s=60)
    world = small_world(Mode.MULTI_VERSION, log=log)
    world.start()
    assert world.run(1e6)
    log.close()
    assert len(list(tmp_path.glob("*.jsonl"))) > 2
    assert audit_run(tmp_path) == audit(whole_run(Mode.MULTI_VERSION))


# Corruptions. Each takes an honest log apart and returns it with what must be named.

Corrupted = tuple[list[Entry], Promise, str]


def _find(entries: list[Entry], kind: type, nth: int = 0) -> tuple[int, int, Any]:
    """Entry place, action place and the nth action of this kind."""
    seen = 0
    for place, entry in enumerate(entries):
        for inner, action in enumerate(entry.actions):
            if isinstance(action, kind):
                if seen == nth:
                    return place, inner, action
                seen += 1
    raise AssertionError(f"no {kind.__name__} number {nth} in the log")


def _find_event(entries: list[Entry], kind: type, nth: int = 0) -> tuple[int, Any]:
    places = [place for place, entry in enumerate(entries) if isinstance(entry.event, kind)]
    return places[nth], entries[places[nth]].event


def _with_actions(entries: list[Entry], place: int, actions: list[act.Action]) -> list[Entry]:
    changed = list(entries)
    changed[place] = replace(entries[place], actions=actions)
    return changed


def _edit(entries: list[Entry], place: int, inner: int, *new: act.Action) -> list[Entry]:
    """Put `new` in place of one action."""
    actions = list(entries[place].actions)
    actions[inner : inner + 1] = new
    return _with_actions(entries, place, actions)


def _add_action(entries: list[Entry], place: int, *new: act.Action) -> list[Entry]:
    return _with_actions(entries, place, [*entries[place].actions, *new])


def _with_event(entries: list[Entry], place: int, event: ev.Event) -> list[Entry]:
    changed = list(entries)
    changed[place] = replace(entries[place], event=event)
    return changed


def segment_of_another_version(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.SampleFinished, 20)
    (segment,) = event.segments
    other = replace(event, segments=(Segment(0, segment.version + 1),))
    return _with_event(entries, place, other), Promise.C1, f"group {event.request.group}"


def trajectory_of_two_versions(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.SampleFinished, 20)
    (segment,) = event.segments
    other = replace(event, segments=(segment, Segment(3, segment.version)))
    return _with_event(entries, place, other), Promise.C1, f"group {event.request.group}"


def dispatched_under_another_version(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Dispatch, 15)
    assert action.version > 0
    other = replace(action, version=action.version - 1)
    return _edit(entries, place, inner, other), Promise.C1, f"group {action.group}"


def dispatched_without_the_weights(entries: list[Entry]) -> Corrupted:
    """The load that made the first dispatch possible never happened."""
    _, _, action = _find(entries, act.Dispatch)
    loads = [
        place
        for place, entry in enumerate(entries)
        if entry.event == ev.Loaded(action.instance, action.version)
    ]
    return _with_event(entries, loads[0], ev.Tick()), Promise.C1, action.instance


def moved_to_an_instance_without_the_weights(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Move)
    holders = _holders(entries[: place + 1], action.version)
    other = next(name for name in _instances(entries) if name not in holders)
    return _edit(entries, place, inner, replace(action, dst=other)), Promise.C1, other


def unloaded_with_running_requests(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.Dispatch, 5)
    unload = act.Unload(action.instance, action.version)
    return _add_action(entries, place, unload), Promise.C1, action.instance


def continued_under_new_weights(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.Dispatch, 5)
    request = RequestId(action.group, action.samples[0])
    order = act.Reversion(action.instance, request, action.epochs[0], action.version)
    return _add_action(entries, place, order), Promise.C1, f"group {action.group}"


def fed_as_another_version(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Feed, 9)
    other = replace(action, version=action.version + 1)
    return _edit(entries, place, inner, other), Promise.C1, f"group {action.group}"


def ended_twice(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.EndGroup, 5)
    return _add_action(entries, place + 3, action), Promise.C2, f"group {action.group}"


def never_ended(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.EndGroup, 5)
    return _edit(entries, place, inner), Promise.C2, f"group {action.group}"


def issued_and_forgotten(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.IssueGroup, 3)
    lost = replace(action, group=900, prompt=900)
    return _add_action(entries, place, lost), Promise.C2, "group 900"


def issued_twice(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.IssueGroup, 3)
    return _add_action(entries, place + 1, action), Promise.C2, f"group {action.group}"


def prompt_issued_twice(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.IssueGroup, 3)
    other = replace(action, prompt=0)
    return _edit(entries, place, inner, other), Promise.C2, f"group {action.group}"


def dropped_as_surplus(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.EndGroup, 5)
    other = replace(action, end=act.End.SURPLUS, step=None, reason="too long")
    return _edit(entries, place, inner, other), Promise.C2, f"group {action.group}"


def filtered_by_nobodys_rule(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.WaitFor)
    group = action.groups[0]
    version = next(a.version for a in _all(entries, act.IssueGroup) if a.group == group)
    end = act.EndGroup(group, version, act.End.FILTERED, None, "dull")
    return _add_action(entries, place, end), Promise.C2, f"group {group}"


def failed_without_a_reason(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.WaitFor)
    group = action.groups[0]
    version = next(a.version for a in _all(entries, act.IssueGroup) if a.group == group)
    end = act.EndGroup(group, version, act.End.FAILED, None, "")
    return _add_action(entries, place, end), Promise.C2, f"group {group}"


def trained_unscored(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.Scored, 7)
    return _with_event(entries, place, ev.Tick()), Promise.C2, f"group {event.request.group}"


def trained_with_a_reward_that_is_no_number(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.Scored, 7)
    other = replace(event, reward=float("nan"))
    return _with_event(entries, place, other), Promise.C2, f"group {event.request.group}"


def trained_without_generation(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.SampleFinished, 7)
    return _with_event(entries, place, ev.Tick()), Promise.C2, f"group {event.request.group}"


def finished_by_a_lost_epoch(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.SampleFinished, 7)
    other = replace(event, epoch=event.epoch + 1)
    return _with_event(entries, place, other), Promise.C2, f"group {event.request.group}"


def fed_with_a_sample_missing(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Feed, 9)
    other = replace(action, samples=action.samples[:-1])
    return _edit(entries, place, inner, other), Promise.C2, f"group {action.group}"


def dispatched_twice(entries: list[Entry]) -> Corrupted:
    place, _, action = _find(entries, act.Dispatch, 5)
    return _add_action(entries, place, action), Promise.C2, f"group {action.group}"


def trained_too_stale(entries: list[Entry]) -> Corrupted:
    """The user asked for K = 1; the log is that of a run with K = 2."""
    params = entries[0].event.params  # type: ignore[union-attr]
    changed = _with_event(entries, 0, ev.Started(replace(params, max_staleness=1)))
    changed = _with_actions(changed, 0, [act.InForce(0, 1, params.batch_groups)])
    issued = {a.group: a.version for a in _all(entries, act.IssueGroup)}
    late = next(
        a for a in _all(entries, act.EndGroup) if a.step is not None and a.step - a.version == 2
    )
    assert issued[late.group] == late.version
    return changed, Promise.C3, f"group {late.group}"


def another_k_in_force_than_asked(entries: list[Entry]) -> Corrupted:
    batch = entries[0].event.params.batch_groups  # type: ignore[union-attr]
    return _with_actions(entries, 0, [act.InForce(0, 5, batch)]), Promise.C3, "step 0"


def one_admission_too_many(entries: list[Entry]) -> Corrupted:
    """Admission stopped at the bound; one more group on the newest version breaks it."""
    place, _, action = _find(entries, act.IssueGroup, 11)  # the bound allows 12 at step 0
    issued = [a for a in entries[place].actions if isinstance(a, act.IssueGroup)]
    assert issued[-1].group == 11 and action.version == 0
    extra = act.IssueGroup(901, 901, 0, action.step)
    return _add_action(entries, place, extra), Promise.C3, "group 901"


def admitted_on_a_due_version(entries: list[Entry]) -> Corrupted:
    place, inner, action = next(
        (place, inner, action)
        for place, entry in enumerate(entries)
        for inner, action in enumerate(entry.actions)
        if isinstance(action, act.IssueGroup) and action.version == action.step == 2
    )
    other = replace(action, version=0)
    return _edit(entries, place, inner, other), Promise.C3, f"group {action.group}"


def batch_one_short(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.CloseStep, 2)
    other = replace(action, groups=action.groups[:-1])
    return _edit(entries, place, inner, other), Promise.BATCH, f"step {action.step}"


def batch_one_over(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.CloseStep, 2)
    other = replace(action, groups=(*action.groups, 99))
    return _edit(entries, place, inner, other), Promise.BATCH, f"step {action.step}"


def group_in_two_batches(entries: list[Entry]) -> Corrupted:
    """Step 3 is fed a group that step 2 trains already."""
    _, _, earlier = _find(entries, act.CloseStep, 2)
    place, inner, action = _find(entries, act.Feed, 3 * 4)
    other = replace(action, group=earlier.groups[0])
    return _edit(entries, place, inner, other), Promise.BATCH, f"group {earlier.groups[0]}"


def group_twice_in_one_batch(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Feed, 9)
    return _edit(entries, place, inner, action, action), Promise.BATCH, f"group {action.group}"


def step_committed_twice(entries: list[Entry]) -> Corrupted:
    place, event = _find_event(entries, ev.StepCommitted, 2)
    again = replace(entries[place], event=replace(event, checksum="other weights"))
    changed = [*entries[: place + 1], again, *entries[place + 1 :]]
    changed = [replace(entry, number=n) for n, entry in enumerate(changed)]
    return changed, Promise.BATCH, f"step {event.step}"


def steps_out_of_order(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.CloseStep, 2)
    other = replace(action, step=action.step + 1)
    return _edit(entries, place, inner, other), Promise.BATCH, f"step {action.step + 1}"


def trained_outside_its_batch(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.EndGroup, 5)
    other = replace(action, step=action.step + 1)
    return _edit(entries, place, inner, other), Promise.BATCH, f"group {action.group}"


def updates_of_unequal_size(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Feed, 9)
    other = replace(action, update=1 - action.update)
    return _edit(entries, place, inner, other), Promise.BATCH, f"step {action.step}"


def ended_a_step_early(entries: list[Entry]) -> Corrupted:
    params = entries[0].event.params  # type: ignore[union-attr]
    longer = ev.Started(replace(params, num_steps=params.num_steps + 1))
    return _with_event(entries, 0, longer), Promise.BATCH, "step 6"


def retired_early(entries: list[Entry]) -> Corrupted:
    place, _ = _find_event(entries, ev.StepCommitted)
    retire = act.RetireVersion(0)
    return _add_action(entries, place, retire), Promise.VERSIONS, "version 0"


def used_before_its_publication(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.IssueGroup, 3)
    other = replace(action, version=1)
    return _edit(entries, place, inner, other), Promise.VERSIONS, f"group {action.group}"


def loaded_from_a_peer_without_it(entries: list[Entry]) -> Corrupted:
    place, inner, action = _find(entries, act.Load)
    donor = next(name for name in _instances(entries) if name != action.instance)
    return (
        _edit(entries, place, inner, replace(action, donor=donor)),
        (Promise.VERSIONS),
        (action.instance),
    )


def learner_of_another_run(entries: list[Entry]) -> Corrupted:
    place, _ = _find_event(entries, ev.TrainerJoined)
    return _with_event(entries, place, ev.TrainerJoined(7, 7)), Promise.VERSIONS, "version 7"


def entry_skipped(entries: list[Entry]) -> Corrupted:
    return [*entries[:40], *entries[41:]], Promise.LOG, "entry 40"


def acted_after_the_stop(entries: list[Entry]) -> Corrupted:
    number = len(entries)
    late = Entry(number, entries[-1].now, ev.Tick(), [act.RetireVersion(6)])
    return [*entries, late], Promise.LOG, f"entry {number}"


def _all(entries: list[Entry], kind: type) -> list[Any]:
    return [action for entry in entries for action in entry.actions if isinstance(action, kind)]


def _instances(entries: list[Entry]) -> list[str]:
    return [e.event.instance for e in entries if isinstance(e.event, ev.InstanceJoined)]


def _holders(entries: list[Entry], version: int) -> set[str]:
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


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
def test_a_corrupted_log_is_found_and_the_culprit_named(
    corrupt: Callable[[list[Entry]], Corrupted], clean: list[Entry]
) -> None:
    entries, promise, subject = corrupt(clean)
    report = audit(entries)
    assert not report.ok
    assert _names(report, promise, subject), [str(f) for f in report.findings[:10]]


def test_an_instance_put_to_sleep_with_running_requests_is_named(elastic: list[Entry]) -> None:
    place, _, action = _find(elastic, act.Park)
    inner = elastic[place].actions.index(action)
    report = audit(_edit(elastic, place, inner))
    assert _names(report, Promise.VERSIONS, action.instance)


def test_mixed_trajectories_of_partial_must_still_begin_at_zero(elastic: list[Entry]) -> None:
    place, event = _find_event(elastic, ev.SampleFinished, 20)
    other = replace(event, segments=tuple(s._replace(start=s.start + 1) for s in event.segments))
    report = audit(_with_event(elastic, place, other))
    assert _names(report, Promise.C1, f"group {event.request.group}")


def test_the_findings_of_a_hopeless_log_are_counted_not_kept(clean: list[Entry]) -> None:
    garbled = [replace(entry, number=entry.number * 2) for entry in clean] * 3
    report = audit(garbled)
    assert len(report.findings) <= 1_000 <= report.num_findings


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_garbage_is_reported_never_a_crash(data: st.DataObject, clean: list[Entry]) -> None:
    """Drop, repeat, exchange or shuffle entries and actions at will."""
    entries = list(clean)
    for _ in range(data.draw(st.integers(1, 5))):
        place = data.draw(st.integers(0, len(entries) - 1))
        other = data.draw(st.integers(0, len(entries) - 1))
        kind = data.draw(st.sampled_from(["drop", "repeat", "swap", "strip", "exchange"]))
        if kind == "drop":
            del entries[place]
        elif kind == "repeat":
            entries.insert(other, entries[place])
        elif kind == "swap":
            entries[place], entries[other] = entries[other], entries[place]
        elif kind == "strip":
            entries[place] = replace(entries[place], actions=entries[place].actions[::2])
        else:
            entries[place] = replace(entries[place], actions=entries[other].actions)
    report = audit(entries)
    if [entry.number for entry in entries] != list(range(len(clean))):
        assert not report.ok or len(entries) < len(clean)


def _names(report: AuditReport, promise: Promise, subject: str) -> bool:
    return any(
        finding.promise is promise and subject in finding.subject.split(", ")
        for finding in report.findings
    )
