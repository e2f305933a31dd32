"""The controller is back from its log, perhaps without the newest version: it was lost with a host.

All workers are new; groups and batches are as they were. A `Rewound` may follow `Resumed`, before
anything runs: back to the last durable version. The step that made the lost version is trained
again, from the samples that were kept for it; groups that were generated on the lost version end as
lost, and their prompts are issued anew. Everything else waits again for a place.

    before                                   after
    batch v      trained, not durable        closed, to be fed again
    batch v + 1  perhaps held by the learner opened anew, its groups are ready again
    batch v + 2  perhaps being filled        gone, its groups are ready again

The invariant of `window` holds again, for s = v + 1 and f = B: what was taken since that step began
to fill was counted against its places and those of the next, which are all free now. Only a K or B
that changed in between can break it; then the newest groups are given up until it holds.

Invariant: a version that is durable is never gone back over, and a group is never trained twice in
one lineage.
"""

from __future__ import annotations

from dataclasses import replace

from dora_rl.core.actions import Action, End, InForce
from dora_rl.core.batching import adopt_target, end_durable
from dora_rl.core.events import Resumed, Rewound
from dora_rl.core.faults import lose_instance
from dora_rl.core.freshness import another_clock
from dora_rl.core.ledger import abandon, request_score
from dora_rl.core.params import Params
from dora_rl.core.state import Group, GroupPhase, Phase, State
from dora_rl.types import UserError, Version


def on_resumed(state: State, event: Resumed, now: float, out: list[Action]) -> None:
    """The controller is back: all workers are new, groups and batches are as they were."""
    _check_changes(state, event.params)
    for name in list(state.instances):
        lose_instance(state, name, out, blame=False)
    state.learner.alive, state.learner.incarnation = False, -1
    state.learner_losses = state.instance_losses = state.filtered_streak = 0
    state.failed_prompts = state.judged_prompts = 0
    state.scored_s = state.rebalanced_s = -1.0e9
    another_clock(state.freshness)
    for batch in state.batches.values():
        batch.need_s = batch.closed_s = None  # of another clock
    state.stopped = None
    for live in state.versions.values():
        live.load_failures = 0
    # Every worker is new, and may begin to count its starts again.
    for forgotten in (state.incarnations, state.deadlines, state.old_deadlines):
        forgotten.clear()
    for group in list(state.groups.values()):
        for request in group.requests:
            if request.phase is Phase.SCORING:
                request.score_attempts += 1
                request_score(state, request, now, out)
    old = state.params
    # What a step's batch is made with changes between two steps, everything else at once.
    as_before = replace(
        event.params,
        max_staleness=old.max_staleness,
        batch_groups=old.batch_groups,
        updates_per_step=old.updates_per_step,
    )
    if not old.durable_behind:
        state.on_disk = state.committed  # a release that wrote to the disk first
    state.put_in_force(as_before)
    state.target = event.params if as_before != event.params else None
    end_durable(state, out)
    if state.stopped is None and state.target is None:
        out.append(InForce(state.filling, state.policy.max_staleness, old.batch_groups))
    elif state.stopped is None:
        adopt_target(state, out)


def _check_changes(state: State, params: Params) -> None:
    """Fewer steps than before are fine as long as every issued group still finds a place."""
    params.validate()
    old = state.params
    if params.mode is not old.mode:
        raise UserError(
            f"mode = {params.mode.value}: this run is {old.mode.value}; start a new run"
        )
    if params.group_size != old.group_size:
        raise UserError(
            f"group_size = {params.group_size}: the groups of this run have "
            f"{old.group_size} samples; start a new run"
        )
    if params.pools != old.pools:
        raise UserError(
            f"{params.pools} pools of prompts: this run has {old.pools}, and its prompts are "
            "numbered by them; start a new run"
        )
    shorter = params.num_steps < old.num_steps and state.policy.keeps_bound
    if shorter and not replace(state.bound, last=params.num_steps - 1).holds(state.untaken):
        taken = old.batch_groups - state.bound.free  # of the step that is filling
        left = taken + sum(count for _, count in state.untaken)
        raise UserError(
            f"num_steps = {params.num_steps} is too few: the groups that were already issued need "
            f"{state.filling + -(-left // old.batch_groups)} steps"
        )


def on_rewound(state: State, event: Rewound, now: float, out: list[Action]) -> None:
    """Its version is the last durable one; the one after it is lost."""
    version = event.version
    assert state.durable <= version < state.committed, (
        f"version {version} is not between the durable {state.durable} and {state.committed}"
    )
    assert not state.instances and not state.learner.alive, "a run goes back before it goes on"
    _reopen(state, version)
    for group in [g for g in state.groups.values() if g.step is None and _newest_of(g) > version]:
        _lose(state, group, f"version {_newest_of(group)} was lost with its host", out)
    state.versions = {v: live for v, live in state.versions.items() if v <= version}
    state.committed = version
    state.lineage += 1
    for plans in (state.flips, state.newest_due, state.flip_room, state.maybe_idle):
        plans.clear()
    state.partition_due = False
    waiting = [g for g in state.groups.values() if g.step is None]
    waiting.sort(key=lambda group: (group.version, group.id))
    while state.policy.keeps_bound and waiting and not state.bound.holds(state.untaken):
        _lose(state, waiting.pop(), f"no place before its deadline after version {version}", out)
    out.append(InForce(state.filling, state.policy.max_staleness, state.params.batch_groups))


def _reopen(state: State, version: Version) -> None:
    """The step `version` is fed again as it was; the one after it is filled anew."""
    taken: list[Group] = []
    for step in sorted(step for step in state.batches if step > version):
        taken += [state.groups[gid] for gid in state.batches.pop(step).groups]
    for group in reversed(taken):
        group.phase, group.step = GroupPhase.READY, None
        live = state.versions[group.version]
        live.untaken += 1
        live.ready.appendleft(group.id)
        state.num_ready += 1
    again = state.batches[version]
    again.num_fed, again.close_sent = 0, False
    state.open_batch(version + 1)


def _newest_of(group: Group) -> Version:
    """Of the versions that it was generated on; more than one in the `partial` baseline alone."""
    return max(group.version, *(request.version for request in group.requests))


def _lose(state: State, group: Group, reason: str, out: list[Action]) -> None:
    abandon(state, group, End.LOST, reason, out)
    state.reissue.append(group.prompt)
