"""What every endpoint does: sessions, training clients, sampling clients, promises.

Lives on the event loop and decides nothing about order (`turns`), slots (`residents`) or what is
kept (`book`, `states`). Invariants: nobody reaches what another key made; a request that was taken
is answered through its promise, also where it fails; when a session ends nothing of it stays in
memory, and of its files what was saved.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from dora_rl.chat.requests import ApiError, bad_request
from dora_rl.tinker import requests as asked
from dora_rl.tinker.book import Answer, Book, Promise
from dora_rl.tinker.messages import pass_names, read_training_pass, write_outputs
from dora_rl.tinker.sampling import Job as SampleJob
from dora_rl.tinker.sampling import Sampling
from dora_rl.tinker.states import BASE_VERSION, Place, States, check_name
from dora_rl.tinker.trainee import AdapterShape, Base, Trainee
from dora_rl.tinker.training import Job, Model, Training, made
from dora_rl.types import UserError, Version

POLL_S = 30.0  # the SDK gives up after 45
EXPIRE_S = 60.0  # between two looks at what was saved for a limited time


@dataclass(frozen=True, slots=True)
class Limits:
    """What clients of one server may use; `names` are those of the base."""

    names: tuple[str, ...]
    tokenizer: str
    clients_max: int = 8  # training clients at once
    rank_max: int = 32
    head: bool = True  # whether the output matrix may have an adapter
    open_max: int = 1024  # requests of one client that wait, or whose answer was not fetched
    bytes_max: int = 256 << 20  # of all training requests that wait
    answers_bytes_max: int = 512 << 20  # that an owner has not fetched
    snapshots_max: int = 16  # without a name, of one training client
    samplers_max: int = 1024  # of one session; older ones that are idle go
    sessions_max: int = 4096
    session_idle_s_max: float = 900.0


@dataclass(slots=True)
class Session:
    id: str
    owner: str
    used_s: float


@dataclass(slots=True)
class Sampler:
    """One sampling client. `joined` counts its copies in other processes."""

    id: str
    owner: str
    session: str
    version: Version
    path: str | None = None
    joined: int = 0
    jobs: dict[str, SampleJob] = field(default_factory=dict)


def json_answer(**body: Any) -> Answer:
    return Answer(json.dumps(body).encode())


class TinkerService:
    """One method per endpoint: the owner and the body in, a JSON object out."""

    def __init__(
        self,
        base: Base,
        states: States,
        sampling: Sampling,
        limits: Limits,
        num_threads: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.base, self.states, self.limits, self._now = base, states, limits, now
        self.book = Book(uuid.uuid4().hex[:12])
        self.sampling = sampling
        self.training = Training(base.options.device, num_threads, self._settle, self._fail, now)
        self._sessions: dict[str, Session] = {}
        self._samplers: dict[str, Sampler] = {}
        self._events: dict[str, asyncio.Event] = {}
        self._expire_s = 0.0

    # -- sessions --------------------------------------------------------------------------------

    def config(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.CONFIG, body)
        refused, line = asked.sdk_fault(known.get("sdk_version", ""))
        if refused:
            raise bad_request(line)
        return {
            "pjwt_auth_enabled": False,
            "use_pyqwest_transport": False,
            "proto_compress_fwdbwd": False,
            "parallel_fwdbwd_chunks": True,
            "sample_use_retrieve_futures": False,
            "custom_loss_server_side": False,
            "sample_join_sampling_session": True,
        }

    def dynamic_config(self, owner: str, body: bytes) -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    def create_session(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.SESSION, body)
        if len(self._sessions) >= self.limits.sessions_max:
            raise ApiError(429, f"{self.limits.sessions_max} sessions are open; end one")
        session = Session(str(uuid.uuid4()), owner, self._now())
        self._sessions[session.id] = session
        _, line = asked.sdk_fault(known.get("sdk_version", ""))
        warning = {"warning_message": line} if line else {}
        return {"type": "create_session", "session_id": session.id} | warning

    def heartbeat(self, owner: str, body: bytes) -> dict[str, Any]:
        self._session(asked.read(asked.SESSION_NAMED, body)["session_id"], owner)
        return {"type": "session_heartbeat"}

    def finish(self, owner: str, session_id: str) -> dict[str, Any]:
        self._end(self._session(session_id, owner))
        return {}

    def end_idle(self) -> None:
        """Sessions whose clients are gone, requests that wait in vain, states whose time is up."""
        oldest = self._now() - self.limits.session_idle_s_max
        for session in [one for one in self._sessions.values() if one.used_s < oldest]:
            self._end(session)
        self.training.give_up_gaps()
        if self._now() >= self._expire_s:
            self._expire_s = self._now() + EXPIRE_S
            self.states.expire()

    def _session(self, session_id: str, owner: str) -> Session:
        session = self._sessions.get(session_id)
        if session is None or session.owner != owner:
            line = "there is no such session; it has ended, or the server was started anew"
            raise ApiError(404, line)
        session.used_s = self._now()
        return session

    def _end(self, session: Session) -> None:
        del self._sessions[session.id]
        for sampler in [one for one in self._samplers.values() if one.session == session.id]:
            self._close_sampler(sampler)
        self.book.forget(_creations(session))
        models = [one for one in self.training.models.values() if one.session == session.id]
        for model in models:
            self.training.close(model)
            self._forget_snapshots([version for version, _ in model.snapshots])
            self.states.forget_model(model.id)
            self.book.forget(model.id)

    # -- promises --------------------------------------------------------------------------------

    async def retrieve(self, owner: str, body: bytes) -> Answer | None:
        """None: it is still on its way."""
        request_id = asked.read(asked.RETRIEVE, body)["request_id"]
        promise = self.book.find(request_id, owner)
        if promise is None:
            lost = "the server was started anew, and what was on its way then is lost"
            there = "there is no such request, or its answer was fetched long ago"
            line = lost if self.book.is_of_another_start(request_id) else there
            return json_answer(error=line, category="server")
        if promise.answer is None:
            event = self._events.setdefault(promise.id, asyncio.Event())
            try:
                await asyncio.wait_for(event.wait(), POLL_S)
            except TimeoutError:
                return None
            if promise.answer is None:
                return json_answer(error="the session has ended", category="user")
        self.book.fetched(promise)
        return promise.answer

    def _settle(self, promise: Promise, answer: Answer) -> None:
        self.book.answered(promise, answer)
        event = self._events.pop(promise.id, None)
        if event is not None:
            event.set()

    def _fail(self, promise: Promise, error: str, mine: bool) -> None:
        line = " ".join(error.split())
        self._settle(promise, json_answer(error=line, category="user" if mine else "server"))

    def _promised(
        self,
        owner: str,
        scope: str,
        seq: int,
        body: bytes,
        is_past: bool = False,
        is_awaited: bool = False,
    ) -> tuple[Promise, bool]:
        """The promise of a request, and whether it is a new one. One that others of its client
        wait for is taken even where there is no room: they may be what fills it."""
        try:
            known = self.book.known((scope, seq), body)
        except UserError as error:
            raise bad_request(str(error)) from None
        if known is not None:
            return known, False
        if is_past:
            raise bad_request(f"request {seq} of {scope} was answered, and its answer fetched")
        if self.book.num_kept(owner) > self.limits.answers_bytes_max and not is_awaited:
            raise ApiError(429, "too many bytes of answers wait; fetch them first")
        if self.book.num_open(scope) >= self.limits.open_max and not is_awaited:
            raise ApiError(
                429, f"{self.limits.open_max} requests of {scope} wait; fetch their answers first"
            )
        return self.book.promise(owner, (scope, seq), body), True

    # -- training clients ------------------------------------------------------------------------

    def create_model(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.CREATE, body)
        session = self._session(known["session_id"], owner)
        lora = known["lora_config"]
        flags = {name: lora.get(name, True) for name in ("train_mlp", "train_attn")}
        seed = lora.get("seed", uuid.uuid4().int & (2**62 - 1))
        shape = AdapterShape(
            lora["rank"], seed, **flags, train_unembed=lora.get("train_unembed", True)
        )
        wanted = known["base_model"]
        return self._create(
            session, known["model_seq_id"], body, lambda: self._entry(wanted, shape, known), None
        )

    def _entry(self, wanted: str, shape: AdapterShape, known: dict[str, Any]) -> dict[str, Any]:
        """What is known of a model beside its tensors; raises what speaks against it."""
        limits = self.limits
        self._check_base(wanted)
        if shape.rank > limits.rank_max:
            raise UserError(f"rank {shape.rank} is above --rank-max {limits.rank_max}")
        if not (shape.layers() or shape.train_unembed):
            raise UserError("one of train_mlp, train_attn and train_unembed must be true")
        if shape.train_unembed and not limits.head:
            raise UserError(
                "on a GPU the output matrix has no adapter here: pass train_unembed=False"
            )
        if shape.train_mlp and self.base.is_sparse:
            raise UserError("experts have no adapters here: pass train_mlp=False")
        return {
            "base_model": limits.names[0],
            "rank": shape.rank,
            "seed": shape.seed,
            "train_mlp": shape.train_mlp,
            "train_attn": shape.train_attn,
            "train_unembed": shape.train_unembed,
            "user_metadata": known.get("user_metadata"),
        }

    def _check_base(self, wanted: str) -> None:
        names = self.limits.names
        if wanted not in names:
            raise UserError(f"this server has one base, {' or '.join(map(repr, names))}")

    def _create(
        self,
        session: Session,
        number: int,
        body: bytes,
        entry_of: Callable[[], dict[str, Any]],
        load: tuple[Place, bool] | None,
    ) -> dict[str, Any]:
        """A model whose first request makes it, from what was saved where there is a `load`."""
        model_id = f"{session.id}:train:{number}"
        is_past = model_id in self.training.models
        promise, is_new = self._promised(session.owner, _creations(session), number, body, is_past)
        if not is_new:
            return {"request_id": promise.id, "model_id": model_id}
        try:
            entry = entry_of()
            if len(self.training.models) >= self.limits.clients_max:
                most = self.limits.clients_max
                raise UserError(f"{most} training clients are open (--clients-max); close one")
        except UserError as error:
            self._fail(promise, str(error), True)
            return {"request_id": promise.id, "model_id": model_id}
        model = Model(model_id, session.owner, session.id, shape_of(entry))
        self.training.open(model)

        def run() -> Answer:
            def fill(trainee: Trainee) -> None:
                if load is not None:
                    adapters, moments = self.states.load(load[0])
                    trainee.load(adapters, moments if load[1] else None)

            self.states.add_model(model_id, entry | {"owner": session.owner})
            made(model, self.base, fill)
            if load is not None:
                return json_answer(type="load_weights", path=str(load[0]), model_id=model_id)
            return json_answer(type="create_model", model_id=model_id)

        def otherwise() -> None:
            if model_id in self.training.models:
                self.training.close(model)
            self.states.forget_model(model_id)

        def then() -> None:
            if model_id not in self.training.models:  # its session ended meanwhile
                self.states.forget_model(model_id)

        self.training.add(model, 0, Job(promise, run, then, otherwise))
        return {"request_id": promise.id, "model_id": model_id}

    def info(self, owner: str, body: bytes) -> dict[str, Any]:
        model = self._model(asked.read(asked.INFO, body)["model_id"], owner)
        name = self.limits.names[0]
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_name": name,
            "model_data": {"model_name": name, "tokenizer_id": self.limits.tokenizer},
            "is_lora": True,
            "lora_rank": model.shape.rank,
        }

    def _model(self, model_id: str, owner: str) -> Model:
        model = self.training.models.get(model_id)
        if model is None or model.owner != owner:
            raise ApiError(
                404,
                "there is no such training client; its session has ended, or the server was "
                "started anew: go on with create_training_client_from_state_with_optimizer",
            )
        self._session(model.session, owner)
        return model

    def training_pass(self, owner: str, body: bytes) -> dict[str, Any]:
        try:
            model_id, seq = pass_names(body)
        except UserError as error:
            raise bad_request(str(error)) from None

        def run(trainee: Trainee) -> Answer:
            logprobs, loss = trainee.run(read_training_pass(body))
            return Answer(write_outputs(logprobs, {"loss:sum": loss}), True)

        return self._queued(owner, model_id, seq, body, run)

    def optim_step(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.STEP, body)

        def run(trainee: Trainee) -> Answer:
            norm = trainee.step(asked.adam_step(known))
            return json_answer(metrics={"grad_norm": norm})

        return self._queued(owner, known["model_id"], known["seq_id"], body, run)

    def save(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.SAVE, body)
        model = self._model(known["model_id"], owner)

        def run(trainee: Trainee) -> Answer:
            place = Place(model.id, "weights", check_name(known.get("path", f"{known['seq_id']}")))
            tensors = trainee.adapters(), trainee.moments()
            self.states.save(place, self._kept(known), *tensors, known.get("overwrite", False))
            return json_answer(type="save_weights", path=str(place))

        return self._queued(owner, model.id, known["seq_id"], body, run)

    @staticmethod
    def _kept(known: dict[str, Any]) -> dict[str, Any]:
        """Of a saved state or a named snapshot."""
        ttl = known.get("ttl_seconds")
        expires = {} if ttl is None else {"expires": time.time() + ttl}
        return {"checkpoint_metadata": known.get("user_metadata")} | expires

    def load(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.LOAD, body)
        if "session_id" in known:
            session = self._session(known["session_id"], owner)
            try:
                place, entry = self._saved(known["path"], owner)
            except UserError as error:
                raise ApiError(404, str(error)) from None

            def entry_of() -> dict[str, Any]:
                wanted = known.get("base_model", self.limits.names[0])
                return self._entry(wanted, shape_of(entry), known)

            how = place, bool(known["optimizer"])
            return self._create(session, known.get("model_seq_id", 0), body, entry_of, how)
        model = self._model(known.get("model_id", ""), owner)

        def run(trainee: Trainee) -> Answer:
            place, _ = self._saved(known["path"], owner)
            adapters, moments = self.states.load(place)
            trainee.load(adapters, moments if known["optimizer"] else None)
            return json_answer(type="load_weights", path=str(place), model_id=model.id)

        return self._queued(owner, model.id, known.get("seq_id", 1), body, run)

    def _saved(self, path: str, owner: str) -> tuple[Place, dict[str, Any]]:
        place, entry = self.states.find(path, owner)
        if place.kind != "weights":
            raise UserError("that is a snapshot for sampling; go on from what save_state gave")
        return place, entry

    def save_for_sampler(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.SAVE_SAMPLER, body)
        model = self._model(known["model_id"], owner)
        version = self.states.new_version()
        name, number = known.get("path"), known.get("sampling_session_seq_id")
        if name is None and number is None:
            raise bad_request("a snapshot needs a path or a sampling_session_seq_id")
        sampler_id = f"{model.session}:sample:{number}" if name is None else None

        def run(trainee: Trainee) -> Answer:
            place = name and Place(model.id, "sampler_weights", check_name(name))
            trainee.publish(self.states.store, version, self.states.base)
            if place:
                try:
                    self.states.name_snapshot(place, version, self._kept(known))
                except Exception:
                    self.states.store.discard([version])  # it has no name
                    raise
            return json_answer(
                type="save_weights_for_sampler",
                path=str(place) if place else None,
                sampling_session_id=sampler_id,
            )

        def then() -> None:
            if model.id not in self.training.models:  # its session ended meanwhile
                if sampler_id is not None:
                    self._forget_snapshots([version])
            elif sampler_id in self._samplers:
                self._forget_snapshots([version])
                raise UserError(f"there is a sampling client {number} of this session")
            elif sampler_id is not None:
                model.snapshots.append((version, sampler_id))
                self._open_sampler(Sampler(sampler_id, owner, model.session, version))
                self._drop_old_snapshots(model)

        return self._queued(owner, model.id, known["seq_id"], body, run, then)

    def _drop_old_snapshots(self, model: Model) -> None:
        while len(model.snapshots) > self.limits.snapshots_max:
            version, sampler_id = model.snapshots.pop(0)
            sampler = self._samplers.get(sampler_id)
            if sampler is not None:
                self._close_sampler(sampler)
            self._forget_snapshots([version])

    def _forget_snapshots(self, versions: list[Version]) -> None:
        for version in versions:
            self.sampling.forget(version)
        self.states.store.discard(versions)

    def _queued(
        self,
        owner: str,
        model_id: str,
        seq: int,
        body: bytes,
        run: Callable[[Trainee], Answer],
        then: Callable[[], None] = lambda: None,
    ) -> dict[str, Any]:
        """A promise; what is wrong with the request is said through it, as others wait for it."""
        model = self._model(model_id, owner)
        if seq < 1:
            raise bad_request("the first request of a training client has number 1")
        training = self.training
        is_past, is_awaited = training.is_past(model, seq), training.is_awaited(model, seq)
        if (
            not training.is_next(model, seq)
            and training.num_bytes + len(body) > self.limits.bytes_max
        ):
            raise ApiError(429, f"{self.limits.bytes_max} bytes of requests wait; come back later")
        promise, is_new = self._promised(owner, model.id, seq, body, is_past, is_awaited)
        if is_new:
            job = Job(promise, lambda: run(model.there()), then, num_bytes=len(body))
            training.add(model, seq, job)
        return {"request_id": promise.id, "model_id": model.id}

    # -- sampling clients ------------------------------------------------------------------------

    def create_sampler(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.SAMPLER, body)
        session = self._session(known["session_id"], owner)
        sampler_id = f"{session.id}:sample:{known['sampling_session_seq_id']}"
        path, version = known.get("model_path"), BASE_VERSION
        try:
            if path is not None:
                place, entry = self.states.find(path, owner)
                if place.kind != "sampler_weights":
                    raise UserError(f"{path} is a state; sample from save_weights_for_sampler's")
                version = entry["version"]
            self._check_base(known.get("base_model", self.limits.names[0]))
        except UserError as error:
            raise ApiError(404, str(error)) from None
        there = self._samplers.get(sampler_id)
        if there is not None and (there.path != path or (path is None and there.version)):
            raise bad_request(f"sampling client {sampler_id} has other weights")
        if there is None:  # otherwise it was asked for again
            self._open_sampler(Sampler(sampler_id, owner, session.id, version, path))
        return {"type": "create_sampling_session", "sampling_session_id": sampler_id}

    def join_sampler(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.SAMPLER_NAMED, body)
        sampler = self._sampler(known["sampling_session_id"], owner)
        sampler.joined += 1
        return {"type": "join_sampling_session", "client_counter": sampler.joined}

    def sampler_info(self, owner: str, sampler_id: str) -> dict[str, Any]:
        sampler = self._sampler(sampler_id, owner)
        name = self.limits.names[0]
        return {"sampler_id": sampler.id, "base_model": name, "model_path": sampler.path}

    def sample(self, owner: str, body: bytes) -> dict[str, Any]:
        known = asked.read(asked.SAMPLE, body)
        sampler = self._sampler(known["sampling_session_id"], owner)
        promise, is_new = self._promised(owner, sampler.id, known["seq_id"], body)
        if is_new:
            try:
                wanted = asked.sampling_asked(known, self.sampling.context_max)
            except UserError as error:
                self._fail(promise, str(error), True)
            else:
                self._sample(sampler, promise, wanted)
        names = [f"{promise.id}-{place}" for place in range(known.get("num_samples", 1))]
        return {"request_id": promise.id, "sample_sequence_ids": names}

    def _sample(self, sampler: Sampler, promise: Promise, wanted: Any) -> None:
        def settle(answer: Answer | None, error: str = "", mine: bool = True) -> None:
            sampler.jobs.pop(promise.id, None)
            if answer is None:
                self._fail(promise, error, mine)
            else:
                self._settle(promise, answer)

        job = self.sampling.ask(sampler.id, sampler.version, wanted, settle)
        if promise.answer is None:
            sampler.jobs[promise.id] = job

    def cancel(self, owner: str, body: bytes) -> dict[str, Any]:
        promise = self.book.find(asked.read(asked.RETRIEVE, body)["request_id"], owner)
        sampler = self._samplers.get(promise.key[0]) if promise is not None else None
        if promise is not None and sampler is not None and promise.id in sampler.jobs:
            self.sampling.cancel(sampler.jobs[promise.id])
        return {}

    def _sampler(self, sampler_id: str, owner: str) -> Sampler:
        sampler = self._samplers.get(sampler_id)
        if sampler is None or sampler.owner != owner:
            raise ApiError(
                404,
                "there is no such sampling client; its session has ended, newer snapshots took "
                "its place, or the server was started anew",
            )
        self._session(sampler.session, owner)
        return sampler

    def _open_sampler(self, sampler: Sampler) -> None:
        mine = [one for one in self._samplers.values() if one.session == sampler.session]
        idle = [one for one in mine if not one.jobs]
        if len(mine) >= self.limits.samplers_max and idle:
            self._close_sampler(idle[0])
        self._samplers[sampler.id] = sampler
        self.sampling.open(sampler.id)

    def _close_sampler(self, sampler: Sampler) -> None:
        del self._samplers[sampler.id]
        self.sampling.close(sampler.id)
        for name in list(sampler.jobs):
            promise = self.book.find(name, sampler.owner)
            if promise is not None and promise.answer is None:
                self._fail(promise, "this sampling client has ended", True)
        self.book.forget(sampler.id)


def _creations(session: Session) -> str:
    """The scope of its training clients' first requests."""
    return f"{session.id}:train"


def shape_of(entry: dict[str, Any]) -> AdapterShape:
    names = ("rank", "seed", "train_mlp", "train_attn", "train_unembed")
    return AdapterShape(**{name: entry[name] for name in names})
