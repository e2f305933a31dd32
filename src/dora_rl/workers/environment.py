"""An environment worker: holds the episodes of many requests and answers their turns.

Steps of different episodes overlap (in one event loop, synchronous environments in threads). It
decides nothing: limits on how many run at once are the controller's, and what a lost worker knew
is in every question.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from dora_rl.envs.host import Ask, Host, load_environments
from dora_rl.workers.messages import Channel, End, Forget, Ready, Step, Stepped, ints
from dora_rl.workers.turns import turn_text
from dora_rl.workers.worker import Setup


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
    answer = await host.answer(
        Ask(
            asked.request,
            asked.label,
            asked.row,
            asked.seed,
            tuple(asked.token_ids.tolist()),
            tuple(asked.loss_mask.tolist()),
            tuple(asked.logprobs.tolist()),
            asked.version,
        )
    )
    outcome = (answer.done, answer.cut, answer.reward, answer.error, answer.hung)
    return Stepped(asked.id, ints(answer.token_ids), *outcome)
