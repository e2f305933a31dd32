"""The books of a vLLM engine, kept without vLLM: a process that counts stands in for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Output, Request
from dora_rl.engine.vllm.engine import VllmEngine, VllmOptions
from dora_rl.engine.vllm.process import Gain, RequestKv, VllmProcess
from dora_rl.ports import Canary
from dora_rl.types import Finish, RequestId, SamplingParams, UserError

ONE = RequestId(0, 0)
EOS = 9


class Counting(VllmProcess):
    """Answers every request with the last token plus one, two tokens a step."""

    def __init__(self) -> None:
        self.vocab, self.context_max, self.block_tokens, self.num_blocks = 50, 40, 16, 8
        self.dtype = torch.float32
        self.scored = {}
        self.texts: dict[str, list[int]] = {}
        self.kv: dict[str, RequestKv | None] = {}

    def load(self, source: Any, files: Any) -> None:
        assert not self.texts, "weights are replaced between requests"

    def add(self, name: str, seq: Any, seed: int, kv: RequestKv | None = None) -> None:
        self.texts[name], self.kv[name] = list(seq.tokens), kv

    def abort(self, name: str) -> None:
        del self.texts[name]

    def read_kv(self, name: str) -> RequestKv | None:
        return RequestKv(2, (torch.zeros(1, 64, dtype=torch.uint8),))

    def kv_layout(self) -> list[list[Any]]:
        return [["layer", "torch.float32", [16], [1]]]

    def step(self) -> Iterator[Gain]:
        for name, text in list(self.texts.items()):
            new = [text[-1] + 1, text[-1] + 2]
            text += new
            yield Gain(name, new, [-0.5, -0.25])


class Weights:
    """A sealed version whose tensors nobody looks at."""

    def __init__(self, version: int) -> None:
        self.version, self.base, self.checksum = version, "", ""
        self.canary: Canary | None = None


@pytest.fixture
def engine(tmp_path: Path) -> VllmEngine:
    journal = Journal(tmp_path / "journal", every=1)
    options = VllmOptions("model", (EOS,))
    made = VllmEngine(options, EngineOptions(), journal=journal, process=Counting())
    made.load(0, Weights(0), verify=False)
    return made


def request(prompt: tuple[int, ...] = (1, 2), key: RequestId = ONE, **more: Any) -> Request:
    params = SamplingParams(tokens_max=more.pop("tokens_max", 8), **more.pop("params", {}))
    return Request(key, more.pop("version", 0), prompt, params, **more)


def run(engine: VllmEngine) -> list[Output]:
    found: list[Output] = []
    while engine.has_work():
        found += engine.step()
    return found


def test_a_response_ends_at_its_end_of_sequence(engine: VllmEngine, tmp_path: Path) -> None:
    engine.submit(request((5, 6)))
    last = run(engine)[-1].trajectory
    assert last is not None and last.finish is Finish.STOP
    assert last.token_ids.tolist() == [7, 8, EOS] and last.logprobs.tolist() == [-0.5, -0.25, -0.5]
    assert engine.find(ONE) is None and not read_journal(tmp_path / "journal")
    stats = engine.stats()
    assert stats.decode_tokens == 3 and stats.running == 0 and stats.used_blocks == 0


def test_a_length_cuts_what_was_given_at_once(engine: VllmEngine) -> None:
    engine.submit(request((10,), tokens_max=3, params={"raw_logprobs": True}))
    last = run(engine)[-1].trajectory
    assert last is not None and last.finish is Finish.LENGTH
    assert last.token_ids.tolist() == [11, 12, 13]
    assert last.raw_logprobs is not None and len(last.raw_logprobs) == 3


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"version": 3}, "version 3 is not resident"),
        ({"prompt": ()}, "the prompt is empty"),
        ({"prompt": (1, 50)}, "token id 50 is outside the vocabulary of 50"),
        ({"tokens_max": 39}, r"41 tokens \(prompt \+ tokens_max\) exceed the context of 40"),
        ({"params": {"forced_ids": (3,)}}, "native engine alone"),
        ({"params": {"raw_logprobs": True, "top_p": 0.5}}, "one log-prob per token"),
    ],
)
def test_what_can_never_run_is_refused(engine: VllmEngine, bad: dict[str, Any], why: str) -> None:
    engine.submit(request(**bad))
    (output,) = run(engine)
    assert output.trajectory is not None and output.trajectory.finish is Finish.REFUSED
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(output.trajectory.error)


def test_a_parked_request_is_taken_from_vllm_and_goes_on(engine: VllmEngine) -> None:
    engine.submit(request((10,)))
    engine.step()
    with pytest.raises(UserError, match="is running, not parked"):
        engine.unpark(ONE)
    engine.park(ONE)
    assert engine.is_parked(ONE) and not engine.has_work() and engine.stats().parked == 1
    engine.unpark(ONE)
    last = run(engine)[-1].trajectory
    assert last is not None and last.token_ids.tolist() == list(range(11, 19))
    assert not engine.abort(ONE)


def test_a_session_goes_on_in_its_next_turn(engine: VllmEngine) -> None:
    engine.submit(request((5, 6), keep=True))
    run(engine)
    assert engine.stats().idle == 1
    engine.extend(ONE, (20,), SamplingParams(tokens_max=2))
    last = run(engine)[-1].trajectory
    assert last is not None and last.turns == 2
    assert last.token_ids.tolist() == [7, 8, EOS, 20, 21, 22]
    assert last.loss_mask.tolist() == [1, 1, 1, 0, 1, 1]
    assert engine.abort(ONE) and engine.find(ONE) is None


def test_a_moved_request_takes_its_kv_along(engine: VllmEngine, tmp_path: Path) -> None:
    process = Counting()
    other = VllmEngine(VllmOptions("model", (EOS,)), EngineOptions(), process=process)
    engine.submit(request((10,)))
    engine.step()
    export = engine.export(ONE)
    data = memoryview(b"".join(bytes(chunk.numpy()) for chunk in export.chunks()))
    with pytest.raises(UserError, match="version 0 is not resident"):
        other.take_in(export.meta, data)
    export.cancel()
    assert engine.has_work()
    other.load(0, Weights(0), verify=False)
    export = engine.export(ONE)
    other.take_in(export.meta, data)
    export.done()
    assert [kv is not None for kv in process.kv.values()] == [True]
    last = run(other)[-1].trajectory
    assert last is not None and last.token_ids.tolist() == list(range(11, 19))
    assert engine.find(ONE) is None and not engine.has_work()


def test_versions_are_held_one_at_a_time(engine: VllmEngine) -> None:
    with pytest.raises(UserError, match=r"holds \[0\]; retire one"):
        engine.load(1, Weights(1), verify=False)
    engine.submit(request((10,)))
    with pytest.raises(UserError, match="version 0 has 1 requests"):
        engine.retire(0)
    engine.park(ONE)
    engine.retire(0)
    engine.load(1, Weights(1), verify=False)
    with pytest.raises(UserError, match="version 0 is not resident"):
        engine.unpark(ONE)
    engine.reversion(ONE, 1)
    engine.unpark(ONE)
    last = run(engine)[-1].trajectory
    assert last is not None and last.version == 1
