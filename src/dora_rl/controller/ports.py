"""The ports of a local run: the core's actions as messages to worker processes.

They decide nothing and never wait for an answer; what comes of an action arrives in the inbox.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.ledger import current, scoring, unscored
from dora_rl.io.wire import encode_fleet, encode_learner
from dora_rl.ports import FleetAction, LearnerAction, LedgerAction
from dora_rl.types import REWARD_MAX, Finish, Prompt, RequestId

if TYPE_CHECKING:
    from dora_rl.worlds.local import LocalRun


def prompt_of(run: LocalRun, rid: RequestId, epoch: int) -> Prompt | None:
    """The prompt of a request that this epoch of is still generating."""
    if run.stop is not None or current(run.state, rid, epoch) is None:
        return None
    return run.train.prompt(run.state.groups[rid.group].prompt)


class FleetPort:
    """The instances behind the `Generator` port."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def do(self, action: FleetAction) -> None:
        run = self.run
        if isinstance(action, act.Restart):
            run.pool.kill(action.instance)
            run.journals.collect(action.instance, alive=set(run.state.groups))
            run.pool.restart(action.instance)
            return
        name = action.src if isinstance(action, act.Move) else action.instance
        body: dict[str, Any] = {"action": encode_fleet(action)}
        if isinstance(action, act.Load):
            run.carrier.load(action)
        if not isinstance(action, act.Dispatch):
            run.pool.send(name, "order", body)
            return
        run.records.work_begins()
        prompt = run.train.prompt(action.prompt)
        resumes: dict[str, Any] = {}
        for sample in action.samples if action.resume else ():
            saved = run.journals.look_up(RequestId(action.group, sample))
            if saved is not None:
                resumes[str(sample)] = saved
        run.keeper.note_continued(action, resumes)
        for sample, epoch in zip(action.samples, action.epochs, strict=True):
            if str(sample) in resumes:
                num_tokens = len(resumes[str(sample)]["resume_ids"])
                rid = RequestId(action.group, sample)
                run.later.append(ev.Continued(rid, epoch, num_tokens))
        arrays = {"prompt_ids": np.asarray(prompt.token_ids, dtype=np.int32)}
        body |= {"resumes": resumes, "env": run.envs.dispatch(prompt)}
        run.pool.send(name, "order", body, arrays)


class LearnerPort:
    """The learner process behind its port."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def do(self, action: LearnerAction) -> None:
        run = self.run
        if isinstance(action, act.RestartTrainer):
            run.start_learner()
            return
        if isinstance(action, act.OptimizerRewound):
            run.on_wait(
                [
                    f"the weights are those of version {action.version}, the optimizer's state is "
                    f"that of version {action.optimizer_version}: the newest that was saved"
                ]
            )
            return
        body: dict[str, Any] = {"action": encode_learner(action)}
        arrays = None
        if isinstance(action, act.Feed):
            run.records.work_begins()
            batch = run.state.batches[action.step]
            prompt = run.train.prompt(run.state.groups[action.group].prompt)
            more, arrays = run.samples.feed(action, prompt.token_ids)
            body |= more | {"batch_groups": batch.size, "updates": batch.updates}
        for name in run.layout.learners:  # every rank is fed the same, in the same order
            run.pool.send(name, "order", body, arrays)
        if isinstance(action, act.CloseStep):
            run.step_closed(action)


class RewardPort:
    """The scoring pool behind its port."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def do(self, action: act.Score) -> None:
        run, rid, attempt = self.run, action.request, action.attempt
        sample = run.samples.get(rid)
        if sample is None:
            run.later.append(ev.ScoreFailed(rid, attempt, "its row is not in the table"))
            return
        if sample.reward is not None:  # scored just before a crash
            run.later.append(ev.Scored(rid, attempt, sample.reward))
            return

        parts: dict[str, float] = {}

        def answer(reward: float | None, why: str) -> None:
            if reward is None or not abs(reward) <= REWARD_MAX:
                if scoring(run.state, rid, attempt) is not None:
                    self._failed(rid, attempt, why or f"the reward is {reward}")
                return
            if unscored(run.state, rid) is None:
                return  # too late: scored by another answer, or ended
            run.samples.reward(rid, reward, parts)
            run.handle(ev.Scored(rid, attempt, reward))

        prompt, finish = run.train.prompt(action.prompt), sample.finish
        if not run.config.reward.functions:
            self._without_functions(action, finish)
            return
        more = run.samples.where_to_read(rid)
        scoring_pool, ids = run.scoring, sample.token_ids
        scoring_pool.submit(prompt, sample.text, ids, finish.value, answer, parts.update, more)

    def _failed(self, rid: RequestId, attempt: int, why: str) -> None:
        told = self.run.scoring.failures.add(why)
        if told:
            self.run.on_wait(told)
        self.run.handle(ev.ScoreFailed(rid, attempt, why))

    def _without_functions(self, action: act.Score, finish: Finish) -> None:
        """Only environments give rewards, and this one did not."""
        run, rid = self.run, action.request
        if finish is Finish.LENGTH:  # it was cut off before it came to that
            run.samples.reward(rid, 0.0)
            run.later.append(ev.Scored(rid, action.attempt, 0.0))
            return
        why = "its environment gave no reward, and reward.functions is empty"
        run.later.append(ev.ScoreFailed(rid, action.attempt, why))


class KeeperPort:
    """Rows, journals and versions: kept while they live."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run
        self._last: LedgerAction | None = None

    def do(self, action: LedgerAction) -> None:
        run = self.run
        match action:
            case act.EndGroup():
                self._ended(action)
            case act.SetAside():
                text = f"prompt {action.prompt} is set aside: {action.reason}"
                run.on_wait([text])
                return  # the last end keeps its place, for the reason of a stop
            case act.RetireVersion():
                run.versions.to_retire.add(action.version)
                run.retire_unpinned()
            case act.Stop():
                run.stop = replace(action, reason=action.reason + self._why_failed())
            case _:
                pass
        self._last = action

    def _why_failed(self) -> str:
        """Too many failed groups stop a run right after the last of them, which has the reason."""
        match self._last:
            case act.EndGroup(end=act.End.FAILED, reason=reason):
                return f"; the last group failed: {reason}"
            case _:
                return ""

    def _ended(self, action: act.EndGroup) -> None:
        run = self.run
        if action.end is not act.End.TRAINED:
            run.dropped[action.end.value] += 1
            if action.end is not act.End.FILTERED:
                run.records.totals.discarded_tokens += run.samples.num_tokens(action.group)
                run.records.keep()  # after this nobody knows how many they were
        run.samples.drop(action.group)
        run.envs.forget(action.group)
        run.journals.forget(action.group, run.params.group_size)

    def note_continued(self, action: act.Dispatch, resumes: dict[str, Any]) -> None:
        """For the record: which requests went on from their journal, and how far they were."""
        for sample, saved in resumes.items():
            self.run.records.continued(
                {
                    "group": action.group,
                    "sample": int(sample),
                    "version": action.version,
                    "journal_version": saved["version"],
                    "token_ids": list(saved["resume_ids"]),
                }
            )
