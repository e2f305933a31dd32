"""What a training run does with an engine that guesses, on a GPU: versions are loaded by a thread
while graphs are captured and bursts fly, batches of all sizes, more requests than rows for guesses.

Run with `pytest tests/gpu/test_guesses_run_gpu.py -m gpu`, for addresses under `compute-sanitizer`.
What the host does is tested without a GPU in `test_guesses_story.py`.
"""

from __future__ import annotations

import dataclasses
import random
from collections import Counter

import numpy as np
import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.model.random_weights import RandomWeights
from dora_rl.types import RequestId, SamplingParams, Trajectory, Version
from tests.kit.engines import finish_all
from tests.kit.places import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
VERSIONS, GROUPS_EACH, NUM_SAMPLES = 6, 30, 8


class Run:
    """Each version answers some groups; the next one is loaded while they are decoded."""

    def __init__(self) -> None:
        tiny = read_spec(ROOT / "recipes" / "models" / "tiny")
        self.spec = dataclasses.replace(
            tiny,
            hidden=512,
            intermediate=1024,
            num_heads=12,
            num_kv_heads=2,
            head_dim=128,
            num_layers=3,
            dtype="bfloat16",
        )
        options = EngineOptions(
            device="cuda",
            dtype="bfloat16",
            num_blocks=4000,
            seqs_max=384,
            context_max=640,
            step_tokens_max=4096,
            block_tokens=64,
            versions_max=3,
            speculation="on",
        )
        self.engine, self.draw = Engine(self.spec, options), random.Random(5)
        self.done: dict[RequestId, Trajectory] = {}
        self.requests: dict[RequestId, Request] = {}

    def weights(self, version: Version) -> RandomWeights:
        return RandomWeights(self.spec, version, device="cuda")

    def request(self, version: Version, group: int, sample: int) -> Request:
        """Half of the groups are greedy: text of random weights repeats itself. In the others, each
        second sample draws as the one before it."""
        draw = random.Random(1000 * version + group)
        prompt = tuple(draw.randrange(self.spec.vocab) for _ in range(draw.randint(3, 150)))
        length = draw.choice((4, 60, 200, 400)) - 3 * (sample % 2)
        params = SamplingParams(
            tokens_max=max(1, length), temperature=float(group % 2), ignore_eos=True
        )
        rid = RequestId(1000 * version + group, sample)
        stream = RequestId(rid.group, sample // 2)
        return Request(rid, version, prompt, params, seed=3, stream=stream)

    def step(self) -> None:
        for output in self.engine.step():
            if output.trajectory is not None:
                self.done[output.id] = output.trajectory

    def answer(self, version: Version) -> None:
        for group in range(GROUPS_EACH):
            for sample in range(NUM_SAMPLES):
                request = self.request(version, group, sample)
                self.requests[request.id] = request
                self.engine.submit(request)
            self.step()

    def load(self, version: Version) -> None:
        for _ in self.engine.load_layers(version, self.weights(version)):
            self.step()

    def retire_unused(self) -> None:
        self.engine.drain()
        used = {seq.version for seq in self.engine.sequences()}
        for version in self.engine.versions():
            if version not in used:
                self.engine.retire(version)


@pytest.mark.parametrize("fixed", [3.0, 0.0])
def test_versions_come_and_go_while_it_guesses(fixed: float) -> None:
    torch.cuda.memory._set_allocator_settings("expandable_segments:True")  # as a worker does
    run = Run()
    engine = run.engine
    assert engine.guessing is not None
    engine.guessing.fixed = fixed
    engine.load(0, run.weights(0))
    for version in range(VERSIONS):
        run.answer(version)
        while len(engine.versions()) == 3:
            run.step()
            run.retire_unused()
        if version + 1 < VERSIONS:
            run.load(version + 1)
    while engine.has_work():
        run.step()
        engine.scheduler.pool.check()
    torch.cuda.synchronize()
    assert len(run.done) == VERSIONS * GROUPS_EACH * NUM_SAMPLES
    drafts = engine.stats().drafts
    assert len(drafts) == VERSIONS and min(accepted for _, accepted in drafts.values()) > 50, drafts
    assert not engine.stats().used_blocks
    check_scores(run)


def check_scores(run: Run) -> None:
    """Log-probs of what the last version has said are those of the prompt's pass."""
    version = VERSIONS - 1
    mine = [rid for rid in run.done if run.requests[rid].version == version][:64]
    for rid in mine:
        request, ids = run.requests[rid], tuple(run.done[rid].token_ids.tolist())
        params = dataclasses.replace(request.params, forced_ids=ids)
        run.engine.submit(dataclasses.replace(request, params=params))
    scored = finish_all(run.engine)
    gaps = [np.abs(run.done[rid].logprobs - scored[rid].logprobs).max() for rid in mine]
    assert max(gaps) < 0.08, Counter(np.round(gaps, 2).tolist())
