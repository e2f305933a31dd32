"""What a run would train on is refused before it starts where its objective would be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.setup.learner_check import check_learner
from dora_rl.setup.settings import resolve
from dora_rl.types import UserError
from tests.kit.places import ROOT

QUICKSTART = str(ROOT / "recipes" / "quickstart.toml")
MODEL = str(ROOT / "recipes" / "models" / "tiny")


def check(**settings: Any) -> None:
    data: dict[str, Any] = {"model": {"path": MODEL}}
    for name, value in settings.items():
        section, _, key = name.partition("__")
        data.setdefault(section, {})[key] = value
    check_learner(resolve(data, "a.toml"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"rollout__top_k": 5}, ["rollout.top_k = 5:", "train with 0"]),
        ({"rollout__top_p": 0.9}, ["rollout.top_p = 0.9:", "train with 1"]),
        ({"rollout__min_p": 0.1}, ["rollout.min_p = 0.1:", "`dora-rl eval` and `serve`"]),
        ({"rollout__temperature": 0}, ["rollout.temperature = 0:", "above 0"]),
        ({"algorithm__temperature": 0.5}, ["algorithm.temperature = 0.5:", "leave it out"]),
        (
            {
                "algorithm__temperature": 0.5,
                "algorithm__old_logprobs": "behaviour",
                "algorithm__corrections": ["token_tis"],
            },
            ["algorithm.temperature = 0.5:", "rollout.temperature = 1"],
        ),
        ({"algorithm__corrections": ["token_tis"]}, ["algorithm.corrections ['token_tis']"]),
    ],
)
def test_ratios_that_would_be_wrong(settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        check(**settings)
    for word in words:
        assert word in str(caught.value), caught.value


def test_ratios_that_are_right() -> None:
    check()
    check(rollout__temperature=0.6)
    check(rollout__temperature=0.6, algorithm__temperature=0.6)
    check(algorithm__temperature=0.5, algorithm__old_logprobs="proximal")
    check(algorithm__corrections=["token_tis"], algorithm__correction_numerator="current")


OWN = """\
import torch

def good(inputs, options, width=0.2):
    return -(inputs.logprobs_T - inputs.old_logprobs_T).clamp(-width, width) * inputs.advantages_T

def bad(inputs, options):
    return inputs.logprobs_T.log()

def cut_counts(rewards, truncated, penalty=1.0):
    return [r - penalty * cut for r, cut in zip(rewards, truncated)]

def too_few(rewards):
    return [0.0]
"""


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["algorithm.loss=own.py:good", "algorithm.loss_args.width=0.3"], []),
        (["algorithm.advantage=own.py:cut_counts", "algorithm.advantage_args={penalty=2}"], []),
        (["algorithm.loss=own.py:bad"], ["'own.py:bad' (", "own.py, line 6) returns a loss"]),
        (["algorithm.loss=own.py:good", "algorithm.loss_args.widht=1"], ["did you mean 'width'?"]),
        (["algorithm.advantage=own.py:too_few"], ["own.py:too_few", "must return one finite"]),
        (["algorithm.loss_args.width=1"], ["algorithm.loss_args is for a function of your own"]),
        (["algorithm.loss_args.width=inf"], ["loss_args.width", "finite"]),
        (["rollout.top_k=5"], ["rollout.top_k = 5"]),
    ],
)
def test_the_check_command_tries_loss_and_advantage(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    overrides: list[str],
    words: list[str],
) -> None:
    (tmp_path / "own.py").write_text(OWN)
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    where = f"runtime.run_dir={tmp_path / 'run'}"
    status = main(["check", "recipes/quickstart.toml", where, "runtime.device=cpu", *overrides])
    captured = capsys.readouterr()
    if not words:
        assert status == 0, captured.err
        own = overrides[0].partition("=")[2]
        assert f"{own}: tried on a made-up batch" in captured.out
        return
    assert status == 2 and captured.err.count("\n") == 1
    for word in words:
        assert word in captured.err, captured.err
