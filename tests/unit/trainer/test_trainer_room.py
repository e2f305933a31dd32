"""Memory that runs out in a pack: one smaller try, the same gradient, told once, never a loop."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.out_of_memory import shortage
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.memory import Room
from dora_rl.trainer.scoring import SealedScorer
from dora_rl.trainer.warm_up import warm_up
from dora_rl.types import Group, UserError
from tests.kit.trainer_cases import SMOOTH_EPS, changed, flat, make_groups

TRAINER = TrainerConfig(lr=1e-3, device="cpu", pack_tokens=100, eps=SMOOTH_EPS)
WORDS = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 9 GiB"


class SmallMemory:
    """Stands for an allocator: a pack of more tokens than fit fails, half-way through backward or
    before it. Layers that are computed again need a quarter of the room."""

    def __init__(self, learner: Learner, tokens_max: int, where: str = "forward") -> None:
        self.failures = 0
        self.packs: list[int] = []
        self._tokens, self._tokens_max, self._where = 0, tokens_max, where
        self._policy: Any = learner.policy
        self._policy.register_forward_pre_hook(self._forward)
        # The embedding's gradient comes last, when all others have been added.
        first = next(p for n, p in learner.policy.named_parameters() if "layers.0" in n)
        first.register_hook(self._backward)

    def _is_short(self) -> bool:
        return self._tokens > self._tokens_max * (4 if self._policy.checkpointing else 1)

    def _fail(self) -> None:
        self.failures += 1
        raise torch.OutOfMemoryError(WORDS)

    def _forward(self, module: Any, args: tuple[Any, ...]) -> None:
        self._tokens = len(args[0])
        if torch.is_grad_enabled():
            self.packs.append(self._tokens)
            if self._where == "forward" and self._is_short():
                self._fail()

    def _backward(self, gradient: torch.Tensor) -> None:
        if self._where == "backward" and self._is_short():
            self._fail()


def train(
    learner: Learner, groups: list[Group], num_steps: int = 2
) -> tuple[torch.Tensor, list[dict[str, float]]]:
    metrics = []
    for step in range(num_steps):
        learner.begin_step(step)
        for group in groups:
            learner.feed([replace(group, version=step)])
        metrics.append(learner.finish_step())
    return flat(learner), metrics


LOSSES = [
    (AlgorithmConfig(), TRAINER),
    (AlgorithmConfig(), changed(TRAINER, compute_dtype="bfloat16")),
    (AlgorithmConfig(loss="ppo"), TRAINER),  # buffered, with a critic
    (AlgorithmConfig(kl_coef=0.1), changed(TRAINER, updates_per_step=2)),
]
NAMES = ["grpo", "bfloat16", "critic", "updates"]


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize(("algorithm", "trainer"), LOSSES, ids=NAMES)
def test_a_run_short_of_memory_learns_the_same(
    model_dir: Path, algorithm: AlgorithmConfig, trainer: TrainerConfig, where: str
) -> None:
    """Bit for bit as with the smaller packs from the start: nothing is counted twice."""
    groups = make_groups(3, 6)
    learner = Learner(model_dir, algorithm, trainer, batch_groups=6)
    memory = SmallMemory(learner, 60, where)
    got, metrics = train(learner, groups)
    assert memory.failures == 1 and learner.pack_tokens <= 50
    small = trainer.model_copy(update={"pack_tokens": learner.pack_tokens})
    want, calm = train(Learner(model_dir, algorithm, small, batch_groups=6), groups)
    assert torch.equal(got, want)
    assert metrics[0].pop("memory/retries") == 1
    for found, wanted in zip(metrics, calm, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6)


def test_it_is_told_once_and_remembered(model_dir: Path) -> None:
    learner = Learner(model_dir, None, TRAINER)
    memory = SmallMemory(learner, 30)
    train(learner, make_groups(3, 6))
    assert memory.failures == len(learner.notes) == 2  # 100, 50, 25
    assert "Tried to allocate 2.00 GiB" in learner.notes[0]
    assert all("begins again" in note for note in learner.notes)
    before = len(memory.packs)
    train(learner, make_groups(4, 6), 1)
    assert max(memory.packs[before:]) <= 30 and learner.pack_tokens <= 30
    assert len(learner.notes) == 2


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_one_long_document_is_computed_twice(model_dir: Path, where: str) -> None:
    groups = make_groups(5, 4, tokens_max=40)
    want, calm = train(Learner(model_dir, None, TRAINER), groups, 1)
    learner = Learner(model_dir, None, TRAINER)
    memory = SmallMemory(learner, 15, where)
    got, metrics = train(learner, groups, 1)
    assert any("computed twice" in note for note in learner.notes)
    assert metrics[0]["memory/retries"] == memory.failures == len(learner.notes)
    assert metrics[0]["grad_norm"] == pytest.approx(calm[0]["grad_norm"], rel=1e-4)
    assert (got - want).abs().max() < 1e-6
    assert learner.policy.checkpointing is False, "short packs are as fast as before"


def test_what_cannot_be_smaller_ends_with_a_line(model_dir: Path) -> None:
    learner = Learner(model_dir, None, TRAINER)
    memory = SmallMemory(learner, 1)
    learner.begin_step(0)
    with pytest.raises(UserError, match=r"out of memory: a document of \d+ tokens") as told:
        for group in make_groups(3, 6):
            learner.feed([group])
        learner.finish_step()
    assert "Tried to allocate 2.00 GiB" in str(told.value) and "\n" not in str(told.value)
    assert memory.failures < 12


def test_other_errors_are_not_memory(model_dir: Path) -> None:
    learner = Learner(model_dir, None, TRAINER)

    def fail(*_: Any) -> None:
        raise RuntimeError("shapes differ")

    learner.policy.register_forward_pre_hook(fail)
    learner.begin_step(0)
    with pytest.raises(RuntimeError, match="shapes differ"):
        learner.feed(make_groups(3, 6))
    assert shortage(RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling")) != ""
    assert shortage(ValueError("no")) == ""


def test_a_warm_up_that_does_not_fit_makes_packs_smaller(model_dir: Path) -> None:
    learner = Learner(model_dir, None, changed(TRAINER, pack_tokens=1000))
    learner.policy.compiled = True  # type: ignore[assignment]  # as if: something is to be compiled
    memory = SmallMemory(learner, 300)
    warm_up(learner, 10_000)
    assert memory.failures == len(learner.notes) == 2 and learner.pack_tokens <= 250
    assert all(p.grad is None for p in learner.policy.parameters())


class SmallScoring:
    """Stands for an allocator too: a frozen model reads no pack of more tokens than fit."""

    def __init__(self, model: Any, tokens_max: int) -> None:
        self.failures, self._tokens_max = 0, tokens_max
        model.register_forward_pre_hook(self._forward)

    def _forward(self, module: Any, args: tuple[Any, ...]) -> None:
        if len(args[0]) > self._tokens_max and not torch.is_grad_enabled():
            self.failures += 1
            raise torch.OutOfMemoryError(WORDS)


FROZEN = [
    AlgorithmConfig(kl_coef=0.1),
    AlgorithmConfig(kl_coef=0.1, kl_in="reward"),  # scored while groups are taken, not in a pack
    AlgorithmConfig(loss="ppo"),  # values of the whole batch
]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
@pytest.mark.parametrize("algorithm", FROZEN, ids=["reference", "in reward", "critic"])
def test_what_is_only_scored_is_scored_in_smaller_packs(
    model_dir: Path, algorithm: AlgorithmConfig, compute: str
) -> None:
    trainer = changed(TRAINER, compute_dtype=compute)
    groups = make_groups(3, 6)
    learner = Learner(model_dir, algorithm, trainer, batch_groups=6)
    frozen = learner.reference if learner.critic is None else learner.critic
    memory = SmallScoring(frozen, 30)
    got, metrics = train(learner, groups, 1)
    assert memory.failures == len(learner.notes) == metrics[0]["memory/retries"] > 0
    assert "scored under frozen weights" in learner.notes[0] and learner.pack_tokens <= 30
    want, _ = train(Learner(model_dir, algorithm, trainer, batch_groups=6), groups, 1)
    assert (got - want).abs().max() < (1e-6 if compute == "float32" else 3e-3)
    train(learner, groups, 1)
    assert memory.failures == len(learner.notes), "it is remembered"


def test_one_document_that_cannot_be_scored_ends_with_a_line(model_dir: Path) -> None:
    learner = Learner(model_dir, AlgorithmConfig(kl_coef=0.1, kl_in="reward"), TRAINER)
    SmallScoring(learner.reference, 1)
    learner.begin_step(0)
    with pytest.raises(UserError, match="cannot be scored under frozen weights") as told:
        learner.feed(make_groups(3, 6))
    assert "Tried to allocate 2.00 GiB" in str(told.value) and "\n" not in str(told.value)


def test_fewer_frozen_versions_where_there_is_no_room_for_another() -> None:
    made: list[torch.nn.Module] = []

    def make_twin() -> Any:
        if made:
            raise torch.OutOfMemoryError(WORDS)
        made.append(torch.nn.Linear(2, 2))
        return made[-1]

    def sealed(version: int) -> Any:
        shapes = {"weight": (2, 2), "bias": (2,)}
        return SimpleNamespace(
            names=lambda: list(shapes), tensor=lambda n: torch.full(shapes[n], float(version))
        )

    said: list[str] = []
    scorer = SealedScorer(sealed, make_twin, make_twin, 1.0, Room(64, said.append))
    first = scorer._model(1)
    assert scorer._model(2) is first and scorer.models_max == len(said) == 1
    assert first.weight[0, 0].item() == 2.0 and WORDS.split(".")[0] in said[0]
    assert scorer._model(1) is first and first.weight[0, 0].item() == 1.0 and len(said) == 1
