"""Each loss and its gradient against plain torch on transformers' own model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.func import functional_call

from dora_rl.tinker.losses import LOSSES
from dora_rl.tinker.messages import Datum, TrainingPass
from dora_rl.tinker.trainee import ALPHA, AdapterShape, Base, Trainee
from dora_rl.trainer.policy.lora import load_adapter_tensors
from tests.kit.tiny_models import VOCAB, save_model

RANK, LENGTHS = 4, (5, 11, 3, 8)


@pytest.fixture(scope="module", params=["qwen2", "qwen3-tied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp(request.param)
    return save_model(request.param, path), Base(path, "cpu", "float32")


def random_trainee(base: Base) -> Trainee:
    """Its adapters are not at their start, where half of the gradients are zero."""
    trainee = Trainee(base, AdapterShape(RANK, seed=1))
    generator = torch.Generator().manual_seed(0)
    load_adapter_tensors(
        trainee.policy,
        {
            n: torch.randn(t.shape, generator=generator) * 0.05
            for n, t in trainee.adapters().items()
        },
    )
    return trainee


def plain_logprobs(model: Any, adapters: dict[str, Tensor], datum: Datum) -> Tensor:
    """(N, K) or (N,): through merged weights, one sequence, all logits."""
    weights = {name: p.detach() for name, p in model.model.named_parameters()}
    head = model.get_output_embeddings().weight.detach()
    for name, a in adapters.items():
        if ".lora_A." not in name:
            continue
        added = ALPHA / RANK * adapters[name.replace("lora_A", "lora_B")] @ a
        module = name.partition(".lora_A.")[0].removeprefix("inner.model.")
        if module == "lm_head":
            head = head + added
        else:
            weights[f"{module}.weight"] = weights[f"{module}.weight"] + added
    ids = torch.from_numpy(datum.token_ids.astype(np.int64))[None]
    states = functional_call(model.model, weights, (ids,)).last_hidden_state[0]
    targets = torch.from_numpy(datum.inputs["target_tokens"])
    table = (states @ head.t()).log_softmax(-1)
    wide = targets if targets.dim() == 2 else targets[:, None]
    return table.gather(-1, wide).view(targets.shape)


def given(datum: Datum, name: str) -> Tensor:
    return torch.from_numpy(datum.inputs[name])


def cross_entropy(lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    return (-lp * given(datum, "weights")).sum()


def importance_sampling(lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    return -(torch.exp(lp - given(datum, "logprobs")) * given(datum, "advantages")).sum()


def ppo(lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    ratio = torch.exp(lp - given(datum, "logprobs"))
    return pessimistic(ratio, datum, config, (0.8, 1.2))


def pessimistic(
    ratio: Tensor, datum: Datum, config: dict[str, float], usual: tuple[float, float]
) -> Tensor:
    low = config.get("clip_low_threshold", usual[0])
    high = config.get("clip_high_threshold", usual[1])
    advantages = given(datum, "advantages")
    return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages).sum()


def cispo(lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    low, high = config.get("clip_low_threshold", 0.0), config.get("clip_high_threshold", 4.0)
    ratio = torch.exp(lp - given(datum, "logprobs")).clamp(low, high).detach()
    return -(ratio * lp * given(datum, "advantages")).sum()


def dro(lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    square = (lp - given(datum, "logprobs")) ** 2
    beta = config.get("beta", 0.05)
    return -(lp * given(datum, "advantages") - 0.5 * beta * square).sum()


def gspo(lp: Tensor, datum: Datum, config: dict[str, float]) -> Tensor:
    marked = given(datum, "sequence_ratio_mask") != 0
    mean = (lp.detach() - given(datum, "logprobs"))[marked].mean()
    return pessimistic(torch.exp(mean + lp - lp.detach()), datum, config, (0.0, 0.0))


PLAIN: dict[str, Callable[[Tensor, Datum, dict[str, float]], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
    "gspo": gspo,
}
CLIP = {"clip_low_threshold": 0.9, "clip_high_threshold": 1.05}
CASES: list[tuple[str, dict[str, float]]] = [
    *((name, {}) for name in PLAIN if name != "gspo"),
    ("ppo", CLIP),
    ("cispo", CLIP),
    ("dro", {"beta": 0.7}),
    ("gspo", CLIP),
]


def random_data(name: str, model: Any, adapters: dict[str, Tensor], seed: int = 0) -> list[Datum]:
    """Log-probs of a sampler near enough that ratios are on both sides of every bound."""
    draw = np.random.default_rng(seed)
    data = []
    for length in LENGTHS:
        ids = draw.integers(0, VOCAB, length).astype(np.int32)
        bare = Datum(ids, {"target_tokens": draw.integers(0, VOCAB, length)})
        near = plain_logprobs(model, adapters, bare).detach().numpy()
        noise = draw.normal(0, 0.8, length)
        columns = {
            "weights": draw.random(length),
            "logprobs": near + noise,
            "advantages": draw.normal(0, 1, length),
            "sequence_ratio_mask": (draw.random(length) < 0.7) | (np.arange(length) == 0),
        }
        inputs = {
            key: columns[key].astype(np.float32) for key in LOSSES[name].needs if key in columns
        }
        data.append(Datum(ids, bare.inputs | inputs))
    return data


def check(model: Any, base: Base, data: list[Datum], name: str, config: dict[str, float]) -> None:
    trainee = random_trainee(base)
    leaves = {n: t.clone().requires_grad_() for n, t in trainee.adapters().items()}
    expected = [plain_logprobs(model, leaves, datum) for datum in data]
    loss = sum(PLAIN[name](lp, datum, config) for lp, datum in zip(expected, data, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    found, value = trainee.run(TrainingPass("m", 1, name, config, False, tuple(data)))
    assert value == pytest.approx(float(loss.detach()), rel=2e-5, abs=1e-4)
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.shape == tuple(theirs.shape)
        np.testing.assert_allclose(mine, theirs.detach().numpy(), atol=2e-5)
    grads = {n: p.grad for n, p in trainee.policy.named_parameters() if p.requires_grad}
    assert grads.keys() == leaves.keys() and len(grads) == 2 * (7 * 2 + 1)
    for key, leaf in leaves.items():
        mine, theirs = grads[key], leaf.grad
        assert mine is not None and theirs is not None and bool(theirs.any())
        assert float((mine - theirs).norm()) <= 2e-4 * float(theirs.norm()) + 1e-6, key


@pytest.mark.parametrize(("name", "config"), CASES)
def test_loss_and_gradient_are_those_of_plain_torch(
    model: Any, name: str, config: dict[str, float]
) -> None:
    whole, base = model
    adapters = random_trainee(base).adapters()
    check(whole, base, random_data(name, whole, adapters), name, config)


def test_several_targets_of_one_position(model: Any) -> None:
    whole, base = model
    draw = np.random.default_rng(1)
    data = [
        Datum(
            draw.integers(0, VOCAB, length).astype(np.int32),
            {
                "target_tokens": draw.integers(0, VOCAB, (length, width)),
                "weights": draw.random((length, width)).astype(np.float32),
            },
        )
        for length, width in ((5, 3), (4, 1), (6, 2))
    ]
    check(whole, base, data, "cross_entropy", {})


def test_bounds_of_a_token_go_before_those_of_the_request(model: Any) -> None:
    whole, base = model
    trainee = random_trainee(base)
    data = random_data("ppo", whole, trainee.adapters())
    wide = [
        Datum(
            d.token_ids,
            d.inputs | {k: np.full_like(d.inputs["logprobs"], v) for k, v in CLIP.items()},
        )
        for d in data
    ]
    asked = [TrainingPass("m", 1, "ppo", c, True, tuple(d)) for c, d in ((CLIP, data), ({}, wide))]
    assert trainee.run(asked[0])[1] == trainee.run(asked[1])[1]


def test_a_batch_may_come_in_any_number_of_requests(model: Any) -> None:
    whole, base = model
    data = random_data("importance_sampling", whole, random_trainee(base).adapters())
    norms = []
    for parts in ([data], [data[:1], data[1:]], [[one] for one in data]):
        trainee, total = random_trainee(base), 0.0
        for part in parts:
            asked = TrainingPass("m", 1, "importance_sampling", {}, False, tuple(part))
            total += trainee.run(asked)[1]
        grads = [p.grad for p in trainee.policy.parameters() if p.grad is not None]
        norms.append((total, float(torch.stack([g.norm() for g in grads]).norm())))
    for one in norms[1:]:
        assert one == pytest.approx(norms[0], rel=1e-5)


def test_a_forward_pass_leaves_no_gradient(model: Any, tmp_path: Path) -> None:
    whole, base = model
    trainee = random_trainee(base)
    data = random_data("dro", whole, trainee.adapters())
    trainee.run(TrainingPass("m", 1, "dro", {}, True, tuple(data)))
    assert all(p.grad is None for p in trainee.policy.parameters())
