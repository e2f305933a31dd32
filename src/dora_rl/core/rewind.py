"""Back to the last durable version: what follows when a host was lost with a sealed version.

Happens right after a resume, before anything runs. The step that made the lost version is trained
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

from dora_rl.core.actions import Action, End, InForce
from dora_rl.core.ledger import abandon
from dora_rl.core.state import Group, GroupPhase, State
from dora_rl.types import Version


def on_rewound(state: State, version: Version, out: list[Action]) -> None:
    """`version` is the last durable one; the one after it is lost."""
    assert state.durable <= version < state.committed, (
        f"version {version} is not between the durable {state.durable} and {state.committed}"
    )
    assert not state.instances and not state.trainer.alive, "a run goes back before it goes on"
    _reopen(state, version)
    lost = [g for g in state.groups.values() if g.step is None and _newest_of(g) > version]
    for group in lost:
        _lose(state, group, f"version {_newest_of(group)} was lost with its host", out)
    for gone in [v for v in state.versions if v > version]:
        del state.versions[gone]
    state.committed = version
    state.lineage += 1
    for plans in (state.flips, state.seats, state.flip_room, state.stirred):
        plans.clear()
    state.partition_due = False
    if state.policy.keeps_bound:
        _make_it_hold(state, out)
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
    state.filling = version + 1
    state.open_batch()
    state.filled_older = 0
    state.waiting_for = ()


def _newest_of(group: Group) -> Version:
    """Of the versions that it was generated on; more than one in the `partial` baseline alone."""
    return max(group.version, *(request.version for request in group.requests))


def _lose(state: State, group: Group, reason: str, out: list[Action]) -> None:
    abandon(state, group, End.LOST, reason, out)
    state.reissue.append(group.prompt)


def _make_it_hold(state: State, out: list[Action]) -> None:
    waiting = [g for g in state.groups.values() if g.step is None]
    waiting.sort(key=lambda group: (group.version, group.id))
    while waiting and not state.bound.holds(state.untaken):
        group = waiting.pop()
        _lose(state, group, f"no place before its deadline after version {state.committed}", out)
