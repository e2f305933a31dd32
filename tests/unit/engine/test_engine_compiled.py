"""The compiled kernels against torch: products, scores and draws; rows against themselves."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dora_rl.engine.cpu import compiled
from dora_rl.engine.cpu.compiled import CompiledRunner, usable
from dora_rl.engine.cpu.runner import TorchRunner
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.runner import make_runner
from dora_rl.engine.tensors import sampler
from dora_rl.model.directory import HfDirectory, read_spec
from tests.kit.engines import SMALL, Saved, random_prompts
from tests.kit.tiny_models import FAMILIES

NARROW = (("-mavx2", "-mfma"),)  # eight lanes, for machines without AVX-512
DENSE = [family for family in FAMILIES if "moe" not in family]

needs_compiler = pytest.mark.skipif(compiled.load_kernels() is None, reason="no C compiler")


def kernels_of(flags: str) -> compiled.Kernels:
    if flags == "native":
        kernels = compiled.load_kernels()
        assert kernels is not None
        return kernels
    path = compiled.build(NARROW)
    if path is None:
        pytest.skip("not an x86-64 machine")
    return compiled.Kernels(path)


@needs_compiler
@pytest.mark.parametrize("flags", ["native", "narrow"])
def test_a_product_equals_torch_and_its_rows_stand_alone(flags: str) -> None:
    kernels = kernels_of(flags)
    generator = torch.Generator().manual_seed(3)
    for num_out, num_in, rows in (
        (16, 32, 5),
        (97, 64, 31),
        (160, 96, 13),
        (33, 16, 1),
        (7, 48, 3),
    ):
        x = torch.randn(rows, num_in, generator=generator)
        weight = torch.randn(num_out, num_in, generator=generator)
        packed = weight.clone()
        kernels.pack(packed)
        got = kernels.linear(x, packed)
        torch.testing.assert_close(got, x @ weight.t(), atol=2e-5, rtol=1e-5)
        assert torch.equal(kernels.linear(x, packed, threads=2), got)
        for row in range(rows):
            alone = kernels.linear(x[row : row + 1].contiguous(), packed)
            assert torch.equal(alone[0], got[row])


@needs_compiler
@pytest.mark.parametrize("flags", ["native", "narrow"])
@pytest.mark.parametrize("family", DENSE)
def test_scores_equal_those_of_torch(family: str, flags: str, saved: Saved) -> None:
    _, path = saved(family)
    spec, options = read_spec(path), EngineOptions(**SMALL, step_tokens_max=64)
    runners = (CompiledRunner(spec, options, kernels_of(flags)), TorchRunner(spec, options))
    for runner in runners:
        for _ in runner.load(1, HfDirectory(path), str(path)):
            pass
    for ids in random_prompts((2, 17, 64, 200)):
        ours, theirs = (torch.tensor(runner.score(1, ids)) for runner in runners)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@needs_compiler
def test_threads_change_nothing(saved: Saved) -> None:
    _, path = saved("qwen3")
    spec, options = read_spec(path), EngineOptions(**SMALL, step_tokens_max=64)
    kernels = usable(spec, options)
    assert kernels is not None
    runner = CompiledRunner(spec, options, kernels)
    for _ in runner.load(0, HfDirectory(path), str(path)):
        pass
    ids = random_prompts((90,))[0]
    one = runner.score(0, ids)
    torch.set_num_threads(2)
    assert runner.score(0, ids) == one


def draw(logits: torch.Tensor, heat: float, forced: int = -1) -> tuple[list[int], list, list]:
    kernels = compiled.load_kernels()
    assert kernels is not None
    rows, vocab = logits.shape
    keys, positions = np.arange(rows) * 7919, np.arange(rows)
    temperature = np.full(rows, heat, np.float32)
    wanted = np.full(rows, forced)
    token, logprob = np.empty(rows, np.int64), np.empty(rows, np.float32)
    raw, scratch = np.empty(rows, np.float32), np.empty(vocab + 64, np.float32)
    running = np.empty(vocab // 64 + 1)
    arrays = (keys, positions, temperature, wanted, token, logprob, raw, scratch, running)
    kernels.draw(logits.data_ptr(), rows, vocab, *(array.ctypes.data for array in arrays))
    return token.tolist(), logprob.tolist(), raw.tolist()


def sampled(logits: torch.Tensor, heat: float, forced: int = -1) -> sampler.Drawn:
    rows = len(logits)
    return sampler.sample(
        logits,
        sampler.SamplingRows(
            keys=torch.arange(rows) * 7919,
            positions=torch.arange(rows),
            temperature=torch.full((rows,), heat),
            top_k=torch.zeros(rows, dtype=torch.int64),
            top_p=torch.ones(rows),
            min_p=torch.zeros(rows),
            forced=torch.full((rows,), forced),
            scaled=heat != 1.0,
            filtered=False,
            raw=True,
            top_n=0,
        ),
    )


@needs_compiler
@pytest.mark.parametrize("vocab", [16, 97, 1000])
@pytest.mark.parametrize(("heat", "forced"), [(1.0, -1), (0.6, -1), (0.0, -1), (1.3, 5)])
def test_draws_equal_those_of_torch(vocab: int, heat: float, forced: int) -> None:
    logits = torch.randn(400, vocab, generator=torch.Generator().manual_seed(vocab)) * 3
    tokens, logprobs, raw = draw(logits, heat, forced)
    want = sampled(logits, heat, forced)
    equal = [a == b for a, b in zip(tokens, want.token_ids.tolist(), strict=True)]
    assert sum(equal) >= 399  # a uniform number may fall between two roundings of the same sum
    same = torch.tensor(equal)
    torch.testing.assert_close(torch.tensor(logprobs)[same], want.logprobs[same], atol=3e-6, rtol=0)
    assert want.raw_logprobs is not None
    torch.testing.assert_close(torch.tensor(raw)[same], want.raw_logprobs[same], atol=3e-6, rtol=0)


@needs_compiler
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    logits = torch.zeros(3, 97)
    logits[1, 40] = bad
    tokens, logprobs, _ = draw(logits, 1.0)
    assert np.isnan(logprobs[1]) and np.isfinite(logprobs[0]) and np.isfinite(logprobs[2])
    assert all(0 <= token < 97 for token in tokens)


def test_without_a_compiler_torch_computes(monkeypatch: pytest.MonkeyPatch, saved: Saved) -> None:
    _, path = saved("llama")
    spec, options = read_spec(path), EngineOptions(**SMALL, step_tokens_max=64)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    compiled.load_kernels.cache_clear()
    try:
        assert isinstance(make_runner(spec, options), TorchRunner)
    finally:
        compiled.load_kernels.cache_clear()


@needs_compiler
def test_models_that_the_kernels_do_not_know_go_to_torch(saved: Saved) -> None:
    small = {**SMALL, "step_tokens_max": 64}
    spec = read_spec(saved("llama")[1])
    assert isinstance(make_runner(spec, EngineOptions(**small)), CompiledRunner)
    for options in ({"compiled_kernels": False}, {"dtype": "bfloat16"}, {"lora_rank": 4}):
        assert isinstance(make_runner(spec, EngineOptions(**small, **options)), TorchRunner)
    sparse = read_spec(saved("qwen3-moe")[1])
    assert isinstance(make_runner(sparse, EngineOptions(**small)), TorchRunner)
