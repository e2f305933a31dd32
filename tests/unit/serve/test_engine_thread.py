"""A fault ends the request that it belongs to; where the engine breaks, everybody hears it."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.runner import Runner, make_runner
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.serve.engine_thread import EngineThread
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import Finish, RequestId, SamplingParams, UserError
from tests.kit.places import MODEL
from tests.unit.serve.serving import ENGINE, alone

WAIT_S = 60
PROMPTS = [(5, 6, 7), (7, 6, 5), (8, 9), (9, 9, 9)]
BAD_SEED = 666


class BrokenEngine:
    """Takes requests and raises at every step."""

    def __init__(self) -> None:
        self.options = SimpleNamespace(device="cpu")
        self.scheduler = SimpleNamespace(find=lambda request: None)
        self.requests: list[Request] = []

    def has_work(self):
        return bool(self.requests)

    def versions(self):
        return (0,)

    def start_over(self):
        self.requests.clear()

    def submit(self, request):
        self.requests.append(request)

    def load_layers(self, version, source):
        while True:
            yield f"layer of {version} from {source}"

    def step(self):
        raise RuntimeError("out of memory")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_broken_engine_fails_what_waits_for_it():
    delivered = []
    thread = EngineThread(BrokenEngine(), delivered.extend)  # type: ignore[arg-type]
    heard: dict[int, list[str]] = {0: [], 1: []}
    load: Future[None] = Future()
    thread.tell(thread.load, 1, "somewhere", load)
    for index in heard:
        request = Request(RequestId(index + 1, 0), 0, (1, 2))
        sink = lambda piece, i=index: heard[i].append(piece.finish)  # noqa: E731
        thread.tell(thread.begin, request, index, sink)
    thread.start()
    thread.join(30)
    assert not thread.is_alive() and thread.broken and "out of memory" in thread.reason
    for sink, piece in delivered:
        sink(piece)
    assert heard == {0: [Finish.ERROR], 1: [Finish.ERROR]}
    with pytest.raises(UserError, match="failed"):
        load.result(0)


class FaultyRunner(Runner):
    """The real one, but a step with the bad request in it raises: at its launch, or when its
    results are collected; once `after` of its tokens are there, and so many `times`."""

    def __init__(self, real: Runner, where: str, after: int, times: int) -> None:
        self.spec, self.options, self.weights = real.spec, real.options, real.weights
        self.cache, self.context, self.blocks_max = real.cache, real.context, real.blocks_max
        self._real, self._where, self._after, self.times = real, where, after, times

    def load(self, slot, source, where):
        return self._real.load(slot, source, where)

    def launch(self, plan, slots):
        self._maybe(plan.spans, "launch")
        launched = self._real.launch(plan, slots)
        return plan.spans, launched

    def collect(self, launched):
        self._maybe(launched[0], "collect")
        return self._real.collect(launched[1])

    def score(self, slot: int, token_ids: Sequence[int]) -> list[float]:
        return self._real.score(slot, token_ids)

    def _maybe(self, spans, where: str) -> None:
        bad = any(
            span.seq.request.seed == BAD_SEED and span.start >= span.seq.num_prompt + self._after
            for span in spans
        )
        if bad and where == self._where and self.times:
            self.times -= 1
            raise OverflowError("a number of this request is too large")


class Answers:
    """Sinks of several requests, filled by the engine's thread."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.errors: dict[int, str] = {}
        self.finished: dict[int, Finish] = {}
        self.all_there = threading.Event()
        self.num_wanted = 0

    def sink(self, number):
        def take(piece):
            self.token_ids.setdefault(number, []).extend(piece.token_ids)
            if piece.finish is not None:
                self.finished[number], self.errors[number] = piece.finish, piece.error
            if len(self.finished) == self.num_wanted:
                self.all_there.set()

        return take

    def deliver(self, pieces) -> None:
        for sink, piece in pieces:
            sink(piece)


def answers_of(where: str, after: int, times: int = 1 << 30) -> tuple[Answers, EngineThread]:
    spec = read_spec(MODEL)
    runner = FaultyRunner(make_runner(spec, ENGINE), where, after, times)
    engine = Engine(spec, ENGINE, open_tokenizer(MODEL, False).decode, runner=runner)
    engine.load(0, MODEL)
    answers = Answers()
    thread = EngineThread(engine, answers.deliver, 1)
    requests = [
        Request(
            RequestId(1 + number, 0),
            0,
            prompt,
            SamplingParams(tokens_max=20, ignore_eos=True),
            BAD_SEED if number == 1 else number,
            stream=RequestId(0, 0),
        )
        for number, prompt in enumerate(PROMPTS)
    ]
    answers.num_wanted = len(requests)
    for number, request in enumerate(requests):
        thread.tell(thread.begin, request, number, answers.sink(number))
    thread.start()
    assert answers.all_there.wait(WAIT_S)
    return answers, thread


def expected(number: int) -> list[int]:
    prompt = PROMPTS[number]
    return alone(prompt, number, tokens_max=20, ignore_eos=True).token_ids.tolist()


@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("after", [-2, 0, 7])
def test_a_fault_in_a_step_ends_its_request_alone(where, after, capsys):
    """The others get exactly what they get alone; the bad one what it had, and an error."""
    answers, thread = answers_of(where, after)
    assert answers.finished[1] is Finish.ERROR and "OverflowError" in answers.errors[1]
    assert "too large" not in answers.errors[1], "what broke inside is for the operator"
    assert "a number of this request is too large" in capsys.readouterr().err
    for number in (0, 2, 3):
        assert answers.token_ids[number] == expected(number)
        assert answers.finished[number] is Finish.LENGTH
    again, done = Answers(), Request(RequestId(9, 0), 0, PROMPTS[0], SamplingParams(tokens_max=3))
    again.num_wanted = 1
    thread.tell(thread.begin, done, 0, again.sink(0))
    assert thread.is_alive() and not thread.broken
    thread.stop()
    thread.engine.scheduler.pool.check()
    assert not thread.broken


def test_a_fault_that_does_not_come_again_costs_nobody_anything():
    answers, thread = answers_of("collect", 3, times=1)
    thread.stop()
    for number in (0, 2, 3):
        assert answers.token_ids[number] == expected(number)
    bad = alone(PROMPTS[1], BAD_SEED, tokens_max=20, ignore_eos=True).token_ids.tolist()
    assert answers.token_ids[1] == bad and not thread.broken


def test_a_request_that_cannot_even_begin_is_told_so():
    spec = read_spec(MODEL)
    engine = Engine(spec, ENGINE, open_tokenizer(MODEL, False).decode)
    engine.load(0, MODEL)
    answers = Answers()
    answers.num_wanted = 2
    thread = EngineThread(engine, answers.deliver, 1)
    bad = Request(RequestId(1, 0), 0, (1, 2), SamplingParams(tokens_max=4, top_k=10**30))
    good = Request(RequestId(2, 0), 0, (1, 2), SamplingParams(tokens_max=4, ignore_eos=True))
    for number, request in enumerate((bad, good)):
        thread.tell(thread.begin, request, number, answers.sink(number))
    thread.start()
    assert answers.all_there.wait(WAIT_S)
    assert answers.finished == {0: Finish.ERROR, 1: Finish.LENGTH} and not thread.broken
    thread.stop()
