"""An instance of two devices: two vLLM processes that share every layer give the native tokens.

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
from tests.kit.tiny_models import save_model
from dora_rl.engine.vllm.engine import VllmEngine, VllmOptions
from dora_rl.engine.engine import Engine
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.ports import Canary
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.types import RequestId, SamplingParams, UserError

def main():
    torch.set_num_threads(1)
    home = Path(sys.argv[1])
    store = SharedMemoryWeightStore(home / "store")
    options = EngineOptions(context_max=128, seqs_max=16, kv_bytes_max=1 << 27, versions_max=2)
    ids = tuple(range(5, 21))
    native = None
    for version in range(2):
        path = home / f"model{version}"
        save_model("qwen3-tied", path, version)
        native = native or Engine(read_spec(path), options)
        native.load(version, path)
        canary = Canary(ids, tuple(native.runner.score(native.residency.slots[version], ids)))
        source = HfDirectory(path)
        store.publish(version, [(n, source.tensor(n)) for n in source.names()], canary)
    engine = VllmEngine(VllmOptions(str(home / "model0"), (), num_devices=2), options)
    assert len(engine._process._engine.collective_rpc("check_health")) == 2
    for version in range(2):
        engine.load(version, store.open(version))  # with the checksum and the canary
        done = []
        for each in (engine, native):
            params = SamplingParams(tokens_max=16, temperature=0, ignore_eos=True)
            for index in range(4):
                prompt = tuple(range(1, 9 + index))
                each.submit(Request(RequestId(index, 0), version, prompt, params))
            out = {}
            while each.has_work():
                for output in each.step():
                    if output.trajectory is not None:
                        out[output.id] = output.trajectory
            done.append(out)
        assert len(done[0]) == 4
        for key, trajectory in done[0].items():
            assert trajectory.token_ids.tolist() == done[1][key].token_ids.tolist(), key
        engine.retire(version)
    print("DEVICES OK")

if __name__ == "__main__":
    main()
"""


def test_two_devices_share_the_layers(tmp_path: Path) -> None:
    script = tmp_path / "two_devices.py"  # a file, because vLLM's processes import it again
    script.write_text(SCRIPT)
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    result = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=environment,
        text=True,
        capture_output=True,
        timeout=600,
        check=False,
    )
    assert "DEVICES OK" in result.stdout, result.stderr[-3000:]
