"""The workers of the inline world: what runs in a process elsewhere, as an object here."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

from dora_rl.workers import messages as msg
from dora_rl.workers.environment import open_host, take_step
from dora_rl.workers.evaluator import Evaluator
from dora_rl.workers.learner import LearnerWorker
from dora_rl.workers.reward import Scorer
from dora_rl.workers.rollout import RolloutWorker
from dora_rl.workers.worker import Setup

REPORT_S = 1.0


class AtOnce(Executor):
    """Does what it is given before it returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised where the result is asked for
            done.set_exception(error)
        return done


class InlineWorker:
    """A worker as an object of this process."""

    def hear(self, message: msg.Message) -> None:
        raise NotImplementedError

    def turn(self) -> bool:
        """One round of its own work; False: there was none."""
        return False

    def close(self) -> None:
        """A clean end."""

    def drop(self) -> None:
        """The end of a process: nothing is written any more."""


class InlineRollout(InlineWorker):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        self._worker = RolloutWorker(setup, send)
        self._worker.join()
        self.hear, self.turn, self.close = (
            self._worker.hear,
            self._worker.turn,
            self._worker.close,
        )


class SendOnly:
    """The learner's channel: what it is told comes by `hear`. Implements `learner.Talk`."""

    def __init__(self, send: msg.Send) -> None:
        self._send = send

    def send(self, message: msg.Message) -> None:
        self._send(message)

    def poll(self, timeout_s: float) -> bool:
        del timeout_s
        return False

    def receive(self) -> msg.Message:
        raise EOFError


class InlineLearner(InlineWorker):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        self._worker = LearnerWorker(setup, SendOnly(send), AtOnce())
        self._worker.join()
        self._reported_s = time.monotonic()
        self.hear = self._worker.hear

    def turn(self) -> bool:
        if time.monotonic() - self._reported_s > REPORT_S:
            self._reported_s = time.monotonic()
            self._worker.report()
        has_work = self._worker.has_own_work()
        if has_work:
            self._worker.go_on()
        return has_work

    def close(self) -> None:
        self._worker.close()
        self.drop()

    def drop(self) -> None:
        if self._worker.start.lock is not None:
            os.close(self._worker.start.lock)


class InlineReward(InlineWorker):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        self._scorer, self._send = Scorer(setup), send
        send(msg.Ready(self._scorer.at_once))

    def hear(self, message: msg.Message) -> None:
        assert isinstance(message, msg.Score)
        self._send(self._scorer.answer(message))


class InlineEnvironment(InlineWorker):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        self._host, self._send, self._loop = open_host(setup), send, asyncio.new_event_loop()
        send(msg.Ready())

    def hear(self, message: msg.Message) -> None:
        if isinstance(message, msg.Forget):
            self._host.forget(message.group)
            return
        assert isinstance(message, msg.Step)
        self._send(self._loop.run_until_complete(take_step(self._host, message)))

    def close(self) -> None:
        self._host.close()
        self._loop.close()


class InlineEvaluator(InlineWorker):
    def __init__(self, setup: Setup, send: msg.Send) -> None:
        self._evaluator, self._send = Evaluator(setup, send), send
        send(msg.Ready())

    def hear(self, message: msg.Message) -> None:
        assert isinstance(message, msg.Evaluate)
        self._send(self._evaluator.answer(message))


WORKERS: dict[str, Callable[[Setup, msg.Send], InlineWorker]] = {
    "instance": InlineRollout,
    "learner": InlineLearner,
    "reward": InlineReward,
    "env": InlineEnvironment,
    "evaluator": InlineEvaluator,
}
