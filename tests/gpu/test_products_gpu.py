"""Products of few rows with large matrices on a GPU: plain, streamed, and the output head.

Run with `pytest tests/gpu/test_products_gpu.py -m gpu` on a machine with a CUDA device and Triton.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _operands(rows: int, versions: int, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x and weights of a product whose values are about one, bfloat16."""
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(versions * rows, k, generator=generator, device="cuda").bfloat16()
    weight = torch.randn(versions, n, k, generator=generator, device="cuda").bfloat16() * k**-0.5
    return x, weight


def _product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """[version * row, N] in float32."""
    versions, n, k = weight.shape
    return torch.bmm(x.view(versions, -1, k).float(), weight.float().transpose(1, 2)).view(-1, n)


@pytest.mark.parametrize("rows", [1, 16, 33, 128])
@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("splits", [1, 4])
def test_skinny_product(rows: int, versions: int, splits: int) -> None:
    from dora_rl.engine.cuda.kernels.skinny import Tiles, multiply

    n, k = 384, 1024
    x, weight = _operands(rows, versions, n, k)
    want = _product(x, weight)
    got = multiply(x, weight, Tiles(64, 128, splits, 4))
    assert got.shape == (splits, versions * rows, n)
    assert (got.sum(0) - want).abs().max() < 1e-3
    gated = multiply(x, weight, Tiles(64, 128, 1, 3), gate=True)
    expected = torch.nn.functional.silu(want[:, : n // 2]) * want[:, n // 2 :]
    assert (gated.float() - expected).abs().max() < 0.1


@pytest.mark.parametrize("rows", [1, 16, 33, 64])
@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize(("splits", "rings"), [(1, (2, 2)), (2, (3, 4)), (4, (2, 2)), (8, (1, 1))])
def test_streamed_product_equals_the_plain_one(
    rows: int, versions: int, splits: int, rings: tuple[int, int]
) -> None:
    """Rings shorter than K and as long, tiles that come round several times: the same sums."""
    from dora_rl.engine.cuda.kernels.skinny import STREAMED_ROWS_MAX, Tiles, multiply

    if not STREAMED_ROWS_MAX or torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper and Triton 3.6")
    n, k = 384, 1024
    x, weight = _operands(rows, versions, n, k)
    want = multiply(x, weight, Tiles(64, 128, splits, 4))
    assert torch.equal(multiply(x, weight, Tiles(64, 128, splits, *rings)), want)
    if splits == 1:
        gated = multiply(x, weight, Tiles(64, 128, 1, *rings), gate=True)
        torch.testing.assert_close(gated, multiply(x, weight, Tiles(64, 128, 1, 3), gate=True))


@pytest.mark.parametrize("rows", [1, 33, 64, 65])
@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("vocab", [1024, 128 * 500])
def test_the_head_is_streamed_for_few_rows(rows: int, versions: int, vocab: int) -> None:
    """And by cuBLAS where so small a product would be cut into parts."""
    from dora_rl.engine.cuda.decoder import CudaDecoder
    from dora_rl.engine.cuda.kernels import skinny

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    n, k = vocab, 256
    x, heads = _operands(rows, versions, n, k)
    decoder = CudaDecoder.__new__(CudaDecoder)
    decoder.weights = cast(Any, SimpleNamespace(lm_head=heads))
    decoder._num_processors = processors
    got = decoder.all_logits(x, 0, versions)
    assert got.dtype == torch.float32
    assert (got - _product(x, heads)).abs().max() < 1e-4
    slots = torch.arange(versions * rows, device="cuda")
    logits, chunks = decoder.scored_logits(x, 0, versions, slots, torch.ones_like(got[:, 0]))
    assert torch.equal(logits, got)
    weights = chunks.total * (chunks.peak - got.amax(-1, keepdim=True)).exp()
    total = (got - got.amax(-1, keepdim=True)).exp().sum(-1)
    torch.testing.assert_close(weights.sum(-1), total)
    tiles = skinny.tiles_of(rows, heads, processors)
    hopper = skinny.STREAMED_ROWS_MAX and torch.cuda.get_device_capability()[0] == 9
    if hopper and vocab > 1024:
        assert tiles is not None
        assert (tiles.splits, bool(tiles.row_stages)) == (1, rows <= 64)
        held = tiles.stages * tiles.n + tiles.row_stages * max(16, 64 if rows > 32 else rows)
        assert rows > 64 or 2 * held * tiles.k * 2 <= skinny.STREAMED_BYTES


@pytest.mark.parametrize("rows", [1, 33, 64])
@pytest.mark.parametrize("versions", [1, 3])
def test_the_streamed_head_knows_its_chunks(rows: int, versions: int) -> None:
    """Peaks and sums of every tile, at the temperature of each row's slot; 0 is as 1."""
    from dora_rl.engine.cuda.kernels.skinny import multiply, multiply_scored, tiles_of

    processors = torch.cuda.get_device_properties(0).multi_processor_count
    n, k, count = 128 * 500, 256, versions * rows
    generator = torch.Generator("cuda").manual_seed(0)
    x = torch.randn(count, k, generator=generator, device="cuda").bfloat16()
    heads = torch.randn(versions, n, k, generator=generator, device="cuda").bfloat16() * k**-0.5
    slots = torch.randperm(count, generator=generator, device="cuda")
    temperature = torch.rand(count, generator=generator, device="cuda") + 0.5
    temperature[0] = 0
    tiles = tiles_of(rows, heads, processors)
    if tiles is None or not tiles.row_stages:
        pytest.skip("needs a Hopper and Triton 3.6")
    logits, chunks = multiply_scored(x, heads, tiles, slots, temperature)
    assert torch.equal(logits, multiply(x, heads, tiles)[0])
    scale = torch.where(temperature > 0, 1 / temperature, 1.0)[slots]
    scaled = (logits * scale[:, None]).view(count, -1, chunks.size)
    peak = scaled.amax(-1)
    torch.testing.assert_close(chunks.peak, peak)
    torch.testing.assert_close(chunks.total, (scaled - peak[..., None]).exp().sum(-1))


@pytest.mark.parametrize("vocab", [50, 9_000, 64_000])
def test_a_draw_does_not_depend_on_the_chunks(vocab: int) -> None:
    """Small and large ones, greedy and warm rows: the same tokens and log-probs."""
    from dora_rl.engine.cuda.kernels.rows import Chunks, chunks_of, draw
    from dora_rl.engine.cuda.slots import DeviceSlots

    rows = 40
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(rows, vocab, generator=generator, device="cuda") * 3
    slots = torch.arange(rows, device="cuda").flip(0)
    positions = torch.full((rows,), 7, dtype=torch.int32, device="cuda")
    drawn: list[torch.Tensor] = []
    for size in (0, 64):
        state = DeviceSlots(rows, 4, 0, "cuda")
        state.key.copy_(torch.arange(rows + 1, device="cuda") * 12_345)
        state.temperature.copy_(torch.arange(rows + 1, device="cuda") % 3 * 0.7)
        state.step.fill_(1)
        chunks = chunks_of(logits, slots, state.temperature)
        if size:
            scale = torch.where(state.temperature > 0, 1 / state.temperature, 1.0)[slots]
            filled = torch.full((rows, -(-vocab // size) * size), -torch.inf, device="cuda")
            filled[:, :vocab] = logits * scale[:, None]
            scaled = filled.view(rows, -1, size)
            peak = scaled.amax(-1)
            chunks = Chunks(size, peak, (scaled - peak[..., None]).exp().sum(-1))
        out = torch.zeros((2, 2, rows), dtype=torch.int32, device="cuda")
        draw(logits, chunks, slots, positions, state, out)
        drawn.append(out[0].clone())
        assert torch.equal(state.last_token[slots], out[0, 0].long())
        assert state.position[slots].tolist() == [8] * rows
    assert (drawn[0][0] == drawn[1][0]).float().mean() > 0.9  # where sums round differently
    same = drawn[0][0] == drawn[1][0]
    logprobs = [each[1].view(torch.float32)[same] for each in drawn]
    torch.testing.assert_close(*logprobs, atol=1e-4, rtol=0)
    greedy = slots % 3 == 0
    assert torch.equal(drawn[1][0][greedy].long(), logits[greedy].argmax(-1))


def test_the_cut_of_a_product_fits_a_processor() -> None:
    from dora_rl.engine.cuda.kernels.skinny import STREAMED_BYTES, STREAMED_ROWS_MAX, tiles_of

    weight = torch.empty(1, 4096, 2048, dtype=torch.bfloat16, device="cuda")
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper")
    for rows in (1, 16, 64, 128):
        for gate in (False, True):
            tiles = tiles_of(rows, weight, 64, gate)
            assert tiles is not None
            assert bool(tiles.row_stages) == (rows <= STREAMED_ROWS_MAX)
            held = tiles.stages * 64 * (2 if gate else 1) + tiles.row_stages * max(16, rows)
            assert held * 128 * 2 <= STREAMED_BYTES


@pytest.mark.parametrize("rows", [129, 200, 256])
@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("tiles", [0, 1, 2])
@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.usefixtures("hopper")
def test_wide_product(rows: int, versions: int, tiles: int, splits: int) -> None:
    """Every kind of tiles, rings longer and shorter than K, against float32."""
    from dora_rl.engine.cuda.kernels.cuts import Cut, Tiles
    from dora_rl.engine.cuda.kernels.wide import multiply

    n, k = 768, 1024
    x, weight = _operands(rows, versions, n, k)
    want = _product(x, weight)
    got = multiply(x, weight, Cut(Tiles(tiles), splits))
    assert got.shape == (splits, versions * rows, n)
    assert got.dtype == torch.bfloat16
    assert (got.float().sum(0) - want).abs().max() < 0.03  # each part is rounded
    if splits == 1:
        torch.testing.assert_close(got[0], want.bfloat16(), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("rows", [129, 256])
@pytest.mark.parametrize("versions", [1, 3])
@pytest.mark.parametrize("tiles", [0, 1, 2])
@pytest.mark.usefixtures("hopper")
def test_wide_gate_equals_the_separate_kernels(rows: int, versions: int, tiles: int) -> None:
    """And a row that is not finite, or far out, spoils no other."""
    from dora_rl.engine.cuda.kernels.cuts import Cut, Tiles
    from dora_rl.engine.cuda.kernels.rows import gate
    from dora_rl.engine.cuda.kernels.wide import multiply

    n, k = 768, 512
    x, weight = _operands(rows, versions, n, k)
    x[7], x[10], x[100] = float("nan"), 3e4, -3e4
    whole = torch.bmm(x.view(versions, rows, k), weight.transpose(1, 2)).view(versions * rows, n)
    got = multiply(x, weight, Cut(Tiles(tiles)), gate=True)
    torch.testing.assert_close(got, gate(whole), rtol=2**-6, atol=1e-5, equal_nan=True)


@pytest.mark.usefixtures("hopper")
def test_which_products_are_left_to_cublas() -> None:
    from dora_rl.engine.cuda.kernels import wide

    weight = torch.empty((1, 4096, 2048), dtype=torch.bfloat16, device="cuda")
    assert wide.cut_of(256, weight, 132) is not None
    assert wide.cut_of(128, weight, 132) is None
    assert wide.cut_of(256, weight.float(), 132) is None
