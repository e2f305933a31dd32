"""On a GPU the engine records the same routing as on the CPU: what the model's routers choose.

Run with `pytest tests/gpu/test_routing_gpu.py -m gpu` on a machine with a CUDA device and Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.config import TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import begin_import, chunk_bytes, chunk_from_bytes
from dora_rl.model.directory import read_spec
from dora_rl.trainer.documents import documents_of
from dora_rl.trainer.policy.model import load_policy
from dora_rl.trainer.scoring import score
from dora_rl.types import Group, RequestId, SamplingParams, Trajectory
from tests.kit.engines import finish_all, random_prompts
from tests.kit.tiny_models import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

PARAMS = SamplingParams(tokens_max=40, ignore_eos=True)
SMALL = {
    "device": "cuda",
    "block_tokens": 16,
    "num_blocks": 256,
    "context_max": 256,
    "seqs_max": 32,
    "step_tokens_max": 256,
    "versions_max": 2,
    "record_routing": True,
}
LENGTHS = (1, 16, 17, 40, 64)


def make_engine(paths: list[Path], **options: Any) -> Engine:
    engine = Engine(read_spec(paths[0]), EngineOptions(**(SMALL | options)))
    for version, path in enumerate(paths):
        engine.load(version, path)
    return engine


@torch.no_grad()
def check_routing(model: Any, found: Trajectory) -> None:
    """Float32: the same choices, ties aside, of all tokens but the newest."""
    ids = [*found.prompt_ids.tolist(), *found.token_ids.tolist()]
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    expected = torch.stack([layer.softmax(-1).topk(2).indices for layer in logits], 1).numpy()[:-1]
    assert found.expert_ids is not None
    recorded = found.expert_ids[:-1]
    assert (recorded != 255).all()
    agree = (np.sort(recorded, -1) == np.sort(expected, -1)).all(-1)
    assert agree.mean() > 0.995, np.argwhere(~agree)
    assert (found.expert_ids[-1] == 255).all()


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-moe-mixed"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"cuda_graphs": False, "async_steps": False},
        {"num_blocks": 24, "step_tokens_max": 40, "host_blocks_max": 64},
        {"speculation": "on"},
    ],
    ids=["fast", "plain", "pre-empted", "drafts"],
)
def test_it_is_what_the_models_routers_choose(
    tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    paths = [tmp_path / str(seed) for seed in range(2)]
    models = [save_model(family, path, seed) for seed, path in enumerate(paths)]
    engine = make_engine(paths, **options)
    for group, prompt in enumerate(random_prompts(LENGTHS)):
        for version in range(2):
            engine.submit(Request(RequestId(group, version), version, prompt, PARAMS, seed=1))
    done = finish_all(engine)
    assert len(done) == 2 * len(LENGTHS)
    for rid, found in done.items():
        check_routing(models[rid.sample], found)


def test_the_tokens_are_the_same_with_the_record_and_it_moves(tmp_path: Path) -> None:
    model = save_model("qwen3-moe", tmp_path)
    plain = make_engine([tmp_path], record_routing=False)
    source, target = make_engine([tmp_path]), make_engine([tmp_path])
    (prompt,) = random_prompts((40,))
    for engine in (plain, source):
        engine.submit(Request(RequestId(0, 0), 0, prompt, PARAMS, seed=1))
    (expected,) = finish_all(plain).values()
    for _ in range(9):
        source.step()
    export = source.export(RequestId(0, 0))
    arrival = begin_import(target, export.meta)
    for chunk in export.chunks():
        arrival.write(chunk_from_bytes(target, bytes(chunk_bytes(chunk))))
    arrival.commit()
    export.done()
    (found,) = finish_all(target).values()
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    check_routing(model, found)


@pytest.mark.parametrize("compiled", ["off", "on"])
def test_a_learner_in_bfloat16_goes_the_same_ways(tmp_path: Path, compiled: str) -> None:
    save_model("qwen3-moe", tmp_path)
    engine = make_engine([tmp_path], dtype="bfloat16")
    for group, prompt in enumerate(random_prompts((20,) * 12)):
        engine.submit(Request(RequestId(group, 0), 0, prompt, PARAMS))
    groups = [
        Group(found.request.group, 0, found.prompt_ids, (found,))
        for found in finish_all(engine).values()
    ]
    asked = [d for group in groups for d in documents_of(group, group.samples[0], 0.0)]
    gaps = {}
    for how in ("on", "off"):
        options = TrainerConfig(device="cuda", router_replay=how, compile=compiled)
        scored = score(load_policy(tmp_path, options), asked, 1.0, 4096)
        pairs = zip(scored, asked, strict=True)
        gaps[how] = torch.cat([(ours - d.rollout_logprobs).abs() for ours, d in pairs])
    assert gaps["on"].max() < 0.1 and gaps["off"].max() > 2 * gaps["on"].max()
    assert gaps["on"].mean() < gaps["off"].mean()
