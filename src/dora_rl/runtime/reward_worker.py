"""A reward worker: one sample at a time, so that a hang or a crash costs one sample only."""

from __future__ import annotations

from pathlib import Path

from dora_rl.rewards.base import ScoreError, ScoreItem, build
from dora_rl.runtime.wire import Channel
from dora_rl.runtime.worker import Setup


def serve_rewards(setup: Setup, channel: Channel) -> None:
    """Answer every "score" with "scored"; a bad sample is an error, not an end."""
    reward = build(setup.config.reward, Path(setup.extra["base_dir"]))
    channel.send("ready", {})
    while True:
        message = channel.receive()
        if message.kind == "end":
            return
        body = message.body
        item = ScoreItem(
            prompt=body["prompt"],
            prompt_text=body["prompt_text"],
            completion=body["completion"],
            completion_ids=tuple(int(t) for t in message.arrays["token_ids"]),
            answer=body["answer"],
            columns=body["columns"],
            finish=body["finish"],
        )
        result = reward.score([item])[0]
        if isinstance(result, ScoreError):
            channel.send("scored", {"id": body["id"], "error": result.reason})
        else:
            channel.send("scored", {"id": body["id"], "reward": float(result)})
