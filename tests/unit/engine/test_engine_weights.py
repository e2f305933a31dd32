"""Model directories and sealed versions: what loads, and the one line when it does not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.ports import Canary
from dora_rl.types import RequestId, SamplingParams, UserError
from dora_rl.weights.store import SharedMemoryWeightStore
from tests.kit import tiny_models
from tests.kit.engines import Saved, check_against, finish_all, make_engine, random_prompts

GREEDY = SamplingParams(tokens_max=8, temperature=0, ignore_eos=True)


def generate(engine: Engine, version: int = 0):
    key = RequestId(0, 0)
    engine.submit(Request(key, version, random_prompts((9,))[0], GREEDY))
    return finish_all(engine)[key]


def test_sharded_directory(tmp_path: Path) -> None:
    model = tiny_models.save_model("qwen3-moe", tmp_path, max_shard_size="50KB")
    assert (tmp_path / "model.safetensors.index.json").is_file()
    check_against(model, generate(make_engine(tmp_path)))


def test_bfloat16(saved: Saved) -> None:
    _, path = saved("qwen3")
    exact = generate(make_engine(path))
    options = EngineOptions(dtype="bfloat16", block_tokens=16, num_blocks=32, context_max=128)
    engine = Engine(read_spec(path), options)
    engine.load(0, path)
    rounded = generate(engine)
    gaps = [abs(a - b) for a, b in zip(exact.logprobs, rounded.logprobs, strict=True)]
    same = exact.token_ids.tolist() == rounded.token_ids.tolist()
    assert max(gaps[: len(gaps) if same else 1]) < 0.2


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "config.json").unlink(), "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), "not valid JSON"),
        (lambda p: (p / "model.safetensors").unlink(), "neither model.safetensors nor"),
        (
            lambda p: (p / "model.safetensors").write_bytes(
                (p / "model.safetensors").read_bytes()[:-100]
            ),
            "model.safetensors: truncated or not safetensors",
        ),
        (lambda p: edit(p, architectures=["GPT2LMHeadModel"]), "architecture GPT2LMHeadModel"),
        (lambda p: edit(p, hidden_size=32), r"config.json says"),
        (lambda p: edit(p, num_hidden_layers=3), "tensors are missing"),
        (lambda p: edit(p, num_hidden_layers=1), "does not belong"),
        (lambda p: edit(p, num_key_value_heads=3), "cannot share"),
        (lambda p: edit(p, use_sliding_window=True), "sliding-window"),
        (
            lambda p: edit(p, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4}),
            "rope type 'dynamic'",
        ),
    ],
)
def test_bad_directories(
    spoil: Callable[[Path], object], message: str, saved: Saved, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(saved("qwen3")[1], path)
    spoil(path)
    with pytest.raises(UserError, match=message) as error:
        make_engine(path)
    assert "\n" not in str(error.value)


def edit(path: Path, **changes: object) -> None:
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@torch.no_grad()
def canary_of(model: PreTrainedModel) -> Canary:
    ids = random_prompts((12,), seed=8)[0]
    logprobs = torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)
    chosen = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return Canary(ids, tuple(chosen.tolist()))


@pytest.fixture
def store(tmp_path: Path) -> SharedMemoryWeightStore:
    return SharedMemoryWeightStore(tmp_path / "store")


def test_sealed_version(saved: Saved, store: SharedMemoryWeightStore) -> None:
    model, path = saved("qwen3", 1)
    store.publish(3, model.state_dict().items(), canary_of(model))
    engine = make_engine(path)
    engine.load(3, store.open(3))
    check_against(model, generate(engine, 3))


@pytest.mark.parametrize("published", [torch.bfloat16, torch.float32])
def test_a_version_of_a_learner_in_bfloat16_is_loaded_by_an_engine_in_float32(
    saved: Saved, store: SharedMemoryWeightStore, published: torch.dtype
) -> None:
    """The canary says what it was computed in: the tensors may be finer than that."""
    model, path = saved("qwen3", 1)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in model.state_dict().items()}
    sealed = {name: tensor.to(published) for name, tensor in state.items()}
    right = canary_of(model)
    rounded = Canary(right.token_ids, tuple(x + 0.02 for x in right.logprobs), "bfloat16")
    store.publish(3, sealed.items(), rounded)
    engine = make_engine(path)
    engine.load(3, store.open(3))
    assert 3 in engine.versions()
    store.publish(4, sealed.items(), replace(rounded, dtype="float32"))
    with pytest.raises(UserError, match="canary"):
        engine.load(4, store.open(4))


def test_fused_experts_of_a_state_dict(saved: Saved, store: SharedMemoryWeightStore) -> None:
    model, path = saved("qwen3-moe", 1)
    names = model.state_dict()
    assert "model.layers.0.mlp.experts.gate_up_proj" in names
    store.publish(3, names.items(), canary_of(model))
    engine = make_engine(path)
    engine.load(3, store.open(3))
    check_against(model, generate(engine, 3))


def test_a_sealed_version_that_is_not_what_was_published(
    saved: Saved, store: SharedMemoryWeightStore
) -> None:
    model, path = saved("qwen3", 1)
    engine = make_engine(path)
    state = model.state_dict()

    class Changed:
        """The right names and checksum, one weight off."""

        version, canary = 3, None
        checksum = store.publish(3, state.items())

        def names(self) -> list[str]:
            return list(state)

        def tensor(self, name: str) -> torch.Tensor:
            return state[name] + (1e-3 if name == "model.norm.weight" else 0)

    with pytest.raises(UserError, match="checksum"):
        engine.load(3, Changed())
    with pytest.raises(UserError, match="say they are version 3"):
        engine.load(4, store.open(3))
    store.publish(5, state.items(), canary_of(saved("qwen3", 2)[0]))
    with pytest.raises(UserError, match="canary log-probs differ"):
        engine.load(5, store.open(5))
    assert engine.versions() == (0,)
    engine.load(3, store.open(3))


def test_versions_that_do_not_fit_in_memory(saved: Saved) -> None:
    spec = read_spec(saved("qwen3")[1])
    with pytest.raises(UserError, match=r"versions_max is 100000000: each version takes .* fit"):
        Engine(spec, EngineOptions(versions_max=100_000_000, num_blocks=4, context_max=64))


def test_names_of_a_directory(saved: Saved) -> None:
    model, path = saved("llama")
    assert set(HfDirectory(path).names()) == set(model.state_dict())
