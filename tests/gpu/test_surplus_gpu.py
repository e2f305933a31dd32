"""Rows beyond the end of a request, on a GPU: what they leave on the device reaches nobody.

Run with `pytest tests/gpu -m gpu` on a machine with a CUDA device and Triton.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.types import RequestId, SamplingParams
from tests.kit.engines import finish_all, random_prompts
from tests.kit.tiny_models import save_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

OPTIONS = EngineOptions(
    block_tokens=16, num_blocks=64, context_max=256, seqs_max=2, step_tokens_max=3
)


@pytest.mark.parametrize("num_given", range(1, 9))
def test_a_session_goes_on_behind_rows_beyond_its_turn(tmp_path: Path, num_given: int) -> None:
    """A turn ends inside a burst, and the next is in flight; what their rows left on the device is
    not taken for the tokens of the next turn, wherever its prefill is cut."""
    torch.backends.cuda.matmul.allow_tf32 = False
    save_model("qwen3", tmp_path, 0)
    key, (prompt,) = RequestId(0, 0), random_prompts((5,))
    given = tuple(range(20, 20 + num_given))

    def session(device: str, stop_ids: tuple[int, ...]) -> tuple[int, ...]:
        engine = Engine(read_spec(tmp_path), OPTIONS.model_copy(update={"device": device}))
        engine.load(0, tmp_path)
        if device == "cuda":
            engine.runner.burst, engine.runner._choose_burst = 3, lambda: None
        params = SamplingParams(tokens_max=12, temperature=0, ignore_eos=True, stop_ids=stop_ids)
        engine.submit(Request(key, 0, prompt, params, keep=True))
        finish_all(engine)
        engine.extend(key, given)
        return finish_all(engine)[key].token_ids.tolist()

    stop = session("cpu", ())[3]
    assert session("cuda", (stop,)) == session("cpu", (stop,))


def test_prefill_reads_nothing_behind_the_context() -> None:
    """There may be NaN of a row beyond the end of another request."""
    from dora_rl.engine.cuda.kernels.attention import attend_prefill

    generator = torch.Generator("cuda").manual_seed(0)
    pool = torch.randn(2, 6, 2, 16, 64, device="cuda", generator=generator)
    q = torch.randn(7, 2, 2, 64, device="cuda", generator=generator)
    table = torch.tensor([[3, 1, 0]], dtype=torch.int32, device="cuda")
    tiles = torch.tensor([[0, 0, 14, 7]], dtype=torch.int32, device="cuda")  # positions 14 to 20
    expected = attend_prefill(q, pool, table, tiles, 64)
    pool[:, 1, :, 5:] = float("nan")
    assert torch.equal(attend_prefill(q, pool, table, tiles, 64), expected)
