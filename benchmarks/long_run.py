"""A run directory of any length, for measuring what reads one: the dashboard with 100,000 groups.

A short run is simulated and its log repeated, each time as if the controller had stopped after the
last step and been resumed for the next ones: groups, prompts, versions, steps and times go on.
The log keeps every promise (`audit` finds nothing) and has as many lines as a run of that length;
only the snapshots between segments are left out, so it cannot itself be resumed. metrics.jsonl and
rollouts.jsonl are written beside it. `benchmarks/dashboard.py` and its test in the browser use it.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.data.lengths import LogNormal
from dora_rl.observe.eventlog import Entry, MemoryLog, encode_entry
from dora_rl.sim.presets import preset_named, world_spec
from dora_rl.sim.world import World
from dora_rl.types import Mode

BATCH_GROUPS = 32
PER_SEGMENT = 20_000
PAUSE_S = 5.0
_SHIFTED = {
    "group": "group", "prompt": "group", "groups": "group", "version": "step", "step": "step",
    "optimizer_version": "step", "versions": "step",
}  # fmt: skip


def write_long_run(
    folder: Path, num_groups: int, *, group_size: int = 8, base_steps: int = 30
) -> int:
    """Write the directory; returns how many groups it has (whole repetitions)."""
    entries = _short_run(group_size, base_steps)
    base_groups = base_steps * BATCH_GROUPS
    times = -(-num_groups // base_groups)
    events = folder / "events"
    events.mkdir(parents=True)
    lines = _repeated(entries, times, base_steps, base_groups)
    number = 0
    file: Any = None
    for number, line in enumerate(lines):
        if number % PER_SEGMENT == 0:
            file = _next(file, events / f"{number:012d}.jsonl")
        file.write(line)
    file.close()
    _write_files(folder, entries, times, base_steps, base_groups)
    return times * base_groups


def _next(file: Any, path: Path) -> Any:
    if file is not None:
        file.close()
    return path.open("wb")


def _short_run(group_size: int, num_steps: int) -> list[Entry]:
    preset = replace(
        preset_named("small"),
        batch_groups=BATCH_GROUPS,
        group_size=group_size,
        num_steps=num_steps,
        warmup_steps=1,
        updates_per_step=1,
        lengths=LogNormal.with_mean(400, 1.0, 4096),
    )
    log = MemoryLog()
    world = World(world_spec(preset, Mode.MULTI_VERSION, 0), log=log)
    world.start()
    assert world.run(1e8)
    return log.entries


def _repeated(
    entries: list[Entry], times: int, base_steps: int, base_groups: int
) -> Iterator[bytes]:
    """Lines of the whole log. Every value is parsed once and written once per repetition."""
    records = [json.loads(encode_entry(entry)[9:]) for entry in entries]
    began, lasted = records[0]["t"], records[-1]["t"] - records[0]["t"] + PAUSE_S
    params = records[0]["e"]["params"] | {"num_steps": times * base_steps}
    number = 0
    for turn in range(times):
        shift = {"group": turn * base_groups, "step": turn * base_steps}
        for record in records:
            event = record["e"]
            if event["is"] == "Started":
                event = {"is": "Started" if turn == 0 else "Resumed", "params": params}
            actions = [a for a in record["a"] if turn == times - 1 or a["is"] != "Stop"]
            if event["is"] == "Resumed":
                actions = []  # K and B are in force already
            body = {
                "n": number,
                "t": began + turn * lasted + record["t"] - began,
                "e": _moved(event, shift, turn),
                "a": [_moved(action, shift, turn) for action in actions],
            }
            text = json.dumps(body, separators=(",", ":")).encode()
            yield b"%08x %s\n" % (zlib.crc32(text), text)
            number += 1


def _moved(value: dict[str, Any], shift: dict[str, int], turn: int) -> dict[str, Any]:
    """One event or action, moved on by some groups and steps."""
    moved = dict(value)
    for name, item in value.items():
        if name == "request":
            moved[name] = [item[0] + shift["group"], item[1]]
        elif name == "segments":
            moved[name] = [[start, version + shift["step"]] for start, version in item]
        elif name in ("life", "incarnation") and item >= 0:
            moved[name] = item + turn
        elif name in _SHIFTED and item is not None:
            by = shift[_SHIFTED[name]]
            moved[name] = [one + by for one in item] if isinstance(item, list) else item + by
    return moved


def _write_files(
    folder: Path, entries: list[Entry], times: int, base_steps: int, base_groups: int
) -> None:
    tokens: dict[tuple[int, int], int] = {}
    reward: dict[tuple[int, int], float] = {}
    batches: list[tuple[float, list[act.EndGroup]]] = []
    began_s = entries[0].now
    for entry in entries:
        if isinstance(entry.event, ev.SampleFinished):
            request = entry.event.request
            tokens[request.group, request.sample] = entry.event.num_tokens
        elif isinstance(entry.event, ev.Scored):
            request = entry.event.request
            reward[request.group, request.sample] = entry.event.reward
        elif isinstance(entry.event, ev.StepCommitted):
            ends = [a for a in entry.actions if isinstance(a, act.EndGroup)]
            batches.append((entry.now - began_s, ends))
            began_s = entry.now
    with (folder / "metrics.jsonl").open("w") as metrics, (
        folder / "rollouts.jsonl"
    ).open("w") as rollouts:  # fmt: skip
        for turn in range(times):
            for step, (step_s, ends) in enumerate(batches):
                _write_step(
                    metrics, rollouts, turn * base_steps + step, step_s, ends, turn * base_groups,
                    turn * base_steps, tokens, reward,
                )  # fmt: skip


def _write_step(
    metrics: TextIO,
    rollouts: TextIO,
    step: int,
    step_s: float,
    ends: list[Any],
    groups_on: int,
    versions_on: int,
    tokens: dict[tuple[int, int], int],
    reward: dict[tuple[int, int], float],
) -> None:
    mine = [(end, key) for end in ends for key in _samples_of(end.group, tokens)]
    for end, (group, sample) in mine:
        number = tokens[group, sample]
        line = {
            "step": step, "group": group + groups_on, "sample": sample,
            "version": end.version + versions_on, "num_prompt": 64, "num_tokens": number,
            "reward": reward[group, sample], "finish": "stop", "text": "simulated",
            "prompt": f"prompt {group + groups_on}", "segments": 1,
        }  # fmt: skip
        rollouts.write(json.dumps(line) + "\n")
    lengths = sorted(tokens[key] for _, key in mine)
    line = {
        "step": step,
        "loss": 0.1 / (1 + step),
        "entropy": 1.0 / (1 + 0.01 * step),
        "grad_norm": 0.5,
        "num_samples": len(lengths),
        "tokens_trained": sum(lengths),
        "time/step": step_s,
        "response_length/median": lengths[len(lengths) // 2],
        "response_length/max": lengths[-1],
    }
    metrics.write(json.dumps(line) + "\n")


def _samples_of(group: int, tokens: dict[tuple[int, int], int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    while (group, len(found)) in tokens:
        found.append((group, len(found)))
    return found
