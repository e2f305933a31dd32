"""A run on one machine: controller, instances, learner, rewards and evaluator as processes.

The controller is one thread that empties the crew's inbox, feeds the core and performs its
actions. Workers are processes, not threads: on a CPU each decodes or trains with its own
interpreter (threads would share one lock for the Python half of every step), and a crash of one
never takes the run with it.

    worker says          controller does                       core hears
    finished + arrays    row into the table                    SampleFinished
    exported             tells the destination to import       -
    imported             tells the source to forget            Moved
    committed + metrics  writes a line of metrics.jsonl        StepCommitted
    (gone)               reads its journal, starts it again    InstanceLost / TrainerLost
"""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.config import RunConfig
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.state import State
from dora_rl.core.step import initial
from dora_rl.data.prompts import PromptSource
from dora_rl.observe.eventlog import FileLog
from dora_rl.ports import FleetAction, LearnerAction, LedgerAction, Ports
from dora_rl.runtime.crew import Crew, Letter
from dora_rl.runtime.evaluation import Evaluations
from dora_rl.runtime.journals import Journals
from dora_rl.runtime.layout import Layout
from dora_rl.runtime.loop import Loop
from dora_rl.runtime.records import Records, TrainedSample
from dora_rl.runtime.samples import Samples
from dora_rl.runtime.scoring import ScoringPool
from dora_rl.runtime.settings import core_params
from dora_rl.runtime.weights import DiskWeightStore, SharedMemoryWeightStore
from dora_rl.runtime.wire import Message, decode_event, encode_fleet, encode_learner
from dora_rl.types import RequestId, Version

TICK_S = 0.5
RESTARTS_MAX = 20


class MonotonicClock:
    def now(self) -> float:
        return time.monotonic()


class LocalRun:
    """One `dora-rl train` on this machine."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        train: PromptSource,
        evaluation: PromptSource | None,
        decode: Callable[[Sequence[int]], str],
        *,
        resume: bool,
    ) -> None:
        self.config, self.layout = config, layout
        self.run_dir = Path(config.runtime.run_dir)
        self.train, self.decode = train, decode
        self.resume = resume
        params = core_params(config)
        events = self.run_dir / "events"
        if resume:
            self.log, state = FileLog.resume(events)
        else:
            self.log, state = FileLog.create(events), initial(params)
        self.params = params
        self.samples = Samples(self.run_dir / "table.log", params.group_size)
        self.records = Records(self.run_dir, rollouts=config.logging.rollouts)
        self.journals = Journals(self.run_dir / "journal")
        self.shared = SharedMemoryWeightStore(layout.weights_root)
        self.disk = DiskWeightStore(self.run_dir / "weights")
        self.crew = Crew(config, self.run_dir)
        self.loop = Loop(
            state,
            Ports(MonotonicClock(), _Fleet(self), _Learner(self), _Rewards(self), self, self.log),
        )
        self.pool = ScoringPool(
            self.crew, config.reward.num_workers, config.reward.timeout_s, {"base_dir": "."}
        )
        self.evaluations = self._evaluations(evaluation)
        self.stop: act.Stop | None = None
        self.fed: dict[int, dict[int, act.Feed]] = {}
        self.prompt_of = {group.id: group.prompt for group in state.groups.values()}
        self.trained: list[TrainedSample] = []
        self.later: deque[ev.Event] = deque()
        self.dropped: dict[str, int] = {}
        self.to_retire: set[Version] = set()
        self.num_restarts = 0
        self.on_step: Callable[[dict[str, float]], None] = lambda line: None

    @property
    def state(self) -> State:
        return self.loop.state

    def _evaluations(self, source: PromptSource | None) -> Evaluations | None:
        if source is None:
            return None
        e = self.config.evaluation
        prompts = list(source.once(e.num_prompts))[: e.num_prompts]
        extra = {"device": self.layout.device, "nice": 5}
        return Evaluations(
            self.crew, self.pool, prompts, e.num_samples, self.decode, self._evaluated, extra
        )

    def _evaluated(self, version: Version, figures: dict[str, float]) -> None:
        self.records.evaluation(version, figures)
        self.on_step({f"eval/{name}": value for name, value in figures.items()})
        self._retire_unpinned()

    # -- the loop ---------------------------------------------------------------------------------

    def start(self) -> None:
        if self.resume:
            self.journals.collect()
            self.handle(ev.Resumed(self.params))
        else:
            self.handle(ev.Started(self.params))
        if self.stop is not None:
            return
        self.crew.start("learner", "learner", self.layout.learner_extra())
        for name in self.layout.instances:
            self.crew.start("instance", name, self.layout.instance_extra(name))

    def run(self, interrupted: Callable[[], bool]) -> act.Stop:
        """Until the core says stop and the last evaluation is in."""
        self.start()
        ticked = 0.0
        while self.stop is None or not self._settled():
            if interrupted() and self.stop is None:
                self.handle(ev.StopRequested("interrupted"))
                break
            with contextlib.suppress(queue.Empty):
                self.read(self.crew.inbox.get(timeout=TICK_S))
            now = time.monotonic()
            if now - ticked >= TICK_S:
                ticked = now
                self.handle(ev.Tick())
                self.pool.check_time()
        assert self.stop is not None
        return self.stop

    def _settled(self) -> bool:
        done = self.stop is not None and self.stop.done
        return not done or self.evaluations is None or self.evaluations.idle

    def handle(self, event: ev.Event) -> None:
        if self.stop is None or isinstance(event, ev.Resumed):
            self.loop.handle(event)
        while self.later and self.stop is None:
            self.loop.handle(self.later.popleft())

    def close(self) -> dict[str, Any]:
        self.crew.end(self.config.runtime.grace_s)
        reason = self.stop.reason if self.stop is not None else "cut off"
        mode = self.params.mode.value
        summary = self.records.summary(mode, self.state.committed, reason, self.layout.num_cores)
        self.records.close()
        self.samples.close()
        self.log.close()
        if self.stop is not None and self.stop.done:
            self.shared.destroy()
        return summary

    # -- what workers say -------------------------------------------------------------------------

    def read(self, letter: Letter) -> None:
        if not self.crew.current(letter):
            return
        if letter.message is None:
            self._lost(letter.name)
            return
        message = letter.message
        match message.kind:
            case "event":
                self._event(decode_event(message.body))
            case "finished":
                self._finished(message)
            case "committed":
                self._committed(message)
            case "usage":
                self._usage(letter.name, message.body)
            case "exported" | "imported" | "import_failed":
                self._moving(letter.name, message)
            case "scored":
                self.pool.scored(letter.name, message.body)
            case _ if letter.name.startswith("reward"):
                self.pool.ready(letter.name)
            case _:
                assert self.evaluations is not None
                self.evaluations.hear(message.kind, message.body)
                self._retire_unpinned()

    def _event(self, event: ev.Event) -> None:
        first = isinstance(event, ev.TrainerJoined) and event.version == 0 and not self.resume
        if first and self.evaluations is not None and not self.records.totals.evaluations:
            self.evaluations.ask(0)
        committed = self.state.committed
        self.handle(event)
        if self.state.committed > committed:  # sealed before a crash, logged only now
            self._record_step(committed, {})

    def _finished(self, message: Message) -> None:
        event = decode_event(message.body)
        assert isinstance(event, ev.SampleFinished)
        group = self.state.groups.get(event.request.group)
        if group is None or self.stop is not None:
            return
        self.records.totals.tokens_generated += event.num_tokens
        text = self.decode(message.arrays["token_ids"].tolist())
        self.samples.put(event, group.version, message, text)
        self.handle(event)

    def _committed(self, message: Message) -> None:
        event = decode_event(message.body["event"])
        self._usage("learner", message.body["usage"])
        assert isinstance(event, ev.StepCommitted)
        self.handle(event)
        self._record_step(event.step, message.body["metrics"])

    def _record_step(self, step: int, metrics: dict[str, float]) -> None:
        trained, self.trained = self.trained, []
        if not trained:
            return
        line = self.records.step(step, metrics, trained, self.dropped)
        self.dropped = {}
        self.on_step(line)
        every = self.config.evaluation.every_steps
        version = step + 1
        due = (every and version % every == 0) or version == self.params.num_steps
        if due and self.evaluations is not None:
            self.evaluations.ask(version)

    def _usage(self, name: str, body: dict[str, float]) -> None:
        self.records.totals.busy_s[name] = body["busy_s"]
        self.records.totals.cpu_s[name] = body["cpu_s"]

    def _moving(self, name: str, message: Message) -> None:
        body = message.body
        rid, epoch = RequestId(body["group"], body["sample"]), body["epoch"]
        if message.kind == "exported":
            self.crew.send(body["dst"], "import", {**body, "src": name})
        elif message.kind == "imported":
            self.crew.send(body["src"], "move_done", body)
            self.records.totals.migrations += 1
            self.records.totals.kv_bytes_moved += body["num_bytes"]
            self.handle(
                ev.Moved(rid, epoch, body["src"], name, body["num_bytes"], body["num_tokens"])
            )
        else:
            self.crew.send(body["src"], "move_cancel", body)
            self.handle(ev.MoveFailed(rid, epoch, body["src"], name, True, body["reason"]))

    def _lost(self, name: str) -> None:
        """A process ended that should not have."""
        if self.crew.closing or (self.stop is not None and not self.stop.done):
            return
        if name.startswith("reward"):
            self.pool.lost(name)
            return
        if name == "evaluator":
            assert self.evaluations is not None
            self.evaluations.lost()
            return
        if self.stop is not None:
            return
        self.num_restarts += 1
        if self.num_restarts > RESTARTS_MAX + 10 * self.state.committed:
            tail = self.crew.log_tail(name)
            self.handle(ev.StopRequested(f"workers keep dying; {name} last said: {tail}"))
            return
        if name == "learner":
            self.handle(ev.TrainerLost("its process ended"))
        else:
            self.journals.collect(name)
            self.handle(ev.InstanceLost(name, "its process ended"))
        self.crew.restart(name)

    # -- Keeper -----------------------------------------------------------------------------------

    def do(self, action: LedgerAction) -> None:
        match action:
            case act.IssueGroup():
                self.prompt_of[action.group] = action.prompt
            case act.EndGroup():
                self._ended(action)
            case act.RetireVersion():
                self.to_retire.add(action.version)
                self._retire_unpinned()
            case act.Stop():
                self.stop = action
            case _:
                pass

    def _ended(self, action: act.EndGroup) -> None:
        if action.end is act.End.TRAINED and action.step is not None:
            feed = self.fed.get(action.step, {}).pop(action.group, None)
            if not self.fed.get(action.step):
                self.fed.pop(action.step, None)
            samples = feed.samples if feed is not None else self.samples.scored(action.group)
            prompt = self.train.prompt(self.prompt_of[action.group])
            self.trained.extend(
                self.samples.trained(action.group, samples, prompt.text, len(prompt.token_ids))
            )
        else:
            self.dropped[action.end.value] = self.dropped.get(action.end.value, 0) + 1
            if action.end is not act.End.FILTERED:
                self.records.totals.discarded_tokens += self.samples.num_tokens(action.group)
        self.prompt_of.pop(action.group, None)
        self.samples.drop(action.group)
        self.journals.forget(action.group, self.params.group_size)

    def _retire_unpinned(self) -> None:
        pins: set[Version] = self.evaluations.pins() if self.evaluations is not None else set()
        for version in self.to_retire - pins:
            self.shared.retire(version)
            self.disk.retire(version)
            self.to_retire.discard(version)


class _Fleet:
    """The instances behind the `Generator` port."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def do(self, action: FleetAction) -> None:
        run = self.run
        if isinstance(action, act.Restart):
            run.journals.collect(action.instance)
            run.crew.restart(action.instance)
            return
        name = action.src if isinstance(action, act.Move) else action.instance
        body: dict[str, Any] = {"action": encode_fleet(action)}
        if not isinstance(action, act.Dispatch):
            run.crew.send(name, "order", body)
            return
        prompt = run.train.prompt(action.prompt)
        resumes: dict[str, Any] = {}
        for sample in action.samples if action.resume else ():
            saved = run.journals.take(RequestId(action.group, sample))
            if saved is not None:
                resumes[str(sample)] = saved
        arrays = {"prompt_ids": np.asarray(prompt.token_ids, dtype=np.int32)}
        run.crew.send(name, "order", body | {"resumes": resumes}, arrays)


class _Learner:
    """The learner process behind its port."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def do(self, action: LearnerAction) -> None:
        run = self.run
        if isinstance(action, act.RestartTrainer):
            run.crew.restart("learner")
            return
        body: dict[str, Any] = {"action": encode_learner(action)}
        arrays = None
        if isinstance(action, act.Feed):
            run.fed.setdefault(action.step, {})[action.group] = action
            prompt = run.train.prompt(run.prompt_of[action.group])
            more, arrays = run.samples.feed(action, prompt.token_ids)
            body |= more
        run.crew.send("learner", "order", body, arrays)


class _Rewards:
    """The scoring pool behind its port."""

    def __init__(self, run: LocalRun) -> None:
        self.run = run

    def do(self, action: act.Score) -> None:
        run = self.run
        row = run.samples.row(action.request)
        if row is None:
            lost = ev.ScoreFailed(action.request, action.attempt, "its row is not in the table")
            run.later.append(lost)
            return

        def answer(reward: float | None, why: str) -> None:
            if reward is None:
                run.handle(ev.ScoreFailed(action.request, action.attempt, why))
                return
            run.samples.reward(action.request, reward)
            run.handle(ev.Scored(action.request, action.attempt, reward))

        prompt = run.train.prompt(action.prompt)
        ids = row.columns["token_ids"]
        run.pool.submit(prompt, str(row.columns["text"]), ids, str(row.columns["finish"]), answer)  # type: ignore[arg-type]
