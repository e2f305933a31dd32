"""The evaluator: generates held-out prompts under one pinned version while training goes on."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dora_rl.config import RunConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.envs.host import Answer, Ask, Host, label_of, load_environments
from dora_rl.model.directory import read_spec
from dora_rl.out_of_memory import free_cached, shortage
from dora_rl.types import Finish, RequestId, SamplingParams, Trajectory, Version
from dora_rl.weights.format import check_committed
from dora_rl.weights.lora_base import whole
from dora_rl.weights.store import DiskWeightStore
from dora_rl.workers.engines import decode_of
from dora_rl.workers.environment import apply_answer, ask_of, episode_seed, turn_text
from dora_rl.workers.messages import (
    Alive,
    EvalPrompt,
    Evaluate,
    Evaluated,
    Message,
    Note,
    Send,
)
from dora_rl.workers.worker import Role, Setup

ALIVE_S = 1.0


class Evaluator(Role):
    """An engine for one version at a time. Says now and then that it is still generating."""

    def __init__(self, setup: Setup, send: Send) -> None:
        super().__init__(setup, send)
        config = setup.config
        self._engine = open_engine(
            config,
            Path(config.model.path),
            setup.extra["device"],
            memory_share=setup.extra["memory_share"],
        )
        self._store = DiskWeightStore(Path(setup.run_dir) / "weights")
        self._turns = EvalTurns(config, Path(".")) if config.env.environments else None
        self._said_s = time.monotonic()

    def hear(self, message: Message) -> None:
        """Answers every `Evaluate`, with the responses of that version, greedy and sampled."""
        assert isinstance(message, Evaluate)
        engine, version, config = self._engine, message.version, self.setup.config
        for old in engine.versions():
            engine.retire(old)
        sealed = self._store.open(version)
        check_committed(sealed, message.checksum)
        source = whole(sealed, Path(config.model.path))
        missing = _try_load(engine, version, source)
        if missing:  # once more, without what torch holds on to
            self._note(f"out of memory while version {version} was loaded ({missing}); once more")
            free_cached()
            engine.load(version, source)
        self.send(Alive())
        params = config.rollout.sampling_params()
        asked = (message.prompts, message.num_samples, params)
        answers = evaluate(engine, version, *asked, self._say_alive, self._turns)
        self.send(Evaluated(version, tuple(answers)))

    def _note(self, line: str) -> None:
        self.send(Note(f"{self.setup.name}: {line}"))

    def _say_alive(self) -> None:
        """And what the engine has to say."""
        notes, self._engine.notes = self._engine.notes, []
        for line in notes:
            self._note(line)
        if time.monotonic() - self._said_s > ALIVE_S:
            self._said_s = time.monotonic()
            self.send(Alive())


def open_engine(config: RunConfig, model: Path, device: str, **more: Any) -> Engine:
    """For one version at a time."""
    torch.set_num_threads(max(1, config.rollout.threads))
    own = {"versions_max": 1, "record_routing": False}
    options = config.engine_options(device, 1) | own | more
    return Engine(read_spec(model), EngineOptions(**options), decode_of(config, model))


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


def evaluate(
    engine: Engine,
    version: Version,
    prompts: Sequence[EvalPrompt],
    num_samples: int,
    params: SamplingParams,
    alive: Callable[[], None] = lambda: None,
    turns: EvalTurns | None = None,
) -> list[Trajectory]:
    """Per prompt: the greedy response (sample 0) and `num_samples` sampled ones.

    `alive` is called after every engine step.
    """
    if turns is not None:
        turns.begin(prompts)
    greedy = replace(params, temperature=0.0)
    for index, prompt in enumerate(prompts):
        for sample in range(1 + num_samples):
            how = params if sample else greedy
            opens = turns is not None and turns.opens(index)
            more = {"keep": turns is not None, "turns": 0 if opens else 1}
            rid = RequestId(index, sample)
            engine.submit(Request(rid, version, prompt.row.token_ids, how, 1, **more))
    done = _generate(engine, turns, (greedy, params), alive)
    return [done[rid] for rid in sorted(done)]


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
    last = replace(answer, done=True, cut=True, error="") if answer.error else answer
    ended = apply_answer(engine, rid, last, params)
    if ended is None:
        return None
    if answer.error:
        return replace(ended, reward=None, finish=Finish.ERROR, error=answer.error)
    cut = answer.reward is None and ended.finish is Finish.LENGTH
    return replace(ended, reward=cut_reward if cut else answer.reward)


class EvalTurns:
    """Environments inside the evaluator's own process: questions in, answers out, no waiting.

    One thread runs the event loop of the episodes; the engine's loop asks and collects between its
    steps. An environment that fails or hangs costs that answer only. Never used in training, where
    environments have processes of their own.
    """

    def __init__(self, config: RunConfig, base_dir: Path) -> None:
        self._loaded = load_environments(config.env, base_dir)
        self._host = Host(self._loaded, turn_text(config))
        # What an episode is worth that was cut off before it got a reward; None: functions say.
        self.cut_reward = None if config.reward.functions else 0.0
        self._prompts: Sequence[EvalPrompt] = ()
        self._answers: queue.SimpleQueue[tuple[RequestId, Answer]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self.num_open = 0
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def begin(self, prompts: Sequence[EvalPrompt]) -> None:
        self._prompts = prompts

    def opens(self, prompt: int) -> bool:
        label = label_of(self._prompts[prompt].env, self._loaded)
        return self._loaded[label].kind.opens

    def ask(self, trajectory: Trajectory) -> None:
        rid = trajectory.request
        asked = self._prompts[rid.group]
        label = label_of(asked.env, self._loaded)
        ask = ask_of(trajectory, label, asked.row, episode_seed(0, rid.group))
        self.num_open += 1
        asyncio.run_coroutine_threadsafe(self._answer(ask), self._loop)

    async def _answer(self, ask: Ask) -> None:
        self._answers.put((ask.request, await self._host.answer(ask)))

    def take(self, wait_s: float) -> list[tuple[RequestId, Answer]]:
        """What has been answered; waits for the first if there is a question open."""
        found: list[tuple[RequestId, Answer]] = []
        try:
            while self.num_open:
                found.append(self._answers.get(timeout=0.0 if found else wait_s))
                self.num_open -= 1
        except queue.Empty:
            pass
        return found

    def end(self) -> None:
        """The evaluation is over; the next one begins with fresh episodes."""
        for group in range(len(self._prompts)):
            self._loop.call_soon_threadsafe(self._host.forget, group)
