"""Which prompts start, and on which version. Keeps the bound of `window` (docs/staleness.md).

New groups go to the newest version and fill free decode slots, up to `inflight_groups`, while
fewer than `ready_max` groups lie ready. A few may fill idle slots of an older version
(`fill_older_max`), never of one that is due in the step being filled.
"""

from __future__ import annotations

from dora_rl.core.actions import Action, IssueGroup
from dora_rl.core.placement import best_holder, queue
from dora_rl.core.prompts import next_prompt
from dora_rl.core.state import Group, Live, Request, State
from dora_rl.core.window import Bound, Untaken
from dora_rl.types import RequestId, Version


def admit(state: State, out: list[Action]) -> bool:
    """Issue as many groups as limits, bound and slots allow; False: and the next events more."""
    num_samples = 0
    while _room(state):
        if not state.has_room(out, num_samples):
            return False
        num_samples += state.params.group_size
        bound, untaken = state.bound, state.untaken
        version = _version_for(state, bound, untaken)
        if version is None:
            return True
        issue(state, version, out)
    return True


def _room(state: State) -> bool:
    params = state.params
    if state.num_inflight >= params.inflight_groups or state.num_ready >= params.ready_max:
        return False
    if not state.trainer.alive and state.num_issued == 0:
        return False  # the first learner seals version 0
    size = params.group_size
    if state.num_active + size > state.slots_awake:
        # A group larger than all slots together still runs, alone.
        return state.num_active == 0 and state.slots_awake > 0
    return True


def _version_for(state: State, bound: Bound, untaken: Untaken) -> Version | None:
    total = sum(count for _, count in untaken)
    cap = state.policy.cap
    if cap is not None and total + state.params.batch_groups - bound.free >= cap:
        return None
    if state.target is not None and total >= bound.free:
        return None  # K or B is about to change: only finish the step being filled
    older = _idle_older(state, bound, untaken)
    if older is not None:
        return older
    return state.newest if may_admit(state, bound, untaken, state.newest) else None


def may_admit(state: State, bound: Bound, untaken: Untaken, version: Version) -> bool:
    if not state.policy.keeps_bound:
        return bound.free > 0 and version >= bound.oldest and bound.filling <= bound.last
    return bound.may_admit(untaken, version)


def _idle_older(state: State, bound: Bound, untaken: Untaken) -> Version | None:
    """An older version with idle slots, when the newest has none and the share is not used up."""
    if state.filled_older >= state.params.fill_older_max:
        return None
    newest = state.versions[state.newest]
    if newest.num_pending or best_holder(state, newest) is not None:
        return None
    for live in reversed(state.versions.values()):
        due = live.version + bound.max_staleness <= bound.filling
        if live.version == state.newest or due or not live.unended or live.num_pending:
            continue
        fits = may_admit(state, bound, untaken, live.version)
        if fits and best_holder(state, live) is not None:
            return live.version
    return None


def issue(state: State, version: Version, out: list[Action]) -> Group:
    """Enter a new group into the ledger and its samples into the queue of its version."""
    prompt = next_prompt(state)
    group = Group(state.next_group, prompt, version, [])
    state.next_group += 1
    live: Live = state.versions[version]
    for sample in range(state.params.group_size):
        request = Request(RequestId(group.id, sample), version)
        group.requests.append(request)
        queue(state, request, None, first=False)
    size = len(group.requests)
    group.num_generating = size
    live.untaken += 1
    live.unended += 1
    live.num_active += size
    state.num_active += size
    state.num_inflight += 1
    state.num_issued += 1
    state.groups[group.id] = group
    if version != state.newest:
        state.filled_older += 1
    out.append(IssueGroup(group.id, prompt, version, state.filling))
    return group
