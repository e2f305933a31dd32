"""Long random stories of an engine that guesses: what a run does with it, at many sizes. Every
address that a kernel would use is looked at (`story_runner.py`), and every response is the one that
was known beforehand. Needs no GPU; Triton is imported, not used."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.types import Finish, RequestId, SamplingParams
from tests.kit.story_runner import STOP, VOCAB, StoryRunner, said
from tests.kit.tiny_models import save_model

OPTIONS: dict[str, Any] = {
    "block_tokens": 16,
    "num_blocks": 400,
    "context_max": 160,
    "seqs_max": 40,
    "step_tokens_max": 128,
    "versions_max": 3,
    "speculation": "on",
}


class Story:
    """Versions come and go, groups are submitted, and some are put aside or dropped."""

    def __init__(self, path: Path, seed: int, **options: Any) -> None:
        self.path, self.draw = path, random.Random(seed)
        given = EngineOptions(**(OPTIONS | options))
        self.runner = StoryRunner(read_spec(path), given)
        self.engine = Engine(read_spec(path), given, runner=self.runner)
        self.requests: dict[RequestId, Request] = {}
        self.live: dict[RequestId, int] = {}  # by version
        self.num_ended = self.group = self.version = 0
        self.engine.load(0, path)

    def turn(self) -> None:
        draw = self.draw
        if len(self.live) < 60 and draw.random() < 0.3:
            self.submit()
        if draw.random() < 0.02 and len(self.engine.versions()) < 3:
            self.version += 1
            self.engine.load(self.version, self.path)
        self.retire()
        if self.live and draw.random() < 0.03:
            rid = draw.choice(list(self.live))
            if draw.random() < 0.5:
                self.engine.drain()
                if self.engine.find(rid) is not None:
                    self.engine.park(rid) if not self.engine.is_parked(rid) else None
            elif self.engine.abort(rid):
                del self.live[rid]
        self.wake(0.2)
        self.step()

    def wake(self, chance: float) -> None:
        for rid in list(self.live):
            if self.engine.is_parked(rid) and self.draw.random() < chance:
                self.engine.unpark(rid)

    def submit(self) -> None:
        draw = self.draw
        self.group += 1
        prompt = tuple(draw.randrange(1, VOCAB) for _ in range(draw.choice((1, 7, 16, 32, 45))))
        params = SamplingParams(
            tokens_max=draw.choice((1, 5, 60, 100, 115)), stop_ids=(STOP,), ignore_eos=True
        )
        for sample in range(draw.choice((1, 8, 20))):
            rid = RequestId(self.group, sample)
            version = draw.choice(self.engine.versions())
            request = Request(rid, version, prompt, params, seed=3)
            self.requests[rid], self.live[rid] = request, version
            self.engine.submit(request)

    def retire(self) -> None:
        versions = self.engine.versions()
        self_used = {seq.version for seq in self.engine.sequences()}
        if len(versions) > 1 and versions[0] not in self_used and self.draw.random() < 0.3:
            self.engine.retire(versions[0])

    def step(self) -> None:
        for output in self.engine.step():
            found = output.trajectory
            if found is None or found.finish not in (Finish.STOP, Finish.LENGTH):
                assert found is None, found
                continue
            request = self.requests[output.id]
            expected = said(request, request.version)
            assert found.token_ids.tolist() == expected, (output.id, request.version)
            assert found.logprobs.tolist() == [-token / 8 for token in expected]
            if self.live.pop(output.id, None) is not None:
                self.num_ended += 1
        self.engine.scheduler.pool.check()

    def finish(self) -> None:
        while self.live:
            self.wake(1.0)
            assert self.engine.has_work()
            self.step()
        self.engine.drain()
        assert not self.engine.stats().used_blocks
        assert len(self.engine.scheduler.free_slots) == self.engine.options.seqs_max


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("model")
    save_model("qwen3", where, 0)
    return where


@pytest.mark.parametrize("fixed", [4.0, 1.5, 0.0])
@pytest.mark.parametrize(
    "options",
    [{}, {"num_blocks": 90, "seqs_max": 12}, {"block_tokens": 64, "num_blocks": 130}],
    ids=["room", "short", "large blocks"],
)
def test_every_story_ends_as_it_must(path: Path, fixed: float, options: dict[str, Any]) -> None:
    story = Story(path, 7, **options)
    assert story.engine.guessing is not None
    story.engine.guessing.fixed = fixed
    for _ in range(150):
        story.turn()
    story.finish()
    assert story.num_ended > 30
    assert fixed == 0 or (story.runner.num_right > 100 and story.runner.rows_most > 5)


@pytest.mark.parametrize("seed", [1, 2])
def test_memory_that_runs_out_in_the_middle(path: Path, seed: int) -> None:
    """Between two passes of a burst: what was read and what ran are told apart."""
    story = Story(path, seed)
    assert story.engine.guessing is not None
    story.engine.guessing.fixed = 3.0
    story.runner.failing = 0.01
    for _ in range(200):
        story.turn()
        story.engine.scheduler.step_tokens_max = 128  # or the next steps would be ever smaller
    story.runner.failing = 0.0
    story.finish()
    assert story.engine.notes and story.runner.num_right > 30
