"""Environments: the worker that holds their episodes, and what an answer does to a session.

    rollout instance --turn--> controller --Step--> this worker --Stepped--> back, `apply_answer`

Steps of different episodes overlap (in one event loop, synchronous environments in threads). The
worker decides nothing: limits on how many run at once are the controller's, and what a lost worker
knew is in every question. Never tokenizes: ids come in and are appended. Invariant: an answer is
applied to an idle session only, once; a session that has no room for its next turn ends there, with
the reward it has, and is never refused for its length.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.config import RunConfig
from dora_rl.envs.base import Row, TurnText
from dora_rl.envs.host import Answer, Ask, Host, load_environments
from dora_rl.histories import history_of
from dora_rl.types import Finish, Prompt, RequestId, SamplingParams, Trajectory
from dora_rl.workers.messages import Channel, End, Forget, Ready, Step, Stepped
from dora_rl.workers.worker import Setup

if TYPE_CHECKING:
    from dora_rl.workers.engines import InstanceEngine

_MASK = (1 << 64) - 1
_SPREAD = 0x9E3779B97F4A7C15


def open_host(setup: Setup) -> Host:
    loaded = load_environments(setup.config.env, Path(setup.extra["base_dir"]))
    return Host(loaded, turn_text(setup.config))


def serve_environments(setup: Setup, channel: Channel) -> None:
    """Answer every `Step` with `Stepped`, in any order, until `End`."""
    host = open_host(setup)
    channel.send(Ready())
    asyncio.run(_serve(host, channel))
    if host.busy:
        os._exit(0)  # a synchronous step that is still under way would keep the process


async def _serve(host: Host, channel: Channel) -> None:
    tasks: set[asyncio.Task[None]] = set()
    while not isinstance(message := await asyncio.to_thread(channel.receive), End):
        if isinstance(message, Forget):
            host.forget(message.group)
            continue
        assert isinstance(message, Step)
        task = asyncio.create_task(_step(host, channel, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    host.close()


async def _step(host: Host, channel: Channel, asked: Step) -> None:
    channel.send(await take_step(host, asked))


async def take_step(host: Host, asked: Step) -> Stepped:
    (sample,) = asked.samples
    return Stepped(asked.id, await host.answer(ask_of(sample, asked.label, asked.row, asked.seed)))


def ask_of(sample: Trajectory, label: str, row: Row, seed: int) -> Ask:
    """The question that a response asks its environment where it is now."""
    return Ask(
        sample.request,
        label,
        row,
        seed,
        token_ids=tuple(sample.token_ids.tolist()),
        loss_mask=tuple(sample.loss_mask.tolist()),
        logprobs=tuple(sample.logprobs.tolist()),
        version=sample.version,
        branches=sample.branches,
    )


def apply_answer(
    engine: InstanceEngine, request: RequestId, answer: Answer, params: SamplingParams
) -> Trajectory | None:
    """Begin the next turn; or, where the episode ends, close the session and return it whole."""
    seq = engine.find(request)
    assert seq is not None and not answer.error
    so_far = seq.trajectory()
    known = len(seq.tokens)
    if answer.branch is not None:
        before = history_of(
            so_far.prompt_ids, so_far.token_ids, so_far.branches, answer.branch.parent
        )
        known = min(len(before), len(so_far.prompt_ids) + answer.branch.fork)
    room = engine.length_max - known - len(answer.token_ids)
    if not answer.done and room > 0:
        limited = replace(params, tokens_max=min(params.tokens_max, room))
        if answer.branch is not None:
            engine.branch(request, answer.branch, answer.token_ids, limited)
        else:
            engine.extend(request, answer.token_ids, limited)
        return None
    whole = answer.done and not answer.cut
    finish = Finish.STOP if whole else Finish.LENGTH
    trajectory = replace(so_far, finish=finish, turn_rewards=answer.turn_rewards)
    engine.abort(request)
    return trajectory


def row_of(prompt: Prompt) -> Row:
    """A prompt's row for an environment."""
    wrote: Any = prompt.columns.get("prompt", prompt.text)
    return Row(wrote, prompt.text, prompt.answer, dict(prompt.columns), prompt.token_ids)


def episode_seed(run_seed: int, prompt_index: int) -> int:
    """The same for all samples of a group, so that they face the same episode."""
    x = (run_seed * _SPREAD + prompt_index + 1) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    return (x ^ (x >> 31)) & 0x7FFFFFFF


def turn_text(config: RunConfig) -> TurnText:
    """Decoder and encoder of the run's model."""
    from dora_rl.model.directory import read_spec
    from dora_rl.setup.tokenizer import open_tokenizer

    path, rollout = Path(config.model.path), config.rollout
    tokenizer = open_tokenizer(path, config.model.trust_remote_code)
    stop_ids = {*rollout.stop_ids, *read_spec(path).eos_ids}
    return TurnText(tokenizer, stop_ids, rollout.stop_strings, config.data.template_options)
