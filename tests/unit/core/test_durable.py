"""Two levels at a step's end: committed when sealed, ended when durable, undone when lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.params import Params
from dora_rl.core.state import GroupPhase
from dora_rl.core.waits import waits
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import Entry, replay
from dora_rl.types import Mode
from tests.kit.hand_driven import Hand


def hand(**params: Any) -> Hand:
    spec: dict[str, Any] = {"batch_groups": 2, "group_size": 2, "num_steps": 6, "max_staleness": 1}
    made = Hand(**(spec | {"durable_behind": 1} | params))
    made.begin(resident_max=4)
    return made


def train_step(run: Hand) -> list[act.Action]:
    """Groups until the step closes, and its commit; the disk has the version before by then."""
    step = run.state.committed
    while not run.state.batches[step].close_sent:
        run.settle()
        run.complete(run.running()[0].id)
    run.tell(ev.BatchAccepted(step))
    return run.tell(ev.StepCommitted(step, f"sum{step + 1}", durable=step))


def ends(actions: list[act.Action]) -> list[tuple[int, act.End]]:
    return [(a.group, a.end) for a in actions if isinstance(a, act.EndGroup)]


def resume(run: Hand, **params: Any) -> None:
    run.tell(ev.Resumed(replace(run.params, **params)))


def come_back(run: Hand) -> None:
    version = run.state.committed
    run.tell(ev.LearnerJoined(version, version, incarnation=9, durable=version))
    run.join("a", resident_max=4)


def test_groups_end_when_their_version_is_durable_and_not_before() -> None:
    run = hand()
    assert not ends(train_step(run))
    assert run.state.committed == 1 and run.state.durable == 0
    assert any(a.version == 1 for e in run.entries for a in e.actions if isinstance(a, act.Load))
    batch = list(run.state.batches[0].groups)
    assert ends(run.tell(ev.VersionDurable(1))) == [(g, act.End.TRAINED) for g in batch]
    assert run.state.durable == 1 and 0 not in run.state.batches
    run.audit()


def test_a_commit_says_that_the_version_before_is_durable() -> None:
    """A learner seals no second one before; that word may be late, or be lost with the learner."""
    run = hand()
    train_step(run)
    first = list(run.state.batches[0].groups)
    assert ends(train_step(run)) == [(g, act.End.TRAINED) for g in first]
    assert not ends(run.tell(ev.VersionDurable(1))), "late"
    run.audit()


def test_word_of_the_disk_may_come_before_word_of_the_seal() -> None:
    run = hand(num_steps=1)
    while not run.state.batches[0].close_sent:
        run.complete(run.running()[0].id)
    run.tell(ev.BatchAccepted(0))
    run.tell(ev.VersionDurable(1))
    assert run.state.durable == 0
    run.tell(ev.StepCommitted(0, "sum1", durable=0))
    assert run.state.stopped == "all steps are trained"
    run.audit()


def test_the_run_ends_when_its_last_version_is_durable() -> None:
    run = hand(num_steps=2)
    train_step(run)
    train_step(run)
    assert run.state.committed == 2 and run.state.stopped is None
    assert "version 2 to be on disk" in waits(run.state)[0].what
    cut = audit([*run.entries])
    assert cut.ok and not cut.proved
    run.tell(ev.VersionDurable(2))
    assert run.state.stopped == "all steps are trained"
    run.audit()


def test_a_run_that_was_killed_before_its_last_version_was_durable_ends_with_its_learner() -> None:
    run = hand(num_steps=1)
    train_step(run)
    resume(run)
    assert run.state.stopped is None
    come_back(run)
    assert run.state.stopped == "all steps are trained"
    run.audit()


def test_the_last_durable_version_is_never_retired() -> None:
    """Nothing was issued on version 1; it is what the run would go back to."""
    run = hand(max_staleness=3, num_steps=3)
    train_step(run)
    run.tell(ev.VersionDurable(1))
    train_step(run)
    assert run.state.committed == 2 and run.state.durable == 1
    retired = [
        a.version for e in run.entries for a in e.actions if isinstance(a, act.RetireVersion)
    ]
    assert 1 not in retired and 1 in run.state.versions


@pytest.mark.parametrize("mode", [Mode.MULTI_VERSION, Mode.PARTIAL, Mode.SYNC, Mode.ONE_STEP_OFF])
@pytest.mark.parametrize("later", [0, 1, 2, 3], ids="{} groups later".format)
@pytest.mark.parametrize("accepted", [False, True])
def test_a_lost_version_is_gone_back_over(mode: Mode, later: int, accepted: bool) -> None:
    """However far the run had come after it: the step is trained again from the same groups, those
    of the lost version are issued anew, and the run ends with every group trained once."""
    run = hand(mode=mode, max_staleness=2)
    train_step(run)
    run.tell(ev.VersionDurable(1))
    train_step(run)
    again = list(run.state.batches[1].groups)
    for _ in range(later):
        run.settle()
        if run.running():
            run.complete(run.running()[0].id)
    if accepted and run.state.batches[2].close_sent:
        run.tell(ev.BatchAccepted(2))
    on_lost = {g.id for g in run.state.groups.values() if g.version == 2}
    resume(run)
    told = run.tell(ev.Rewound(1))
    state = run.state
    assert (state.committed, state.filling, state.lineage) == (1, 2, 1)
    assert state.batches[1].groups == again
    lost = {group for group, end in ends(told)}
    assert {end for _, end in ends(told)} <= {act.End.LOST} and on_lost <= lost
    assert lost == on_lost or mode is Mode.PARTIAL
    assert list(state.versions)[-1] == 1 and len(state.reissue) == len(lost)
    come_back(run)
    fed = [a.group for a in run.entries[-2].actions if isinstance(a, act.Feed) and a.step == 1]
    assert fed == again
    run.to_the_end()
    run.audit()
    trained = [a for e in run.entries for a in e.actions if isinstance(a, act.EndGroup)]
    per_step = [a.step or 0 for a in trained if a.end is act.End.TRAINED]
    assert sorted(per_step) == [s for s in range(6) for _ in range(2)]
    assert replay(run.entries).ok


def test_going_back_with_another_batch_size_keeps_the_bound() -> None:
    """B has shrunk since: groups that no longer find a place in time are given up and told."""
    run = hand(batch_groups=4, max_staleness=1, num_steps=20)
    train_step(run)
    run.tell(ev.VersionDurable(1))
    resume(run, batch_groups=1, max_staleness=0)
    come_back(run)
    train_step(run)
    resume(run, batch_groups=1, max_staleness=0)
    run.tell(ev.Rewound(1))
    come_back(run)
    run.to_the_end()
    run.audit()


def test_a_durable_version_is_not_gone_back_over() -> None:
    run = hand()
    train_step(run)
    run.tell(ev.VersionDurable(1))
    resume(run)
    with pytest.raises(AssertionError, match="not between"):
        run.tell(ev.Rewound(0))


# -- logs of the last release ----------------------------------------------------------------------


def test_in_a_log_of_the_last_release_committed_is_durable() -> None:
    """Told by its parameters, which let no version be behind; going on with it is as always."""
    run = hand(durable_behind=0)
    assert ends(train_step(run)), "at once"
    assert run.state.durable == 1
    resume(run, durable_behind=1)
    assert run.state.durable == run.state.on_disk == 1
    come_back(run)
    assert not ends(train_step(run))
    run.tell(ev.VersionDurable(2))
    run.to_the_end()
    run.audit()
    assert not any(isinstance(e.event, ev.VersionDurable) for e in run.entries[:5])


def test_parameters_without_the_field_are_of_the_old_order() -> None:
    assert Params().durable_behind == 0


# -- what the audit finds --------------------------------------------------------------------------


def findings(entries: list[Entry]) -> str:
    return "; ".join(str(finding) for finding in audit(entries).findings)


def changed(entries: list[Entry], kind: type, **fields: Any) -> list[Entry]:
    """The log with the last event of this kind told otherwise."""
    place = max(i for i, entry in enumerate(entries) if isinstance(entry.event, kind))
    entry = entries[place]
    event: Any = entry.event
    told = replace(event, **fields)
    return [*entries[:place], replace(entry, event=told), *entries[place + 1 :]]


def test_the_audit_finds_a_version_that_was_sealed_too_early() -> None:
    run = hand()
    train_step(run)
    train_step(run)
    assert findings(run.entries) == ""
    assert "only version 0 was on disk" in findings(
        changed(run.entries, ev.StepCommitted, durable=0)
    )


def test_the_audit_finds_groups_that_end_before_their_version_is_durable() -> None:
    run = hand()
    train_step(run)
    run.tell(ev.VersionDurable(1))
    assert findings(run.entries) == ""
    assert "not in its batch" in findings(changed(run.entries, ev.VersionDurable, version=0))


def test_the_audit_finds_an_end_without_the_last_version_on_disk() -> None:
    run = hand(num_steps=1)
    train_step(run)
    run.tell(ev.VersionDurable(1))
    assert "only version 0 is known to be on disk" in findings(
        changed(run.entries, ev.VersionDurable, version=0)
    )


def test_the_audit_finds_a_run_that_went_back_over_a_durable_version_or_in_its_middle() -> None:
    run = hand()
    train_step(run)
    resume(run)
    run.tell(ev.Rewound(0))
    assert findings(run.entries) == ""
    early = next(i for i, e in enumerate(run.entries) if isinstance(e.event, ev.StepCommitted)) + 1
    entry = replace(run.entries[early - 1], number=early, event=ev.VersionDurable(1), actions=[])
    after = [replace(e, number=e.number + 1) for e in run.entries[early:]]
    assert "1 durable" in findings([*run.entries[:early], entry, *after])
    middle = [e for e in run.entries if not isinstance(e.event, ev.Resumed)]
    assert "while the run was going on" in findings(
        [replace(e, number=i) for i, e in enumerate(middle)]
    )


def test_the_audit_finds_a_group_that_is_called_lost_and_was_not() -> None:
    run = hand()
    train_step(run)
    resume(run)
    run.tell(ev.Rewound(0))
    last = run.entries[-1]
    waiting = [g for g in run.state.groups.values() if g.phase is not GroupPhase.TRAINING]
    extra = act.EndGroup(waiting[0].id, waiting[0].version, act.End.LOST, None, "lost")
    entries = [*run.entries[:-1], replace(last, actions=[*last.actions, extra])]
    assert "ended as lost, its version 0 is not" in findings(entries)
