"""Whole runs of a tiny mixture of experts: the learner goes where the engine went, and the books
say so."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.core import events as ev
from dora_rl.setup.learner_check import check_learner, describe_experts
from dora_rl.store.trajectories import routing_from_json
from dora_rl.types import UserError
from tests.kit.inline_runs import config_of, events_of, proven
from tests.kit.places import MODEL
from tests.kit.trainer_cases import write_tiny_model

SIZES = {"vocab_size": 16, "max_position_embeddings": 512, "eos_token_id": 1, "num_experts": 8}
BFLOAT16 = {"rollout": {"dtype": "bfloat16", "speculation": "off"}}


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixture")
    for file in MODEL.iterdir():
        if file.suffix in (".json", ".jinja"):
            shutil.copy(file, path / file.name)
    tokenizer = (path / "tokenizer.json").read_bytes()
    write_tiny_model(path, "qwen3_moe", **SIZES)
    (path / "tokenizer.json").write_bytes(tokenizer)
    return path


def run(mixture: Path, folder: Path, replay: str, **sections: dict[str, Any]) -> Path:
    """Three steps in bfloat16, where engine and learner round apart; all is computed again."""
    trainer = {"compute_dtype": "bfloat16", "router_replay": replay, "router_aux_coef": 0.01}
    run_dir = folder / replay
    config = config_of(
        run_dir,
        model={"path": str(mixture)},
        trainer=trainer | sections.pop("trainer", {}),
        audit={"recompute_share": 1.0, "tolerance": 0.1},
        orchestration={"num_steps": 3, "max_staleness": 1},
        **BFLOAT16,
        **sections,
    )
    file = folder / f"{replay}.json"
    file.write_text(config.model_dump_json())
    assert main(["train", str(file)]) == 0
    return run_dir


def steps_of(run_dir: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if "moe/balance" in line]


def recomputed(run_dir: Path) -> list[ev.Recomputed]:
    return [event for event in events_of(run_dir) if isinstance(event, ev.Recomputed)]


@pytest.mark.full
def test_a_run_that_replays_and_one_that_does_not(mixture: Path, tmp_path: Path) -> None:
    replayed, alone = (run(mixture, tmp_path, how) for how in ("on", "off"))
    for run_dir in (replayed, alone):
        proven(run_dir)
        assert len(steps_of(run_dir)) == 3
    with_replay, without = steps_of(replayed), steps_of(alone)
    assert all(line["moe/replayed"] == 1.0 for line in with_replay)
    assert 0 < max(line["moe/mismatch"] for line in with_replay) < 0.2, "their own would differ"
    assert not any("moe/mismatch" in line for line in without)
    # The first step is of the same weights in both.
    assert with_replay[0]["mismatch_abs"] < 0.8 * without[0]["mismatch_abs"]
    gaps = [max(event.gap_max for event in recomputed(d)) for d in (replayed, alone)]
    assert gaps[0] < 0.5 * gaps[1]

    lines = [json.loads(line) for line in (replayed / "rollouts.jsonl").read_text().splitlines()]
    for line in lines:
        digest, found = routing_from_json(line["experts"])
        assert digest and (found is not None) == (line["sample"] == 0)
        if found is not None:
            assert found.shape == (line["num_prompt"] + line["num_tokens"], 2, 2)
    rollouts = (alone / "rollouts.jsonl").read_text().splitlines()
    assert all(json.loads(line)["experts"] == [] for line in rollouts)


def test_the_audit_sees_the_routing_and_computes_again_with_it(
    mixture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = run(mixture, tmp_path, "auto")
    assert main(["audit", "--files", "--recompute", "9", str(run_dir)]) == 0
    said = capsys.readouterr().out
    assert "computed again now: " in said
    path = run_dir / "rollouts.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    first = next(line for line in lines if line["sample"] == 0)
    first["experts"] = []
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["audit", "--files", str(run_dir)]) == 1
    assert "rewards or experts are not those that were generated" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"rollout": {"backend": "vllm"}, "trainer": {"router_replay": "on"}}, "vLLM does not say"),
        ({"trainer": {"router_replay": "on", "implementation": "transformers"}}, "transformers"),
        ({"model": {"path": str(MODEL)}, "trainer": {"router_replay": "on"}}, "has no experts"),
        ({"model": {"path": str(MODEL)}, "trainer": {"router_aux_coef": 0.1}}, "has no experts"),
        ({"trainer": {"router_aux_coef": 0.1, "lora_rank": 2}}, "routers carry no adapter"),
        (
            {"trainer": {"lora_rank": 2, "lora_targets": ["up_proj"]}},
            "up_proj is a layer of the experts here, and those carry no adapters",
        ),
    ],
)
def test_what_a_mixture_cannot_do_is_one_line(
    mixture: Path, tmp_path: Path, sections: dict[str, dict[str, Any]], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check_learner(config_of(tmp_path, **({"model": {"path": str(mixture)}} | sections)))


def test_it_is_told_who_chooses_the_experts(mixture: Path, tmp_path: Path) -> None:
    def told(device: str, **sections: dict[str, Any]) -> str:
        config = config_of(tmp_path, **({"model": {"path": str(mixture)}} | sections))
        return "; ".join(describe_experts(config, device))

    assert "where it went" in told("cpu") == told("cuda", trainer={"router_replay": "on"})
    assert "on a GPU set trainer.router_replay = 'on'" in told("cuda")
    assert "choose anew (no replay)" in told("cpu", rollout={"backend": "vllm"})
    assert "choose anew (no replay)" in told("cuda", trainer={"router_replay": "off"})
    guessing: dict[str, dict[str, Any]] = {"rollout": {"speculation": "on"}}
    assert "nothing is guessed" in told("cuda", trainer={"router_replay": "on"}, **guessing)
    assert "nothing is guessed" not in told("cuda", **guessing) + told("cpu", **guessing)
    assert "carry no adapters" in told("cpu", trainer={"lora_rank": 2})
    assert not told("cpu", model={"path": str(MODEL)})
