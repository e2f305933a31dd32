"""The life of groups, requests and prompts: scored, ready, filtered, failed, ended once.

Never decides where something runs. A message about a request that is no longer where the message
believes it to be (an old epoch, a sample already finished) is ignored.

A prompt is a place of the prompt stream. One whose group failed is issued again, but never twice in
a row without a new one in between, and after `group_failures_max` failed groups it is set aside:
named, and not issued again. What counts against `failed_share_max` are prompts, not groups, so
that the repeats of a bad one do not stop a run whose other prompts are fine.

    new -> issued -> trained, filtered, surplus: forgotten here
              |  ^
              v  | reissued
            failed -> set aside
"""

from __future__ import annotations

import math

from dora_rl.core.actions import Abort, Action, End, EndGroup, Score, SetAside, Stop
from dora_rl.core.curriculum import draw, note
from dora_rl.core.events import SampleFailed, SampleFinished, Scored, ScoreFailed, StopRequested
from dora_rl.core.placement import release, requeue
from dora_rl.core.state import GENERATING, Group, GroupPhase, Phase, Request, State
from dora_rl.core.waits import SCORE, watch
from dora_rl.types import Mode, RequestId, StepIndex

REASON_CHARS_MAX = 300  # of a reason that is kept as long as the run


def current(state: State, rid: RequestId, epoch: int) -> Request | None:
    """The request, if this epoch of it is still generating."""
    request = state.request(rid)
    here = request is not None and request.epoch == epoch and request.phase in GENERATING
    return request if here else None


def unscored(state: State, rid: RequestId) -> Request | None:
    """The request, if its tokens are complete and wait for a score."""
    request = state.request(rid)
    return request if request is not None and request.phase is Phase.SCORING else None


def scoring(state: State, rid: RequestId, attempt: int) -> Request | None:
    """The request, if this question for its score is the last one and open."""
    request = unscored(state, rid)
    return request if request is not None and request.score_attempts == attempt else None


def on_finished(state: State, event: SampleFinished, now: float, out: list[Action]) -> None:
    if (request := current(state, event.request, event.epoch)) is None:
        return
    group = state.groups[request.id.group]
    pure = len(event.segments) == 1 and event.segments[0].version == group.version
    if not pure and state.params.mode is not Mode.PARTIAL:
        fail_sample(state, request, "decoded under another version", out)
        return
    stop_generating(state, request, Phase.SCORING)
    state.instance_losses = 0
    if not any(other.phase in GENERATING for other in group.requests):
        group.phase = GroupPhase.REWARDING
    request_score(state, request, now, out)


def on_sample_failed(state: State, event: SampleFailed, now: float, out: list[Action]) -> None:
    request = current(state, event.request, event.epoch)
    if request is not None and event.final:
        fail_sample(state, request, event.reason, out)
    elif request is not None:
        retry(state, request, event.reason, out)


def retry(
    state: State, request: Request, reason: str, out: list[Action], *, blame: bool = True
) -> None:
    """Start a generating request again from its journal, on the same version.

    A restart of the whole run is nobody's fault and counts as no attempt. Attempts are forgotten
    when the request goes on further than before (`suspects.on_continued`).
    """
    request.attempts += blame
    if blame and request.attempts >= state.params.attempts_max:
        fail_sample(state, request, f"{reason} (after {request.attempts} attempts)", out)
    else:
        requeue(state, request)


def stop_generating(state: State, request: Request, phase: Phase) -> None:
    """The request leaves its instance or queue for good."""
    release(state, request)
    request.phase = phase
    state.versions[request.version].num_active -= 1
    state.num_active -= 1


def request_score(state: State, request: Request, now: float, out: list[Action]) -> None:
    out.append(Score(request.id, state.groups[request.id.group].prompt, request.score_attempts))
    watch(state, SCORE, request, now)


def on_scored(state: State, event: Scored, now: float, out: list[Action]) -> None:
    """A score is one of the same tokens, whichever question it answers."""
    if (request := unscored(state, event.request)) is None:
        return
    state.scored_s = now
    if not math.isfinite(event.reward):
        if request.score_attempts == event.attempt:
            retry_score(state, request, f"reward is {event.reward}", now, out)
        return
    request.reward = event.reward
    request.phase = Phase.SCORED
    group = state.groups[request.id.group]
    group.num_scored += 1
    _settle_group(state, group, "", out)


def on_score_failed(state: State, event: ScoreFailed, now: float, out: list[Action]) -> None:
    if (request := scoring(state, event.request, event.attempt)) is not None:
        state.scored_s = now
        retry_score(state, request, event.reason, now, out)


def retry_score(state: State, request: Request, reason: str, now: float, out: list[Action]) -> None:
    request.score_attempts += 1
    request.score_failures += 1
    if request.score_failures >= state.params.attempts_max:
        fail_sample(state, request, reason, out)
    else:
        request_score(state, request, now, out)


def fail_sample(
    state: State, request: Request, reason: str, out: list[Action], *, kills: bool = False
) -> None:
    """`kills`: it ran alone on the instances that were lost with it, and its group fails."""
    if request.phase in GENERATING:
        stop_generating(state, request, Phase.FAILED)
    request.phase = Phase.FAILED
    group = state.groups[request.id.group]
    group.num_failed += 1
    _settle_group(state, group, reason, out, kills=kills)


def _settle_group(
    state: State, group: Group, reason: str, out: list[Action], *, kills: bool = False
) -> None:
    """Ready, filtered or failed, as soon as that is certain."""
    params, size = state.params, len(group.requests)
    if kills or group.num_failed > size - params.samples_needed:
        _fail_group(state, group, reason, out, kills=kills)
    elif group.num_scored + group.num_failed == size:
        rewards = {r.reward for r in group.requests if r.phase is Phase.SCORED}
        if params.pools:
            note(state.curriculum, params, group.prompt, told=len(rewards) > 1)
        if params.filter_equal and len(rewards) == 1:
            end_group(state, group, End.FILTERED, None, "all rewards equal", out)
            state.filtered_streak += 1
            if state.filtered_streak >= params.filtered_max:
                stop(
                    state,
                    f"{state.filtered_streak} groups in a row were filtered because all their "
                    f"rewards were equal: the task is too easy or too hard for step "
                    f"{state.filling}",
                    out,
                )
        else:
            group.phase = GroupPhase.READY
            state.num_inflight -= 1
            state.num_ready += 1
            state.versions[group.version].ready.append(group.id)


def _fail_group(state: State, group: Group, reason: str, out: list[Action], *, kills: bool) -> None:
    """It cannot train; its prompt is issued again, or set aside."""
    abandon(state, group, End.FAILED, reason, out)
    prompt_failed(state, group, reason, out, kills=kills)
    params = state.params
    failed, ended, what = state.failed_prompts, state.judged_prompts, "prompts"
    if not params.group_failures_max:
        failed, ended, what = state.num_ended[End.FAILED], sum(state.num_ended.values()), "groups"
    if failed >= params.failed_min and failed > params.failed_share_max * ended:
        key = "orchestration.failed_share_max"
        stop(state, f"{failed} of {ended} {what} failed, more than {key} allows", out)


def abandon(state: State, group: Group, end: End, reason: str, out: list[Action]) -> None:
    """End a group whose requests may still be running somewhere."""
    for request in group.requests:
        if request.phase in GENERATING:
            places = [p for p in (request.instance, request.dest) if p is not None]
            stop_generating(state, request, Phase.FAILED)
            out.extend(Abort(place, request.id, request.epoch) for place in places)
    end_group(state, group, end, None, reason, out)


def end_group(
    state: State,
    group: Group,
    end: End,
    step: StepIndex | None,
    reason: str,
    out: list[Action],
) -> None:
    """The one place where a group leaves the ledger."""
    live = state.versions[group.version]
    if group.phase is not GroupPhase.TRAINING:
        live.untaken -= 1
        if group.phase is GroupPhase.READY:
            state.num_ready -= 1
            live.ready.remove(group.id)
        else:
            state.num_inflight -= 1
    live.unended -= 1
    state.num_ended[end] = state.num_ended.get(end, 0) + 1
    if end not in (End.FAILED, End.LOST):  # a group of this prompt ended as it should
        if state.failures.pop(group.prompt, 0):
            state.failed_prompts = max(0, state.failed_prompts - 1)
        else:
            state.judged_prompts += 1
    del state.groups[group.id]
    out.append(EndGroup(group.id, group.version, end, step, reason))


def next_prompt(state: State) -> int:
    """The prompt of the next group."""
    in_turn = state.params.group_failures_max and state.reissued_last
    state.reissued_last = bool(state.reissue) and not in_turn
    if state.reissued_last:
        return state.reissue.popleft()
    state.next_prompt += 1
    if state.params.pools:
        return draw(state.curriculum, state.params)
    return state.next_prompt - 1


def prompt_failed(
    state: State, group: Group, reason: str, out: list[Action], *, kills: bool
) -> None:
    """Its group has just failed: once more, or never again."""
    limit, prompt = state.params.group_failures_max, group.prompt
    if not limit:
        state.reissue.append(prompt)
        return
    failures = state.failures.get(prompt, 0) + 1
    if failures == 1:
        state.failed_prompts += 1
        state.judged_prompts += 1
    if failures < limit and not kills:
        state.failures[prompt] = failures
        state.reissue.append(prompt)
        return
    state.failures.pop(prompt, None)
    state.set_aside[prompt] = reason[:REASON_CHARS_MAX]
    out.append(SetAside(prompt, group.id, failures, kills, state.set_aside[prompt]))


def on_stop_requested(state: State, event: StopRequested, now: float, out: list[Action]) -> None:
    stop(state, event.reason, out)


def stop(state: State, reason: str, out: list[Action], *, done: bool = False) -> None:
    if state.stopped is None:
        state.stopped = reason
        out.append(Stop(reason, done))
