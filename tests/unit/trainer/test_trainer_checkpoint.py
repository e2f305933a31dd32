"""Checkpoints: loadable elsewhere, atomic, pruned, best by evaluation; adapters as in PEFT."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from dora_rl.model.names import SCALE
from dora_rl.trainer.attention import Layout
from dora_rl.trainer.checkpoints.state import Checkpoints, write_atomically
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.lora import whole_version
from dora_rl.types import UserError
from dora_rl.weights.store import SharedMemoryWeightStore
from tests.kit.trainer_cases import changed, make_groups, write_tiny_model

TRAINER = TrainerConfig(lr=1e-3, device="cpu", pack_tokens=64)


def train(model_dir: Path, trainer: TrainerConfig, steps: int = 1) -> Learner:
    learner = Learner(model_dir, AlgorithmConfig(), trainer)
    for step in range(steps):
        learner.begin_step(step)
        learner.feed(make_groups(step, 2, version=step))
        learner.finish_step()
    return learner


def our_scores(learner: Learner, ids: torch.Tensor) -> torch.Tensor:
    layout = Layout([len(ids)], torch.device("cpu"))
    with torch.no_grad():
        return learner.policy(ids, layout, torch.arange(len(ids) - 1), ids[1:]).logprobs_T


def their_scores(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        table = model(ids[None]).logits[0].log_softmax(-1)
    return table[:-1].gather(-1, ids[1:, None]).squeeze(-1)


@pytest.mark.parametrize("family", ["qwen3_tied", "qwen3_moe"])
def test_transformers_loads_a_checkpoint_as_it_is(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    learner = train(write_tiny_model(tmp_path / "start", family), TRAINER)
    directory = learner.save(tmp_path / "ckpt")
    assert (directory / "tokenizer.json").is_file()
    theirs, info = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["unexpected_keys"]
    ids = torch.arange(12)
    assert (our_scores(learner, ids) - their_scores(theirs, ids)).abs().max() < 1e-5


def test_peft_loads_the_adapter(model_dir: Path, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    learner = train(model_dir, changed(TRAINER, lora_rank=2, lr=1e-2), steps=3)
    trained = [n for n, p in learner.policy.named_parameters() if p.requires_grad]
    assert trained and all(".lora_" in n for n in trained)
    directory = learner.save(tmp_path / "ckpt")
    ids = torch.arange(12)
    mine = our_scores(learner, ids)
    base = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    assert (mine - their_scores(base, ids)).abs().max() > 1e-3
    adapted = PeftModel.from_pretrained(base, str(directory / "adapter"))
    assert (mine - their_scores(adapted, ids)).abs().max() < 1e-5
    merged = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert (mine - their_scores(merged, ids)).abs().max() < 1e-5
    with pytest.raises(UserError, match="no such linear layer"):
        Learner(model_dir, None, changed(TRAINER, lora_rank=2, lora_targets=("query",)))


def test_lora_versions_are_adapters(model_dir: Path, tmp_path: Path) -> None:
    """A published adapter is small, says what it says, and can be trained on."""
    trainer = changed(TRAINER, lora_rank=2, lr=1e-2)
    learner = train(model_dir, trainer, steps=3)
    store = SharedMemoryWeightStore(tmp_path / "store")
    learner.publish(store, 3).result()
    sealed = store.open(3)
    assert all(".lora_" in name or name == SCALE for name in sealed.names())
    whole = SharedMemoryWeightStore(tmp_path / "whole")
    merged = Learner(model_dir, None, trainer.model_copy(update={"lora_publish": "merged"}))
    merged.adopt(store, 3)
    # One computes with the merged weights, the other beside the base.
    ids = torch.arange(12)
    assert (our_scores(merged, ids) - our_scores(learner, ids)).abs().max() < 1e-5
    merged.publish(whole, 3).result()
    expected = whole.open(3)
    read = whole_version(sealed, model_dir).tensor
    for name in expected.names():
        assert (read(name).float() - expected.tensor(name).float()).abs().max() < 1e-6
    with pytest.raises(UserError, match="adapters merged"):
        learner.adopt(whole, 3)


def test_a_half_written_checkpoint_is_never_seen(model_dir: Path, tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        (target / "config.json").write_text("{}")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(tmp_path / "step_000001", fail)
    assert not (tmp_path / "step_000001").exists()
    assert Checkpoints(tmp_path, CheckpointConfig()).saved() == []
    learner = train(model_dir, TRAINER)
    learner.save(tmp_path / "step_000001")
    learner.save(tmp_path / "step_000001")  # again, over the finished one
    assert Checkpoints(tmp_path, CheckpointConfig()).saved()[-1].path == tmp_path / "step_000001"
    with pytest.raises(UserError, match="nothing to resume"):
        Learner.resume(model_dir)


def test_newest_and_best_are_kept(model_dir: Path, tmp_path: Path) -> None:
    learner = train(model_dir, TRAINER)
    kept = Checkpoints(tmp_path, CheckpointConfig(every_steps=2, keep=2))
    assert [s for s in range(6) if kept.due(s)] == [1, 3, 5]
    assert kept.due(4, last=True)
    scores = {1: 0.5, 2: 0.9, 3: 0.9, 4: 0.1, 5: 0.2}
    for step, score in scores.items():
        learner.save(kept.path_of(step))
        kept.rate(step, score)
        kept.prune(sealed=step + 1)
    assert [s.step for s in kept.saved()] == [3, 4, 5]
    best = kept.best()
    assert best is not None and best.step == 3, "of equals the later one"
    lowest = Checkpoints(tmp_path, CheckpointConfig(best_is_max=False)).best()
    assert lowest is not None and lowest.step == 4
    assert kept.saved()[-1].path == kept.path_of(5)


def test_a_checkpoint_of_a_version_that_is_not_sealed_replaces_no_other(
    model_dir: Path, tmp_path: Path
) -> None:
    learner = train(model_dir, TRAINER)
    kept = Checkpoints(tmp_path, CheckpointConfig(keep=1))
    for step in (1, 2, 3):
        learner.save(kept.path_of(step))
    (tmp_path / ".step_000003.gone" / "trainer").mkdir(parents=True)  # a crash while deleting
    kept.prune(sealed=3)
    assert [s.step for s in kept.saved()] == [2, 3]
    kept.forget(3)
    kept.forget(4)  # there is none
    assert [s.step for s in kept.saved()] == [2] and len(list(tmp_path.iterdir())) == 1
