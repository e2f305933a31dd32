"""The queues in front of learner and engine: fair, in order, every request answered once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from dora_rl.chat.service import Piece
from dora_rl.engine.sequence import Request
from dora_rl.tinker.book import Answer, Promise
from dora_rl.tinker.messages import Asked
from dora_rl.tinker.sampling import Sampling
from dora_rl.tinker.trainee import AdapterShape
from dora_rl.tinker.training import GAP_S_MAX, Job, Model, Training
from dora_rl.types import Finish, SamplingParams


def training_of(order: list[str], now: Callable[[], float] = lambda: 0.0) -> Training:
    def settle(promise: Promise, answer: Answer) -> None:
        order.append(promise.id)

    def fail(promise: Promise, error: str, mine: bool) -> None:
        order.append(f"{promise.id}: {error}")

    return Training("cpu", 1, settle, fail, now)


def model_of(training: Training, name: str) -> Model:
    model = Model(name, "me", "session", AdapterShape(1))
    training.open(model)
    return model


def add(
    training: Training, model: Model, seq: int, run: Callable[[], Answer] | None = None
) -> None:
    promise = Promise(f"{model.id}{seq}", "me", (model.id, seq), b"")
    training.add(model, seq, Job(promise, run or (lambda: Answer(b""))))


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_long_queue_of_one_client_does_not_starve_another() -> None:
    order: list[str] = []

    async def main() -> None:
        training = training_of(order)
        a, b = (model_of(training, name) for name in "ab")
        for seq in range(50):
            add(training, a, seq)
        for seq in range(2):
            add(training, b, seq)
        task = asyncio.create_task(training.run())
        await until(lambda: len(order) == 52)
        task.cancel()
        training.stop()

    asyncio.run(main())
    assert order[:5] == ["a0", "b0", "a1", "b1", "a2"]


def test_a_request_that_fails_is_told_and_the_next_ones_run() -> None:
    order: list[str] = []

    def broken() -> Answer:
        raise RuntimeError("a mistake\nof ours")

    async def main() -> None:
        training = training_of(order)
        model = model_of(training, "a")
        add(training, model, 0, broken)
        add(training, model, 1)
        task = asyncio.create_task(training.run())
        await until(lambda: len(order) == 2)
        task.cancel()
        training.stop()

    asyncio.run(main())
    assert order == ["a0: internal error (RuntimeError)", "a1"]


def test_what_goes_wrong_behind_a_request_is_told_and_the_next_ones_run() -> None:
    order: list[str] = []

    def full() -> None:
        raise OSError(28, "No space left on device")

    async def main() -> None:
        training = training_of(order)
        model = model_of(training, "a")
        promise = Promise("a0", "me", (model.id, 0), b"")
        training.add(model, 0, Job(promise, lambda: Answer(b""), then=full))
        add(training, model, 1)
        task = asyncio.create_task(training.run())
        await until(lambda: len(order) == 2)
        task.cancel()
        training.stop()

    asyncio.run(main())
    assert order[0].startswith("a0: cannot write: No space left") and order[1] == "a1"


def test_requests_behind_one_that_never_comes_are_told() -> None:
    order: list[str] = []
    clock = [0.0]

    async def main() -> None:
        training = training_of(order, lambda: clock[0])
        model = model_of(training, "a")
        add(training, model, 1)
        clock[0] = GAP_S_MAX + 1
        training.give_up_gaps()
        training.stop()

    asyncio.run(main())
    assert order == ["a1: request 0 of a never came, so those after it were not run"]


class Thread:
    """An engine that does what the test says."""

    def __init__(self, slots: int = 2) -> None:
        options = SimpleNamespace(versions_max=slots)
        self.engine = SimpleNamespace(options=options, context_max=64, retire=self._retire)
        self.begun: list[tuple[Request, int, Any]] = []
        self.loaded: list[int] = []
        self.aborted: list[Any] = []

    def tell(self, call: Callable[..., Any], *arguments: Any) -> None:
        call(*arguments)

    def begin(self, request: Request, place: int, sink: Any) -> None:
        self.begun.append((request, place, sink))

    def abort(self, request: Any) -> None:
        self.aborted.append(request)

    def load(self, version: int, source: Any, done: Any) -> None:
        self.loaded.append(version)
        done.set_result(None)

    def _retire(self, version: int) -> None:
        self.loaded.remove(version)

    def finish(self, index: int, finish: Finish = Finish.STOP, error: str = "") -> None:
        _, place, sink = self.begun.pop(index)
        sink(Piece(place, (3,), (-0.5,), finish=finish, error=error))


STORE: Any = SimpleNamespace(open=lambda version: version)
ASKED = Asked((1, 2), SamplingParams(tokens_max=1), 1, 0, False, 0, 2)


def sampling_of(thread: Any, answers: list[str], running_max: int = 2) -> Any:
    sampling = Sampling(thread, STORE, running_max)

    def ask(client: str, version: int, number: int) -> Any:
        def settle(answer: Answer | None, error: str = "", mine: bool = True) -> None:
            answers.append(f"{client}{number}" + (f": {error}" if answer is None else ""))

        return sampling.ask(client, version, ASKED, settle)

    return sampling, ask


def test_samples_of_several_clients_take_turns() -> None:
    answers: list[str] = []

    async def main() -> None:
        thread = Thread()
        sampling, ask = sampling_of(thread, answers)
        for client in "ab":
            sampling.open(client)
        for number in range(6):
            ask("a", 1, number)
        ask("b", 1, 0)
        while len(answers) < 7:
            await until(lambda: bool(thread.begun))
            assert len(thread.begun) <= 2
            thread.finish(0)
        assert thread.loaded == [1]

    asyncio.run(main())
    assert answers[:3] == ["a0", "b0", "a1"] and len(answers) == 7


def test_more_snapshots_than_slots_take_turns_too() -> None:
    answers: list[str] = []

    async def main() -> None:
        thread = Thread(slots=1)
        sampling, ask = sampling_of(thread, answers)
        for number, client in enumerate("abc"):
            sampling.open(client)
            for each in range(3):
                ask(client, number, each)
        while len(answers) < 9:
            await until(lambda: bool(thread.begun))
            assert len({request.version for request, _, _ in thread.begun}) == 1
            assert [thread.begun[0][0].version] == thread.loaded
            thread.finish(0)

    asyncio.run(main())
    assert sorted(answers) == [f"{client}{n}" for client in "abc" for n in range(3)]


def test_a_failed_sample_and_a_client_that_leaves_free_their_places() -> None:
    answers: list[str] = []

    async def main() -> None:
        thread = Thread()
        sampling, ask = sampling_of(thread, answers, running_max=1)
        for client in "ab":
            sampling.open(client)
        ask("a", 1, 0)
        await until(lambda: bool(thread.begun))
        thread.finish(0, Finish.REFUSED, "too long")
        running = ask("a", 1, 1)
        await until(lambda: bool(thread.begun))
        waiting = ask("b", 1, 0)
        sampling.cancel(waiting)
        sampling.cancel(waiting)
        sampling.close("a")
        assert thread.aborted == [request.id for request, _, _ in thread.begun] and running.ended
        thread.begun.clear()
        ask("b", 1, 1)
        await until(lambda: bool(thread.begun))
        thread.finish(0)

    asyncio.run(main())
    assert answers == ["a0: too long", "b0: the client gave this request up", "b1"]


def test_a_snapshot_that_cannot_be_loaded_is_told_to_its_clients_alone() -> None:
    answers: list[str] = []

    def read(version: int) -> int:
        if version == 7:
            raise OSError("the disk")
        return version

    async def main() -> None:
        thread: Any = Thread()
        sampling = Sampling(thread, SimpleNamespace(open=read), 4)  # type: ignore[arg-type]
        for client, version in (("a", 7), ("b", 1)):
            sampling.open(client)

            def settle(answer: Answer | None, error: str = "", mine: bool = True, c: str = client):
                answers.append(f"{c}: {error}" if answer is None else c)

            sampling.ask(client, version, ASKED, settle)
        await until(lambda: bool(thread.begun) and bool(answers))
        thread.finish(0)

    asyncio.run(main())
    assert answers == ["a: this snapshot cannot be loaded: the disk", "b"]
