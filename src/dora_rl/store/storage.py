"""A shard of the sample table: the payload of its groups, and journals of instances elsewhere.

Rows come from instances, are read by rewards and the learner, and never pass the controller, which
keeps what it decides by (lengths, rewards, versions: `sample_index`). A row is on disk before the
controller hears of it, and told again if the instance asks again. Shard n has the groups whose
number leaves the remainder n; all shards live on the controller's host, with the run directory.

Lines of rollouts.jsonl are written here too, when a step closes: once per step and group, whoever
asks how often.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.envs.base import spans
from dora_rl.io.append_log import read_lines
from dora_rl.io.connection import Link, Refused, Server, TransportError
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.store.journals import Journals
from dora_rl.store.samples import Samples
from dora_rl.store.table import TableClosed
from dora_rl.types import GroupId, Prompt, RequestId
from dora_rl.workers import messages as msg
from dora_rl.workers.worker import Setup, beat

BEAT_S = 1.0


class Storage:
    """One shard: serves the data connections; the controller's messages come through `hear`."""

    def __init__(self, setup: Setup, channel: msg.Channel) -> None:
        config, self._channel = setup.config, channel
        run_dir, number = Path(setup.run_dir), int(setup.extra["shard"])
        self._samples = Samples(run_dir / f"table.{number}.log")
        self._journals = Journals(run_dir / "journal")
        self._tokenizer = open_tokenizer(Path(config.model.path), config.model.trust_remote_code)
        self._lock = threading.Lock()
        self._rollouts = run_dir / "rollouts.jsonl" if config.logging.rollouts else None
        found = read_lines(run_dir / "rollouts.jsonl")
        self._written = {(line["step"], line["group"]) for line in found}
        self.server = Server(bytes.fromhex(setup.key), self._answer)

    # -- instances, rewards, learner --------------------------------------------------------------

    def _answer(self, question: dict[str, Any], link: Link) -> None:
        try:
            self._do(question, link)
        except TableClosed as error:  # the asker hears nothing, and asks the next shard
            raise TransportError("the shard ends") from error

    def _do(self, question: dict[str, Any], link: Link) -> None:
        kind = question["kind"]
        if kind == "put":
            self._put(msg.unpack(bytes(link.read(int(question["num_bytes"])))))
            link.say({})
        elif kind == "journal":
            lines = bytes(link.read(int(question["num_bytes"])))
            name, life, whole = question["name"], int(question["life"]), bool(question["whole"])
            self._journals.write(name, life, lines, whole=whole)
            link.say({})
        elif kind == "rows":
            data = self._read(int(question["group"]), question["samples"])
            link.say({"num_bytes": len(data)})
            link.write(data)
        else:
            raise Refused(f"a storage shard has no {kind!r}")

    def _put(self, message: msg.Message) -> None:
        """Write the row, then tell the controller what it decides by."""
        assert isinstance(message, msg.Finished)
        (sample,) = message.samples
        text = self._tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        with self._lock:
            self._samples.put(replace(sample, text=text))
        said = msg.Stored(
            message.event,
            logprob_sum=float(sample.logprobs.sum(dtype=np.float64)),
            num_generated=sample.num_trained,
            turns=tuple(spans(sample.loss_mask.tolist())),
            reward=sample.reward,
        )
        self._channel.send(said)

    def _read(self, group: GroupId, samples: Sequence[int]) -> bytes:
        with self._lock:
            asked = [self._samples.get(RequestId(group, sample)) for sample in samples]
        found = [trajectory for trajectory in asked if trajectory is not None]
        if len(found) < len(asked):
            raise Refused(f"samples {list(samples)} of group {group} are not all here")
        return msg.pack(msg.Rows(tuple(found)))

    # -- the controller ---------------------------------------------------------------------------

    def hear(self, message: msg.Message) -> None:
        with self._lock:
            match message:
                case msg.Drop(group):
                    self._samples.drop(group)
                case msg.Sync():
                    self._samples.sync()
                case msg.Trained():
                    if self._rollouts is not None:
                        self._write(self._rollouts, message)
                    self._channel.send(msg.Wrote(message.step, message.group))
                case _:
                    raise AssertionError(f"a shard does not hear {message!r}")

    def groups(self) -> list[GroupId]:
        return self._samples.groups()

    def _write(self, path: Path, due: msg.Trained) -> None:
        """The group's lines, in one write where there is room."""
        step, group = due.step, due.group
        if (step, group) in self._written:
            return
        for sample, reward, parts in zip(due.samples, due.rewards, due.parts, strict=True):
            self._samples.reward(RequestId(group, sample), reward, parts)
        lines: list[str] = []
        index, token_ids, text, env = due.prompt
        prompt = Prompt(index, token_ids, text, env=env)
        for trained in self._samples.trained(group, due.samples, prompt):
            record = asdict(trained) | {"version": due.version}
            lines.append(json.dumps({"step": step, **record}) + "\n")
        with path.open("ab") as file:  # writes the rest too where a part went first
            file.write("".join(lines).encode())
        self._written.add((step, group))


def serve_storage(setup: Setup, channel: msg.Channel) -> None:
    """Until the controller says `End` or is gone."""
    storage = Storage(setup, channel)
    channel.send(msg.Serving(storage.server.port, tuple(storage.groups())))
    beat(lambda: channel.send(msg.Alive()), BEAT_S)
    while not isinstance(message := channel.receive(), msg.End):
        storage.hear(message)
    storage.server.close()
