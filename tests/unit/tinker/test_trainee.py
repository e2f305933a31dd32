"""Clients on one base: nobody touches another's numbers, or the base; bfloat16 too."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.tinker.messages import Datum, TrainingPass
from dora_rl.tinker.trainee import AdamStep, AdapterShape, Base, Trainee, publish_base
from dora_rl.types import RequestId, SamplingParams, UserError
from dora_rl.weights.lora_base import base_checksum
from dora_rl.weights.store import DiskWeightStore
from tests.kit.engines import finish_all
from tests.kit.tiny_models import save_model

IDS = [5, 17, 3, 44, 8, 21, 60, 9]


def asked(ids: list[int], forward_only: bool = False) -> TrainingPass:
    inputs = {"target_tokens": np.array(ids[1:]), "weights": np.ones(len(ids) - 1, np.float32)}
    datum = Datum(np.array(ids[:-1], np.int32), inputs)
    return TrainingPass("m", 1, "cross_entropy", {}, forward_only, (datum,))


def adam(lr: float = 3e-3, **changes: Any) -> AdamStep:
    values: dict[str, Any] = {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-12}
    return AdamStep(**(values | {"weight_decay": 0.0, "clip": 0.0} | changes))


def made(tmp_path: Path, stored: torch.dtype, dtype: Literal["float32", "bfloat16"]) -> Base:
    path = tmp_path / "model"
    save_model("qwen3-tied", path).to(stored).save_pretrained(path)
    return Base(path, "cpu", dtype)


def history(trainee: Trainee, ids: list[int], steps: int = 3) -> list[Any]:
    found = []
    for _ in range(steps):
        logprobs, loss = trainee.run(asked(ids))
        found += [logprobs[0].tolist(), loss, trainee.step(adam())]
    return found


def test_interleaved_clients_compute_what_each_computes_alone(tmp_path: Path) -> None:
    base = made(tmp_path, torch.float32, "float32")
    before = {name: p.clone() for name, p in base.policy.named_parameters()}
    shapes = AdapterShape(4, 1), AdapterShape(2, 2, train_mlp=False)
    inputs = IDS, IDS[::-1]
    alone = [history(Trainee(base, shape), ids) for shape, ids in zip(shapes, inputs, strict=True)]
    trainees = [Trainee(base, shape) for shape in shapes]
    together: list[list[Any]] = [[], []]
    for _ in range(3):
        passes = [one.run(asked(ids)) for one, ids in zip(trainees, inputs, strict=True)]
        for index, (logprobs, loss) in enumerate(passes):
            together[index] += [logprobs[0].tolist(), loss, trainees[index].step(adam())]
    assert together == alone
    for name, p in base.policy.named_parameters():
        assert torch.equal(p, before[name]) and p.grad is None and not p.requires_grad
    own = dict(base.policy.named_parameters())["model.embed_tokens.weight"]
    for trainee in trainees:
        theirs = dict(trainee.policy.named_parameters())["inner.model.embed_tokens.weight"]
        assert theirs.data_ptr() == own.data_ptr(), "the base is there once"


def test_the_update_is_that_of_torch_adamw(tmp_path: Path) -> None:
    base = made(tmp_path, torch.float32, "float32")
    trainee = Trainee(base, AdapterShape(4, 1))
    plain = {n: torch.nn.Parameter(t.clone()) for n, t in trainee.adapters().items()}
    theirs = torch.optim.AdamW(plain.values(), lr=0.0)
    for number, (lr, decay, clip) in enumerate([(3e-3, 0.1, 0.0), (1e-3, 0.0, 0.5)]):
        trainee.run(asked(IDS))
        grads = {n: p.grad for n, p in trainee.policy.named_parameters() if p.requires_grad}
        for name, p in plain.items():
            found = grads[name]
            assert found is not None
            p.grad = found.clone()
        norm = torch.nn.utils.clip_grad_norm_(plain.values(), clip or float("inf"))
        betas = (0.9, 0.95 - 0.1 * number)
        for group in theirs.param_groups:
            group |= {"lr": lr, "betas": betas, "eps": 1e-10, "weight_decay": decay}
        theirs.step()
        step = adam(lr, betas=betas, eps=1e-10, weight_decay=decay, clip=clip)
        assert trainee.step(step) == pytest.approx(float(norm), rel=1e-5)
        for name, tensor in trainee.adapters().items():
            torch.testing.assert_close(tensor, plain[name].detach(), rtol=1e-5, atol=1e-7)


def test_a_saved_state_goes_on_bit_for_bit(tmp_path: Path) -> None:
    base = made(tmp_path, torch.float32, "float32")
    one = Trainee(base, AdapterShape(4, 1))
    history(one, IDS)
    adapters = {name: tensor.clone() for name, tensor in one.adapters().items()}
    moments = {name: tensor.clone() for name, tensor in one.moments().items()}
    expected = history(one, IDS)
    other = Trainee(base, AdapterShape(4, 9))
    other.load(adapters, moments)
    assert history(other, IDS) == expected
    other.load(adapters, None)
    assert history(other, IDS) != expected
    with pytest.raises(UserError, match="rank and layers must be the same"):
        Trainee(base, AdapterShape(2, 1)).load(adapters, moments)


def test_a_pass_that_breaks_leaves_no_gradient_behind(tmp_path: Path) -> None:
    base = made(tmp_path, torch.float32, "float32")
    trainee = Trainee(base, AdapterShape(4, 1))
    trainee.run(asked(IDS))
    policy, calls = trainee.policy, []

    class Broken(torch.nn.Module):
        def forward(self, *_: Any) -> Any:
            calls.append(1)
            raise RuntimeError("no memory")

    trainee.policy = Broken()  # type: ignore[assignment]
    with pytest.raises(RuntimeError):
        trainee.run(asked(IDS))
    trainee.policy = policy
    assert calls and trainee.step(adam()) == 0.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_bfloat16_base_learns_and_samples_what_it_learned(
    tmp_path: Path, dtype: Literal["float32", "bfloat16"]
) -> None:
    """In bfloat16 the base stays as it is stored; adapters and moments are float32 all the same."""
    base = made(tmp_path, torch.bfloat16, dtype)
    kinds = {p.dtype for p in base.policy.parameters()}
    assert kinds == {torch.bfloat16 if dtype == "bfloat16" else torch.float32}
    trainee = Trainee(base, AdapterShape(4, 1))
    found = history(trainee, IDS, 12)
    assert found[-2] < 0.3 * found[1]
    assert {t.dtype for t in (*trainee.adapters().values(), *trainee.moments().values())} == {
        torch.float32
    }
    base_sum, own_sum = sampled_sums(tmp_path, base, trainee, dtype)
    trained = -trainee.run(asked(IDS, forward_only=True))[1]
    assert own_sum == pytest.approx(trained, abs=1e-3 if dtype == "float32" else 0.3)
    assert base_sum < own_sum - 5


@pytest.mark.parametrize("family", ["gemma3", "glm", "glm4", "olmo2", "olmo3", "phi3", "smollm3"])
def test_every_family_learns_and_samples_what_it_learned(tmp_path: Path, family: str) -> None:
    """Layers that a family has as one, or by other names, have adapters as well."""
    save_model(family, tmp_path / "model")
    base = Base(tmp_path / "model", "cpu", "float32")
    trainee = Trainee(base, AdapterShape(4, 1))
    for part, flag in ((".mlp.", "train_attn"), (".self_attn.", "train_mlp")):
        alone = Trainee(base, AdapterShape(4, 1, train_unembed=False, **{flag: False}))
        names = {name for name in trainee.adapters() if part in name}
        assert names and alone.adapters().keys() == names
    history(trainee, IDS, 3)
    base_sum, own_sum = sampled_sums(tmp_path, base, trainee, "float32")
    trained = -trainee.run(asked(IDS, forward_only=True))[1]
    assert own_sum == pytest.approx(trained, abs=1e-3) and base_sum < own_sum


def sampled_sums(
    tmp_path: Path, base: Base, trainee: Trainee, dtype: Literal["float32", "bfloat16"]
) -> tuple[float, float]:
    """The log-prob of IDS in an engine that took both snapshots: the base's, the trainee's."""
    store, path = DiskWeightStore(tmp_path / "versions"), tmp_path / "model"
    publish_base(base, store, 0, base_checksum(path))
    trainee.publish(store, 1, base_checksum(path))
    engine = Engine(
        read_spec(path),
        EngineOptions(
            dtype=dtype, lora_rank=8, lora_head=True, versions_max=2, kv_bytes_max=8 << 20
        ),
    )
    engine.load_base(path)
    for version in (0, 1):
        for _ in engine.load_layers(version, store.open(version)):  # its canary is checked
            pass
        params = SamplingParams(tokens_max=7, forced_ids=tuple(IDS[1:]), ignore_eos=True)
        engine.submit(Request(RequestId(version, 0), version, (IDS[0],), params))
    sums = {key.group: float(t.logprobs.sum()) for key, t in finish_all(engine).items()}
    return sums[0], sums[1]


def test_bfloat16_gradients_point_where_float32_ones_do(tmp_path: Path) -> None:
    flat = []
    for index, dtype in enumerate(("float32", "bfloat16")):
        base = made(tmp_path / f"{index}", torch.bfloat16, dtype)  # type: ignore[arg-type]
        trainee = Trainee(base, AdapterShape(4, 1))
        trainee.run(asked(IDS))
        parts = [p.grad.flatten() for p in trainee.policy.parameters() if p.grad is not None]
        flat.append(torch.cat(parts))
    assert float(torch.cosine_similarity(flat[0], flat[1], 0)) > 0.99
