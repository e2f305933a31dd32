"""Learners that must not see a gap: lr 0, so every version, the reference and the live policy are
the same weights. The model files are float32, so masters lie between the numbers of bfloat16.

Shared by the tests on a CPU and those on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.model.directory import read_spec, write_model
from dora_rl.trainer import documents as made
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.losses.recipes import RECIPES
from dora_rl.trainer.policy.lora import adapter_tensors, load_adapter_tensors
from dora_rl.trainer.policy.model import (
    build_decoder,
    lean_spec,
    load_policy,
    load_weights,
    named_weights,
)
from dora_rl.trainer.scoring import fill_old_values, score
from tests.kit.trainer_cases import FAMILIES, SHAPE, VOCAB, initialise, make_groups
from tests.kit.trainer_store import MemoryStore

LOSSES = tuple(RECIPES)
LONG = {"max_position_embeddings": 3200, "head_dim": 32}
FORMS = ("whole", "adapters", "merged")


def write_exact_model(directory: Path, family: str, sharpness: float = 1.0, **shape: Any) -> Path:
    """A model none of whose weights are numbers of bfloat16, norms and biases included. The sharper
    its attention, the more it depends on positions."""
    config: dict[str, Any] = {"tie_word_embeddings": False, **SHAPE, **FAMILIES[family], **shape}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    arch = lean_spec(config)
    assert arch is not None
    decoder = build_decoder(arch, TrainerConfig(device="cpu"))
    initialise(decoder, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, p in decoder.named_parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape, generator=generator) * 0.1)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                p.mul_(sharpness)
    write_model(directory, named_weights(decoder), 1 << 30)
    return directory


def trainer_options(form: str = "whole", **others: Any) -> TrainerConfig:
    options: dict[str, Any] = {"lr": 0.0, "device": "cpu", "pack_tokens": 256}
    if form != "whole":
        options |= {"lora_rank": 3, "lora_publish": form, "lora_alpha": 5.0}
    return TrainerConfig(**{**options, **others})


def algorithm_options(loss: str, old_logprobs: str, **others: Any) -> AlgorithmConfig:
    """Every ratio that is not exactly 1 is clipped, every difference counts in a KL of k2."""
    options: dict[str, Any] = {
        "loss": loss,
        "old_logprobs": old_logprobs,
        "clip_low": 1e-9,
        "clip_high": 1e-9,
        "constant_tokens": 20,
        "kl_estimator": "k2",
        "critic_lr": 0.0,
    }
    return AlgorithmConfig(**{**options, **others})


def move_adapters(learner: Learner) -> None:
    """To where training might have them; new ones add nothing to their base."""
    generator = torch.Generator().manual_seed(1)
    moved = {
        name: torch.randn(p.shape, generator=generator) * 0.3
        for name, p in adapter_tensors(learner.policy).items()
    }
    load_adapter_tensors(learner.policy, moved)


def learner_of(
    model: Path, algorithm: AlgorithmConfig, trainer: TrainerConfig, moved: bool = False
) -> tuple[Learner, MemoryStore]:
    """A learner whose versions 0 and 1 are sealed: both are its weights."""
    store = MemoryStore()
    learner = Learner(model, algorithm, trainer, batch_groups=4, store=store)
    if moved:
        move_adapters(learner)
    for version in (0, 1):
        learner.publish(store, version).result()
    return learner, store


def run_step(learner: Learner, tokens_max: int = 20) -> dict[str, float]:
    """Step 1 on groups of version 0."""
    learner.begin_step(1)
    learner.feed(make_groups(5, 4, version=0, tokens_max=tokens_max))
    return learner.finish_step()


def assert_no_gap(metrics: dict[str, float], reference: bool) -> None:
    """Zero to the last bit; what was not measured does not count as zero."""
    assert metrics["train/packs"] >= 2 and "update/skipped_non_finite" not in metrics
    names = ["ppo_kl", *(n for n in metrics if n.startswith("clip_ratio/"))]
    for name in [*names, "kl"] if reference else names:
        assert metrics[name] == 0.0, (name, metrics[name])


def check_recipe(model: Path, loss: str, old: str, trainer: TrainerConfig) -> None:
    """KL to the reference, ratios and clip marks of one step with two updates."""
    teacher = str(model) if loss == "distill" else ""
    trainer = trainer.model_copy(update={"updates_per_step": 2, "teacher_model": teacher})
    learner, store = learner_of(model, algorithm_options(loss, old, kl_coef=0.1), trainer)
    assert_no_gap(run_step(learner), reference=True)
    # `behaviour` was computed under the groups' version; `proximal` from the second update on.
    assert store.opened and set(store.opened) == {0 if old == "behaviour" else 1}
    if trainer.lora_rank:  # an adapter of zeros is exact in any arithmetic: again with another
        learner, store = learner_of(model, algorithm_options(loss, old), trainer, True)
        assert_no_gap(run_step(learner), reference=False)
        assert store.opened


def documents_of(length: int, count: int, seed: int = 0) -> list[Document]:
    """Documents of one length, every token but the first trained."""
    generator = torch.Generator().manual_seed(seed)
    out = []
    for _ in range(count):
        ids = torch.randint(VOCAB, (length,), generator=generator)
        out.append(Document(ids, torch.arange(length - 1), torch.zeros(length - 1), 0.0, 0))
    return out


def check_sealed_scores(learner: Learner, documents: Sequence[Document], version: int = 0) -> None:
    """A twin of the sealed version gives the live policy's log-probs, bit for bit."""
    live = score(learner.policy, documents, 1.0, learner.pack_tokens)
    sealed = learner.scorer.score(documents, [version] * len(documents))
    for a, b in zip(live, sealed, strict=True):
        assert torch.equal(a, b), float((a - b).abs().max())


def check_critic(model: Path, trainer: TrainerConfig, tokens_max: int = 20) -> None:
    """Old values are the values of the pass; the critic's body starts as the policy, exactly."""
    learner, _ = learner_of(model, algorithm_options("ppo", "behaviour"), trainer)
    critic = learner.critic
    assert critic is not None
    with torch.no_grad():
        critic.head.copy_(torch.linspace(-1, 1, critic.head.numel()).view_as(critic.head))
    groups = make_groups(5, 4, tokens_max=tokens_max)
    documents = [d for g in groups for s in g.samples for d in made.documents_of(g, s, 0.0)]
    fill_old_values(critic, documents, pack_tokens=1 << 20)
    pack = collate(documents, learner.device)
    values = critic(pack.token_ids_P, pack.layout, pack.rows_T)
    assert torch.equal(torch.cat([d.old_values for d in documents]), values.detach().cpu())  # type: ignore[misc]
    assert values.abs().max() > 0.1
    states = learner.policy.states(pack.token_ids_P, pack.layout)
    assert torch.equal(critic.body.states(pack.token_ids_P, pack.layout), states)


def early_and_late(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> tuple[float, float]:
    """Mean gap of two ways to compute the same log-probs, around positions 50 and 3,000."""
    gap = torch.stack([(a.cpu() - b.cpu()).abs() for a, b in zip(ours, theirs, strict=True)])
    return float(gap[:, 25:75].mean()), float(gap[:, 2975:3025].mean())


def other_arithmetic(model: Path, learner: Learner, store: MemoryStore) -> list[Tensor]:
    """Log-probs of `documents_of(3025, 4)` under version 0, all arithmetic in float32."""
    options = trainer_options(compute_dtype="float32", device=str(learner.device))
    policy = load_policy(model, options)
    load_weights(policy, lambda name: store.sealed[0].tensors[name].float())
    return score(policy, documents_of(3025, 4), 1.0, 1)


def by_the_engine(model: Path, learner: Learner, store: MemoryStore) -> list[Tensor]:
    """The same by the rollout engine in bfloat16, whose kernels and order of sums are its own."""
    kind = learner.device.type
    options = EngineOptions(device=kind, dtype="bfloat16", kv_bytes_max=1 << 26)
    engine = Engine(read_spec(model), options)
    engine.load(0, store.sealed[0], verify=False)  # type: ignore[arg-type]
    slot = engine.residency.slots[0]
    return [
        torch.tensor(engine.runner.score(slot, d.token_ids.tolist())) for d in documents_of(3025, 4)
    ]
