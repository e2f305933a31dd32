"""A vLLM engine behind the calls that a rollout instance makes of the native one.

Holds one policy version, or one LoRA adapter slot per version; a request is handed to vLLM only
while its version is loaded, and the prefix cache is emptied whenever weights change, so no token is
ever computed under another version. The requests themselves live here (tokens, log-probs, journal):
what vLLM holds of one is a copy that can be dropped and made again. So a parked, exported or
recovered request continues by prefilling its tokens anew, on any instance of its version; with
`VllmOptions.kv_moves` an exported one takes its KV along.

vLLM runs inside this process and only inside `step` and `load`. Its random numbers are its own:
versions are kept apart as everywhere, exactness is the native engine's promise.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_rl.engine.journal import Journal, continuation, request_from_json, request_json
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Decode, EngineStats, Limits, Output, RequestBook, Status, mix64
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.vllm.process import Gain, RequestKv, VllmOptions, VllmProcess
from dora_rl.model.directory import FileSource, TensorSource
from dora_rl.model.sealed import CheckedSource, check_base, check_canary
from dora_rl.ports import Canary, SealedWeights
from dora_rl.types import Finish, RequestId, UserError, Version
from dora_rl.user_code import require

__all__ = ["VllmEngine", "VllmExport", "VllmOptions"]


class VllmEngine(RequestBook):
    """See the module docstring. Call for call as `engine.Engine`, where an instance needs it."""

    def __init__(
        self,
        vllm: VllmOptions,
        options: EngineOptions,
        decode: Decode | None = None,
        journal: Journal | None = None,
        process: VllmProcess | None = None,
    ) -> None:
        self._vllm = vllm
        self._process = process or VllmProcess(vllm, options)
        limits = Limits(
            self._process.vocab,
            self._process.context_max,
            self._process.num_blocks,
            self._process.block_tokens,
        )
        super().__init__(limits, vllm.eos_ids, decode, journal)
        self._versions_max = options.versions_max if vllm.lora_rank else 1
        self._resident: list[Version] = []
        self._base = ""  # its checksum, under adapters
        self._seqs: dict[RequestId, Seq] = {}  # every request that is here, in order of arrival
        self._sent: dict[str, Seq] = {}  # those that vLLM works on, by the name it knows them by
        self._name_of: dict[RequestId, str] = {}
        self._begun: set[str] = set()  # that have gained something
        self._arrived: dict[RequestId, RequestKv] = {}  # until the request is sent
        self._num_sent = self._num_prefix_tokens = 0

    # ---------------------------------------------------------------- versions

    def versions(self) -> tuple[Version, ...]:
        return tuple(sorted(self._resident))

    def load_base(self, source: TensorSource, verify: bool = True) -> None:
        """The weights under every adapter; `verify`: adapters for other weights are refused."""
        assert not self._seqs, "the base is loaded before any request"
        checked = CheckedSource(source)
        self._process.load(checked if verify else source, self._files_of(source))
        self._base = checked.checksum() if verify else ""

    def _files_of(self, source: object) -> Sequence[Path]:
        """What the processes of several devices read."""
        if self._vllm.num_devices == 1:
            return ()
        if not isinstance(source, FileSource):
            raise UserError("an instance of several devices loads weights from files alone")
        return source.files

    def load_layers(
        self, version: Version, source: SealedWeights, verify: bool = True
    ) -> Iterator[str]:
        """In place, at once: with one version per instance there is nothing to decode meanwhile."""
        require(
            (
                version not in self._resident,
                f"version {version} is already resident",
            ),
            (
                len(self._resident) < self._versions_max,
                f"version {version}: this vLLM instance holds {list(self.versions())}; retire one",
            ),
            (
                source.version == version,
                f"version {version}: the sealed weights say {source.version}",
            ),
        )
        check_base(source, self._base, self._vllm.model)
        checked = CheckedSource(source)
        reader: TensorSource = checked if verify else source
        if self._vllm.lora_rank:
            self._process.load_adapter(version, reader)
        else:
            self._process.load(reader, self._files_of(source))
        yield "weights"
        if verify:
            checked.check(source)
            if source.canary is not None:
                self._check_canary(version, source.canary)
        self._resident.append(version)

    def _check_canary(self, version: Version, canary: Canary) -> None:
        name = f"canary.{version}"
        self._process.score(name, canary.token_ids, version)
        while (logprobs := self._process.scored.pop(name, None)) is None:
            self._collect()
        check_canary(canary, logprobs, version, self._process.dtype)

    def retire(self, version: Version) -> None:
        """Give the version's place up; refused while a request runs on it."""
        if users := [tuple(seq.id) for seq in self._sent.values() if seq.version == version]:
            raise UserError(f"version {version} has {len(users)} requests, the first is {users[0]}")
        if version not in self._resident:
            raise UserError(f"version {version} is not resident, so it cannot be retired")
        self._resident.remove(version)
        if self._vllm.lora_rank:
            self._process.drop_adapter(version)

    # ---------------------------------------------------------------- requests

    def take_in(self, meta: bytes, data: memoryview) -> None:
        """A request from elsewhere with its KV (see `VllmExport`); raises if it cannot go on."""
        body = json.loads(meta)
        request = request_from_json(body["request"])
        self.check_resident(request.id, request.version)
        if body["layout"] != self._process.kv_layout():
            raise UserError(f"request {tuple(request.id)}: its KV is laid out otherwise than here")
        self._arrived[request.id] = unpack_kv(body, data)
        self.submit(request)
        self._arrived.pop(request.id, None)  # of one that was refused, or had ended

    def _refusal(self, seq: Seq, length: int) -> str:
        return self._process.refusal(seq)

    def _enter(self, seq: Seq) -> None:
        self._seqs[seq.id] = seq

    def _run(self, seq: Seq) -> None:
        """Hand it to vLLM: what has not arrived with it is prefilled, then it samples on."""
        assert seq.version in self._resident
        self._num_sent += 1
        name = f"{seq.id.group}.{seq.id.sample}.{self._num_sent}"
        self._sent[name] = seq
        self._name_of[seq.id] = name
        seq.status = Status.RUNNING
        self._num_prefill_tokens += len(seq.tokens)
        # A continuation must not draw the numbers of the beginning again.
        seed = mix64(seq.key ^ seq.num_response) >> 1
        self._process.add(name, seq, seed, self._arrived.pop(seq.id, None))

    def _unsend(self, seq: Seq) -> None:
        if name := self._name_of.pop(seq.id, None):
            del self._sent[name]
            self._begun.discard(name)
            self._process.abort(name)

    def _rest(self, seq: Seq) -> None:
        self._unsend(seq)
        seq.status = Status.IDLE

    def _leave(self, seq: Seq) -> None:
        del self._seqs[seq.id]
        self._unsend(seq)

    def find(self, request: RequestId) -> Seq | None:
        return self._seqs.get(request)

    def sequences(self) -> Iterable[Seq]:
        return list(self._seqs.values())

    def park(self, request: RequestId) -> None:
        """Take it from vLLM; its tokens stay, its KV does not."""
        seq = self.known(request)
        self._unsend(seq)
        seq.status = Status.PARKED

    def export(self, request: RequestId) -> VllmExport:
        """Put a request aside until it has arrived elsewhere."""
        parked = self.is_parked(request)
        name = self._name_of.get(request)
        kv = self._process.read_kv(name) if name else None
        self.park(request)
        return VllmExport(self, self.known(request), parked, kv, self._process.kv_layout())

    def reversion(self, request: RequestId, version: Version) -> None:
        """Continue on other weights (the `partial` baseline only): re-prefilled, and recorded."""
        seq = self.known(request)
        self.check_resident(request, version)
        self._unsend(seq)
        seq.change_version(version)
        self.note(seq)
        if seq.status is not Status.PARKED:
            self.go_on(seq)

    # -------------------------------------------------------------------- step

    def warm_up(self, plain: bool = True) -> Iterator[None]:
        return iter(())  # vLLM has done so when it is made

    def has_work(self) -> bool:
        return bool(self.outputs or self._sent)

    def step(self) -> list[Output]:
        """One step of vLLM. Returns what every request gained."""
        if self._sent:
            self._collect()
        return self.hand_out(1)

    def drain(self) -> None:
        """Nothing of vLLM's is in flight between two calls that is not simply computed again."""

    def _collect(self) -> None:
        for gain in self._process.step():
            if (seq := self._sent.get(gain.name)) is not None:
                if gain.name not in self._begun:
                    self._begun.add(gain.name)
                    self._num_prefill_tokens -= gain.num_cached
                    self._num_prefix_tokens += gain.num_cached
                self._commit(seq, gain)

    def _commit(self, seq: Seq, gain: Gain) -> None:
        token_ids, logprobs = gain.token_ids, gain.logprobs
        if gain.failed or any(map(math.isnan, logprobs)):
            self.fail(seq, gain.failed or "non-finite logits")
            return
        finish: Finish | None = None
        for count, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True), 1):
            seq.tokens.append(token)
            seq.logprobs.append(logprob)
            seq.loss_mask.append(1)
            if finish := self.finish_of(seq):  # a stop string may end inside what vLLM gave at once
                token_ids, logprobs = token_ids[:count], logprobs[:count]
                break
        raw = logprobs if seq.request.params.raw_logprobs else []
        seq.raw_logprobs += raw
        seq.num_tokens = len(seq.tokens)
        self.gain(seq, token_ids, logprobs, raw, gain.top, finish)

    def stats(self) -> EngineStats:
        size, total = self.limits.block_tokens, self.limits.num_blocks
        lengths = [len(seq.tokens) for seq in self._sent.values()]
        used = min(total, sum(-(-length // size) for length in lengths))
        aside = [seq.status for seq in self._seqs.values()]
        return EngineStats(
            free_blocks=total - used,
            used_blocks=used,
            cached_blocks=0,
            total_blocks=total,
            host_blocks=0,
            running=len(lengths),
            waiting=0,
            spilled=0,
            parked=aside.count(Status.PARKED),
            idle=aside.count(Status.IDLE),
            kv_tokens=sum(lengths),
            steps=self.num_steps,
            decode_tokens=self.num_decode_tokens,
            prefill_tokens=self._num_prefill_tokens,
            prefix_tokens=self._num_prefix_tokens,
            preemptions=0,
            exact=False,
        )


class VllmExport:
    """The sending half of a move; without KV the receiver prefills the request's tokens. Invariant:
    the sender keeps the request, put aside, until `done`."""

    def __init__(
        self,
        engine: VllmEngine,
        seq: Seq,
        parked: bool,
        kv: RequestKv | None,
        layout: list[list[Any]],
    ) -> None:
        self._engine, self._seq, self._parked, self._kv = engine, seq, parked, kv
        self.has_kv = kv is not None
        self.num_bytes = kv.num_bytes if kv is not None else 0
        body = {"request": request_json(continuation(seq)), "layout": layout}
        if kv is not None:
            body |= {"num_tokens": kv.num_tokens, "num_blocks": kv.layers[0].shape[0]}
        self.meta = json.dumps(body, separators=(",", ":")).encode()

    def chunks(self) -> Iterator[Tensor]:
        """All blocks of a layer, layer after layer."""
        return iter(self._kv.layers if self._kv is not None else ())

    def done(self) -> None:
        self._engine.forget(self._seq.id)

    def cancel(self) -> None:
        if not self._parked:
            self._engine.unpark(self._seq.id)


def unpack_kv(body: dict[str, Any], data: memoryview) -> RequestKv:
    """The chunks of an export from their bytes, one after the other."""
    layers, begin, blocks = [], 0, int(body["num_blocks"])
    for _, dtype, shape, _ in body["layout"]:
        size = math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize
        part = data[begin : begin + blocks * size]
        if len(part) != blocks * size:
            raise UserError(f"{len(data)} bytes of KV came, more were announced")
        layers.append(torch.frombuffer(bytearray(part), dtype=torch.uint8).view(blocks, size))
        begin += blocks * size
    return RequestKv(int(body["num_tokens"]), tuple(layers))
