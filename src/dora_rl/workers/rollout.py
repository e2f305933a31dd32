"""A rollout instance as a process: commands in, engine steps, events and trajectories out.

Single-threaded: between two engine steps it reads the commands that have come. It decides nothing;
what to load, run, move or park comes from the core. KV of a migrating request goes through a file
in shared memory from instance to instance (of another host: read through its relay), never through
the controller.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.data.lengths import LogNormal, uniforms
from dora_rl.engine.engine import Engine
from dora_rl.engine.journal import Journal, continuation, request_from_json, request_json
from dora_rl.engine.sequence import Request, Status, is_plain
from dora_rl.engine.transfer import Export, begin_import, chunk_bytes, chunk_from_bytes
from dora_rl.io.transport import TransportError
from dora_rl.io.wire import Channel, Message, decode_fleet, encode_event, pack
from dora_rl.out_of_memory import free_cached, shortage
from dora_rl.store.sample_digest import sample_digest
from dora_rl.store.storage_client import StorageStream
from dora_rl.store.trajectories import to_message
from dora_rl.types import (
    BaseDiffers,
    Finish,
    RequestId,
    Trajectory,
    UserError,
    Version,
)
from dora_rl.weights.store import SharedMemoryWeightStore, WeightsError
from dora_rl.workers.arrivals import Arrivals
from dora_rl.workers.engines import make_engine
from dora_rl.workers.instance_turns import InstanceTurns
from dora_rl.workers.stillness import Stillness
from dora_rl.workers.warming import Warming
from dora_rl.workers.worker import Setup

if TYPE_CHECKING:
    from dora_rl.engine.backends.vllm_move import VllmExport

REPORT_S = 1.0
REPORT_BUSY_S = 0.25  # the core reads off the lengths of running requests
IDLE_S = 0.2
ARRIVAL_S = 0.01  # while something is on its way here


class RolloutWorker:
    """The loop of one instance."""

    def __init__(self, setup: Setup, channel: Channel) -> None:
        config = setup.config
        torch.set_num_threads(max(1, config.rollout.threads))
        self.setup, self.channel = setup, channel
        self.name = setup.name
        self.seed = config.runtime.seed
        self.params = config.rollout.sampling_params()
        self.resident_max = int(setup.extra["resident_max"])
        path = Path(setup.run_dir) / "journal" / f"{setup.name}.{setup.incarnation}.jsonl"
        key, shards = bytes.fromhex(setup.key), setup.extra.get("storage")
        # On a cluster rows and journal lines go to storage shards, beside the run directory.
        self.storage = StorageStream(key, setup.name, setup.incarnation, shards) if shards else None
        journal = Journal(self.storage or path, config.rollout.journal_steps)
        self.arrivals = Arrivals(key)
        decode = _decoder(config.model.path) if self.params.stop_strings else None
        device, share = setup.extra["device"], setup.extra["memory_share"]
        self.engine = make_engine(config, device, self.resident_max, share, decode, journal)
        self.store = SharedMemoryWeightStore(
            setup.extra["weights_root"], verify=config.weights.verify
        )
        self.transfer_root = Path(setup.extra["transfer_root"])
        self.epochs: dict[RequestId, int] = {}
        self.exports: dict[RequestId, Export | VllmExport] = {}
        self.load_attempts: dict[Version, int] = {}
        self.awaited: list[Version] = []  # to be loaded, and not in the store yet
        self.loads: deque[tuple[Version, Iterator[str]]] = deque()
        self.loads_short: set[Version] = set()  # for which there was not enough memory, once
        self.checksums: dict[Version, str] = {}  # of what is being loaded
        self.warming = Warming(self.engine, is_plain(self.params))
        self.awake = True
        self.reported_s = 0.0
        self.busy_s = 0.0
        self.turns = InstanceTurns(self)
        self.stillness = Stillness()

    def run(self) -> None:
        stats = self.engine.stats()
        tokens = stats.total_blocks * self.engine.options.block_tokens
        self.channel.send_event(
            ev.InstanceJoined(
                self.name,
                int(self.setup.extra["slots_max"]),
                self.resident_max,
                tokens,
                bool(self.setup.extra["elastic"]),
                life=self.setup.incarnation,
            )
        )
        while True:
            busy = (self.awake and self.engine.has_work()) or bool(self.loads)
            idle_s = ARRIVAL_S if self.arrivals.num_open or self.awaited else IDLE_S
            if not busy and self.awake:
                busy = self.warming.part()
            while self.channel.poll(0.0 if busy else idle_s):
                message = self.channel.receive()
                if message.kind == "end":
                    self._close()
                    return
                self._command(message)
                busy = True
            for body, data in self.arrivals.take():
                self._arrived(body, data)
            if self.awaited:
                self._begin_loads()
            if self.loads:
                self._load_some()
            if self.awake and self.engine.has_work():
                began = time.monotonic()
                for output in self.engine.step():
                    if output.trajectory is None or self.turns.ended(output.trajectory):
                        continue
                    self.finish(output.trajectory)
                self.busy_s += time.monotonic() - began
            self._tell_notes()
            self._report()

    def _tell_notes(self) -> None:
        """What the engine has to say to whoever watches, once."""
        notes, self.engine.notes = self.engine.notes, []
        for line in notes:
            self.channel.send("note", {"line": f"{self.name}: {line}"})

    def _close(self) -> None:
        """What is in flight continues from the journal, to the last token."""
        self.engine.drain()
        assert self.engine.journal is not None
        self.engine.journal.close()

    def _report(self) -> None:
        now = time.monotonic()
        period_s = REPORT_BUSY_S if self.engine.has_work() else REPORT_S
        if now - self.reported_s >= period_s:
            self.reported_s = now
            stats = self.engine.stats()
            still = self.stillness.look(self._lengths(), now) if self.awake else ()
            report = ev.InstanceReport(
                self.name, stats.steps, stats.kv_tokens, num_waiting=stats.idle, still=still
            )
            self.say(report)
            self.channel.send("usage", {"busy_s": self.busy_s, "cpu_s": time.process_time()})

    def _lengths(self) -> dict[RequestId, int]:
        """Of the requests that should be gaining tokens; -1: the engine does not know it."""
        found: dict[RequestId, int] = {}
        for rid in self.epochs:
            seq = self.engine.find(rid)
            if seq is None:
                found[rid] = -1
            elif seq.status not in (Status.IDLE, Status.PARKED) and rid not in self.exports:
                found[rid] = seq.num_tokens
        return found

    def _command(self, message: Message) -> None:
        match message.kind:
            case "import":
                self._import(message.body)
            case "observed":
                self.turns.observed(message)
            case "storage":
                assert self.storage is not None
                self.storage.move_to(message.body["addresses"])
            case "move_done":
                self._end_export(_rid(message.body), done=True)
            case "move_cancel":
                self._end_export(_rid(message.body), done=False)
            case _:
                self._order(message)

    def _order(self, message: Message) -> None:
        action = decode_fleet(message.body["action"])
        match action:
            case act.Dispatch():
                self._dispatch(action, message)
            case act.Load():
                self.load_attempts[action.version] = action.attempt
                under_way = [*self.awaited, *(version for version, _ in self.loads)]
                if action.version not in under_way:  # asked again when it took long
                    self.awaited.append(action.version)
            case act.Unload():
                self.engine.retire(action.version)
            case act.Abort():
                self.arrivals.give_up(action.request, action.epoch)
                if self.epochs.get(action.request) == action.epoch:
                    if self.exports.pop(action.request, None) is not None:
                        self._path_of(action.request, action.epoch).unlink(missing_ok=True)
                    self.engine.abort(action.request)
                    self.epochs.pop(action.request, None)
            case act.Park() | act.Unpark() | act.Reversion():
                if self.epochs.get(action.request) == action.epoch:
                    self._aside(action)
            case act.Move():
                self._export(action)
            case act.Sleep():
                self.engine.drain()
                self.awake = False
            case act.Wake():
                self.awake = True
            case _:
                raise AssertionError(f"an instance does not perform {action!r}")

    def _aside(self, action: act.Park | act.Unpark | act.Reversion) -> None:
        """Ended requests are gone; their end is already on its way to the controller."""
        self.engine.drain()
        if self.engine.find(action.request) is None:
            return
        if isinstance(action, act.Park):
            self.engine.park(action.request)
        elif isinstance(action, act.Unpark):
            self.engine.unpark(action.request)
        else:
            self.engine.reversion(action.request, action.version)
            if self.engine.is_parked(action.request):
                self.engine.unpark(action.request)

    def _dispatch(self, action: act.Dispatch, message: Message) -> None:
        prompt_ids = tuple(message.arrays["prompt_ids"].tolist())
        lengths = self._forced_lengths(action.prompt)
        resumes: dict[str, Any] = message.body["resumes"]
        for sample, epoch in zip(action.samples, action.epochs, strict=True):
            rid = RequestId(action.group, sample)
            if self.epochs.pop(rid, None) is not None:
                self.engine.abort(rid)  # an earlier placement that the controller gave up
            self.epochs[rid] = epoch
            saved, env = resumes.get(str(sample)), message.body.get("env")
            if saved is not None:
                request = replace(request_from_json(saved), version=action.version)
            else:
                params = self.params
                if lengths is not None:
                    length = lengths[sample]
                    params = replace(params, tokens_max=length, ignore_eos=True, stop_ids=())
                request = Request(rid, action.version, prompt_ids, params, self.seed)
                if env is not None:
                    request = replace(request, keep=True, turns=0 if env["opens"] else 1)
            self.engine.submit(request)

    def _forced_lengths(self, prompt: int) -> list[int] | None:
        """Of the samples of a prompt, where the configuration draws them."""
        rollout = self.setup.config.rollout
        if not rollout.forced_length_median:
            return None
        lengths = LogNormal(
            rollout.forced_length_median, rollout.forced_length_sigma, rollout.tokens_max
        )
        return lengths.draw(uniforms(self.seed, prompt, rollout.num_samples)).tolist()

    def finish(self, trajectory: Trajectory, reward: float | None = None) -> None:
        """A request has ended; `reward` is what its environment gave."""
        rid = trajectory.request
        epoch = self.epochs.pop(rid, None)
        if epoch is None:
            return
        if trajectory.finish in (Finish.REFUSED, Finish.ERROR):
            final = trajectory.finish is Finish.REFUSED and "resident" not in trajectory.error
            self.say(ev.SampleFailed(rid, epoch, self.name, trajectory.error, final))
            return
        event = ev.SampleFinished(
            rid,
            epoch,
            self.name,
            len(trajectory.token_ids),
            trajectory.finish,
            trajectory.segments,
            digest=sample_digest(
                rid,
                trajectory.segments,
                trajectory.token_ids,
                trajectory.logprobs,
                trajectory.loss_mask,
            ),
            incarnation=self.setup.incarnation,
        )
        samples, arrays = to_message([replace(trajectory, reward=reward)])
        body = {"event": encode_event(event), "samples": samples}
        if self.storage is not None:
            self.storage.put(rid.group, pack("finished", body, arrays))
        else:
            self.channel.send("finished", body, arrays)

    def _begin_loads(self) -> None:
        """An instance may be up before the learner has sealed (or copied back) a version."""
        there = self.store.versions()
        for version in [version for version in self.awaited if version in there]:
            self.awaited.remove(version)
            self._load(version)

    def _load(self, version: Version) -> None:
        try:
            verify = self.setup.config.rollout.verify_weights
            if verify:  # the engine hashes the tensors it reads; once is enough
                sealed = self.store.map(version)
                sealed.check_header()
            else:
                sealed = self.store.open(version)
            self.checksums[version] = sealed.checksum
            self.loads.append((version, self.engine.load_layers(version, sealed, verify)))
        except BaseDiffers:
            raise  # no load will ever succeed here
        except (WeightsError, UserError) as error:
            self._say_failed(version, error)

    def _load_some(self) -> None:
        """A layer, or a look at the thread that loads; in between, other versions decode."""
        version, layers = self.loads[0]
        try:
            next(layers)
            return
        except StopIteration:
            checksum, attempt = self.checksums.pop(version), self.load_attempts.get(version, -1)
            self.say(ev.Loaded(self.name, version, attempt=attempt, checksum=checksum))
        except BaseDiffers:
            raise
        except (WeightsError, UserError) as error:
            self._say_failed(version, error)
        except RuntimeError as error:
            self._load_again(version, error)
        self.loads.popleft()

    def _load_again(self, version: Version, error: RuntimeError) -> None:
        """Where memory ran out, once more without what torch holds on to; then the core decides."""
        missing = shortage(error)
        if not missing:
            raise error
        self.checksums.pop(version)
        if version in self.loads_short:
            self._say_failed(version, error)
            return
        self.loads_short.add(version)
        line = f"out of memory while version {version} was loaded ({missing}); it is loaded again"
        self.engine.notes.append(line)
        free_cached()
        self.awaited.append(version)

    def _say_failed(self, version: Version, error: Exception) -> None:
        attempt = self.load_attempts.get(version, -1)
        self.say(ev.LoadFailed(self.name, version, str(error), attempt=attempt))

    def say(self, event: ev.FromInstance) -> None:
        """What the core is told of this instance says which incarnation of it speaks."""
        self.channel.send_event(replace(event, incarnation=self.setup.incarnation))

    def _export(self, action: act.Move) -> None:
        """Write the request to shared memory and say where; it stays here until it has arrived."""
        rid = action.request
        self.engine.drain()
        if self.epochs.get(rid) != action.epoch or self.engine.find(rid) is None:
            return
        export = self.engine.export(rid)
        self.exports[rid] = export
        path = self._path_of(rid, action.epoch)
        seq = self.engine.find(rid)
        assert seq is not None
        body = {"group": rid.group, "sample": rid.sample, "epoch": action.epoch}
        body |= {"attempt": action.attempt}
        body |= {"dst": action.dst, "num_tokens": seq.num_tokens, "path": str(path)}
        if action.how is not act.How.KV or not export.has_kv:
            saved = request_json(continuation(seq))
            self.channel.send("exported", body | {"num_bytes": 0, "request": saved})
            return
        try:
            write_export(export, path)
        except OSError as error:  # shared memory is full: the request stays
            path.unlink(missing_ok=True)
            self._end_export(rid, done=False)
            who = (rid, action.epoch, self.name, action.dst)
            self.say(ev.MoveFailed(*who, True, str(error), attempt=action.attempt))
            return
        self.channel.send("exported", body | {"num_bytes": export.num_bytes})

    def _end_export(self, rid: RequestId, *, done: bool) -> None:
        export = self.exports.pop(rid, None)
        if export is None:
            return
        self._path_of(rid, self.epochs.get(rid, 0)).unlink(missing_ok=True)
        if done:
            export.done()
            self.epochs.pop(rid, None)
        else:
            export.cancel()

    def _path_of(self, rid: RequestId, epoch: int) -> Path:
        """Named after this instance: the next one may export the same request at any moment."""
        return self.transfer_root / f"{rid.group}.{rid.sample}.{epoch}.{self.name}.kv"

    def _import(self, body: dict[str, Any]) -> None:
        """Take a request over: with nothing but its tokens, from this host, or from another."""
        if "request" in body:
            self._arrived(body, b"")
        elif "relay" in body:
            self.arrivals.fetch(body)
        else:
            path = Path(body["path"])
            try:
                self._arrived(body, path.read_bytes())
            except OSError as error:
                self.channel.send("import_failed", body | {"reason": str(error)})
            path.unlink(missing_ok=True)

    def _arrived(self, body: dict[str, Any], data: bytes | bytearray | TransportError) -> None:
        rid = _rid(body)
        try:
            if isinstance(data, TransportError):
                raise data
            if "request" in body:
                self.engine.submit(request_from_json(body["request"]))
            else:
                self._take_blocks(memoryview(data))
        except (UserError, TransportError) as error:
            self.channel.send("import_failed", body | {"reason": str(error)})
            return
        self.epochs[rid] = int(body["epoch"])
        self.channel.send("imported", body)

    def _take_blocks(self, data: memoryview) -> None:
        length = int.from_bytes(data[:4], "little")
        if not isinstance(self.engine, Engine):
            self.engine.take_in(bytes(data[4 : 4 + length]), data[4 + length :])
            return
        arrival = begin_import(self.engine, bytes(data[4 : 4 + length]))
        size = self.engine.runner.cache.block_bytes
        for at in range(4 + length, len(data), size):
            arrival.write(chunk_from_bytes(self.engine, data[at : at + size]))
        arrival.commit()


def write_export(export: Export | VllmExport, path: Path) -> None:
    """Metadata and KV blocks, one after the other."""
    with path.open("wb") as file:
        file.write(len(export.meta).to_bytes(4, "little") + export.meta)
        for chunk in export.chunks():
            file.write(chunk_bytes(chunk))


def _rid(body: dict[str, Any]) -> RequestId:
    return RequestId(int(body["group"]), int(body["sample"]))


def _decoder(path: str) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path).decode
