"""When the engine breaks, every waiting client hears it, and nobody waits for ever."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace

import pytest

from dora_rl.engine.sequence import Request
from dora_rl.serve.engine_thread import EngineThread
from dora_rl.types import Finish, RequestId, UserError


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
