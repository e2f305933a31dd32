"""The inline world: a whole run in this process. Every mode, resume, faults; and the oracle of the
local world."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dora_rl.controller.run import Run
from dora_rl.core import events as ev
from dora_rl.setup.prepare import prepare
from dora_rl.types import Mode, UserError
from dora_rl.worlds.inline import InlineWorkers, open_inline
from dora_rl.worlds.kinds import open_run
from tests.kit.inline_runs import config_of, events_of, proven, train
from tests.kit.places import MODEL

SEEN: list[str] = []


def rows(run_dir: Path) -> dict[tuple[int, int], dict[str, Any]]:
    lines = (run_dir / "rollouts.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {(row["group"], row["sample"]): row for row in found}


@pytest.mark.parametrize("mode", list(Mode))
def test_every_mode_trains_and_is_proven(tmp_path: Path, mode: Mode) -> None:
    config = config_of(tmp_path / "run", orchestration={"mode": mode})
    before = threading.active_count()
    stop, _ = train(config)
    assert stop.done and threading.active_count() <= before, "it has no threads"
    assert proven(tmp_path / "run").figures.groups_trained == 4
    assert len(rows(tmp_path / "run")) == 8


def test_without_staleness_it_is_the_local_world_bit_for_bit(tmp_path: Path) -> None:
    for kind in ("inline", "local"):
        orchestration = {"mode": "multi_version", "max_staleness": 0}
        run_dir = tmp_path / kind
        config = config_of(run_dir, runtime={"world": kind}, orchestration=orchestration)
        config = config.model_copy(
            update={"runtime": config.runtime.model_copy(update={"run_dir": str(run_dir)})}
        )
        stop, _ = train(config)
        assert stop.done
    inline, local = rows(tmp_path / "inline"), rows(tmp_path / "local")
    assert inline.keys() == local.keys() and len(inline) == 8
    for place, row in inline.items():
        for name in ("token_ids", "logprobs", "logprob_sum", "version", "reward", "step"):
            assert row[name] == local[place][name], (place, name)
    for version in ("00000001", "00000002"):
        (one,) = (tmp_path / "inline" / "weights" / version).glob("*.safetensors")
        (other,) = (tmp_path / "local" / "weights" / version).glob("*.safetensors")
        assert one.read_bytes() == other.read_bytes(), version


def test_a_reward_runs_in_this_very_thread_and_what_it_raises_is_told(tmp_path: Path) -> None:
    """So a debugger in it has the console, and everything else stands still."""
    code = tmp_path / "mine.py"
    code.write_text(
        "import threading\n"
        "def mine(completion, answer):\n"
        "    assert threading.current_thread() is threading.main_thread()\n"
        "    if len(completion) % 3 == 0:\n"
        "        raise KeyError('mine')\n"
        "    return float(len(completion) % 2)\n"
    )
    reward = {"functions": [f"{code}:mine"]}
    config = config_of(tmp_path / "run", reward=reward)
    stop, lines = train(config)
    assert stop.done or "failed" in stop.reason
    assert any("raised KeyError" in line for line in lines)
    assert "in mine" in (tmp_path / "run" / "user_errors.log").read_text()


def test_it_resumes_where_it_was_interrupted(tmp_path: Path) -> None:
    whole = config_of(tmp_path / "whole", orchestration={"mode": "sync", "num_steps": 3})
    train(whole)
    parts = config_of(tmp_path / "parts", orchestration={"mode": "sync", "num_steps": 3})

    def after_one_step(run: Run) -> Callable[[], bool]:
        return lambda: run.state.committed >= 1

    stop, _ = train(parts, watch=after_one_step)
    assert not stop.done and stop.reason == "interrupted"
    stop, _ = train(parts, resume=True)
    assert stop.done and proven(tmp_path / "parts")
    one, other = rows(tmp_path / "whole"), rows(tmp_path / "parts")
    assert {k: r["token_ids"] for k, r in one.items()} == {
        k: r["token_ids"] for k, r in other.items()
    }


class Kills:
    """Ends workers while a run goes on, each once."""

    def __init__(self, run: Run, workers: InlineWorkers, names: list[str]) -> None:
        self._run, self._workers, self._names = run, workers, names

    def __call__(self) -> bool:
        decoding = self._run.state.num_active > 0
        if self._names and (decoding or self._names[0] != "instance0"):
            name = self._names[0]
            if self._workers.workers[name].joined:
                self._workers.kill(self._names.pop(0))
        return False


def test_workers_that_end_are_replaced_and_nothing_is_lost(tmp_path: Path) -> None:
    """Learner, instance and reward worker: each comes back, the run is proven, the rows agree with
    those of a run in which nobody ended."""
    calm = config_of(tmp_path / "calm", orchestration={"mode": "sync"})
    train(calm)
    config = config_of(tmp_path / "run", orchestration={"mode": "sync"})
    workers, lines = InlineWorkers(config), list[str]()
    run = open_inline(prepare(config), resume=False, workers=workers)
    run.notify.on_lines = lines.extend
    try:
        stop = run.run(Kills(run, workers, ["learner", "reward0", "instance0"]))
    finally:
        run.close()
    assert stop.done and proven(tmp_path / "run")
    found = events_of(tmp_path / "run")
    assert any(isinstance(event, ev.InstanceLost) for event in found)
    assert any(isinstance(event, ev.LearnerLost) for event in found)
    assert any("the learner ended and begins again" in line for line in lines)
    one, other = rows(tmp_path / "calm"), rows(tmp_path / "run")
    assert {k: r["token_ids"] for k, r in one.items()} == {
        k: r["token_ids"] for k, r in other.items()
    }


def test_evaluations_and_environments_run_inline_too(tmp_path: Path) -> None:
    config = config_of(
        tmp_path / "run",
        data={
            "train": ["dora_rl.envs.calculator:Expressions"],
            "eval": ["dora_rl.envs.calculator:Expressions"],
        },
        reward={"functions": []},
        model={"path": str(MODEL.with_name("tiny_tools"))},
        rollout={"tokens_max": 16, "stop_ids": [19]},
        evaluation={"num_prompts": 4, "num_samples": 1, "every_steps": 1},
        env={"environments": [{"name": "calculator", "turns_max": 4}], "num_workers": 1},
    )
    stop, _ = train(config)
    assert stop.done and proven(tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    evaluated = [json.loads(line)["version"] for line in lines if "eval/greedy" in line]
    assert sorted(evaluated) == [0, 1, 2]
    assert any(len(row["turns"]) > 1 for row in rows(tmp_path / "run").values())


def test_a_loss_that_cannot_be_trained_stops_the_run_with_one_line(tmp_path: Path) -> None:
    code = tmp_path / "loss.py"
    code.write_text(
        "from pathlib import Path\n"
        "def mine(inputs, options):\n"
        f"    if Path({str(tmp_path / 'trained')!r}).exists():\n"
        "        raise KeyError('mine')\n"
        "    return -inputs.logprobs_T * inputs.advantages_T\n"
    )
    config = config_of(tmp_path / "run", algorithm={"loss": f"{code}:mine"})

    def begun(run: Run) -> Callable[[], bool]:
        (tmp_path / "trained").touch()  # the trial before the start has been passed
        return lambda: False

    stop, _ = train(config, watch=begun)
    assert not stop.done and stop.reason.startswith("learner: ")
    assert "raised KeyError" in stop.reason


def test_several_ranks_are_refused(tmp_path: Path) -> None:
    config = config_of(tmp_path / "run", resources={"learner_ranks": 2})
    with pytest.raises(UserError, match="has one process"):
        open_run(prepare(config), resume=False)
