"""Several decode steps in one call, read late: the same answers as one step at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from ahead_runner import AheadRunner
from test_engine_greedy import finish_all, random_prompts
from transformers import PreTrainedModel

from dora_rl.engine.backend import make_runner
from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, read_journal
from dora_rl.engine.models import read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.types import Finish, RequestId, SamplingParams

Saved = Callable[..., tuple[PreTrainedModel, Path]]
OPTIONS = EngineOptions(block_tokens=16, num_blocks=32, context_max=64, seqs_max=5)
PROMPTS = random_prompts((9, 20, 31, 40))
GREEDY = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True)


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def make(path: Path, burst: int, journal: Journal | None = None) -> Engine:
    """One step at a time, or in bursts."""
    spec = read_spec(path)
    runner = make_runner(spec, OPTIONS)
    ahead = AheadRunner(runner, burst) if burst > 1 else runner
    engine = Engine(spec, OPTIONS, decode=text_of, journal=journal, runner=ahead)
    engine.load(0, path)
    return engine


@pytest.fixture
def path(saved: Saved) -> Path:
    return saved("qwen3")[1]


def finish(engine: Engine, params: SamplingParams):
    for group, prompt in enumerate(PROMPTS):
        engine.submit(Request(RequestId(group, 0), 0, prompt, params))
    return finish_all(engine)


def test_a_stop_string_ends_a_response_inside_a_burst(path: Path) -> None:
    free = finish(make(path, 1), GREEDY)
    strings = tuple(text_of(free[RequestId(g, 0)].token_ids[g + 5 : g + 7]) for g in range(4))
    params = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True, stop_strings=strings)
    engine = make(path, 6)
    found = finish(engine, params)
    assert found == finish(make(path, 1), params)
    assert all(t.finish is Finish.STOP for t in found.values())
    assert engine.runner.num_bursts > 1


def test_a_burst_runs_past_no_context(path: Path) -> None:
    """One request could go on for long; another is near the end of the context."""
    engine = make(path, 50)
    launch, ends = engine.runner.launch, []

    def watch(plan, slots):
        ends.extend(span.start + plan.repeat for span in plan.spans if plan.repeat > 1)
        return launch(plan, slots)

    engine.runner.launch = watch
    engine.submit(Request(RequestId(9, 0), 0, PROMPTS[0], replace(GREEDY, tokens_max=50)))
    done = finish(engine, GREEDY)
    del done[RequestId(9, 0)]
    assert done == finish(make(path, 1), GREEDY)
    assert max(ends) == 64


def test_steps_of_a_burst_are_counted_and_journalled(path: Path, tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j", every=6, durable=False)
    engine = make(path, 6, journal)
    engine.submit(Request(RequestId(0, 0), 0, PROMPTS[0], GREEDY))
    for _ in range(4):  # the prompt, then bursts, each read one call later
        engine.step()
    assert engine.stats().steps == 1 + 3 * 6
    (saved,) = read_journal(tmp_path / "j")
    assert len(saved.resume_ids) == 1 + 2 * 6
