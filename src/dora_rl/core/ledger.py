"""The life of groups and requests after generation: scored, ready, filtered, failed, ended once.

Never decides where something runs. A message about a request that is no longer where the message
believes it to be (an old epoch, a sample already finished) is ignored.
"""

from __future__ import annotations

import math

from dora_rl.core.actions import Abort, Action, End, EndGroup, Score, Stop
from dora_rl.core.deadlines import watch_score
from dora_rl.core.events import SampleFailed, SampleFinished, Scored, ScoreFailed
from dora_rl.core.placement import again, release
from dora_rl.core.prompts import prompt_failed, prompt_settled
from dora_rl.core.state import GENERATING, Group, GroupPhase, Phase, Request, State
from dora_rl.types import Mode, RequestId, StepIndex


def current(state: State, rid: RequestId, epoch: int) -> Request | None:
    """The request, if this epoch of it is still generating."""
    request = state.request(rid)
    if request is None or request.epoch != epoch or request.phase not in GENERATING:
        return None
    return request


def stop_generating(state: State, request: Request) -> None:
    """The request leaves its instance or queue for good."""
    release(state, request)
    state.versions[request.version].num_active -= 1
    state.num_active -= 1
    state.groups[request.id.group].num_generating -= 1


def on_finished(state: State, event: SampleFinished, now: float, out: list[Action]) -> None:
    request = current(state, event.request, event.epoch)
    if request is None:
        return
    group = state.groups[request.id.group]
    pure = len(event.segments) == 1 and event.segments[0].version == group.version
    stop_generating(state, request)
    if not pure and state.params.mode is not Mode.PARTIAL:
        fail_sample(state, request, "decoded under another version", out)
        return
    request.num_tokens = event.num_tokens
    request.phase = Phase.SCORING
    state.instance_losses = 0
    if not group.num_generating:
        group.phase = GroupPhase.REWARDING
    ask_score(state, request, now, out)


def ask_score(state: State, request: Request, now: float, out: list[Action]) -> None:
    prompt = state.groups[request.id.group].prompt
    out.append(Score(request.id, prompt, request.score_attempts))
    watch_score(state, request, now)


def on_sample_failed(state: State, event: SampleFailed, now: float, out: list[Action]) -> None:
    request = current(state, event.request, event.epoch)
    if request is None:
        return
    if event.final:
        stop_generating(state, request)
        fail_sample(state, request, event.reason, out)
    else:
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
        stop_generating(state, request)
        fail_sample(state, request, f"{reason} (after {request.attempts} attempts)", out)
        return
    again(state, request)


def scoring(state: State, rid: RequestId, attempt: int) -> Request | None:
    """The request, if this question for its score is the last one and open."""
    request = unscored(state, rid)
    return request if request is not None and request.score_attempts == attempt else None


def unscored(state: State, rid: RequestId) -> Request | None:
    """The request, if its tokens are complete and wait for a score."""
    request = state.request(rid)
    return request if request is not None and request.phase is Phase.SCORING else None


def on_scored(state: State, event: Scored, now: float, out: list[Action]) -> None:
    """A score is one of the same tokens, whichever question it answers."""
    request = unscored(state, event.request)
    if request is None:
        return
    state.scored_s = now
    if not math.isfinite(event.reward):
        if request.score_attempts == event.attempt:
            score_again(state, request, f"reward is {event.reward}", now, out)
        return
    request.reward = event.reward
    request.phase = Phase.SCORED
    group = state.groups[request.id.group]
    group.num_scored += 1
    settle_group(state, group, "", out)


def on_score_failed(state: State, event: ScoreFailed, now: float, out: list[Action]) -> None:
    request = scoring(state, event.request, event.attempt)
    if request is not None:
        state.scored_s = now
        score_again(state, request, event.reason, now, out)


def score_again(state: State, request: Request, reason: str, now: float, out: list[Action]) -> None:
    request.score_attempts += 1
    request.score_failures += 1
    if request.score_failures >= state.params.attempts_max:
        fail_sample(state, request, reason, out)
    else:
        ask_score(state, request, now, out)


def fail_sample(state: State, request: Request, reason: str, out: list[Action]) -> None:
    request.phase = Phase.FAILED
    group = state.groups[request.id.group]
    group.num_failed += 1
    settle_group(state, group, reason, out)


def settle_group(state: State, group: Group, reason: str, out: list[Action]) -> None:
    """Ready, filtered or failed, as soon as that is certain."""
    size, needed = len(group.requests), state.params.samples_needed
    if group.num_failed > size - needed:
        fail_group(state, group, reason, out)
    elif group.num_scored + group.num_failed == size:
        rewards = {r.reward for r in group.requests if r.phase is Phase.SCORED}
        if state.params.filter_equal and len(rewards) == 1:
            end_group(state, group, End.FILTERED, None, "all rewards equal", out)
            state.filtered_streak += 1
            _check_filtered(state, out)
        else:
            group.phase = GroupPhase.READY
            state.num_inflight -= 1
            state.num_ready += 1
            state.versions[group.version].ready.append(group.id)


def fail_group(
    state: State, group: Group, reason: str, out: list[Action], *, kills: bool = False
) -> None:
    """It cannot train; its prompt is issued again, or set aside."""
    abandon(state, group, End.FAILED, reason, out)
    prompt_failed(state, group, reason, out, kills=kills)
    _check_failed_share(state, out)


def abandon(state: State, group: Group, end: End, reason: str, out: list[Action]) -> None:
    """End a group whose requests may still be running somewhere."""
    for request in group.requests:
        if request.phase in GENERATING:
            places = [p for p in (request.instance, request.dest) if p is not None]
            stop_generating(state, request)
            request.phase = Phase.FAILED
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
    if end not in (End.FAILED, End.LOST):
        prompt_settled(state, group.prompt)
    del state.groups[group.id]
    out.append(EndGroup(group.id, group.version, end, step, reason))


def _check_filtered(state: State, out: list[Action]) -> None:
    params = state.params
    if state.filtered_streak >= params.filtered_max and state.stopped is None:
        stop(
            state,
            f"{state.filtered_streak} groups in a row were filtered because all their rewards "
            f"were equal: the task is too easy or too hard for step {state.filling}",
            out,
        )


def _check_failed_share(state: State, out: list[Action]) -> None:
    params = state.params
    failed, ended, what = state.failed_prompts, state.judged_prompts, "prompts"
    if not params.group_failures_max:
        failed, ended, what = state.num_ended[End.FAILED], sum(state.num_ended.values()), "groups"
    if failed >= params.failed_min and failed > params.failed_share_max * ended:
        stop(state, f"{failed} of {ended} {what} failed, more than failed_share_max allows", out)


def stop(state: State, reason: str, out: list[Action], *, done: bool = False) -> None:
    if state.stopped is None:
        state.stopped = reason
        out.append(Stop(reason, done))
