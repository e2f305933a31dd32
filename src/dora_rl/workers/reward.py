"""A reward worker: scores what it is given. Where functions only wait (a judge, asynchronous code)
it takes many samples at once, otherwise one, so that a hang or a crash costs that sample alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora_rl.io.wire import Channel
from dora_rl.rewards.base import ScoreError, ScoreItem, build
from dora_rl.store.storage_client import StorageReader
from dora_rl.workers.worker import Setup


def serve_rewards(setup: Setup, channel: Channel) -> None:
    """Answer every "score" with "scored"; a bad sample is an error, not an end."""
    section = setup.config.reward
    reward = build(section, Path(setup.extra["base_dir"]))
    reader = StorageReader(bytes.fromhex(setup.key))
    channel.send("ready", {"at_once": section.concurrent_max if reward.many else 1})
    while True:
        message = channel.receive()
        if message.kind == "end":
            return
        items = read_items(message.body["items"], message.arrays["token_ids"], reader)
        results = [
            {"error": score.total.reason}
            if isinstance(score.total, ScoreError)
            else {"reward": score.total, "parts": score.parts}
            for score in reward.score_parts(items)
        ]
        channel.send("scored", {"id": message.body["id"], "results": results})


def read_items(
    items: list[dict[str, Any]], token_ids: NDArray[Any], reader: StorageReader | None = None
) -> list[ScoreItem]:
    """The samples of a message; their token ids lie one after the other, or in storage."""
    found: list[ScoreItem] = []
    ends = np.cumsum([item["num_tokens"] for item in items])
    for item, end in zip(items, ends, strict=True):
        ids, text = token_ids[int(end) - item["num_tokens"] : int(end)], item["completion"]
        if "rows" in item and reader is not None:
            (stored,) = reader.rows(item["rows"])
            ids, text = stored.token_ids, stored.text
        found.append(
            ScoreItem(
                prompt=item["prompt"],
                prompt_text=item["prompt_text"],
                completion=text,
                completion_ids=tuple(ids.tolist()),
                answer=item["answer"],
                columns=item["columns"],
                finish=item["finish"],
            )
        )
    return found
