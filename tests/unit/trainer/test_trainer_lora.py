"""Adapters: what is sealed is what is computed, dropout or not; the output matrix has none."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from exact_cases import documents_of, move_adapters, write_exact_model
from safetensors.torch import load_file, save_file
from trainer_cases import make_groups, write_tiny_model
from trainer_store import MemoryStore

from dora_rl.config import RunConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.models import read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.setup.learner_check import check_learner
from dora_rl.trainer.attention_layout import Layout
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.options import AlgorithmOptions, CheckpointOptions, TrainerOptions
from dora_rl.trainer.scoring import score
from dora_rl.types import UserError
from dora_rl.weights.store import SharedMemoryWeightStore

TRAINER = TrainerOptions(lr=1e-3, device="cpu", pack_tokens=64, lora_rank=3)


def load_into_engine(model: Path, sealed: object, dtype: str, rank: int) -> None:
    """As an instance does: by checksum and canary, or not at all."""
    options = EngineOptions(dtype=dtype, lora_rank=rank, kv_bytes_max=1 << 20)
    engine = Engine(read_spec(model), options)
    if rank:
        engine.load_base(model, verify=False)
    engine.load(1, sealed)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["adapters", "merged"])
def test_versions_trained_with_dropout_are_accepted(tmp_path: Path, form: str, dtype: str) -> None:
    model = write_exact_model(tmp_path / "model", "qwen3")
    trainer = replace(TRAINER, lora_dropout=0.5, lora_publish=form, compute_dtype=dtype)
    learner = Learner(model, None, trainer)
    move_adapters(learner)
    learner.begin_step(0)
    learner.feed(make_groups(3, 2))
    learner.finish_step()
    store = SharedMemoryWeightStore(tmp_path / "store")
    learner.publish(store, 1).result()
    load_into_engine(model, store.open(1), dtype, 3 if form == "adapters" else 0)


def test_dropout_is_for_training_passes_alone(model_dir: Path) -> None:
    learner = Learner(model_dir, None, replace(TRAINER, lora_dropout=0.5))
    move_adapters(learner)
    document = documents_of(30, 1)[0]
    ids, rows = document.token_ids, document.rows
    (still,) = score(learner.policy, [document], 1.0, 64)
    (again,) = score(learner.policy, [document], 1.0, 64)
    assert torch.equal(still, again)

    def training_pass() -> torch.Tensor:
        return learner.policy(ids, Layout([len(ids)], ids.device), rows, ids[1:]).logprobs_N

    first, second = training_pass(), training_pass()
    assert not torch.equal(first, still) and not torch.equal(first, second)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied"])
@pytest.mark.parametrize("form", ["adapters", "merged"])
def test_an_adapter_on_the_output_matrix_is_refused(tmp_path: Path, family: str, form: str) -> None:
    model = write_tiny_model(tmp_path / "model", family)
    targets = ("q_proj", "lm_head")
    values = {"lora_rank": 2, "lora_targets": targets, "lora_publish": form}
    config = RunConfig.model_validate({"model": {"path": str(model)}, "trainer": values})
    with pytest.raises(UserError, match=r"trainer\.lora_targets 'lm_head'"):
        check_learner(config)
    for implementation in ("lean", "transformers"):
        trainer = replace(
            TRAINER, lora_targets=targets, lora_publish=form, implementation=implementation
        )
        with pytest.raises(UserError, match=r"'lm_head'.*output matrix has no adapter"):
            Learner(model, None, trainer)


def test_both_forms_have_the_gradient_of_the_adapter(model_dir: Path) -> None:
    """Beside the base it is autograd's own; through the merged weight it must be the same."""
    ids = documents_of(30, 1)[0].token_ids
    rows, layout = torch.arange(29), Layout([30], ids.device)
    gradients = []
    for form in ("adapters", "merged"):
        learner = Learner(model_dir, None, replace(TRAINER, lora_publish=form))
        move_adapters(learner)
        learner.policy(ids, layout, rows, ids[1:]).logprobs_N.mean().backward()
        found = {n: p.grad for n, p in learner.policy.named_parameters() if p.requires_grad}
        gradients.append(found)
    beside, through = gradients
    assert beside.keys() == through.keys() and all(".lora_" in name for name in beside)
    for name, gradient in beside.items():
        assert gradient is not None and gradient.abs().max() > 0
        assert torch.allclose(through[name], gradient, rtol=1e-3, atol=1e-5), name


def stored_in_half(directory: Path, *, said: bool) -> Path:
    """A model as they are published: bfloat16 files. Unless its configuration says so, the learner
    holds it in float32."""
    write_tiny_model(directory, "qwen3")
    file = directory / "model.safetensors"
    save_file({n: t.bfloat16() for n, t in load_file(file).items()}, file)
    config = json.loads((directory / "config.json").read_text())
    text = config | ({"torch_dtype": "bfloat16"} if said else {})
    (directory / "config.json").write_text(json.dumps(text))
    return directory


@pytest.mark.parametrize("form", ["adapters", "merged"])
@pytest.mark.parametrize("loss", ["grpo", "ppo"])
def test_a_frozen_base_in_half_precision_is_exact(tmp_path: Path, form: str, loss: str) -> None:
    """Training, published versions, checkpoints and what is resumed from them: all the same."""
    trainer = replace(TRAINER, compute_dtype="bfloat16", lora_publish=form)
    algorithm = AlgorithmOptions(loss=loss, kl_coef=0.1, old_logprobs="behaviour")
    found: list[dict[str, torch.Tensor]] = []
    for said in (False, True):
        model = stored_in_half(tmp_path / f"model{said}", said=said)
        store: Any = MemoryStore()
        learner = Learner(model, algorithm, trainer, store=store)
        learner.publish(store, 0)
        train_step(learner, 0)
        learner.publish(store, 1)
        saved = learner.save(tmp_path / f"saved{said}", CheckpointOptions(dtype="float32"))
        resumed = Learner.resume(saved, algorithm, trainer, store=store)
        train_step(resumed, 1)
        base = resumed.policy.get_parameter("model.embed_tokens.weight")
        assert base.dtype == (torch.bfloat16 if said else torch.float32)
        assert all(p.dtype == torch.float32 for p in resumed.optimizer.parameters)
        tensors = {n: p.detach().float() for n, p in resumed.policy.named_parameters()}
        tensors |= {f"published {n}": t for n, t in store.sealed[1].tensors.items()}
        tensors |= load_file(saved / "model.safetensors")
        found.append(tensors)
    assert found[0].keys() == found[1].keys()
    for name, tensor in found[0].items():
        assert torch.equal(tensor, found[1][name]), name


def train_step(learner: Learner, step: int) -> None:
    learner.begin_step(step)
    learner.feed(make_groups(3 + step, 2))
    learner.finish_step()
