"""The engine on a GPU: the same answers as `transformers` and as its own plain paths.

Run with `pytest tests/gpu/test_engine_gpu.py -m gpu` on a machine with a CUDA device and Triton.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import move
from dora_rl.model.directory import read_spec
from dora_rl.types import RequestId, SamplingParams, Trajectory
from tests.kit.places import ROOT
from tests.kit.random_adapters import merge, random_adapter
from tests.kit.tiny_models import VOCAB, save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

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


def make_engine(paths: list[Path], **options: object) -> Engine:
    engine = Engine(read_spec(paths[0]), EngineOptions(**(SMALL | options)))
    for version, path in enumerate(paths):
        engine.load(version, path)
    return engine


def finish_all(engine: Engine) -> dict[RequestId, Trajectory]:
    done: dict[RequestId, Trajectory] = {}
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                done[output.id] = output.trajectory
        engine.scheduler.pool.check()
    return done


def prompts(lengths: tuple[int, ...]) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


LENGTHS = (1, 5, 17, 40, 33, 64, 100, 3)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    made = {}

    def get(family: str, seed: int = 0):
        if (family, seed) not in made:
            path = tmp_path_factory.mktemp(f"{family}{seed}")
            made[family, seed] = (save_model(family, path, seed), path)
        return made[family, seed]

    return get


@torch.no_grad()
def check_against(model, trajectory: Trajectory, tolerance: float) -> None:
    prompt, response = trajectory.prompt_ids.tolist(), trajectory.token_ids.tolist()
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.tensor(response)[:, None]
    gap = logits.amax(-1) - logits.gather(1, chosen)[:, 0]
    assert gap.max() <= tolerance
    logprobs = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
    assert (logprobs - torch.tensor(trajectory.logprobs)).abs().max() < tolerance


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3-yarn", "qwen3-moe"])
@pytest.mark.parametrize(
    "options",
    [{}, {"cuda_graphs": False, "async_steps": False}, {"num_blocks": 24, "step_tokens_max": 40}],
    ids=["fast", "plain", "pre-empted"],
)
def test_greedy_equals_transformers(models, family: str, options: dict) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    pair = [models(family, seed) for seed in (0, 1)]
    engine = make_engine([path for _, path in pair], **options)
    for group, prompt in enumerate(prompts(LENGTHS)):
        for sample in range(2):
            engine.submit(Request(RequestId(group, sample), sample, prompt, GREEDY))
    done = finish_all(engine)
    assert len(done) == 2 * len(LENGTHS)
    for key, trajectory in done.items():
        check_against(pair[key.sample][0], trajectory, 1e-4)


@pytest.mark.parametrize("num_graphs", [0, 1])
def test_without_memory_for_graphs_it_decodes_the_same(models, num_graphs: int) -> None:
    """So many are captured, the next one finds no memory: the others serve, or none does."""
    model, path = models("qwen3")
    engine = make_engine([path])
    graphs: Any = engine.runner._drawing  # type: ignore[attr-defined]
    decode = graphs._pass

    def short_of_memory(*args: Any) -> Any:
        if torch.cuda.is_current_stream_capturing() and len(graphs._captured) >= num_graphs:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return decode(*args)

    graphs._pass = short_of_memory
    for group, prompt in enumerate(prompts(LENGTHS)):
        engine.submit(Request(RequestId(group, 0), 0, prompt, GREEDY))
    done = finish_all(engine)
    assert len(done) == len(LENGTHS) and len(graphs._captured) == num_graphs
    for trajectory in done.values():
        check_against(model, trajectory, 1e-4)


def test_bfloat16_is_close(models) -> None:
    model, path = models("qwen3")
    engine = make_engine([path], dtype="bfloat16")
    for group, prompt in enumerate(prompts(LENGTHS)):
        engine.submit(Request(RequestId(group, 0), 0, prompt, GREEDY))
    for trajectory in finish_all(engine).values():
        check_against(model, trajectory, 0.3)


KINDS = (
    SamplingParams(tokens_max=30, ignore_eos=True),
    SamplingParams(tokens_max=30, temperature=0.7, top_p=0.9, top_k=20, stop_ids=(5, 11)),
    SamplingParams(tokens_max=30, temperature=1.3, min_p=0.02, raw_logprobs=True),
)
PLAIN_KINDS = (
    KINDS[0],
    SamplingParams(tokens_max=50, temperature=0.7, stop_ids=tuple(range(0, VOCAB, 9))),
    SamplingParams(tokens_max=35, temperature=1.3, ignore_eos=True),
)


@pytest.mark.parametrize("kinds", [KINDS, PLAIN_KINDS], ids=["any", "bursts"])
def test_sampling_equals_the_cpu(models, kinds: tuple[SamplingParams, ...]) -> None:
    """Same random numbers, same filters: float32 engines draw the same tokens."""
    torch.backends.cuda.matmul.allow_tf32 = False
    _, path = models("qwen3")
    results = []
    for device in ("cuda", "cpu"):
        engine = make_engine([path], device=device)
        engine.runner.burst = 3 if device == "cuda" else 1
        for group, prompt in enumerate(prompts(LENGTHS)):
            engine.submit(Request(RequestId(group, 0), 0, prompt, kinds[group % 3], seed=3))
        calls = 0
        results.append({})
        while engine.has_work():
            calls += 1
            for output in engine.step():
                if output.trajectory is not None:
                    results[-1][output.id] = output.trajectory
        if device == "cuda":
            assert (engine.stats().steps > calls + 5) == (kinds is PLAIN_KINDS)
    same = sum(
        results[0][key].token_ids.tolist() == results[1][key].token_ids.tolist()
        for key in results[0]
    )
    assert same >= len(results[0]) - 1  # a draw within rounding of a boundary may differ
    for key, trajectory in results[0].items():
        other = results[1][key]
        if trajectory.token_ids.tolist() == other.token_ids.tolist():
            gaps = [abs(a - b) for a, b in zip(trajectory.logprobs, other.logprobs, strict=True)]
            assert max(gaps) < 1e-4


@pytest.mark.parametrize("one_pass", [True, False])
def test_three_versions(models, one_pass: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    trio = [models("qwen3", seed) for seed in range(3)]
    engine = make_engine([path for _, path in trio], one_pass=one_pass)
    for group, prompt in enumerate(prompts(LENGTHS)):
        for version in range(3):
            engine.submit(Request(RequestId(group, version), version, prompt, GREEDY))
    for key, trajectory in finish_all(engine).items():
        check_against(trio[key.sample][0], trajectory, 1e-4)


def test_migration_and_parking(models) -> None:
    model, path = models("qwen3")
    first, second = make_engine([path]), make_engine([path])
    for group, prompt in enumerate(prompts(LENGTHS)):
        first.submit(Request(RequestId(group, 0), 0, prompt, GREEDY))
    for _ in range(6):
        first.step()
    for group in range(0, len(LENGTHS), 2):
        move(first, second, RequestId(group, 0))
    first.park(RequestId(1, 0))
    first.step()
    first.unpark(RequestId(1, 0))
    done = finish_all(first) | finish_all(second)
    assert second.stats().prefill_tokens == 0
    assert len(done) == len(LENGTHS)
    for trajectory in done.values():
        check_against(model, trajectory, 1e-4)


@pytest.mark.parametrize("versions", [1, 3])
def test_rows_enter_with_their_embedding_and_position(versions: int) -> None:
    from dora_rl.engine.cuda.kernels.rows import enter

    embed = torch.randn(versions, 50, 96, device="cuda")
    last_token = torch.randint(0, 50, (20,), device="cuda")
    position = torch.arange(20, dtype=torch.int32, device="cuda").flip(0)
    slots = torch.randperm(20, device="cuda")[: 5 * versions]
    step = torch.tensor([4], dtype=torch.int32, device="cuda")
    x, positions = enter(slots, last_token, position, step, embed)
    assert int(step) == 5
    version = torch.arange(versions, device="cuda").repeat_interleave(5)
    assert torch.equal(x, embed[version, last_token[slots]])
    assert torch.equal(positions, position[slots])


@pytest.mark.parametrize("options", [{}, {"cuda_graphs": False, "async_steps": False}])
def test_lora_versions_equal_merged_weights(models, options: dict) -> None:
    """Three adapters in one batch, with and without graphs, against merged weights on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    _, path = models("qwen3")
    engine = Engine(read_spec(path), EngineOptions(**(SMALL | {"lora_rank": 4} | options)))
    engine.load_base(path)
    oracle = Engine(read_spec(path), EngineOptions(**(SMALL | {"device": "cpu"})))
    for version in range(3):
        adapter = random_adapter(path, version)
        engine.load(version, adapter)
        oracle.load(version, merge(path, adapter))
    done = []
    for each in (engine, oracle):
        for index, prompt in enumerate(prompts((5, 17, 40, 33, 9, 21, 3))):
            each.submit(Request(RequestId(index, 0), index % 3, prompt, GREEDY))
        done.append(finish_all(each))
    for key, trajectory in done[0].items():
        assert trajectory.token_ids.tolist() == done[1][key].token_ids.tolist()
        pairs = zip(trajectory.logprobs, done[1][key].logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 5e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "num_parts"), [(1, 1), (70, 4), (256, 1)])
def test_adapter_kernel(dtype, rows: int, num_parts: int) -> None:
    """Every row gets the low-rank part of its own slot."""
    from dora_rl.engine.cuda.kernels.adapters import adapt

    torch.manual_seed(0)
    width, rank, num_slots = 384, 48, 3
    parts = torch.randn(num_parts, rows, width + 256, device="cuda")
    parts = parts if num_parts > 1 else parts.to(dtype)
    up = torch.randn(num_slots, width, rank, device="cuda", dtype=dtype) * 0.1
    slots = torch.randint(0, num_slots, (rows,), device="cuda")
    whole = parts.float().sum(0)
    columns = width + slots[:, None] * rank + torch.arange(rank, device="cuda")
    down = whole.gather(1, columns).to(dtype).float()
    expected = whole[:, :width] + torch.einsum("mr,mnr->mn", down, up.float()[slots])
    gap = (adapt(parts, up, slots).float() - expected).abs().max()
    assert gap < (1e-3 if dtype == torch.float32 else 0.1)


@pytest.mark.usefixtures("hopper")
def test_kernels_in_cuda_c_give_the_log_probs_of_the_prompts_pass(monkeypatch) -> None:
    """150 rows decoded in captured graphs, by products that would be too small to be chosen; then
    their tokens are scored as prompts are, by cuBLAS and Triton."""
    from dora_rl.engine.cuda.kernels import paged, wide
    from dora_rl.engine.cuda.kernels.cuts import Cut, Tiles
    from dora_rl.model.random_weights import RandomWeights

    spec = dataclasses.replace(
        read_spec(ROOT / "recipes" / "models" / "tiny"),
        hidden=256,
        intermediate=512,
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        num_layers=2,
        dtype="bfloat16",
    )
    used: set[str] = set()

    def cut_of(rows: int, _weight: torch.Tensor, _processors: int, gate: bool = False):
        if not 129 <= rows <= 256:
            return None
        used.add("wide")
        return Cut(Tiles.WHOLE, 1) if gate else Cut(Tiles.HALF, 2)

    def attend(*arguments: Any) -> torch.Tensor:
        used.add("paged")
        return paged_attend(*arguments)

    paged_attend = paged.attend
    monkeypatch.setattr(wide, "cut_of", cut_of)
    monkeypatch.setattr(paged, "attend", attend)
    options = {"num_blocks": 600, "seqs_max": 160, "context_max": 200, "prefix_cache": False}
    engine = Engine(spec, EngineOptions(device="cuda", dtype="bfloat16", **options))
    engine.load(0, RandomWeights(spec, 0, device="cuda"))
    prompts = [[(7 * n + 3 * i) % spec.vocab for i in range(20 + n % 90)] for n in range(150)]

    def run(given: dict[RequestId, Trajectory] | None = None) -> dict[RequestId, Trajectory]:
        for group, prompt in enumerate(prompts):
            id_ = RequestId(group, 0)
            forced = tuple(given[id_].token_ids.tolist()) if given else ()
            sampling = SamplingParams(tokens_max=24, ignore_eos=True, forced_ids=forced)
            engine.submit(Request(id_, 0, tuple(prompt), sampling))
        return finish_all(engine)

    drawn = run()
    assert used == {"wide", "paged"}
    scored = run(drawn)
    for id_, trajectory in drawn.items():
        assert scored[id_].token_ids.tolist() == trajectory.token_ids.tolist()
        pairs = zip(scored[id_].logprobs, trajectory.logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 0.05
