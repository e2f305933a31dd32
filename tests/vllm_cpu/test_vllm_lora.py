"""LoRA versions as vLLM adapter slots, several resident at once, against merged weights.

In a process of its own: vLLM is not made twice in one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

pytest.importorskip("vllm")

SCRIPT = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.kit.random_adapters import merge, random_adapter
from tests.kit.tiny_models import save_model
from dora_rl.engine.vllm.engine import VllmEngine, VllmOptions
from dora_rl.engine.engine import Engine
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.ports import Canary
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.types import RequestId, SamplingParams

path = Path(sys.argv[1]) / "model"
save_model("qwen3", path)
store = SharedMemoryWeightStore(path.parent / "store")
options = EngineOptions(context_max=128, seqs_max=16, kv_bytes_max=1 << 28, versions_max=2)
native = Engine(read_spec(path), options)
ids = tuple(range(5, 21))
for version in range(2):
    adapter = random_adapter(path, version, rank=8)
    native.load(version, merge(path, adapter))
    canary = Canary(ids, tuple(native.runner.score(native.residency.slots[version], ids)))
    store.publish(version, adapter.tensors.items(), canary)
engine = VllmEngine(VllmOptions(str(path), (), lora_rank=8), options)
engine.load_base(HfDirectory(path))
engine.load(0, store.open(0))
done = []
for each in (engine, native):
    params = SamplingParams(tokens_max=16, temperature=0, ignore_eos=True)
    for index in range(6):
        if index == 3 and each is engine:
            engine.step()
            engine.load(1, store.open(1))  # while version 0 has requests
        version = index // 3
        each.submit(Request(RequestId(index, 0), version, tuple(range(1, 9 + index)), params))
    out = {}
    while each.has_work():
        for output in each.step():
            if output.trajectory is not None:
                out[output.id] = output.trajectory
    done.append(out)
assert len(done[0]) == 6
for key, trajectory in done[0].items():
    assert trajectory.token_ids.tolist() == done[1][key].token_ids.tolist(), key
    gaps = [abs(a - b) for a, b in zip(trajectory.logprobs, done[1][key].logprobs)]
    assert max(gaps) < 1e-4, (key, gaps)
engine.retire(0)
assert engine.versions() == (1,)
print("LORA OK")
"""


def test_adapter_slots(tmp_path: Path) -> None:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=300, check=False
    )
    assert "LORA OK" in result.stdout, result.stderr[-3000:]
