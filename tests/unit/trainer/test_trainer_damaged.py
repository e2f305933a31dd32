"""Damaged checkpoints and numbers that are not finite: noticed before they are used or written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dora_rl.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from dora_rl.ports import Canary
from dora_rl.trainer.checkpoints.digests import CheckpointDamaged, check_saved, file_digests
from dora_rl.trainer.checkpoints.finite import NotFinite, Ranges, check_canary, check_moments
from dora_rl.trainer.checkpoints.state import Checkpoints
from dora_rl.trainer.learner import Learner
from dora_rl.types import UserError
from dora_rl.weights.store import SharedMemoryWeightStore
from tests.kit.trainer_cases import changed, make_groups

TRAINER = TrainerConfig(lr=1e-3, device="cpu", pack_tokens=64)
STATE, OPTIMIZER = "trainer/state.json", "trainer/optimizer.safetensors"


def trained(model: Path, trainer: TrainerConfig = TRAINER) -> Learner:
    learner = Learner(model, AlgorithmConfig(), trainer)
    learner.begin_step(0)
    learner.feed(make_groups(0, 2, version=0))
    learner.finish_step()
    return learner


@pytest.fixture
def saved(model_dir: Path, tmp_path: Path) -> Path:
    return trained(model_dir).save(tmp_path / "step_000000")


def flip(path: Path, place: float = 0.5, bit: int = 0x40) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= bit
    path.write_bytes(data)


def all_files(saved: Path) -> list[str]:
    return sorted([*file_digests(saved), STATE])


def test_every_file_of_a_checkpoint_has_a_digest(saved: Path) -> None:
    names = {path.relative_to(saved).as_posix() for path in saved.rglob("*") if path.is_file()}
    assert set(all_files(saved)) == names and "tokenizer.json" in names
    check_saved(saved)
    (saved / "trainer" / "score.json").write_text("{}")  # an evaluation comes later
    (saved / "README.md").write_text("my notes")
    check_saved(saved)


def test_one_flipped_bit_anywhere_is_noticed_and_the_file_is_named(saved: Path) -> None:
    for name in all_files(saved):
        data = (saved / name).read_bytes()
        for place in (0.01, 0.5, 0.99):
            flip(saved / name, place)
            with pytest.raises(CheckpointDamaged, match=name):
                Learner.resume(saved, None, TRAINER)
            (saved / name).write_bytes(data)
    Learner.resume(saved, None, TRAINER)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", OPTIMIZER])
def test_a_file_that_is_gone_cut_or_new_is_noticed(saved: Path, name: str) -> None:
    data = (saved / name).read_bytes()
    (saved / name).write_bytes(data[: len(data) // 2])
    with pytest.raises(CheckpointDamaged, match=name):
        check_saved(saved)
    (saved / name).unlink()
    with pytest.raises(CheckpointDamaged, match=name):
        check_saved(saved)
    (saved / name).write_bytes(data)
    (saved / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointDamaged, match=r"pytorch_model\.bin"):
        check_saved(saved)


def test_a_score_that_was_changed_is_noticed(saved: Path) -> None:
    kept = Checkpoints(saved.parent, CheckpointConfig())
    kept.rate(0, 0.5)
    path = saved / "trainer" / "score.json"
    said = path.read_text()
    for damage in (said.replace("0.5", "0.9"), said.replace("eval", "evil"), said[:9], "[]", ""):
        path.write_text(damage)
        with pytest.raises(UserError, match=rf"{path} is damaged; delete it"):
            kept.saved()
    for whole in (said, '{"metric": "eval/greedy", "score": 0.5}'):  # and of an older release
        path.write_text(whole)
        assert [one.score for one in kept.saved()] == [0.5]


def test_a_kill_while_the_score_is_written_leaves_the_checkpoint_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Path, "rename", killed)
        Checkpoints(saved.parent, CheckpointConfig()).rate(0, 0.5)
    assert not (saved / "trainer" / "score.json").exists()
    check_saved(saved)


def as_format(saved: Path, form: int) -> None:
    """As an older release would have written it."""
    state = json.loads((saved / STATE).read_text())
    del state["seal"]
    state["format"] = form
    state["files"] = file_digests(saved, form=form)
    if form == 1:
        del state["files"]
    (saved / STATE).write_text(json.dumps(state))


@pytest.mark.parametrize("form", [1, 2])
def test_checkpoints_of_older_releases_are_read(saved: Path, form: int) -> None:
    as_format(saved, form)
    assert Learner.resume(saved, None, TRAINER).next_step == 1


def test_a_seal_cannot_be_left_out(saved: Path) -> None:
    state = json.loads((saved / STATE).read_text())
    for change in ({"format": 2}, {"num_updates": 7}):
        (saved / STATE).write_text(json.dumps(state | change))
        with pytest.raises(CheckpointDamaged, match=STATE):
            check_saved(saved)


def spoil_moments(saved: Path, suffix: str, value: float) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(saved / OPTIMIZER)
    name = next(name for name in tensors if name.endswith(suffix))
    tensors[name].view(-1)[0] = value
    save_file(tensors, saved / OPTIMIZER)


@pytest.mark.parametrize(
    ("suffix", "value", "line"),
    [
        ("exp_avg", float("nan"), "moments are not finite"),
        ("exp_avg_sq", float("inf"), "moments are not finite"),
        ("exp_avg_sq", -1e-9, "is negative"),
    ],
)
def test_moments_without_a_digest_are_looked_at(
    saved: Path, suffix: str, value: float, line: str
) -> None:
    as_format(saved, 1)
    spoil_moments(saved, f":{suffix}", value)
    with pytest.raises(NotFinite, match=line):
        Learner.resume(saved, None, TRAINER)


def test_moments_that_are_refused_change_nothing(model_dir: Path) -> None:
    learner = trained(model_dir)
    before = {name: value.clone() for name, value in learner.optimizer.state_tensors().items()}
    spoiled = {name: torch.zeros_like(value) for name, value in before.items()}
    spoiled[max(name for name in spoiled if name.endswith(":exp_avg"))].fill_(float("nan"))
    with pytest.raises(NotFinite):
        learner.optimizer.load_state_tensors(spoiled)
    after = learner.optimizer.state_tensors()
    assert all(torch.equal(after[name], value) for name, value in before.items())


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rank", [0, 2], ids=["whole", "adapters"])
def test_what_is_not_finite_is_neither_sealed_nor_saved(
    model_dir: Path, tmp_path: Path, value: float, rank: int
) -> None:
    learner = trained(model_dir, changed(TRAINER, lora_rank=rank))
    store = SharedMemoryWeightStore(tmp_path / "store")
    exact = SharedMemoryWeightStore(tmp_path / "exact")
    learner.publish(store, 1, exact=exact).result()
    last = [p for p in learner.policy.parameters() if p.requires_grad][-1]
    with torch.no_grad():
        last.view(-1)[-1] = value
    with pytest.raises(NotFinite, match="version 2"):
        learner.publish(store, 2, exact=exact)
    with pytest.raises(NotFinite, match="the checkpoint"):
        learner.save(tmp_path / "step_000001")
    assert list(store.versions()) == list(exact.versions()) == [1]
    assert not list(store.root.glob(".new-*")) and not (tmp_path / "step_000001").exists()


def test_a_weight_that_its_rounding_makes_infinite_is_named() -> None:
    ranges = Ranges()
    ranges.add("a", torch.tensor([1.0, 7e4]), torch.bfloat16)
    ranges.add("none", torch.empty(0))
    ranges.add("numbers", torch.tensor([1 << 40]))
    assert ranges.problem() == ""
    ranges.add("b", torch.tensor([1.0, 7e4]), torch.float16)
    ranges.add("c", torch.tensor([float("nan")], dtype=torch.bfloat16))
    assert ranges.problem() == "b and 1 more"
    check_moments({"a:exp_avg": torch.tensor([-1.0]), "a:exp_avg_sq": torch.tensor([0.0])})


def test_a_canary_that_is_not_finite_is_not_published() -> None:
    check_canary(Canary((1, 2), (-0.5,)), 3)
    with pytest.raises(NotFinite, match="version 3 gives log-probs that are not finite"):
        check_canary(Canary((1, 2), (float("nan"),)), 3)
