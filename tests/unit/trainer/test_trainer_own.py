"""A loss and an advantage of the user's own: what they see, their arguments, what is said of their
mistakes, and the trial before a run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.losses.functions import PER_GROUP, GroupAdvantage, GroupScores
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.losses.trial import made_up_inputs, try_advantage, try_loss
from dora_rl.types import Group, Segment, UserError
from dora_rl.user_code import UserCodeError, load_object
from tests.kit.trainer_cases import flat, make_groups, sample
from tests.kit.trainer_store import MemoryStore

LOSSES = """\
import torch
from dora_rl.trainer.losses.inputs import LossOutput

SEEN = []

def half(inputs, options):
    return -0.5 * inputs.logprobs_T * inputs.advantages_T

def saturating(inputs, options, width, floor=0.5, *, name="x"):
    assert isinstance(width, float) and name in ("x", "y")
    ratio = torch.exp(width * torch.tanh((inputs.logprobs_T - inputs.old_logprobs_T) / width))
    return LossOutput(-ratio.clamp(min=floor) * inputs.advantages_T)

def anything(inputs, options, **more):
    return -inputs.logprobs_T * inputs.advantages_T * more.get("scale", 1)

def entropy_only(inputs, options):
    return -inputs.entropy_T

def all_it_sees(inputs, options):
    SEEN.append(inputs)
    near = inputs.logprobs_T - inputs.ref_logprobs_T
    return near.square() - inputs.entropy_T * (inputs.staleness_T + 1) - inputs.logprobs_T

def distance(inputs, options):
    return (inputs.logprobs_T - inputs.old_logprobs_T).square()

def mistakes_alone(inputs, options):
    return -inputs.logprobs_T * inputs.advantages_T.clamp(max=0)

def total(inputs, options):
    return inputs.logprobs_T.sum()

def a_list(inputs, options):
    return [0.0]

def misspelt(inputs, options):
    return inputs.logprobs

def deep(inputs, options):
    def inner():
        return torch.zeros(2) + torch.zeros(3)
    return inner()

def detached(inputs, options):
    return -inputs.logprobs_T.detach()

def without_signal(inputs, options):
    return 0.0 * inputs.logprobs_T

def not_finite(inputs, options):
    return inputs.logprobs_T / (inputs.logprobs_T - inputs.old_logprobs_T)

def steep(inputs, options):
    return (inputs.logprobs_T - inputs.logprobs_T.detach()).sqrt()

def one_argument(inputs):
    return inputs.logprobs_T
"""


@pytest.fixture
def losses(tmp_path: Path) -> Path:
    path = tmp_path / "losses.py"
    path.write_text(LOSSES)
    return path


def loss_line(path: Path, name: str, **args: float | str) -> str:
    """What is said of a loss before a run."""
    with pytest.raises(UserError) as caught:
        try_loss(resolve(AlgorithmConfig(loss=f"{path}:{name}", loss_args=args)))
    line = str(caught.value)
    assert "\n" not in line and str(path) in line
    return line


def line_of(text: str, source: str) -> int:
    return 1 + next(i for i, line in enumerate(source.splitlines()) if text in line)


def test_good_losses_pass_the_trial(losses: Path) -> None:
    for name in ("half", "anything", "entropy_only", "distance", "mistakes_alone"):
        try_loss(resolve(AlgorithmConfig(loss=f"{losses}:{name}")))
    seeing = AlgorithmConfig(loss=f"{losses}:all_it_sees", reference=True)
    try_loss(resolve(seeing))
    args = {"width": 0.3, "floor": 0.1, "name": "y"}
    objective = resolve(AlgorithmConfig(loss=f"{losses}:saturating", loss_args=args))
    try_loss(objective)
    assert not objective.may_skip_zero_advantage


def test_arguments_reach_the_loss(losses: Path) -> None:
    inputs = made_up_inputs()
    for scale in (1, 3):
        options = AlgorithmConfig(loss=f"{losses}:anything", loss_args={"scale": scale})
        objective = resolve(options)
        found = objective.function(inputs, objective.options).loss_T
        assert torch.equal(found, -inputs.logprobs_T * inputs.advantages_T * scale)


def test_every_recipe_passes_the_trial() -> None:
    for name in ("grpo", "dr_grpo", "rloo", "cispo", "longcat", "decoupled_ppo", "ppo"):
        try_loss(resolve(AlgorithmConfig(loss=name, constant_tokens=8)))


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("total", {}, ["must return one loss per token", "(16,)", "not shape ()"]),
        ("a_list", {}, ["must return one loss per token", "not list"]),
        ("misspelt", {}, ["AttributeError", "'logprobs'"]),
        ("detached", {}, ["without a gradient", "inputs.logprobs_T"]),
        ("without_signal", {}, ["gradient of zero for every token"]),
        ("not_finite", {}, ["a loss that is not finite", "at token 0", "on-policy batch"]),
        ("steep", {}, ["a gradient that is not finite", "at token 0"]),
        ("one_argument", {}, ["must take 2 values by place, and takes 1"]),
        ("half", {"width": 1.0}, ["algorithm.loss_args.width", "takes no arguments of its own"]),
        ("saturating", {}, ["needs its argument width", "algorithm.loss_args.width"]),
        (
            "saturating",
            {"widht": 0.3},
            ["unknown argument of", "loss_args 'widht'", "did you mean 'width'?"],
        ),
        ("saturating", {"width": "wide"}, ["raised AssertionError", "losses.py, line 10)"]),
        ("other", {}, ["there is no 'other' in it"]),
    ],
)
def test_mistakes_in_a_loss_are_one_line(
    losses: Path, name: str, args: dict[str, float | str], words: list[str]
) -> None:
    line = loss_line(losses, name, **args)
    for word in words:
        assert word in line, line


def test_an_error_names_the_users_line(losses: Path) -> None:
    at = line_of("torch.zeros(2) + torch.zeros(3)", LOSSES)
    assert f"({losses}, line {at})" in loss_line(losses, "deep")
    for name in ("total", "detached", "not_finite", "steep", "without_signal", "one_argument"):
        at = line_of(f"def {name}(", LOSSES)
        assert f"({losses}, line {at})" in loss_line(losses, name)
    with pytest.raises(UserError, match=r"nowhere.py does not exist; check algorithm.loss"):
        resolve(AlgorithmConfig(loss="nowhere.py:loss"))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_loss_sees_in_training(losses: Path, model_dir: Path, dtype: str) -> None:
    """Reference log-probs, entropy, versions, staleness, groups and token ids, as they were fed."""
    algorithm = AlgorithmConfig(loss=f"{losses}:all_it_sees", reference=True)
    trainer = TrainerConfig(lr=1e-3, device="cpu", compute_dtype=dtype, pack_tokens=1000)
    learner = Learner(model_dir, algorithm, trainer, batch_groups=2, store=MemoryStore())
    first, second = make_groups(1, 2, samples=2, version=1)
    mixed = sample(
        token_ids=[3, 4, 5, 6],
        logprobs=[-1.0] * 4,
        loss_mask=[1, 0, 1, 1],
        reward=1.0,
        segments=(Segment(0, 1), Segment(3, 2)),
        truncated=True,
    )
    second = Group(7, 2, second.prompt_ids, (mixed, second.samples[1]))
    before = flat(learner)
    learner.begin_step(3)
    learner.feed([first, second])
    metrics = learner.finish_step()
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-2) and not torch.equal(before, flat(learner))

    (inputs,) = load_object(f"{losses}:SEEN", Path(), section="algorithm", key="")
    samples = [*first.samples, *second.samples]
    trained = [[t for t, m in zip(s.token_ids, s.loss_mask, strict=True) if m] for s in samples]
    assert inputs.token_ids_T.tolist() == [t for tokens in trained for t in tokens]
    assert inputs.group_S.tolist() == [0, 0, 7, 7] and inputs.step == 3
    assert inputs.ref_logprobs_T.shape == inputs.entropy_T.shape == inputs.logprobs_T.shape
    assert bool((inputs.entropy_T > 0).all()) and inputs.entropy_T.requires_grad
    versions = [inputs.version_T[inputs.sequence_T == i].tolist() for i in range(4)]
    assert set(versions[0]) == set(versions[1]) == {1} and set(versions[3]) == {2}
    assert versions[2] == [1, 1, 2]
    assert torch.equal(inputs.staleness_T, 3 - inputs.version_T)


def test_without_a_reference_there_are_no_reference_logprobs(losses: Path) -> None:
    assert made_up_inputs().ref_logprobs_T is None
    assert "TypeError" in loss_line(losses, "all_it_sees")


# -- advantages ------------------------------------------------------------------------------------

ADVANTAGES = """\
def centred(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]

def per_token(rewards, lengths):
    return [r / n for r, n in zip(rewards, lengths)]

def uncut(rewards, truncated, penalty, scale=1.0):
    return [scale * (r - penalty * cut) for r, cut in zip(rewards, truncated)]

def short(rewards):
    return rewards[1:]

def endless(rewards):
    return [float("inf")] * len(rewards)

def broken(rewards):
    return rewards.mean()

def lonely(rewards):
    return [r / (len(rewards) - 1) for r in rewards]

number = 3
"""


@pytest.fixture
def advantages(tmp_path: Path) -> Path:
    path = tmp_path / "advantages.py"
    path.write_text(ADVANTAGES)
    return path


def own(path: Path, name: str, **args: float) -> GroupAdvantage:
    options = AlgorithmConfig(advantage=f"{path}:{name}", advantage_args=args)
    objective = resolve(options)
    assert not objective.needs_whole_batch and objective.may_skip_zero_advantage
    assert objective.group_advantage is not None
    return objective.group_advantage


PAIR = GroupScores([1.0, 2.0], [2, 8], [False, True])


def test_an_advantage_sees_rewards_lengths_and_what_was_cut(advantages: Path) -> None:
    assert own(advantages, "centred")(PAIR) == PER_GROUP["group_mean"](PAIR)
    assert own(advantages, "per_token")(PAIR) == [0.5, 0.25]
    assert own(advantages, "uncut", penalty=0.5)(PAIR) == [1.0, 1.5]
    assert own(advantages, "uncut", penalty=2.0, scale=3.0)(PAIR) == [3.0, 0.0]


def test_truncation_reaches_an_advantage_in_training(advantages: Path, model_dir: Path) -> None:
    """Rewards are equal: all that differs between the responses is that one was cut off."""
    algorithm = AlgorithmConfig(
        loss="reinforce", advantage=f"{advantages}:uncut", advantage_args={"penalty": 1.0}
    )
    learner = Learner(model_dir, algorithm, TrainerConfig(lr=1e-3, device="cpu"), batch_groups=1)
    cut, whole = (sample([3, 4], [-1.0, -1.0], [1, 1], 1.0, truncated=t) for t in (True, False))
    learner.begin_step(0)
    learner.feed([Group(0, 0, [1, 2], (cut, whole))])
    metrics = learner.finish_step()
    # The advantage of the cut response is 0, and it is skipped: one document of two trains.
    assert metrics["train/tokens_skipped"] == 4 and metrics["grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("short", {}, ["one finite number per response: 1 for the rewards [0.0], not []"]),
        ("endless", {}, ["one finite number per response"]),
        ("broken", {}, ["raised AttributeError", "advantages.py, line 17)"]),
        ("lonely", {}, ["raised ZeroDivisionError", "advantages.py, line 20)"]),
        ("number", {}, ["is not a function"]),
        ("uncut", {}, ["needs its argument penalty", "algorithm.advantage_args.penalty"]),
        ("uncut", {"penalty": 1, "scle": 2}, ["'scle'", "did you mean 'scale'?"]),
        ("uncut", {"penalty": 1, "truncated": 2}, ["unknown argument", "'truncated'"]),
        ("per_token", {"lengths": 2}, ["takes no arguments of its own"]),
    ],
)
def test_mistakes_in_an_advantage_are_one_line(
    advantages: Path, name: str, args: dict[str, float], words: list[str]
) -> None:
    options = AlgorithmConfig(advantage=f"{advantages}:{name}", advantage_args=args)
    with pytest.raises(UserError) as caught:
        try_advantage(resolve(options), 4)
    for word in words:
        assert word in str(caught.value), caught.value


def test_an_advantage_of_a_missing_file() -> None:
    with pytest.raises(UserError, match=r"nowhere.py does not exist; check algorithm.advantage"):
        resolve(AlgorithmConfig(advantage="nowhere.py:f"))


def test_a_mistake_during_training_ends_the_run(losses: Path, model_dir: Path) -> None:
    trainer = TrainerConfig(lr=1e-3, device="cpu")
    learner = Learner(model_dir, AlgorithmConfig(loss=f"{losses}:detached"), trainer)
    learner.begin_step(0)
    learner.feed(make_groups(0, 1))
    with pytest.raises(UserCodeError, match="without a gradient"):
        learner.finish_step()
