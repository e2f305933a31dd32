"""`serve --tinker` on a GPU, in bfloat16: it learns, and samples from what it learned.

pytest tests/gpu/test_tinker_gpu.py -m gpu
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dora_rl.engine.options import EngineOptions
from tests.kit.tinker_server import LIMITS, Refused, datum_body, tinker_server

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
IDS = [2, 3, 4, 5, 6, 7, 8, 9, 10, 11]


def test_a_client_learns_and_samples_on_a_gpu(tmp_path: Path) -> None:
    engine = EngineOptions(
        device="cuda",
        dtype="bfloat16",
        kv_bytes_max=256 << 20,
        seqs_max=32,
        versions_max=3,
        lora_rank=8,
    )
    data = [datum_body(IDS[:-1], target_tokens=IDS[1:], weights=[1.0] * (len(IDS) - 1))]
    with tinker_server(tmp_path, limits=replace(LIMITS, head=False), engine=engine) as served:
        raw = served.client()
        with pytest.raises(Refused, match="pass train_unembed=False"):
            raw.model(0)
        model, samplers, losses = raw.model(1, train_unembed=False), [], list[float]()
        for number in range(4):
            for _ in range(6):
                losses.append(model.run(data).loss)
                assert model.step(lr=3e-3) > 0
            samplers.append(model.snapshot(number))  # more than there are slots
        assert losses[-1] < 0.3 * losses[0], losses
        trained = model.run(data, forward_only=True).logprobs[0]
        scored = samplers[-1].score(IDS)[1:]
        assert scored == pytest.approx(trained, abs=0.15)
        sums = [sum(sampler.score(IDS)[1:]) for sampler in samplers]
        assert sums[0] < sums[-1]
        found = samplers[-1].sample([2], 8, params={"max_tokens": 6, "stop": [], "seed": 1})
        assert len(found.token_ids) == 8 and all(len(ids) == 6 for ids in found.token_ids)
        path = model.do("save_weights", path="one")["path"]
        again = raw.loaded(2, path)
        assert again.run(data, forward_only=True).loss == pytest.approx(-sum(trained), abs=1e-3)
