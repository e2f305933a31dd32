"""Workers that judge a sample: rewards score it, environments answer its turns.

Rewards: samples go out to worker processes, rewards come back. A worker that hangs past its time or
dies is replaced, and costs its sample one attempt; the core decides whether to try again. Where it
had several, each is tried alone first.

Environments: each turn goes from the instance that has it to an environment worker and back.

    instance --TurnEnded--> relay --Step--> env worker --Stepped--> relay --Observed--> instance

A request always goes to the same worker, by its number, so its episode is there. The answer goes to
the instance that asked last. A worker that dies or hangs is replaced and its questions are asked
again; a question that has cost several workers fails its sample. Never decides where a request
runs. Invariant: a question is waiting, at a worker, or answered; each environment has at most its
`concurrent_max` at workers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from dora_rl.config import RunConfig
from dora_rl.envs import host as envs
from dora_rl.rewards.base import ScoreItem
from dora_rl.types import GroupId, Prompt, RequestId, Trajectory
from dora_rl.workers.environment import episode_seed, row_of
from dora_rl.workers.messages import (
    Forget,
    Ints,
    Lesson,
    Message,
    Observed,
    Ready,
    Reward,
    Scorable,
    Score,
    Scored,
    Step,
    Stepped,
    TurnEnded,
    Where,
)
from dora_rl.workers.pool import Worker, Workers

SLACK_S = 10.0  # on top of the time-out that a worker keeps itself
WORKERS_COST_MAX = 3  # workers that may die over one question
Answer: TypeAlias = Callable[[Reward], None]


@dataclass(frozen=True, slots=True)
class Job:
    item: Scorable
    token_ids: Ints
    answer: Answer
    alone: bool = False  # its worker ended while it had this one among others


class Failures:
    """Counts rewards that failed; tells of the first, the tenth, the hundredth and so on."""

    def __init__(self) -> None:
        self._num, self._num_told_next = 0, 1

    def add(self, why: str) -> list[str]:
        """A line for the console if it is time for one, else nothing."""
        self._num += 1
        if self._num < self._num_told_next:
            return []
        self._num_told_next *= 10
        head = "a reward failed" if self._num == 1 else f"{self._num} rewards failed, the last one"
        return [f"{head}: {why}"]


def item_of(prompt: Prompt, sample: Trajectory) -> ScoreItem:
    """What functions are given of a sample; its token ids travel beside it."""
    wrote: Any = prompt.columns.get("prompt", prompt.text)
    return ScoreItem(
        prompt=wrote,
        prompt_text=prompt.text,
        completion=sample.text,
        answer=prompt.answer,
        columns=prompt.columns,
        finish=sample.finish.value,
    )


def lesson_of(prompt: Prompt, sample: Trajectory) -> Lesson:
    """What the teacher is given of it."""
    mask = tuple(sample.loss_mask.tolist())
    return Lesson(prompt.token_ids, mask, sample.branches, sample.reward)


class ScoringPool:
    """Gives jobs to free workers, in order of arrival; as many at once as a worker asks for."""

    def __init__(self, workers: Workers, num_workers: int, timeout_s: float, extra: dict[str, Any]):
        self._workers = workers
        self._timeout_s = timeout_s
        self._waiting: deque[Job] = deque()
        self._free: list[str] = []
        self._busy: dict[str, tuple[int, list[Job], float]] = {}
        self._at_once: dict[str, int] = {}
        self._next = 0
        self._extra = extra
        self.num_answered = 0
        self.num_lost_in_a_row = 0  # workers that ended since the last answer of any
        self.failures = Failures()
        self.names = [f"reward{index}" for index in range(num_workers)]

    def start(self) -> None:
        for name in self.names:
            self._workers.start("reward", name, self._extra)

    def submit(
        self,
        prompt: Prompt,
        sample: Trajectory,
        answer: Answer,
        where: Where | None = None,
        lesson: Lesson | None = None,
    ) -> None:
        """`where`: the worker finds text and tokens there; those of `sample` are empty then.
        `lesson`: the teacher is asked too."""
        scorable = Scorable(item_of(prompt, sample), len(sample.token_ids), where, lesson)
        self._waiting.append(Job(scorable, sample.token_ids, answer))
        self._give_out()

    def _give_out(self) -> None:
        while self._free and self._waiting:
            name = self._free.pop()
            jobs = [self._waiting.popleft()]
            while self._may_join(name, jobs):
                jobs.append(self._waiting.popleft())
            self._next += 1
            self._busy[name] = (self._next, jobs, self._workers.now())
            ids = np.concatenate([job.token_ids for job in jobs])
            self._workers.send(name, Score(self._next, tuple(job.item for job in jobs), ids))

    def _may_join(self, name: str, jobs: list[Job]) -> bool:
        together = self._waiting and not jobs[0].alone and not self._waiting[0].alone
        return bool(together) and len(jobs) < self._at_once.get(name, 1)

    def hear(self, worker: Worker, message: Message) -> None:
        """What a reward worker says."""
        match message:
            case Ready(at_once):
                self._at_once[worker.name] = at_once
                self._free.append(worker.name)
                self._give_out()
            case Scored():
                self._scored(worker.name, message)
            case _:
                raise AssertionError(f"a reward worker does not say {message!r}")

    def _scored(self, name: str, message: Scored) -> None:
        number, jobs, _ = self._busy.pop(name, (-1, [], 0.0))
        self._free.append(name)
        self.num_lost_in_a_row = 0
        if number == message.id:
            self.num_answered += len(jobs)
            for job, reward in zip(jobs, message.rewards, strict=True):
                job.answer(reward)
        self._give_out()

    def lost(self, name: str) -> None:
        """A worker's process ended: its sample failed, a new worker takes the name."""
        self.num_lost_in_a_row += 1
        if name in self._free:
            self._free.remove(name)
        _, jobs, _ = self._busy.pop(name, (-1, [], 0.0))
        if not self._workers.closing:
            self._workers.restart(name)
        self._failed(jobs, "the reward ended its process")

    def check_time(self) -> None:
        """Replace workers that have been busy with one message for too long."""
        now = self._workers.now()
        for name, (_, jobs, since) in list(self._busy.items()):
            if now - since > self._timeout_s:
                del self._busy[name]
                self._workers.restart(name)
                self._failed(jobs, f"the reward did not answer within {self._timeout_s:g} s")

    def _failed(self, jobs: list[Job], why: str) -> None:
        """One of several may be to blame for the rest: each gets a worker to itself."""
        if len(jobs) == 1:
            jobs[0].answer(Reward(error=why))
        self._waiting.extend(replace(job, alone=True) for job in jobs if len(jobs) > 1)
        self._give_out()


@dataclass(slots=True, eq=False)
class Question:
    """One turn that wants an answer."""

    epoch: int
    instance: str
    worker: str
    step: Step
    asked_s: float
    until_s: float = 0.0  # where it is at its worker
    num_lost: int = 0

    @property
    def so_far(self) -> Trajectory:
        return self.step.samples[0]

    @property
    def request(self) -> RequestId:
        return self.so_far.request

    @property
    def label(self) -> str:
        return self.step.label


class EnvRelay:
    """All environments of a run, as the controller uses them."""

    def __init__(
        self,
        workers: Workers,
        config: RunConfig,
        prompt_of: Callable[[RequestId, int], Prompt | None],
    ) -> None:
        """`prompt_of` gives the prompt of a request, None if this epoch of it has ended."""
        self._workers, self._prompt_of = workers, prompt_of
        self._seed = config.runtime.seed
        self._loaded = loaded = envs.load_environments(config.env)
        self.names = [f"env{index}" for index in range(config.env.num_workers if loaded else 0)]
        self._ready: set[str] = set()
        self._waiting: dict[str, deque[Question]] = {label: deque() for label in loaded}
        self._sent: dict[int, Question] = {}
        self._newest: dict[RequestId, Question] = {}
        self._known: dict[str, set[RequestId]] = {name: set() for name in self.names}
        self._next = 0
        self.num_answered = 0

    def start(self) -> None:
        for name in self.names:
            self._workers.start("env", name, {"base_dir": "."})

    def opens(self, prompt: Prompt) -> bool | None:
        """Whether a prompt's environment speaks first; None: it has a single turn."""
        if not self._loaded:
            return None
        return self._loaded[envs.label_of(prompt.env, self._loaded)].kind.opens

    def hear(self, worker: Worker, message: Message) -> None:
        """What an environment worker says."""
        match message:
            case Ready():
                self._ready.add(worker.name)
                for label in self._waiting:
                    self._give_out(label)
            case Stepped():
                self._stepped(worker.name, message)
            case _:
                raise AssertionError(f"an environment worker does not say {message!r}")

    # -- questions --------------------------------------------------------------------------------

    def turn_ended(self, instance: str, said: TurnEnded) -> None:
        """The same one again (after a move, say) only changes the address."""
        (sample,) = said.samples
        rid = sample.request
        prompt, known = self._prompt_of(rid, said.epoch), self._newest.get(rid)
        if prompt is None:
            return
        same = known is not None and np.array_equal(known.so_far.token_ids, sample.token_ids)
        if known is not None and known.so_far.turns == sample.turns and same:
            known.instance, known.epoch = instance, said.epoch
            return
        label = envs.label_of(prompt.env, self._loaded)
        self._next += 1
        seed = episode_seed(self._seed, prompt.index)
        step = Step(self._next, label, row_of(prompt), seed, said.samples)
        worker = self.names[(rid.group + rid.sample) % len(self.names)]
        item = Question(said.epoch, instance, worker, step, self._workers.now())
        self._newest[rid] = item
        self._waiting[label].append(item)
        self._give_out(label)

    def _give_out(self, label: str) -> None:
        waiting, limit = self._waiting[label], self._loaded[label].entry.concurrent_max
        blocked: list[Question] = []
        room = limit - sum(question.label == label for question in self._sent.values())
        while waiting and room > 0:
            question = waiting.popleft()
            if self._newest.get(question.request) is not question:
                continue  # asked again with other tokens, or ended
            if question.worker not in self._ready:
                blocked.append(question)
                continue
            self._send(question)
            room -= 1
        waiting.extendleft(reversed(blocked))

    def _send(self, question: Question) -> None:
        known = self._known[question.worker]
        # A worker that does not know the episode takes all of its steps.
        steps = 1 if question.request in known else question.so_far.turns + 1
        known.add(question.request)
        entry = self._loaded[question.label].entry
        limit_s = steps * entry.timeout_s + entry.latency_s[1] + SLACK_S
        question.until_s = self._workers.now() + limit_s
        self._sent[question.step.id] = question
        self._workers.send(question.worker, question.step)

    # -- answers ----------------------------------------------------------------------------------

    def _stepped(self, worker: str, said: Stepped) -> None:
        question = self._sent.pop(said.id, None)
        if question is not None:
            self.num_answered += 1
            self._deliver(question, said.answer)
            if said.answer.hung:
                self._replace(worker)
            self._give_out(question.label)

    def _deliver(self, question: Question, answer: envs.Answer) -> None:
        rid = question.request
        if self._newest.get(rid) is question:
            del self._newest[rid]
            turn = question.so_far.turns
            self._workers.send(question.instance, Observed(rid, question.epoch, turn, answer))

    # -- workers ----------------------------------------------------------------------------------

    def lost(self, name: str) -> None:
        """A worker's process ended: whoever it was busy with is asked again."""
        for question in self._sent.values():
            question.num_lost += question.worker == name
        self._replace(name)

    def _replace(self, name: str) -> None:
        self._ready.discard(name)
        self._known[name].clear()
        held = [question for question in self._sent.values() if question.worker == name]
        for question in reversed(held):
            del self._sent[question.step.id]
            if question.num_lost >= WORKERS_COST_MAX:
                why = f"the environment {question.label} ended its process"
                self._deliver(question, envs.Answer(error=why))
            else:
                self._waiting[question.label].appendleft(question)
        if not self._workers.closing:
            self._workers.restart(name)

    def check_time(self) -> None:
        """Replace workers that keep a question past its time, which is an error for that one."""
        now = self._workers.now()
        for question in list(self._sent.values()):
            if question.step.id in self._sent and now > question.until_s:
                del self._sent[question.step.id]
                self.num_answered += 1
                why = f"the environment {question.label} does not answer"
                self._deliver(question, envs.Answer(error=why))
                self._replace(question.worker)

    def forget(self, group: GroupId) -> None:
        """A group has ended: nobody wants its answers any more."""
        for rid in [rid for rid in self._newest if rid.group == group]:
            del self._newest[rid]
        for name in self.names:
            gone = {rid for rid in self._known[name] if rid.group == group}
            if gone:
                self._known[name] -= gone
                self._workers.send(name, Forget(group))

    def waits(self) -> list[str]:
        """Who waits for whom since when, for the watchdog."""
        now = self._workers.now()
        oldest: dict[str, Question] = {}
        for question in sorted(self._newest.values(), key=lambda question: question.asked_s):
            oldest.setdefault(question.label, question)
        return [
            f"request {tuple(question.request)} waits for the environment {label} "
            f"({question.worker}) since {now - question.asked_s:.0f} s"
            for label, question in sorted(oldest.items())
        ]
