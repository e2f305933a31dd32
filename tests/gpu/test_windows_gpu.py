"""Kernels of layers that see the newest tokens alone, of wide heads and of other scales, on a GPU.

pytest tests/gpu/test_windows_gpu.py -m gpu
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from dora_rl.engine.cuda.kernels.cuts import Splits

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

DEVICE = "cuda"
LENGTHS = [700, 3, 64, 129, 1, 350]


def _randn(seed: int, *size: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _attend(q, keys_and_values, begin: int, end: int, scale: float) -> torch.Tensor:
    """One row in float64 over the tokens [begin, end) of a request."""
    k, v = keys_and_values.transpose(1, 2).flatten(2, 3)[:, :, begin:end].double()
    score = (q.double() @ k.transpose(1, 2)) * scale
    return torch.softmax(score, -1) @ v


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 500])
@pytest.mark.parametrize("splits", [(1, 1), (3, 1), (9, 2)])
@pytest.mark.parametrize("shape", [(2, 4, 64), (1, 1, 128), (2, 2, 256)])
def test_decode_sees_the_window_alone(shape, splits: tuple[int, int], window: int) -> None:
    from dora_rl.engine.cuda.kernels.attention import attend_decode

    kv_heads, group, dim = shape
    known, rows, tokens, scale = [0, 1, 15, 16, 17, 60, 100, 126, 127], 9, 16, 0.3 / dim**0.5
    pool = _randn(0, 2, rows * 8, kv_heads, tokens, dim)
    q = _randn(1, rows, kv_heads, group, dim)
    table = torch.randperm(rows * 8, generator=torch.Generator().manual_seed(2)).view(rows, 8)
    table, slots = table.int().to(DEVICE), torch.arange(rows, device=DEVICE).flip(0)
    positions = torch.tensor(known, dtype=torch.int32, device=DEVICE)
    for row, slot in enumerate(slots.tolist()):  # what is not seen is not used
        for old in range(max(0, known[row] + 1 - window)):
            pool[:, table[slot, old // tokens], :, old % tokens] = float("nan")
    out = attend_decode(q, pool, table, slots, positions, Splits(*splits), scale, window)
    for row, slot in enumerate(slots.tolist()):
        end = known[row] + 1
        expected = _attend(q[row], pool[:, table[slot].long()], max(0, end - window), end, scale)
        assert (out[row].double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("window", [1, 2, 16, 17, 40, 500])
@pytest.mark.parametrize("shape", [(2, 4, 64), (2, 2, 256)])
@pytest.mark.parametrize("start", [0, 5, 64, 90])
def test_prefill_sees_the_window_alone(shape, window: int, start: int) -> None:
    from dora_rl.engine.cuda.kernels.attention import attend_prefill

    kv_heads, group, dim = shape
    count, tokens, scale = 70, 16, 0.3 / dim**0.5
    pool, q = _randn(0, 2, 12, kv_heads, tokens, dim), _randn(1, count, kv_heads, group, dim)
    table = torch.randperm(12, generator=torch.Generator().manual_seed(2))[None].int().to(DEVICE)
    cuts = [(0, 0, start, 64), (0, 64, start + 64, count - 64)]
    tiles = torch.tensor(cuts, dtype=torch.int32, device=DEVICE)
    out = attend_prefill(q, pool, table, tiles, 64, scale, window)
    for row in range(count):
        end = start + row + 1
        expected = _attend(q[row], pool[:, table[0].long()], max(0, end - window), end, scale)
        assert (out[row].double() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("inner", [96, 1024, 3000])
def test_the_gate_with_gelu(inner: int) -> None:
    from dora_rl.engine.cuda.kernels.rows import gate

    x = _randn(0, 5, 2 * inner) * 3
    first, up = x.chunk(2, -1)
    wanted = functional.gelu(first, approximate="tanh") * up
    assert (gate(x, gelu=True) - wanted).abs().max() < 1e-5
    assert (gate(x) - functional.silu(first) * up).abs().max() < 1e-5


@pytest.mark.parametrize("window", [1, 20, 64, 300])
@pytest.mark.parametrize("dim", [64, 256])
@pytest.mark.parametrize("backend", ["varlen", "flex", "sdpa"])
def test_packed_attention_sees_the_window_alone(backend: str, dim: int, window: int) -> None:
    """Values and gradients in half precision, against one document at a time under a mask."""
    from dora_rl.trainer.attention import BACKENDS, Layout, attend_loop

    layout = Layout(LENGTHS, torch.device(DEVICE))
    total, results = sum(LENGTHS), []
    inputs = [_randn(i, total, h, dim).bfloat16() for i, h in enumerate((4, 2, 2))]
    for run in (BACKENDS[backend], attend_loop):
        q, k, v = (x.clone().requires_grad_() for x in inputs)
        out = run(q, k, v, layout, dim**-0.5, window)
        out.float().square().sum().backward()
        results.append([out.detach(), q.grad, k.grad, v.grad])
    for a, b in zip(*results, strict=True):
        assert torch.isfinite(a).all()
        assert (a.float() - b.float()).norm() <= 2e-2 * b.float().norm() + 1e-3
