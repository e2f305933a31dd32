"""Run directories for the dashboard's tests: a real log of the simulator, files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import Entry, MemoryLog, encode_entry
from dora_rl.sim.presets import PRESETS, world_spec
from dora_rl.sim.world import World
from dora_rl.types import Mode
from tests.kit.places import MODEL


def simulated(mode: Mode = Mode.MULTI_VERSION, **changes: Any) -> list[Entry]:
    from dataclasses import replace

    preset = replace(PRESETS["small"], num_steps=6, **changes)
    log = MemoryLog()
    world = World(world_spec(preset, mode, 0), log=log)
    world.start()
    assert world.run(1e6)
    return log.entries


def write_log(folder: Path, entries: list[Entry]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "000000000000.jsonl").write_bytes(b"".join(map(encode_entry, entries)))


def write_run(run_dir: Path, entries: list[Entry]) -> None:
    """The log, a configuration, and every trained sample with its tokens."""
    write_log(run_dir / "events", entries)
    (run_dir / "config.json").write_text(json.dumps({"model": {"path": str(MODEL)}}))
    version_of: dict[int, int] = {}
    tokens: dict[tuple[int, int], int] = {}
    rewards: dict[tuple[int, int], float] = {}
    in_step: dict[int | None, list[int]] = {}
    rollouts: list[str] = []
    metrics = [json.dumps({"version": 0, "eval/sampled": 0.25, "eval/length_p99": 300.0})]
    for entry in entries:
        match entry.event:
            case ev.SampleFinished(request=request, num_tokens=num):
                tokens[request] = num
            case ev.Scored(request=request, reward=reward):
                rewards[request] = reward
            case _:
                pass
        for action in entry.actions:
            if isinstance(action, act.IssueGroup):
                version_of[action.group] = action.version
            if isinstance(action, act.EndGroup) and action.end is act.End.TRAINED:
                mine = [key for key in tokens if key[0] == action.group]
                in_step.setdefault(action.step, []).extend(tokens[key] for key in mine)
                rollouts += [
                    json.dumps(rollout(action, sample, rewards[action.group, sample]))
                    for _, sample in sorted(mine)
                ]
        if isinstance(entry.event, ev.StepCommitted):
            line = {"step": entry.event.step, "entropy": 0.5, "loss": -0.1}
            # Ten tokens of each step were an environment's, which the log does not tell apart.
            written = sum(in_step.pop(entry.event.step)) - 10
            line |= {"tokens_trained": written, "time/step": 2.0, "perf/tokens_per_s": written / 2}
            metrics.append(json.dumps(line))
    (run_dir / "rollouts.jsonl").write_text("\n".join(rollouts) + "\n")
    (run_dir / "metrics.jsonl").write_text("\n".join(metrics) + "\n")


def rollout(action: act.EndGroup, sample: int, reward: float) -> dict[str, Any]:
    ids = [4, 5, 6, 7, 8, 9]
    return {
        "step": action.step,
        "group": action.group,
        "sample": sample,
        "version": action.version,
        "num_prompt": 3,
        "num_tokens": len(ids),
        "reward": reward,
        "finish": "stop",
        "text": "<script>alert(1)</script>",
        "prompt": f"prompt {action.group}",
        "segments": 1,
        "logprobs": [-0.01, -0.5, -1.5, -3.0, -5.0, -0.2],
        "token_ids": ids,
        "turns": [[0, 2, 1], [2, 4, 0], [4, 6, 1]],
    }
