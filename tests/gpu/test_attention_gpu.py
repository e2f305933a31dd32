"""Decode attention on a GPU: each kernel against its definition, the fused one against its parts.

Run with `pytest tests/gpu/test_attention_gpu.py -m gpu` on a machine with a CUDA device and Triton.
"""

from __future__ import annotations

import pytest
import torch

from dora_rl.engine.cuda.kernels.cuts import Splits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _attend(q, pool, table, slots, positions) -> torch.Tensor:
    """Every row in float64 over the tokens of its context."""
    out = torch.empty_like(q, dtype=torch.float64)
    for row, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
        tokens = pool[:, table[slot].long()].transpose(1, 2).flatten(2, 3)[:, :, : position + 1]
        k, v = tokens.double()
        score = (q[row].double() @ k.transpose(1, 2)) * q.shape[-1] ** -0.5
        out[row] = torch.softmax(score, -1) @ v
    return out


@pytest.mark.parametrize("splits", [(1, 1), (2, 1), (7, 1), (9, 2), (16, 3)])
@pytest.mark.parametrize("shape", [(8, 2, 128), (2, 4, 64), (1, 1, 64), (4, 8, 128)])
def test_decode_attention_kernel(splits: tuple[int, int], shape: tuple[int, int, int]) -> None:
    from dora_rl.engine.cuda.kernels.attention import attend_decode

    kv_heads, group, dim = shape
    rows, num_blocks, tokens = 9, 80, 16
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    pool = randn(2, num_blocks, kv_heads, tokens, dim)
    q = randn(rows, kv_heads, group, dim)
    table = torch.randperm(num_blocks, device="cuda", generator=generator)[: rows * 8]
    table = table.view(rows, 8).to(torch.int32)
    positions = torch.tensor([0, 1, 15, 16, 17, 60, 100, 126, 127], dtype=torch.int32).cuda()
    slots = torch.arange(rows, device="cuda").flip(0)
    out = attend_decode(q, pool, table, slots, positions, Splits(*splits))
    expected = _attend(q, pool, table, slots, positions)
    assert (out.double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("splits", [(1, 1), (2, 1), (7, 1), (9, 2), (16, 3)])
@pytest.mark.parametrize("shape", [(8, 2, 128), (2, 4, 64), (1, 1, 64), (3, 7, 128), (4, 8, 128)])
@pytest.mark.parametrize(("tokens", "each"), [(16, 1), (64, 2), (64, 3), (64, 4), (64, 6), (64, 7)])
@pytest.mark.usefixtures("hopper")
def test_paged_attention(splits, shape: tuple[int, int, int], tokens: int, each: int) -> None:
    """With every ring; more blocks than a warp has lanes; nothing behind a context is used."""
    from dora_rl.engine.cuda.kernels import paged

    kv_heads, group, dim = shape
    rows, blocks_max = 12, 40
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda").bfloat16()

    num_blocks = rows * blocks_max
    pool, q = randn(2, num_blocks, kv_heads, tokens, dim), randn(rows, kv_heads, group, dim)
    table = torch.randperm(num_blocks, device="cuda", generator=generator).int()
    table = table.view(rows, blocks_max)
    last = blocks_max * tokens - 1
    known = [0, 1, tokens - 1, tokens, tokens + 1, 63, 64, 127, 128, 300, last - 1, last]
    positions = torch.tensor(known, dtype=torch.int32).cuda()
    slots = torch.arange(rows, device="cuda").flip(0)
    for slot, position in zip(slots.tolist(), known, strict=True):
        block = table[slot, position // tokens]
        pool[:, block, :, position % tokens + 1 :] = float("nan")
    assert paged.fits(pool, group)
    processors = -(-rows * kv_heads * splits[0] // each)
    out = paged.attend(q, pool, table, slots, positions, Splits(*splits), processors)
    expected = _attend(q, pool, table, slots, positions)
    assert (out.double() - expected).abs().max() < 0.02


@pytest.mark.usefixtures("hopper")
def test_a_key_that_is_not_a_number_spoils_its_own_row_alone() -> None:
    from dora_rl.engine.cuda.kernels import paged

    pool = torch.randn(2, 4, 1, 64, 128, device="cuda").bfloat16()
    q = torch.randn(2, 1, 2, 128, device="cuda").bfloat16()
    pool[0, 0, 0, 5] = float("nan")
    table = torch.arange(4, dtype=torch.int32, device="cuda").view(2, 2)
    positions = torch.tensor([100, 100], dtype=torch.int32, device="cuda")
    slots = torch.arange(2, device="cuda")
    out = paged.attend(q, pool, table, slots, positions, Splits(1, 1), 132)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


def test_what_attention_is_left_to_triton() -> None:
    from dora_rl.engine.cuda.kernels import paged

    def fits(group: int, dim: int, dtype: torch.dtype = torch.bfloat16) -> bool:
        return paged.fits(torch.empty(2, 4, 2, 64, dim, dtype=dtype, device="cuda"), group)

    assert not fits(9, 128)
    assert not fits(2, 96)
    assert not fits(2, 32)
    assert not fits(2, 128, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (8, 2)])
@pytest.mark.parametrize("num_parts", [1, 2])
def test_fused_attention_equals_its_pieces(dtype, splits: tuple[int, int], num_parts: int) -> None:
    """Rotary embedding with the cache write, then decode attention, each by its own kernel."""
    from dora_rl.engine.cuda.kernels.attention import attend_decode
    from dora_rl.engine.cuda.kernels.fused import attend_fused
    from dora_rl.engine.cuda.kernels.rows import rope_write_kernel

    num_kv, num_q, dim, tokens, rows = 4, 2, 128, 16, 7
    heads = num_kv * num_q + 2 * num_kv
    generator = torch.Generator("cuda").manual_seed(0)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device="cuda")

    parts = randn(num_parts, rows, heads * dim)
    qkv = parts.sum(0).to(dtype)
    if num_parts == 1:
        parts = parts.to(dtype)
    norm = randn(1, heads - num_kv, dim).to(dtype)
    cos, sin = randn(128, dim), randn(128, dim)
    table = torch.randperm(64, device="cuda", generator=generator)[: rows * 8]
    table = table.view(rows, 8).to(torch.int32)
    positions = torch.tensor([0, 1, 15, 16, 17, 60, 127], dtype=torch.int32).cuda()
    slots = torch.arange(rows, device="cuda").flip(0)
    pool = randn(2, 64, num_kv, tokens, dim).to(dtype)
    pool_fused = pool.clone()
    q = torch.empty(rows, num_kv, num_q, dim, dtype=dtype, device="cuda")
    rope_write_kernel[(rows, heads // 8)](
        *(qkv, norm, cos, sin, slots, positions, table, q, pool, rows, 0, 1e-6),
        *(pool.stride(0), table.stride(0)),
        H=num_kv * num_q,
        KV=num_kv,
        D=dim,
        C=tokens,
        HB=8,
        PARTS=1,
        NORM=True,
        OVERLAP=False,
    )
    cut = Splits(*splits)
    want = attend_decode(q, pool, table, slots, positions, cut).view(rows, -1)
    where, shape = (table, slots, positions), (num_kv, num_q)
    got = attend_fused(parts, norm, (cos, sin), pool_fused, where, shape, cut, 1e-6, dtype)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    assert (pool.float() - pool_fused.float()).abs().max() < tolerance
    assert (got.float() - want.float()).abs().max() < tolerance
