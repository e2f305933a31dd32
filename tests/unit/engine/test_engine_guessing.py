"""Bursts in which the device guesses by itself: nothing else is said, nothing is lost, and no block
stays behind. The device is the CPU here (`guessing_runner.py`); for a GPU see `tests/gpu`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.runner import make_runner
from dora_rl.engine.sequence import Output, Request
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.transfer import move
from dora_rl.model.directory import read_spec
from dora_rl.types import RequestId, SamplingParams, Trajectory
from tests.kit.engines import Saved, random_prompts
from tests.unit.engine.guessing_runner import GuessingRunner

OPTIONS: dict[str, Any] = {
    "block_tokens": 16,
    "num_blocks": 60,
    "context_max": 112,
    "seqs_max": 6,
    "versions_max": 2,
    "speculation": "off",
}
PROMPTS = random_prompts((9, 20, 31, 40, 17, 33))
PLAIN = SamplingParams(tokens_max=60, ignore_eos=True)
STOPS = SamplingParams(tokens_max=60, stop_ids=tuple(range(0, 90, 9)))
WORDS = SamplingParams(tokens_max=40, ignore_eos=True, stop_strings=("A", "BC", "!#"))
FILTERED = SamplingParams(tokens_max=30, top_k=9, raw_logprobs=True, ignore_eos=True)
Told = dict[RequestId, Trajectory]


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def requests_of(params: SamplingParams, versions: int = 1) -> list[Request]:
    return [
        Request(RequestId(group, sample), group % versions, prompt, params, seed=3)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]


def make(path: Path, plain: Told | None, *, versions: int = 2, **options: Any) -> Engine:
    """With guesses where it is said what would be drawn."""
    fixed: dict[str, Any] = {"fixed": options.pop("fixed", 6.0)}
    given = EngineOptions(**(OPTIONS | options))
    runner: Any = make_runner(read_spec(path), given)
    if plain is not None:

        def truth(seq: Seq) -> list[int]:
            found = plain.get(seq.id)
            return [*seq.request.prompt_ids, *(found.token_ids.tolist() if found else ())]

        runner = GuessingRunner(runner, 4, 5, truth, **fixed)
    engine = Engine(read_spec(path), given, decode=text_of, runner=runner)
    for version in range(versions):
        engine.load(version, path)
    return engine


def finish(engine: Engine, requests: Sequence[Request] = ()) -> dict[RequestId, list[Output]]:
    found: dict[RequestId, list[Output]] = {}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.id, []).append(output)
        engine.scheduler.pool.check()
    return found


def ends(found: dict[RequestId, list[Output]]) -> Told:
    return {rid: outs[-1].trajectory for rid, outs in found.items() if outs[-1].trajectory}


def check_same(plain: dict[RequestId, list[Output]], found: dict[RequestId, list[Output]]) -> None:
    assert plain.keys() == found.keys()
    for rid, outputs in found.items():
        one, other = plain[rid][-1].trajectory, outputs[-1].trajectory
        assert one is not None and other is not None
        assert one == other, rid
        told = [token for output in outputs for token in output.token_ids]
        assert told == other.token_ids.tolist()


@pytest.mark.parametrize("params", [PLAIN, STOPS, WORDS], ids=["length", "stop ids", "strings"])
@pytest.mark.parametrize("num_blocks", [60, 22])
def test_the_same_is_said(saved: Saved, params: SamplingParams, num_blocks: int) -> None:
    """Two versions, more requests than slots, and a pool that is short."""
    path, requests = saved("qwen3")[1], requests_of(params, 2)
    plain = finish(make(path, None), requests)
    engine = make(path, ends(plain), num_blocks=num_blocks)
    check_same(plain, finish(engine, requests))
    runner: Any = engine.runner
    drafts = engine.stats().drafts
    assert runner.num_guessed > 2 and runner.rows_most > 4
    assert all(number > accepted > 5 for number, accepted in drafts.values()) and len(drafts) == 2
    assert not engine.stats().used_blocks and not engine.scheduler.num_host_blocks
    assert len(engine.scheduler.free_slots) == OPTIONS["seqs_max"]


def test_filters_are_drawn_without_guesses(saved: Saved) -> None:
    path = saved("qwen3")[1]
    requests = requests_of(FILTERED)
    plain = finish(make(path, None), requests)
    engine = make(path, ends(plain))
    check_same(plain, finish(engine, requests))
    assert not engine.stats().drafts


def test_what_is_accepted_saves_steps(saved: Saved) -> None:
    path = saved("qwen3")[1]
    requests = requests_of(PLAIN)[:4]
    plain = finish(make(path, None), requests)
    engine = make(path, ends(plain))
    check_same(plain, finish(engine, requests))
    number, accepted = engine.stats().drafts[0]
    made = sum(len(t.token_ids) for t in ends(plain).values())
    assert accepted < made and number > accepted
    assert engine.stats().decode_tokens == made


def test_requests_move_park_and_leave_between_bursts(saved: Saved) -> None:
    path, requests = saved("qwen3")[1], requests_of(PLAIN)[:6]
    plain = finish(make(path, None), requests)
    first, second = make(path, ends(plain)), make(path, ends(plain))
    found: dict[RequestId, list[Output]] = {}

    def step(engine: Engine) -> None:
        for output in engine.step():
            found.setdefault(output.id, []).append(output)

    for request in requests:
        first.submit(request)
    for turn in range(3):
        step(first)
        step(second)
        here = [seq.id for seq in first.sequences()]
        move(first, second, here[turn])
    first.park(RequestId(0, 0)) if first.find(RequestId(0, 0)) else None
    parked = [seq.id for seq in first.sequences() if first.is_parked(seq.id)]
    step(first)
    for rid in parked:
        first.unpark(rid)
    for engine in (first, second):
        while engine.has_work():
            step(engine)
        assert not engine.stats().used_blocks
    check_same(plain, found)


def test_a_session_goes_on_behind_what_it_said(saved: Saved) -> None:
    """What the device drew behind a turn's end is not part of the next one."""
    path = saved("qwen3")[1]
    turns = ((5, 6, 7), (1, 2))

    def talk(engine: Engine) -> Trajectory:
        request = replace(requests_of(STOPS)[3], keep=True)
        engine.submit(request)
        trajectory = None
        for ids in (*turns, None):
            while engine.has_work():
                for output in engine.step():
                    trajectory = output.trajectory or trajectory
            if ids is not None:
                engine.extend(request.id, ids, replace(STOPS, tokens_max=20))
        assert trajectory is not None
        return trajectory

    plain = talk(make(path, None))
    other = talk(make(path, {plain.request: plain}))
    assert plain == other and plain.turns == 3


def test_it_decides_by_itself_and_says_the_same(saved: Saved) -> None:
    path, requests = saved("qwen3")[1], requests_of(PLAIN, 2)
    plain = finish(make(path, None), requests)
    engine = make(path, ends(plain), fixed=0.0)
    check_same(plain, finish(engine, requests))


def test_memory_that_runs_out_loses_nothing(saved: Saved) -> None:
    path, requests = saved("qwen3")[1], requests_of(PLAIN)
    plain = finish(make(path, None), requests)
    engine = make(path, ends(plain), step_tokens_max=256)
    runner: Any = engine.runner
    launch, calls = runner.launch, iter(range(10_000))

    def short(plan: Any, slots: Any) -> Any:
        if next(calls) in (4, 9):
            raise RuntimeError("CUDA out of memory")
        return launch(plan, slots)

    runner.launch = short
    check_same(plain, finish(engine, requests))
    assert len(engine.notes) == 2
