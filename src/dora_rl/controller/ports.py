"""The ports of a run: the core's actions as messages to workers, and what instances say to it.

Ports decide nothing and never wait for an answer; what comes of an action arrives in the inbox.

instance says         controller does                       core hears
Told                  mends a version that cannot be read   the event
Finished              row into the table                    SampleFinished
TurnEnded             asks an environment worker            -
Exported              tells the destination to import       -
Imported              tells the source to forget            Moved / MoveFailed
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dora_rl.controller.evaluation import NO_REWARD, KeptVersions
from dora_rl.controller.loop import Control
from dora_rl.controller.recovery import Ranks
from dora_rl.controller.run_dir import RunFiles
from dora_rl.controller.scoring import EnvRelay, ScoringPool, lesson_of
from dora_rl.controller.world import Carrier, Notify, World
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.ledger import current, scoring, unscored
from dora_rl.data.prompts import PromptSource
from dora_rl.ports import FleetAction, LearnerAction, LedgerAction
from dora_rl.types import REWARD_MAX, Finish, RequestId, Version
from dora_rl.weights.store import WeightsError
from dora_rl.workers import messages as msg
from dora_rl.workers.pool import Worker, Workers


class FleetPort:
    """The instances behind the `Generator` port."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        train: PromptSource,
        workers: Workers,
        carrier: Carrier,
        envs: EnvRelay,
    ) -> None:
        self._control, self._files, self._train = control, files, train
        self._workers, self._carrier, self._envs = workers, carrier, envs

    def do(self, action: FleetAction) -> None:
        match action:
            case act.Restart(instance=name):
                self._workers.kill(name)
                self._files.journals.collect(name, alive=set(self._control.state.groups))
                self._workers.restart(name)
            case act.Dispatch():
                self._workers.send(action.instance, self._dispatched(action))
            case act.Move():
                self._workers.send(action.src, action)
            case act.Load():
                self._carrier.load(action)
                checksum = self._files.checksums.get(action.version, "")
                self._workers.send(action.instance, msg.LoadSealed(action, checksum))
            case _:
                self._workers.send(action.instance, action)

    def _dispatched(self, action: act.Dispatch) -> msg.Dispatched:
        """With what journals have of its samples, of which the core and the records hear."""
        files = self._files
        files.records.work_begins()
        prompt = self._train.prompt(action.prompt)
        files.records.issued(action.prompt, prompt.text)
        saved: dict[int, msg.SavedRequest] = {}
        for sample, epoch in zip(action.samples, action.epochs, strict=True):
            rid = RequestId(action.group, sample)
            found = files.journals.look_up(rid) if action.resume else None
            if found is not None:
                saved[sample] = found
                token_ids = files.journals.token_ids(rid)
                self._control.later(ev.Continued(rid, epoch, len(token_ids)))
                files.records.continued(
                    {
                        "group": action.group,
                        "sample": sample,
                        "version": action.version,
                        "journal_version": found["version"],
                        "token_ids": token_ids,
                    }
                )
        return msg.Dispatched(action, msg.ints(prompt.token_ids), saved, self._envs.opens(prompt))


class FromInstances:
    """The handler of the role `instance`. Decides nothing: a move that the core has given up in the
    meantime is cleaned away."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        workers: Workers,
        carrier: Carrier,
        envs: EnvRelay,
        decode: Callable[[Sequence[int]], str],
        notify: Notify,
    ) -> None:
        self._control, self._files, self._workers = control, files, workers
        self._carrier, self._envs, self._decode = carrier, envs, decode
        self._notify = notify

    def hear(self, worker: Worker, message: msg.Message) -> None:
        match message:
            case msg.Told(event):
                if isinstance(event, ev.LoadFailed):
                    self._repair(event.version)
                self._control.handle(event)
            case msg.Finished():
                self._finished(message)
            case msg.TurnEnded():
                self._envs.turn_ended(worker.name, message)
            case msg.Exported():
                self._exported(worker.name, message)
            case msg.Imported(export, error):
                self._imported(worker, export, error)
            case _:
                raise AssertionError(f"an instance does not say {message!r}")

    def _finished(self, message: msg.Finished) -> None:
        event, control = message.event, self._control
        if not control.is_generating(event.request, event.epoch):
            return
        (sample,) = message.samples
        self._files.records.totals.tokens_generated += sample.num_trained
        text = self._decode(sample.token_ids.tolist())
        version = control.state.groups[event.request.group].version
        self._files.samples.add(replace(sample, version=version, text=text))
        control.handle(event)

    def _repair(self, version: Version) -> None:
        """An instance could not load a version: make sure that the shared copy is good."""
        try:
            if self._files.versions.repair(version, self._files.checksums.get(version, "")):
                self._notify(f"version {version} was damaged in shared memory; restored from disk")
        except WeightsError as error:
            reason = f"version {version} is damaged on disk too: {error}"
            self._control.handle(ev.StopRequested(reason))

    def _exported(self, src: str, export: msg.Exported) -> None:
        request = current(self._control.state, export.request, export.epoch)
        if request is not None and request.dest == export.dst:
            taken = replace(self._carrier.exported(export, src), src=src)
            self._workers.send(export.dst, taken)
        else:
            self._carrier.given_up(export)  # by the core

    def _imported(self, worker: Worker, export: msg.Exported, error: str) -> None:
        self._workers.send(export.src, msg.MoveEnded(export.request, done=not error))
        who = (export.request, export.epoch, export.src, worker.name)
        if error:
            self._control.handle(ev.MoveFailed(*who, True, error, attempt=export.attempt))
            return
        if self._control.stop is None:  # what comes after the stop is not in the log either
            totals = self._files.records.totals
            totals.migrations += 1
            totals.kv_bytes_moved += export.num_bytes
        sizes, incarnation = (export.num_bytes, export.num_tokens), worker.incarnation
        self._control.handle(
            ev.Moved(*who, *sizes, attempt=export.attempt, incarnation=incarnation)
        )


class LearnerPort:
    """The ranks of the learner behind their port."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        train: PromptSource,
        workers: Workers,
        ranks: Ranks,
        world: World,
        notify: Notify,
    ) -> None:
        self._control, self._files, self._train = control, files, train
        self._workers, self._ranks, self._world, self._notify = workers, ranks, world, notify

    def do(self, action: LearnerAction) -> None:
        match action:
            case act.RestartLearner():
                self._ranks.start()
            case act.OptimizerRewound():
                self._notify(
                    f"the weights are those of version {action.version}, the optimizer's state is "
                    f"that of version {action.optimizer_version}: the newest that was saved"
                )
            case act.Feed():
                self._files.records.work_begins()
                state = self._control.state
                batch = state.batches[action.step]
                prompt = self._train.prompt(state.groups[action.group].prompt)
                fed = self._files.samples.feed(action, prompt.token_ids)
                self._send(replace(fed, batch_groups=batch.size, updates=batch.updates))
            case act.CloseStep():
                self._send(msg.Close(action))
                self._world.step_closed(action.step)

    def _send(self, message: msg.Message) -> None:
        """Every rank is fed the same, in the same order."""
        for name in self._ranks.names:
            self._workers.send(name, message)


class RewardPort:
    """The scoring pool behind its port."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        train: PromptSource,
        pool: ScoringPool,
        notify: Notify,
        has_teacher: bool = False,
    ) -> None:
        self._control, self._files, self._train = control, files, train
        self._pool, self._notify, self._has_teacher = pool, notify, has_teacher

    def do(self, action: act.Score) -> None:
        control, samples = self._control, self._files.samples
        rid, attempt = action.request, action.attempt
        sample = samples.get(rid)
        if sample is None:
            control.later(ev.ScoreFailed(rid, attempt, "its row is not in the table"))
            return
        taught = not self._has_teacher or sample.teacher_logprobs is not None
        if sample.reward is not None and taught:  # scored just before a crash
            control.later(ev.Scored(rid, attempt, sample.reward))
            return

        def answer(reward: msg.Reward) -> None:
            if reward.total is None or not abs(reward.total) <= REWARD_MAX:
                if scoring(control.state, rid, attempt) is not None:
                    why = reward.error or f"the reward is {reward.total}"
                    self._notify(*self._pool.failures.add(why))
                    control.handle(ev.ScoreFailed(rid, attempt, why))
                return
            if unscored(control.state, rid) is None:
                return  # too late: scored by another answer, or ended
            samples.reward(rid, reward.total, reward.parts, reward.teacher_logprobs)
            control.handle(ev.Scored(rid, attempt, reward.total))

        if self._pool.names:
            prompt, where = self._train.prompt(action.prompt), samples.where_to_read(rid)
            lesson = lesson_of(prompt, sample) if self._has_teacher else None
            self._pool.submit(prompt, sample, answer, where, lesson)
        elif sample.finish is Finish.LENGTH:  # it was cut off before its environment gave one
            samples.reward(rid, 0.0)
            control.later(ev.Scored(rid, attempt, 0.0))
        else:
            control.later(ev.ScoreFailed(rid, attempt, NO_REWARD))


class KeeperPort:
    """Rows, journals and versions: kept while they live."""

    def __init__(
        self,
        control: Control,
        files: RunFiles,
        kept: KeptVersions,
        envs: EnvRelay,
        notify: Notify,
    ) -> None:
        self._control, self._files, self._kept = control, files, kept
        self._envs, self._notify = envs, notify
        self._last: LedgerAction | None = None

    def do(self, action: LedgerAction) -> None:
        match action:
            case act.EndGroup():
                self._ended(action)
            case act.SetAside():
                self._notify(f"prompt {action.prompt} is set aside: {action.reason}")
                return  # the last end keeps its place, for the reason of a stop
            case act.RetireVersion():
                self._kept.retire(action.version)
            case act.Stop():
                # Too many failed groups stop a run right after the last of them.
                last = self._last
                if isinstance(last, act.EndGroup) and last.end is act.End.FAILED:
                    why = f"{action.reason}; the last group failed: {last.reason}"
                    action = replace(action, reason=why)
                self._control.stop = action
        self._last = action

    def _ended(self, action: act.EndGroup) -> None:
        files = self._files
        if action.end is not act.End.TRAINED:
            files.dropped[action.end.value] += 1
            if action.end is not act.End.FILTERED:
                files.records.totals.discarded_tokens += files.samples.num_tokens(action.group)
                files.records.keep()  # after this nobody knows how many they were
        files.forget(action.group)
        self._envs.forget(action.group)
