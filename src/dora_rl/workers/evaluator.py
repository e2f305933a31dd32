"""The evaluator: generates held-out prompts under one pinned version while training goes on."""

from __future__ import annotations

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
from dora_rl.envs.host import Answer
from dora_rl.io.wire import Channel
from dora_rl.out_of_memory import free_cached, shortage
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import Finish, RequestId, SamplingParams, Trajectory, Version
from dora_rl.weights.lora_base import whole
from dora_rl.weights.store import DiskWeightStore
from dora_rl.workers.eval_turns import EvalTurns
from dora_rl.workers.turns import apply_answer
from dora_rl.workers.worker import Setup

ALIVE_S = 1.0


def serve_evaluations(setup: Setup, channel: Channel) -> None:
    """Answer every "evaluate" with the responses, greedy and sampled, of that version."""
    config = setup.config
    torch.set_num_threads(max(1, config.rollout.threads))
    options = config.engine_options(setup.extra["device"], 1)
    options |= {"versions_max": 1, "memory_share": setup.extra["memory_share"]}
    decode = None
    if config.rollout.stop_strings:
        path = Path(config.model.path)
        decode = open_tokenizer(path, config.model.trust_remote_code).decode
    engine = Engine(read_spec(config.model.path), EngineOptions(**options), decode)
    store = DiskWeightStore(Path(setup.run_dir) / "weights")
    turns = EvalTurns(config, Path(".")) if config.env.environments else None
    alive = _Alive(channel, setup.name, engine)
    channel.send("ready", {})
    while True:
        message = channel.receive()
        if message.kind == "end":
            return
        version = int(message.body["version"])
        prompts = [tuple(ids) for ids in message.body["prompts"]]
        for old in engine.versions():
            engine.retire(old)
        source = whole(store.open(version), Path(config.model.path))
        missing = _try_load(engine, version, source)
        if missing:  # once more, without what torch holds on to
            alive.note(f"out of memory while version {version} was loaded ({missing}); once more")
            free_cached()
            engine.load(version, source)
        channel.send("loaded", {"version": version})
        samples = message.body["num_samples"]
        params = config.rollout.sampling_params()
        if turns is not None:
            turns.begin(message.body["rows"])
        answers = evaluate(engine, version, prompts, samples, params, alive.say, turns)
        channel.send("evaluated", {"version": version, "answers": answers})


def _try_load(engine: Engine, version: Version, source: Any) -> str:
    """What was missing, where memory ran out."""
    try:
        engine.load(version, source)
    except RuntimeError as error:
        missing = shortage(error)
        if not missing:
            raise
        return missing
    return ""


class _Alive:
    """Says now and then that the evaluator is still generating, and what its engine has to say."""

    def __init__(self, channel: Channel, name: str, engine: Engine) -> None:
        self._channel, self._name, self._engine = channel, name, engine
        self._said_s = time.monotonic()

    def note(self, line: str) -> None:
        self._channel.send("note", {"line": f"{self._name}: {line}"})

    def say(self) -> None:
        notes, self._engine.notes = self._engine.notes, []
        for line in notes:
            self.note(line)
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
    turns: EvalTurns | None = None,
) -> list[dict[str, Any]]:
    """Per prompt: the greedy response and `num_samples` sampled ones, as token ids, the rewards
    that an environment gave (None: scored by functions), how each ended, and why it failed ("": it
    did not).

    `alive` is called after every engine step.
    """
    greedy = replace(params, temperature=0.0)
    for index, ids in enumerate(prompts):
        for sample in range(1 + num_samples):
            how = params if sample else greedy
            request = Request(RequestId(index, sample), version, ids, how, seed=1)
            if turns is not None:
                request = replace(request, keep=True, turns=0 if turns.opens(index) else 1)
            engine.submit(request)
    done = _generate(engine, turns, (greedy, params), alive)
    return [
        {
            "greedy": done[RequestId(index, 0)].token_ids.tolist(),
            "sampled": [
                done[RequestId(index, 1 + s)].token_ids.tolist() for s in range(num_samples)
            ],
            "rewards": [done[RequestId(index, s)].reward for s in range(1 + num_samples)],
            "finishes": [done[RequestId(index, s)].finish.value for s in range(1 + num_samples)],
            "failures": [_failure(done[RequestId(index, s)]) for s in range(1 + num_samples)],
        }
        for index in range(len(prompts))
    ]


def _failure(trajectory: Trajectory) -> str:
    if trajectory.finish in (Finish.STOP, Finish.LENGTH):
        return ""
    return trajectory.error or f"the response was {trajectory.finish.value}"


def _generate(
    engine: Engine,
    turns: EvalTurns | None,
    params: tuple[SamplingParams, SamplingParams],
    alive: Callable[[], None],
) -> dict[RequestId, Trajectory]:
    """Until every response is whole; sample 0 of a prompt is greedy."""
    done: dict[RequestId, Trajectory] = {}
    while engine.has_work() or (turns is not None and turns.num_open):
        for output in engine.step():
            if output.trajectory is None:
                continue
            seq = engine.find(output.id)
            if turns is not None and seq is not None:
                turns.ask(output.trajectory)
            else:
                done[output.id] = output.trajectory
        if turns is not None:
            for rid, answer in turns.take(0.0 if engine.has_work() else ALIVE_S):
                ended = _answered(engine, rid, answer, params[rid.sample > 0], turns.cut_reward)
                if ended is not None:
                    done[rid] = ended
        alive()
    if turns is not None:
        turns.end()
    return done


def _answered(
    engine: Engine,
    rid: RequestId,
    answer: Answer,
    params: SamplingParams,
    cut_reward: float | None,
) -> Trajectory | None:
    """The session after an answer, if that ended it. An environment that failed ends it as failed:
    it has no reward, and says why."""
    if answer.error:
        ended = apply_answer(engine, rid, replace(answer, done=True, cut=True, error=""), params)
        assert ended is not None
        return replace(ended, reward=None, finish=Finish.ERROR, error=answer.error)
    ended = apply_answer(engine, rid, answer, params)
    if ended is None:
        return None
    cut = answer.reward is None and ended.finish is Finish.LENGTH
    return replace(ended, reward=cut_reward if cut else answer.reward)
