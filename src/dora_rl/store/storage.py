"""The shards of the sample table on a cluster: the payload of their groups, and how it comes there.

Rows come from instances (`StorageStream`), are read by rewards and the learner (`StorageReader`),
and never pass the controller, which keeps what it decides by (`samples.SampleIndex`). A row is on
disk before the controller hears of it, and told again if the instance asks again. What an instance
has finished is sent by a thread of its own until a shard has it: a shard that is restarted on the
way costs time, never a sample. Shard n has the groups whose number leaves the remainder n; all
shards live on the controller's host, with the run directory.

A shard also keeps the journals of instances elsewhere, and writes lines of rollouts.jsonl when a
step closes: once per step and group, whoever asks how often.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dora_rl.io.append_log import read_lines
from dora_rl.io.connection import FRAME_BYTES_MAX, Link, Refused, Server, TransportError
from dora_rl.io.proof import RunKey
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.store.journals import Journals
from dora_rl.store.samples import Samples, shard_of, spans_of
from dora_rl.store.table import TableClosed
from dora_rl.types import GroupId, Prompt, RequestId, Trajectory
from dora_rl.workers import messages as msg
from dora_rl.workers.worker import Role, Setup, heartbeat

HEARTBEAT_S = 1.0
RETRY_S = 0.3
READ_S_MAX = 20.0
CLOSE_S_MAX = 5.0

Waiting: TypeAlias = "queue.Queue[tuple[dict[str, Any], bytes] | None]"


class Storage(Role):
    """One shard: serves the data connections; the controller's messages come through `hear`."""

    def __init__(self, setup: Setup, send: msg.Send) -> None:
        super().__init__(setup, send)
        config, run_dir, number = setup.config, Path(setup.run_dir), int(setup.extra["shard"])
        self.samples = Samples(run_dir / f"table.{number}.log")
        self._journals = Journals(run_dir / "journal")
        self._tokenizer = open_tokenizer(Path(config.model.path), config.model.trust_remote_code)
        self._lock = threading.Lock()
        self._rollouts = run_dir / "rollouts.jsonl" if config.logging.rollouts else None
        found = read_lines(run_dir / "rollouts.jsonl", lambda error: None)
        self._written = {(line.get("step"), line.get("group")) for line in found}
        self.server = Server(setup.run_key, self._answer, setup.listens_at)

    def join(self) -> None:
        self.send(msg.Serving(self.server.port, tuple(self.samples.groups())))
        heartbeat(lambda: self.send(msg.Alive()), HEARTBEAT_S)

    def drop(self) -> None:
        self.server.close()

    # -- instances, rewards, learner --------------------------------------------------------------

    def _answer(self, question: dict[str, Any], link: Link) -> None:
        match question:
            case {"kind": "put", "num_bytes": size}:
                self._put(msg.unpack(bytes(link.read(int(size), FRAME_BYTES_MAX))))
                link.say({})
            case {"kind": "journal", "num_bytes": size, "name": name, "incarnation": number}:
                lines, whole = bytes(link.read(int(size), FRAME_BYTES_MAX)), bool(question["whole"])
                self._journals.write(name, int(number), lines, whole=whole)
                link.say({})
            case {"kind": "rows", "group": group, "samples": samples}:
                data = self._read(int(group), samples)
                link.say({"num_bytes": len(data)})
                link.write(data)
            case _:
                raise Refused(f"a storage shard has no {question['kind']!r}")

    def _put(self, message: msg.Message) -> None:
        """Write the row, then tell the controller what it decides by."""
        assert isinstance(message, msg.Finished)
        (sample,) = message.samples
        text = self._tokenizer.decode(sample.token_ids.tolist(), skip_special_tokens=True)
        try:
            with self._lock:
                self.samples.add(replace(sample, text=text))
        except TableClosed as error:  # the asker hears nothing, and asks the next shard
            raise TransportError("the shard ends") from error
        self.send(
            msg.Stored(
                message.event,
                logprob_sum=float(sample.logprobs.sum(dtype=np.float64)),
                num_generated=sample.num_trained,
                turns=tuple(spans_of(sample)),
                reward=sample.reward,
            )
        )

    def _read(self, group: GroupId, samples: Sequence[int]) -> bytes:
        with self._lock:
            asked = [self.samples.get(RequestId(group, sample)) for sample in samples]
        found = [trajectory for trajectory in asked if trajectory is not None]
        if len(found) < len(asked):
            raise Refused(f"samples {list(samples)} of group {group} are not all here")
        return msg.pack(msg.Rows(tuple(found)))

    # -- the controller ---------------------------------------------------------------------------

    def hear(self, message: msg.Message) -> None:
        with self._lock:
            match message:
                case msg.Forget(group):
                    self.samples.drop(group)
                case msg.Sync():
                    self.samples.sync()
                case msg.Trained():
                    if self._rollouts is not None:
                        self._write(self._rollouts, message)
                    self.send(msg.Wrote(message.step, message.group))
                case _:
                    raise AssertionError(f"a shard does not hear {message!r}")

    def _write(self, path: Path, due: msg.Trained) -> None:
        """The group's lines, in one write where there is room."""
        step, group = due.step, due.group
        if (step, group) in self._written:
            return
        for sample, reward, parts in zip(due.samples, due.rewards, due.parts, strict=True):
            self.samples.reward(RequestId(group, sample), reward, parts)
        index, token_ids, text, env = due.prompt
        prompt = Prompt(index, token_ids, text, env=env)
        lines = [
            json.dumps({"step": step, **asdict(trained), "version": due.version}) + "\n"
            for trained in self.samples.trained(group, due.samples, prompt)
        ]
        with path.open("ab") as file:  # writes the rest too where a part went first
            file.write("".join(lines).encode())
        self._written.add((step, group))


# -- its clients -----------------------------------------------------------------------------------


class StorageStream:
    """Rows and journal lines of one instance on their way to the shards, in order per shard."""

    def __init__(self, key: RunKey, name: str, incarnation: int, addresses: Sequence[str]) -> None:
        self._key, self._who = key, {"name": name, "incarnation": incarnation}
        self._addresses = list(addresses)
        self._queues: list[Waiting] = [queue.Queue() for _ in addresses]
        for shard, waiting in enumerate(self._queues):
            threading.Thread(target=self._send, args=(shard, waiting), daemon=True).start()

    def move_to(self, addresses: Sequence[str]) -> None:
        """Where the shards are now; their number never changes in a run."""
        assert len(addresses) == len(self._addresses)
        self._addresses = list(addresses)

    def put(self, group: GroupId, packed: bytes) -> None:
        shard = shard_of(group, len(self._queues))
        self._queues[shard].put(({"kind": "put"}, packed))

    def append(self, data: bytes) -> None:
        self._journal(data, whole=False)

    def replace(self, data: bytes) -> None:
        self._journal(data, whole=True)

    def _journal(self, data: bytes, *, whole: bool) -> None:
        head = {"kind": "journal", "whole": whole, **self._who}
        self._queues[0].put((head, data))

    def close(self) -> None:
        """Wait a moment for what is on its way."""
        until = time.monotonic() + CLOSE_S_MAX
        while any(q.unfinished_tasks for q in self._queues) and time.monotonic() < until:
            time.sleep(0.01)
        for waiting in self._queues:
            waiting.put(None)

    def _send(self, shard: int, waiting: Waiting) -> None:
        link: Link | None = None
        while (item := waiting.get()) is not None:
            head, data = item
            while True:
                try:
                    link = link or Link.connect(self._addresses[shard], self._key)
                    link.say({**head, "num_bytes": len(data)})
                    link.write(data)
                    link.hear()
                    break
                except TransportError:
                    if link is not None:
                        link.close()
                    link = None
                    time.sleep(RETRY_S)
            waiting.task_done()


class StorageReader:
    """Reads rows; one connection per shard, made again when it breaks."""

    def __init__(self, key: RunKey) -> None:
        self._key = key
        self._links: dict[str, Link] = {}

    def rows(self, where: msg.Where, wait_s_max: float = READ_S_MAX) -> list[Trajectory]:
        """The samples that `where` names, in its order.

        Raises `TransportError` when they cannot be had for so long.
        """
        address, until = where.address, time.monotonic() + wait_s_max
        while True:
            try:
                link = self._links.get(address) or Link.connect(address, self._key)
                self._links[address] = link
                answer = link.ask("rows", group=where.group, samples=list(where.samples))
                found = msg.unpack(bytes(link.read(int(answer["num_bytes"]), FRAME_BYTES_MAX)))
                assert isinstance(found, msg.Rows)
                return list(found.samples)
            except TransportError:
                if address in self._links:
                    self._links.pop(address).close()
                if time.monotonic() > until:
                    raise
                time.sleep(RETRY_S)
