"""A request moves from one vLLM instance to another with its KV: nothing but its last token is
computed again, the tokens are those of a request that stayed, and no other version takes it.

Each instance is a process: vLLM is not made twice in one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.places import ROOT

pytest.importorskip("vllm")

COMMON = """
import json, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from tests.kit.tiny_models import VOCAB, save_model
from dora_rl.engine.vllm.engine import VllmEngine, VllmOptions
from dora_rl.engine.engine import Engine
from dora_rl.model.directory import read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import HfDirectory
from dora_rl.workers.moves import write_export
from dora_rl.weights.store import SharedMemoryWeightStore
from dora_rl.types import RequestId, SamplingParams, UserError

home = Path(sys.argv[1])
store = SharedMemoryWeightStore(home / "store")
PARAMS = SamplingParams(tokens_max=40, temperature=0, ignore_eos=True)
generator = torch.Generator().manual_seed(5)
PROMPTS = [
    tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in (1, 30, 127, 150)
]

def requests():
    return [Request(RequestId(n, 0), 0, prompt, PARAMS, seed=3) for n, prompt in enumerate(PROMPTS)]

def finish(engine):
    done = {}
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                done[output.id.group] = output.trajectory
    return done

def vllm():
    options = EngineOptions(context_max=256, seqs_max=16, kv_bytes_max=1 << 28)
    return VllmEngine(VllmOptions(str(home / "model0"), (), kv_moves=True), options)
"""
SOURCE = """
for version in range(2):
    save_model("qwen3-tied", home / f"model{version}", version)
    source = HfDirectory(home / f"model{version}")
    store.publish(version, [(n, source.tensor(n)) for n in source.names()])
engine = vllm()
engine.load(0, store.open(0))
for request in requests():
    engine.submit(request)
for _ in range(12):
    engine.step()
told = {}
for request in requests():
    export = engine.export(request.id)
    assert export.has_kv
    write_export(export, home / f"{request.id.group}.kv")
    told[request.id.group] = [export.num_bytes, len(engine.find(request.id).tokens)]
    export.cancel() if request.id.group == 0 else export.done()
rest = finish(engine)  # the one whose move was called off goes on here
assert list(rest) == [0] and len(rest[0].token_ids) == 40
print("TOLD", json.dumps(told))
"""
TARGET = """
def take(engine, group):
    data = memoryview((home / f"{group}.kv").read_bytes())
    length = int.from_bytes(data[:4], "little")
    engine.take_in(bytes(data[4 : 4 + length]), data[4 + length :])

engine = vllm()
engine.load(1, store.open(1))
try:
    take(engine, 1)
    raise AssertionError("KV of another version was taken")
except UserError as error:
    assert "version 0 is not resident" in str(error)
engine.retire(1)
engine.load(0, store.open(0))
before = engine.stats()
for group in (1, 2, 3):
    take(engine, group)
moved = finish(engine)
after = engine.stats()
for request in requests():  # and again, from the beginning: its blocks are its own
    engine.submit(request)
again = finish(engine)
native = Engine(read_spec(home / "model0"), EngineOptions(context_max=256, seqs_max=16))
native.load(0, home / "model0")
for request in requests():
    native.submit(request)
whole = finish(native)
for done in (moved, again):
    for group, trajectory in done.items():
        assert trajectory.token_ids.tolist() == whole[group].token_ids.tolist(), group
        gaps = [abs(a - b) for a, b in zip(trajectory.logprobs, whole[group].logprobs)]
        assert max(gaps) < 1e-4, (group, gaps)
assert set(moved) == {1, 2, 3}
print("TOLD", json.dumps([after.prefill_tokens - before.prefill_tokens,
                          after.prefix_tokens - before.prefix_tokens]))
"""


def run(script: str, home: Path) -> object:
    environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"}
    environment["PYTHONPATH"] = f"{ROOT}{os.pathsep}{environment.get('PYTHONPATH', '')}"
    command = [sys.executable, "-c", COMMON + script, str(home)]
    result = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=300, check=False
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith("TOLD ")]
    assert lines and result.returncode == 0, result.stderr[-3000:]
    return json.loads(lines[-1][5:])


def test_a_request_takes_its_kv_along(tmp_path: Path) -> None:
    told = run(SOURCE, tmp_path)
    assert isinstance(told, dict) and all(num_bytes > 0 for num_bytes, _ in told.values())
    num_tokens = sum(length for group, (_, length) in told.items() if group != "0")
    assert run(TARGET, tmp_path) == [3, num_tokens - 3], "one token of each is computed"
