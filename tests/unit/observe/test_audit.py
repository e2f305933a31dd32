"""The audit passes honest logs and names the culprit in every corrupted one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.audit import AuditReport, Promise, audit, audit_run
from dora_rl.observe.eventlog import Entry, FileLog
from dora_rl.types import Mode
from tests.kit.hand_driven import Hand
from tests.kit.simulated_logs import resumed_run, small_world, whole_run
from tests.unit.observe.corruptions import (
    CORRUPTIONS,
    Corrupted,
    edit,
    find,
    find_event,
    with_event,
)


@pytest.fixture(scope="module")
def clean() -> list[Entry]:
    """Multi-version with so much in flight that only the bound limits admission."""
    return whole_run(Mode.MULTI_VERSION, 2, inflight_groups=1_000, ready_max=1_000)


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
    report, lines = (
        audit_run(tmp_path),
        sum(len(p.read_bytes().splitlines()) for p in tmp_path.glob("*.jsonl")),
    )
    assert report.figures.num_chained == lines and report.figures.num_unchained == 0
    unchained = replace(report, figures=replace(report.figures, num_chained=0))
    assert unchained == audit(whole_run(Mode.MULTI_VERSION))


# Corrupted logs.


@pytest.mark.parametrize("corrupt", CORRUPTIONS, ids=lambda c: c.__name__)
def test_a_corrupted_log_is_found_and_the_culprit_named(
    corrupt: Callable[[list[Entry]], Corrupted], clean: list[Entry]
) -> None:
    entries, promise, subject = corrupt(clean)
    report = audit(entries)
    assert not report.ok
    assert _names(report, promise, subject), [str(f) for f in report.findings[:10]]


def test_a_group_fed_to_the_next_step_before_this_one_is_closed_is_named(
    clean: list[Entry],
) -> None:
    place, inner, action = find(clean, act.Feed)
    report = audit(edit(clean, place, inner, replace(action, step=1)))
    assert any("before step 0 was closed" in str(f) for f in report.findings), report.findings[:3]
    assert _names(report, Promise.BATCH, f"group {action.group}")


def test_a_step_closed_before_the_one_before_is_committed_is_named(clean: list[Entry]) -> None:
    """Its groups may be with the learner by then; it is closed as soon as they are."""
    place, inner, action = next(
        (place, inner, action)
        for place, entry in enumerate(clean)
        for inner, action in enumerate(entry.actions)
        if isinstance(action, act.CloseStep)
        and not any(isinstance(a, act.Feed) and a.step == action.step for a in entry.actions)
    )
    early = edit(clean, place, inner)
    fed = max(
        at
        for at, entry in enumerate(clean)
        for a in entry.actions
        if isinstance(a, act.Feed) and a.step == action.step
    )
    assert fed < place
    actions = [*early[fed].actions, action]
    report = audit([*early[:fed], replace(early[fed], actions=actions), *early[fed + 1 :]])
    assert _names(report, Promise.BATCH, f"step {action.step}")


def test_an_instance_put_to_sleep_with_running_requests_is_named(elastic: list[Entry]) -> None:
    place, _, action = find(elastic, act.Park)
    inner = elastic[place].actions.index(action)
    report = audit(edit(elastic, place, inner))
    assert _names(report, Promise.VERSIONS, action.instance)


def test_mixed_trajectories_of_partial_must_still_begin_at_zero(elastic: list[Entry]) -> None:
    place, event = find_event(elastic, ev.SampleFinished, 20)
    other = replace(event, segments=tuple(s._replace(start=s.start + 1) for s in event.segments))
    report = audit(with_event(elastic, place, other))
    assert _names(report, Promise.C1, f"group {event.request.group}")


def test_the_findings_of_a_hopeless_log_are_counted_not_kept(clean: list[Entry]) -> None:
    garbled = [replace(entry, number=entry.number * 2) for entry in clean] * 8
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


def test_updates_of_a_step_may_change_in_a_resumed_run() -> None:
    """What was fed already is cut into updates anew."""
    hand = Hand(batch_groups=4, group_size=1, num_steps=3, updates_per_step=2)
    hand.begin({"a": 64}, resident_max=9)
    for group in (0, 1, 2):
        hand.complete(group)
    hand.tell(ev.Resumed(replace(hand.params, updates_per_step=1)))
    hand.tell(ev.LearnerJoined(0, 0))
    hand.join("a", 64, versions=(0,), resident_max=9)
    hand.to_the_end()
    assert audit(hand.entries).findings == ()
