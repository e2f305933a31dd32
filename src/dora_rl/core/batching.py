"""Filling a training step: take, feed, close, accept, commit, end.

A ready group is taken oldest version first, and only if every older version keeps enough places
(`window.Bound.may_take`); a blocked take waits for a group that is still running, it never
discards. The step closes with exactly B groups and advances when the learner holds them all.
"""

from __future__ import annotations

from dora_rl.core.actions import Action, CloseStep, End, Feed, InForce, WaitFor
from dora_rl.core.events import BatchAccepted, StepCommitted, VersionDurable
from dora_rl.core.freshness import note_first, on_step
from dora_rl.core.ledger import abandon, end_group, stop
from dora_rl.core.orchestrate import retire_finished, sleep_elastic, wake_elastic
from dora_rl.core.params import policy_of
from dora_rl.core.placement import reversion_all
from dora_rl.core.state import Batch, Group, GroupPhase, Live, Phase, State
from dora_rl.core.window import Bound


def take(state: State, now: float, out: list[Action]) -> None:
    """Fill the step being filled from the ready groups."""
    if state.policy.freshness and state.versions[state.newest].ready:
        note_first(state.freshness, state.newest, now)
    num_taken = 0
    while state.num_ready and not state.batch.closed and state.has_room(out, num_taken):
        num_taken += 1
        live = next(live for live in state.versions.values() if live.ready)
        if not state.bound.may_take(state.untaken, live.version):
            _report_wait(state, live, out)
            return
        _note_take(state, now)
        take_group(state, state.groups[live.ready.popleft()])
        if len(state.batch.groups) == state.params.batch_groups:
            _close(state, now, out)


def take_group(state: State, group: Group) -> None:
    assert state.filling - group.version <= state.policy.max_staleness, "staleness bound broken"
    group.phase = GroupPhase.TRAINING
    group.step = state.filling
    state.num_ready -= 1
    state.versions[group.version].untaken -= 1
    state.batch.groups.append(group.id)
    state.filtered_streak = 0
    if state.policy.keeps_bound:
        assert state.bound.holds(state.untaken), "a taken group left an older one without a place"


def _note_take(state: State, now: float) -> None:
    """The learner trains meanwhile on the groups before it, if it has begun with them."""
    batch = state.batch
    if not state.policy.freshness:
        return
    before = len(batch.groups) if state.streams else 0
    need_s = before * state.freshness.group_s - now
    batch.need_s = need_s if batch.need_s is None else min(batch.need_s, need_s)


def _report_wait(state: State, blocked: Live, out: list[Action]) -> None:
    """Once a step: which older groups is the learner waiting for?"""
    if not state.waiting_for:
        untaken = [group for group in state.groups.values() if group.step is None]
        state.waiting_for = tuple(g.id for g in untaken if g.version < blocked.version)
        out.append(WaitFor(state.filling, state.waiting_for))


def _close(state: State, now: float, out: list[Action]) -> None:
    state.batch.closed = True
    if state.policy.freshness:
        state.batch.closed_s = now
    if state.policy.surplus_at_close:
        for group in [g for g in state.groups.values() if g.step is None]:
            abandon(state, group, End.SURPLUS, "the batch is full", out)


def feed(state: State, now: float, out: list[Action]) -> None:
    """Send the learner what it may start on: the groups of its step, the close when complete,
    then the groups of the next one, so that it trains on while its version travels.

    The next step is closed only after the commit: at most one sealed version is ever unlogged.
    Whoever sleeps while the learner trains wakes between two steps: nothing is fed ahead then.
    """
    if (batch := state.batches.get(state.committed)) is None or not state.learner.alive:
        return
    _feed_groups(state, batch, out)
    if batch.closed and not batch.close_sent and batch.num_fed == len(batch.groups):
        batch.close_sent = True
        out.append(CloseStep(batch.step, tuple(batch.groups)))
        sleep_elastic(state, now, out)
    ahead = state.batches.get(state.committed + 1)
    if ahead is not None and batch.close_sent and not state.num_elastic:
        _feed_groups(state, ahead, out)


def _feed_groups(state: State, batch: Batch, out: list[Action]) -> None:
    if not batch.closed and not state.streams:
        return
    per_update = batch.size // batch.updates
    while batch.num_fed < len(batch.groups) and state.has_room(out):
        place = batch.num_fed
        group = state.groups[batch.groups[place]]
        scored = tuple(r.id.sample for r in group.requests if r.phase is Phase.SCORED)
        out.append(Feed(batch.step, place // per_update, group.id, group.version, scored))
        batch.num_fed += 1


def on_accepted(
    state: State, event: BatchAccepted | StepCommitted, now: float, out: list[Action]
) -> None:
    """The learner holds the closed batch: the next step begins to fill."""
    if event.step != state.filling or not state.batch.close_sent:
        return
    state.open_batch(event.step + 1)
    adopt_target(state, out)
    if state.policy.keeps_bound:
        assert state.bound.holds(state.untaken), "the bound broke at a step's boundary"


def on_committed(state: State, event: StepCommitted, now: float, out: list[Action]) -> None:
    """Version step + 1 is sealed: requests may start on it, the window slides. Its groups end when
    it is durable. A learner seals no second version before, so that the one before is by now.

    A learner trains a step only when it holds all its groups, so this says that it has accepted
    them too, if that message is late. One from before a restart of the learner cannot do harm:
    `close_sent` is false until the batch was fed again, and what was sealed is never fed again.
    """
    on_accepted(state, event, now, out)
    if event.step != state.committed or state.filling <= event.step:
        return
    _measure(state, event, now)
    state.on_disk = max(state.on_disk, state.committed)
    state.committed += 1
    state.learner_losses = state.instance_losses = 0
    state.versions[state.committed] = Live(state.committed)
    end_durable(state, out)
    if state.committed == state.params.num_steps:
        return
    if not state.batch.closed:
        wake_elastic(state, now, out)
    if state.policy.reversion_at_publish:
        reversion_all(state, out)
    retire_finished(state, out)  # what is left of it is done by the next events
    state.rebalance_wanted = True
    state.rebalanced_s = -1.0e9  # a step's end always rebalances


def _measure(state: State, event: StepCommitted, now: float) -> None:
    """What the step that has ended says of how far ahead groups must be issued."""
    batch, params = state.batches[event.step], state.params
    if not state.policy.freshness:
        return
    on_step(state.freshness, batch, now, event.waited_s, params.max_staleness)


def on_durable(state: State, event: VersionDurable, now: float, out: list[Action]) -> None:
    """The disk has a version. Word of it may come before that of its seal."""
    state.on_disk = max(state.on_disk, event.version)
    end_durable(state, out)
    if state.stopped is None:
        retire_finished(state, out)


def end_durable(state: State, out: list[Action]) -> None:
    """Groups whose step can no longer be undone have ended; with the last step the run has."""
    for step in [step for step in state.batches if step < state.durable]:
        groups = [state.groups[gid] for gid in state.batches.pop(step).groups]
        for group in groups:
            end_group(state, group, End.TRAINED, step, "", out)
        state.ended += groups  # to free thousands at once takes longer than to end them: see `step`
    if state.durable >= state.params.num_steps:
        stop(state, "all steps are trained", out, done=True)


def adopt_target(state: State, out: list[Action]) -> None:
    """Put a K or B asked for on resume in force once the invariant holds under it."""
    target = state.target
    if target is None:
        return
    policy = policy_of(target)
    free = target.batch_groups - len(state.batch.groups)
    bound = Bound(
        state.filling, free, policy.max_staleness, target.batch_groups, target.num_steps - 1
    )
    fresh = all(state.groups[g].version >= bound.oldest for g in state.batch.groups)
    if state.batch.closed or free < 1 or not fresh or not bound.holds(state.untaken):
        return
    state.put_in_force(target)
    state.target = None
    state.batch.size, state.batch.updates = target.batch_groups, target.updates_per_step
    out.append(InForce(state.filling, policy.max_staleness, target.batch_groups))
