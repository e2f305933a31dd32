"""An environment worker: holds the episodes of many requests and answers their turns.

Steps of different episodes overlap (in one event loop, synchronous environments in threads). It
decides nothing: limits on how many run at once are the controller's, and what a lost worker knew
is in every question.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np

from dora_rl.envs.host import Answer, Ask, Host
from dora_rl.envs.load import load_environments
from dora_rl.io.wire import Channel, Message
from dora_rl.types import RequestId
from dora_rl.workers.turns import read_row, turn_text
from dora_rl.workers.worker import Setup


def serve_environments(setup: Setup, channel: Channel) -> None:
    """Answer every "step" with "stepped", in any order, until "end"."""
    loaded = load_environments(setup.config.env, Path(setup.extra["base_dir"]))
    host = Host(loaded, turn_text(setup.config))
    channel.send("ready", {})
    asyncio.run(_serve(host, channel))
    if host.busy:
        os._exit(0)  # a synchronous step that is still under way would keep the process


async def _serve(host: Host, channel: Channel) -> None:
    tasks: set[asyncio.Task[None]] = set()
    while True:
        message = await asyncio.to_thread(channel.receive)
        if message.kind == "end":
            break
        if message.kind == "forget":
            host.forget(int(message.body["group"]))
            continue
        task = asyncio.create_task(_step(host, channel, message))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    for task in tasks:
        task.cancel()
    host.close()


async def _step(host: Host, channel: Channel, message: Message) -> None:
    answer = await host.answer(read_ask(message))
    body = {"id": message.body["id"], **answer_body(answer), "hung": answer.hung}
    channel.send("stepped", body, {"token_ids": np.asarray(answer.token_ids, dtype=np.int32)})


def read_ask(message: Message) -> Ask:
    body = message.body
    return Ask(
        RequestId(body["group"], body["sample"]),
        body["label"],
        read_row(body["row"]),
        body["seed"],
        tuple(message.arrays["token_ids"].tolist()),
        tuple(message.arrays["loss_mask"].tolist()),
        tuple(message.arrays["logprobs"].tolist()),
        body["version"],
    )


def answer_body(answer: Answer) -> dict[str, object]:
    return {
        "done": answer.done,
        "cut": answer.cut,
        "reward": answer.reward,
        "error": answer.error,
    }
