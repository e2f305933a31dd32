"""The evaluator: generates held-out prompts under one pinned version while training goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.models import read_spec
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.runtime.weights import DiskWeightStore
from dora_rl.runtime.wire import Channel
from dora_rl.runtime.worker import Setup
from dora_rl.types import RequestId, SamplingParams, Trajectory, Version

ALIVE_S = 1.0


def serve_evaluations(setup: Setup, channel: Channel) -> None:
    """Answer every "evaluate" with the responses, greedy and sampled, of that version."""
    if setup.extra.get("nice"):
        os.nice(int(setup.extra["nice"]))
    config = setup.config
    torch.set_num_threads(max(1, config.rollout.threads))
    options = config.rollout.engine_options(setup.extra["device"], 1)
    options["versions_max"] = 1
    engine = Engine(read_spec(config.model.path), EngineOptions(**options))
    store = DiskWeightStore(Path(setup.run_dir) / "weights")
    channel.send("ready", {})
    while True:
        message = channel.receive()
        if message.kind == "end":
            return
        version = int(message.body["version"])
        prompts = [tuple(ids) for ids in message.body["prompts"]]
        for old in engine.versions():
            engine.retire(old)
        engine.load(version, store.open(version))
        channel.send("loaded", {"version": version})
        samples = message.body["num_samples"]
        params, alive = config.rollout.sampling_params(), _Alive(channel)
        answers = evaluate(engine, version, prompts, samples, params, alive.say)
        channel.send("evaluated", {"version": version, "answers": answers})


class _Alive:
    """Says now and then that the evaluator is still generating."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._said_s = time.monotonic()

    def say(self) -> None:
        if time.monotonic() - self._said_s > ALIVE_S:
            self._said_s = time.monotonic()
            self._channel.send("progress", {})


def evaluate(
    engine: Engine,
    version: Version,
    prompts: list[tuple[int, ...]],
    num_samples: int,
    params: SamplingParams,
    alive: Callable[[], None] = lambda: None,
) -> list[dict[str, Any]]:
    """Per prompt: the greedy response and `num_samples` sampled ones, as token ids.

    `alive` is called after every engine step.
    """
    greedy = replace(params, temperature=0.0)
    for index, ids in enumerate(prompts):
        engine.submit(Request(RequestId(index, 0), version, ids, greedy, seed=1))
        for sample in range(num_samples):
            engine.submit(Request(RequestId(index, 1 + sample), version, ids, params, seed=1))
    done: dict[RequestId, Trajectory] = {}
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                done[output.id] = output.trajectory
        alive()
    return [
        {
            "greedy": list(done[RequestId(index, 0)].token_ids),
            "sampled": [list(done[RequestId(index, 1 + s)].token_ids) for s in range(num_samples)],
        }
        for index in range(len(prompts))
    ]
