"""Which prompts start, and on which version. Keeps the bound of `window` (docs/staleness.md).
Groups that would only age are held back (`freshness`).

New groups go to the newest version and fill free decode slots, up to `inflight_groups`, while
fewer than `ready_max` groups lie ready. A few may fill idle slots of an older version
(`fill_older_max`), never of one that is due in the step being filled.
"""

from __future__ import annotations

from dora_rl.core.actions import Action, HoldBack, IssueGroup
from dora_rl.core.freshness import allowance, hold, may_issue, release
from dora_rl.core.ledger import next_prompt
from dora_rl.core.placement import best_holder, enqueue
from dora_rl.core.state import Group, Request, State
from dora_rl.core.window import Bound, Untaken
from dora_rl.types import RequestId, Version


def admit(state: State, now: float, out: list[Action]) -> bool:
    """Issue as many groups as limits, bound and slots allow. False: this event has no room left."""
    num_samples = 0
    while _may_issue(state):
        if not state.has_room(out, num_samples):
            return False
        num_samples += state.params.group_size
        untaken = state.untaken
        if (version := _version_for(state, state.bound, untaken)) is None:
            return True
        if not _is_fresh_enough(state, untaken, now, out):
            return True
        _issue(state, version, out)
    return True


def _may_issue(state: State) -> bool:
    params = state.params
    if state.num_inflight >= params.inflight_groups or state.num_ready >= params.ready_max:
        return False
    if not state.learner.alive and state.next_group == 0:
        return False  # the first learner seals version 0
    # A group larger than all slots together still runs, alone.
    alone = state.num_active == 0 and state.slots_awake > 0
    return alone or state.num_active + params.group_size <= state.slots_awake


def _version_for(state: State, bound: Bound, untaken: Untaken) -> Version | None:
    """The newest version, or an older one with idle slots when the newest has none."""
    total = sum(count for _, count in untaken)
    cap = state.policy.cap
    if cap is not None and total + state.params.batch_groups - bound.free >= cap:
        return None
    if state.target is not None and total >= bound.free:
        return None  # K or B is about to change: only finish the step being filled
    newest = state.versions[state.newest]
    may_fill_older = state.filled_older < state.params.fill_older_max
    if may_fill_older and not newest.num_pending and best_holder(state, newest) is None:
        for live in reversed(state.versions.values()):
            due = live.version + bound.max_staleness <= bound.filling
            if live is newest or due or not live.unended or live.num_pending:
                continue
            fits = _bound_allows(state, bound, untaken, live.version)
            if fits and best_holder(state, live) is not None:
                return live.version
    return state.newest if _bound_allows(state, bound, untaken, state.newest) else None


def _is_fresh_enough(state: State, untaken: Untaken, now: float, out: list[Action]) -> bool:
    """Whether a group issued now would not only age; see `freshness`."""
    if not state.policy.freshness or state.num_elastic:
        return True
    params, freshness = state.params, state.freshness
    taken = [batch for batch in state.batches.values() if batch.step >= state.committed]
    outstanding = sum(count for _, count in untaken) + sum(len(b.groups) for b in taken)
    ahead = allowance(freshness, params.batch_groups, params.max_staleness)
    if may_issue(outstanding, taken[0].size, ahead):
        release(freshness, now)
        return True
    if hold(freshness, now, state.committed):
        out.append(_held_back(state, outstanding - taken[0].size, now))
    return False


def _held_back(state: State, ahead: int, now: float) -> HoldBack:
    freshness, size = state.freshness, state.params.batch_groups
    began_s = now if freshness.began_s is None else freshness.began_s
    needed_s = max(0.0, began_s + freshness.pace_s * size - now)
    return HoldBack(state.committed, ahead, state.num_ready, state.num_inflight, needed_s)


def _bound_allows(state: State, bound: Bound, untaken: Untaken, version: Version) -> bool:
    if state.policy.keeps_bound:
        return bound.may_admit(untaken, version)
    return bound.free > 0 and version >= bound.oldest and bound.filling <= bound.last


def _issue(state: State, version: Version, out: list[Action]) -> None:
    """Enter a new group into the ledger and its samples into the queue of its version."""
    gid, size, live = state.next_group, state.params.group_size, state.versions[version]
    requests = [Request(RequestId(gid, sample), version) for sample in range(size)]
    group = Group(gid, next_prompt(state), version, requests)
    for request in requests:
        enqueue(state, request, None, first=False)
    state.next_group += 1
    live.untaken += 1
    live.unended += 1
    live.num_active += size
    state.num_active += size
    state.num_inflight += 1
    state.groups[gid] = group
    state.filled_older += version != state.newest
    out.append(IssueGroup(gid, group.prompt, version, state.filling))
