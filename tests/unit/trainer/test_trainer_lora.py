"""Adapters: what is sealed is what is computed, dropout or not; the output matrix has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dora_rl.config import AlgorithmConfig, CheckpointConfig, RunConfig, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.model.directory import read_spec
from dora_rl.setup.learner_check import check_learner
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.lora import Linear, LoraLinear, side_by_side, without_dropout
from dora_rl.trainer.scoring import score
from dora_rl.types import UserError
from dora_rl.weights.store import SharedMemoryWeightStore
from tests.kit.exact_cases import documents_of, move_adapters, write_exact_model
from tests.kit.trainer_cases import changed, make_groups, write_tiny_model
from tests.kit.trainer_store import MemoryStore

TRAINER = TrainerConfig(lr=1e-3, device="cpu", pack_tokens=64, lora_rank=3)


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
    trainer = changed(TRAINER, lora_dropout=0.5, lora_publish=form, compute_dtype=dtype)
    learner = Learner(model, None, trainer)
    move_adapters(learner)
    learner.begin_step(0)
    learner.feed(make_groups(3, 2))
    learner.finish_step()
    store = SharedMemoryWeightStore(tmp_path / "store")
    learner.publish(store, 1).result()
    load_into_engine(model, store.open(1), dtype, 3 if form == "adapters" else 0)


def test_dropout_is_for_training_passes_alone(model_dir: Path) -> None:
    learner = Learner(model_dir, None, changed(TRAINER, lora_dropout=0.5))
    move_adapters(learner)
    document = documents_of(30, 1)[0]
    ids, rows = document.token_ids, document.rows
    (still,) = score(learner.policy, [document], 1.0, 64)
    (again,) = score(learner.policy, [document], 1.0, 64)
    assert torch.equal(still, again)

    def training_pass() -> torch.Tensor:
        return learner.policy(ids, Layout([len(ids)], ids.device), rows, ids[1:]).logprobs_T

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
        trainer = changed(
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
        learner = Learner(model_dir, None, changed(TRAINER, lora_publish=form))
        move_adapters(learner)
        learner.policy(ids, layout, rows, ids[1:]).logprobs_T.mean().backward()
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
    trainer = changed(TRAINER, compute_dtype="bfloat16", lora_publish=form)
    algorithm = AlgorithmConfig(loss=loss, kl_coef=0.1, old_logprobs="behaviour")
    found: list[dict[str, torch.Tensor]] = []
    for said in (False, True):
        model = stored_in_half(tmp_path / f"model{said}", said=said)
        store: Any = MemoryStore()
        learner = Learner(model, algorithm, trainer, store=store)
        learner.publish(store, 0)
        train_step(learner, 0)
        learner.publish(store, 1)
        saved = learner.save(tmp_path / f"saved{said}", CheckpointConfig(dtype="float32"))
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


# -- how they are computed ------------------------------------------------------------------------


class Products(TorchDispatchMode):
    """Notes the shapes of what matrix products make."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(out.shape))
        return out


def backward_products(learner: Learner) -> set[tuple[int, ...]]:
    ids = documents_of(30, 1)[0].token_ids
    rows, layout = torch.arange(29), Layout([30], ids.device)
    loss = learner.policy(ids, layout, rows, ids[1:]).logprobs_T.mean()
    with Products() as seen:
        loss.backward()
    return set(seen.shapes)


@pytest.mark.parametrize("form", ["adapters", "merged"])
def test_no_gradient_of_a_frozen_matrix_is_computed(model_dir: Path, form: str) -> None:
    """A third of the work of full training: 2 FLOPs of 6 for each parameter and token."""
    whole = Learner(model_dir, None, changed(TRAINER, lora_rank=0))
    frozen = {
        tuple(p.shape)
        for name, p in whole.policy.named_parameters()
        if p.dim() == 2 and ("layers" in name or "lm_head" in name)
    }
    assert frozen <= backward_products(whole)
    learner = Learner(model_dir, None, changed(TRAINER, lora_publish=form))
    move_adapters(learner)
    made = backward_products(learner)
    assert made and not made & frozen


def plain_adapted(x: Tensor, layer: LoraLinear) -> Tensor:
    """The formula, in float64."""
    a, b = (t.double() for t in layer.factors())
    bias = layer.base_layer.bias
    y = x.double() @ layer.base_layer.weight.double().t()
    return (y if bias is None else y + bias.double()) + layer.scale * (x.double() @ a.t()) @ b.t()


@pytest.mark.parametrize("outs", [(5, 3, 3), (40, 40), (9, 9), (40, 9)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("targets", [1, 3])
def test_layers_that_share_an_input_equal_the_formula(
    outs: tuple[int, ...], bias: bool, targets: int
) -> None:
    """Few and many outputs, with and without biases, some layers without an adapter."""
    torch.manual_seed(0)
    options = changed(TRAINER, lora_alpha=5.0)
    plain = [Linear(12, out, bias=bias).requires_grad_(False) for out in outs]
    layers = [LoraLinear(layer, options) for layer in plain[:targets]] + plain[targets:]
    for layer in layers[:targets]:
        torch.nn.init.normal_(layer.factors()[1])  # type: ignore[operator]
    x = torch.randn(7, 12, requires_grad=True)
    trained = [x, *(t for layer in layers[:targets] for t in layer.factors())]  # type: ignore[operator]
    weights = [torch.randn(7, out) for out in outs]
    expected = [plain_adapted(x, m) if isinstance(m, LoraLinear) else m(x) for m in layers]
    found = side_by_side(x, *layers)
    gradients = []
    for values in (expected, found):
        loss = sum((v * w).sum() for v, w in zip(values, weights, strict=True))
        gradients.append(torch.autograd.grad(loss, trained))  # type: ignore[arg-type]
    for a, b in zip([*expected, *gradients[0]], [*found, *gradients[1]], strict=True):
        assert torch.allclose(a.to(b.dtype), b, rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("form", ["adapters", "merged"])
def test_layers_with_adapters_are_compiled_whole(tmp_path: Path, form: str, dropout: float) -> None:
    """Nothing in a layer makes the compiler give up, and values stay those of plain layers."""
    model = write_tiny_model(tmp_path / "model", "qwen2")
    ids = documents_of(30, 1)[0].token_ids
    rows, layout = torch.arange(29), Layout([30], ids.device)
    found = []
    for compiled in ("off", "on"):
        torch._dynamo.utils.counters.clear()
        trainer = changed(TRAINER, lora_publish=form, compile=compiled, lora_dropout=dropout)
        learner = Learner(model, None, trainer)
        move_adapters(learner)
        with without_dropout(learner.policy):
            scores = learner.policy(ids, layout, rows, ids[1:]).logprobs_T
        learner.policy(ids, layout, rows, ids[1:]).logprobs_T.mean().backward()
        assert all(p.grad is not None for p in learner.optimizer.parameters)
        found.append(scores.detach())
    assert torch._dynamo.utils.counters["frames"]["ok"] >= 2
    assert not torch._dynamo.utils.counters["graph_break"]
    assert torch.allclose(*found, atol=1e-5)
