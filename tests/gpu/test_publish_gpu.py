"""Versions on their way from a GPU: what is sealed is what the policy held, in any memory.

pytest tests/gpu/test_publish_gpu.py -m gpu
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.config import TrainerConfig
from dora_rl.setup.memory import shelf_bytes
from dora_rl.trainer.checkpoints.masters import whole
from dora_rl.trainer.checkpoints.publish import Publisher
from dora_rl.trainer.policy.model import load_policy, named_weights
from dora_rl.weights.handover import Shelf
from dora_rl.weights.levels import shared_level
from tests.kit.exact_cases import write_exact_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 64}


@pytest.mark.parametrize("shared", [False, True], ids=["host", "device"])
def test_every_version_gives_the_masters_back(tmp_path: Path, shared: bool) -> None:
    """Versions retire, and their pinned memory is filled again; half-way masters come and go."""
    model = write_exact_model(tmp_path / "model", "qwen3", **SHAPE)
    policy = load_policy(model, TrainerConfig(device="cuda", compute_dtype="bfloat16"))
    root = Path("/dev/shm") / f"dora-rl-test-{tmp_path.name}"
    level, publisher = shared_level(root), Publisher()
    num_bytes = sum(p.numel() for p in policy.parameters()) * 2
    if shared:
        publisher.handover = Shelf(root, shelf_bytes(num_bytes // 2, 2))
    sizes = (num_bytes + (1 << 20), num_bytes + (1 << 20))
    mapped = []
    try:
        for version in range(8):
            with torch.no_grad():
                for p in policy.parameters():
                    p.add_(torch.randn_like(p) * 1e-3)
                    p.view(-1)[: p.numel() // (40 if version % 3 else 4)] = 1.00390625
            publisher.prepare(version, level.versions, level.masters, sizes)
            drafts = publisher.begin(version, level.versions, level.masters)
            publisher.snapshot(policy, torch.bfloat16, version, drafts)
            masters = {name: tensor.clone() for name, tensor in named_weights(policy)}
            with torch.no_grad():
                for p in policy.parameters():
                    p.mul_(1.5)  # the next step begins
            publisher.seal(drafts, None, background=True).result()
            sealed, exact = level.versions.open(version), level.masters.open(version)
            for name, master in masters.items():
                published = sealed.tensor(name)
                assert torch.equal(published, master.bfloat16().cpu()), (version, name)
                given_back = whole(name, published, exact)
                assert torch.equal(given_back.view(torch.int32), master.cpu().view(torch.int32))
            del sealed, exact, published, given_back
            level.forget_masters_before(version)
            if version >= 2:
                level.versions.retire(version - 2)
            mapped.append(Path("/proc/self/maps").read_text().count(str(root)))
            sizes = (level.versions.map(version).num_bytes, level.masters.map(version).num_bytes)
        assert max(mapped[4:]) <= max(mapped[:4]), "what is mapped is given back"
    finally:
        publisher.close()
        level.versions.destroy()
