"""Families with windows, norms, rotary positions or layers of their own, on a GPU: engine and
learner against transformers, and the engine's fast paths against what a prompt's pass computes.

pytest tests/gpu/test_families_gpu.py -m gpu
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import move
from dora_rl.model.directory import read_spec
from dora_rl.model.random_weights import RandomWeights
from dora_rl.model.spec import ModelSpec
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.model import load_policy
from dora_rl.types import RequestId, SamplingParams, Trajectory
from dora_rl.weights.store import SharedMemoryWeightStore
from tests.kit.engines import check_against, finish_all, random_prompts
from tests.kit.random_adapters import merge, random_adapter
from tests.kit.tiny_models import FAMILIES, VOCAB, save_model
from tests.kit.trainer_cases import make_groups

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NEW = [family for family in FAMILIES if not family.startswith(("llama", "qwen"))]
GREEDY = SamplingParams(tokens_max=40, temperature=0, ignore_eos=True)
SMALL = {
    "device": "cuda",
    "block_tokens": 16,
    "num_blocks": 256,
    "context_max": 256,
    "seqs_max": 32,
    "step_tokens_max": 256,
    "versions_max": 3,
}
PLAIN = {"cuda_graphs": False, "async_steps": False}
LENGTHS = (1, 5, 17, 40, 33, 64, 100, 3)
DOCUMENTS = [70, 3, 64, 129, 1, 50]


@pytest.fixture(autouse=True)
def _full_float32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    made: dict[tuple[str, int], tuple[PreTrainedModel, Path]] = {}

    def get(family: str, seed: int = 0) -> tuple[PreTrainedModel, Path]:
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp(f"{family}{seed}")
            made[family, seed] = (save_model(family, path, seed), path)
        return made[family, seed]

    return get


def engine_of(paths: list[Path], **options: object) -> Engine:
    engine = Engine(read_spec(paths[0]), EngineOptions(**(SMALL | options)))
    for version, path in enumerate(paths):
        engine.load(version, path)
    return engine


# -- the engine -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize(
    "options",
    [{}, PLAIN, {"num_blocks": 24, "step_tokens_max": 40}],
    ids=["fast", "plain", "pre-empted"],
)
def test_greedy_equals_transformers(models, family: str, options: dict) -> None:
    """Two versions in one batch, in float32."""
    pair = [models(family, seed) for seed in (0, 1)]
    engine = engine_of([path for _, path in pair], **options)
    for group, prompt in enumerate(random_prompts(LENGTHS)):
        for sample in range(2):
            engine.submit(Request(RequestId(group, sample), sample, prompt, GREEDY))
    done = finish_all(engine)
    assert len(done) == 2 * len(LENGTHS)
    for key, trajectory in done.items():
        check_against(pair[key.sample][0], trajectory)


@pytest.mark.parametrize("family", NEW)
def test_requests_move_with_their_keys(models, family: str) -> None:
    model, path = models(family)
    first, second = engine_of([path]), engine_of([path])
    for group, prompt in enumerate(random_prompts(LENGTHS)):
        first.submit(Request(RequestId(group, 0), 0, prompt, GREEDY))
    for _ in range(6):
        first.step()
    for group in range(0, len(LENGTHS), 2):
        move(first, second, RequestId(group, 0))
    done = finish_all(first) | finish_all(second)
    assert second.stats().prefill_tokens == 0 and len(done) == len(LENGTHS)
    for trajectory in done.values():
        check_against(model, trajectory)


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("options", [{}, PLAIN], ids=["fast", "plain"])
def test_adapters_equal_merged_weights(models, family: str, options: dict) -> None:
    """Three adapters in one batch, against merged weights on the CPU."""
    _, path = models(family)
    engine = Engine(read_spec(path), EngineOptions(**(SMALL | {"lora_rank": 4} | options)))
    engine.load_base(path)
    oracle = Engine(read_spec(path), EngineOptions(**(SMALL | {"device": "cpu"})))
    for version in range(3):
        adapter = random_adapter(path, version)
        engine.load(version, adapter)
        oracle.load(version, merge(path, adapter))
    done = []
    for each in (engine, oracle):
        for index, prompt in enumerate(random_prompts((5, 17, 40, 33, 9, 21, 3))):
            each.submit(Request(RequestId(index, 0), index % 3, prompt, GREEDY))
        done.append(finish_all(each))
    for key, trajectory in done[0].items():
        assert trajectory.token_ids.tolist() == done[1][key].token_ids.tolist()
        pairs = zip(trajectory.logprobs, done[1][key].logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 5e-3


def widened(spec: ModelSpec) -> ModelSpec:
    """Of a size that the kernels for half precision take: heads of 64 numbers."""
    rope = spec.rope
    num = rope.width(64) // 2 if rope.short_factors else 0
    factors = tuple(1.0 + i / 16 for i in range(num))
    return dataclasses.replace(
        spec,
        vocab=512,
        hidden=256,
        intermediate=512,
        head_dim=64,
        rope=dataclasses.replace(rope, short_factors=factors),
        dtype="bfloat16",
    )


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("num", [3, 24, 150])
def test_half_precision_agrees_with_float32_on_the_cpu(models, family: str, num: int) -> None:
    """Tokens that the GPU draws, in captured graphs, are scored by the GPU as parts of prompts and
    by the CPU in float32, which has the same rounded weights."""
    spec = widened(read_spec(models(family)[1]))
    weights = RandomWeights(spec, 0, dtype=torch.bfloat16)
    shared = {"num_blocks": 1500, "seqs_max": 160, "context_max": 200, "prefix_cache": False}
    engines = []
    for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32")):
        engine = Engine(spec, EngineOptions(device=device, dtype=dtype, **shared))
        engine.load(0, weights)
        engines.append(engine)
    prompts = [[(7 * n + 3 * i) % spec.vocab for i in range(20 + n % 90)] for n in range(num)]

    def run(engine: Engine, given: dict[RequestId, Trajectory], few: int) -> dict:
        for group, prompt in enumerate(prompts[:few]):
            key = RequestId(group, 0)
            forced = tuple(given[key].token_ids.tolist()) if given else ()
            params = SamplingParams(tokens_max=24, ignore_eos=True, forced_ids=forced)
            engine.submit(Request(key, 0, tuple(prompt), params))
        return finish_all(engine)

    drawn = run(engines[0], {}, num)
    for scored in (run(engines[0], drawn, num), run(engines[1], drawn, min(num, 12))):
        for key, trajectory in scored.items():
            assert trajectory.token_ids.tolist() == drawn[key].token_ids.tolist()
            pairs = zip(trajectory.logprobs, drawn[key].logprobs, strict=True)
            gaps = [abs(a - b) for a, b in pairs]
            assert max(gaps) < 0.1 and sum(gaps) / len(gaps) < 0.02


# -- the learner ----------------------------------------------------------------------------------


def scored(policy: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs of a pack and the gradient of their weighted sum, both on the CPU."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sum(DOCUMENTS),), generator=g).cuda()
    target = torch.randint(VOCAB, (len(ids),), generator=g).cuda()
    rows = torch.arange(len(ids), device="cuda")
    out = policy(ids, Layout(DOCUMENTS, ids.device), rows, target).logprobs_T
    (out * torch.linspace(-1, 1, len(out), device="cuda")).mean().backward()
    gradient = torch.cat([p.grad.reshape(-1) for p in policy.parameters()])  # type: ignore[union-attr]
    return out.detach().float().cpu(), gradient.float().cpu()


def of_transformers(model: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
    """The same, document by document."""
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (sum(DOCUMENTS),), generator=g)
    target = torch.randint(VOCAB, (len(ids),), generator=g)
    model.zero_grad()
    table = torch.cat(
        [model(part[None]).logits[0].log_softmax(-1) for part in ids.split(DOCUMENTS)]
    )
    out = table.gather(-1, target[:, None]).squeeze(-1)
    (out * torch.linspace(-1, 1, len(out))).mean().backward()
    return out.detach(), torch.tensor([float(p.grad.norm()) for p in model.parameters()])  # type: ignore[union-attr]


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("compile_layers", ["off", "on"])
def test_the_learner_equals_transformers(models, family: str, compile_layers: str) -> None:
    model, path = models(family)
    options = {"compute_dtype": "float32", "compile": compile_layers}
    policy = load_policy(path, TrainerConfig(device="cuda", **options))
    assert isinstance(policy, Decoder)
    got, _ = scored(policy)
    want, _ = of_transformers(model)
    assert (got - want).abs().max() < 1e-4
    mine = {n: float(p.grad.norm()) for n, p in policy.named_parameters()}  # type: ignore[union-attr]
    for name, p in model.named_parameters():
        # A row of the embedding that transformers takes for padding has no gradient there.
        if name.startswith("model.layers"):
            norm = float(p.grad.norm())  # type: ignore[union-attr]
            assert mine[name] == pytest.approx(norm, rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("attention", ["auto", "loop"])
def test_the_learner_in_half_precision_stays_near(models, family: str, attention: str) -> None:
    """Compiled, with flash attention where it is `auto`."""
    _, path = models(family)
    exact, gradient = scored(
        load_policy(path, TrainerConfig(device="cuda", compute_dtype="float32"))
    )
    policy = load_policy(path, TrainerConfig(device="cuda", attention=attention))
    assert policy.compute_dtype is torch.bfloat16
    got, rounded = scored(policy)
    assert (got - exact).abs().mean() < 0.1
    assert torch.isfinite(rounded).all()
    assert torch.nn.functional.cosine_similarity(rounded, gradient, 0) > 0.98


@pytest.mark.parametrize("family", NEW)
@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapters"])
def test_an_engine_takes_what_the_learner_publishes(
    models, family: str, rank: int, tmp_path: Path
) -> None:
    """In half precision on both sides, by checksum and canary."""
    _, path = models(family)
    trainer = TrainerConfig(lr=1e-3, device="cuda", pack_tokens=64, lora_rank=rank)
    learner = Learner(path, AlgorithmConfig(), trainer)
    learner.begin_step(0)
    learner.feed(make_groups(0, 2))
    learner.finish_step()
    store = SharedMemoryWeightStore(tmp_path / "store")
    learner.publish(store, 1).result()
    options = SMALL | {"dtype": "bfloat16", "lora_rank": rank}
    engine = Engine(read_spec(path), EngineOptions(**options))
    if rank:
        engine.load_base(path, verify=False)
    engine.load(1, store.open(1))
    assert 1 in engine.versions()
