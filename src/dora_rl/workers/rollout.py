"""A rollout instance as a worker: orders in, engine steps, events and trajectories out.

Single-threaded: between two engine steps it reads the orders that have come. It decides nothing;
what to load, run, move or park comes from the core. `turn` is one round of its loop.

A request between two turns of its environment holds no decode slot: it is an idle session of the
engine, its KV kept or spilled. Whoever holds a session that becomes idle asks, also after a move, a
park or a restart; an answer is applied only to an idle session at that turn, and otherwise dropped,
because whoever has the session then will ask again. So answers may come twice, late or to the wrong
place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.data.lengths import LogNormal, uniforms
from dora_rl.engine.journal import Journal, request_from_json
from dora_rl.engine.sequence import EngineStats, Request, Status, is_plain
from dora_rl.store.storage import StorageStream
from dora_rl.store.trajectories import digest_of
from dora_rl.types import Finish, RequestId, Trajectory
from dora_rl.workers import messages as msg
from dora_rl.workers.engines import make_engine
from dora_rl.workers.environment import apply_answer
from dora_rl.workers.loads import Loads, Warming
from dora_rl.workers.moves import Moves
from dora_rl.workers.worker import Role, Setup

REPORT_S = 1.0
REPORT_BUSY_S = 0.25  # the core reads off the lengths of running requests
IDLE_S = 0.2
ARRIVAL_S = 0.01  # while something is on its way here
STILL_S = 10.0  # before a request is named that gains nothing; the core waits far longer


class Stillness:
    """Which requests gain nothing: remembers how long each was, and since when."""

    def __init__(self) -> None:
        self._seen: dict[RequestId, tuple[int, float]] = {}

    def look(self, lengths: Mapping[RequestId, int], now: float) -> tuple[RequestId, ...]:
        """Those that have been as long as now for `STILL_S`. Who is not given is forgotten."""
        before, self._seen = self._seen, {}
        for rid, length in lengths.items():
            was, since = before.get(rid, (-2, now))
            self._seen[rid] = (length, since if was == length else now)
        return tuple(rid for rid, (_, since) in self._seen.items() if now - since >= STILL_S)


class RolloutWorker(Role):
    """One instance."""

    def __init__(self, setup: Setup, send: msg.Send) -> None:
        super().__init__(setup, send)
        config, extra = setup.config, setup.extra
        torch.set_num_threads(max(1, config.rollout.threads))
        self.name, self.params = setup.name, config.rollout.sampling_params()
        path = Path(setup.run_dir) / "journal" / f"{setup.name}.{setup.incarnation}.jsonl"
        key, shards = setup.run_key, extra.get("storage")
        # On a cluster rows and journal lines go to storage shards, beside the run directory.
        who = (key, setup.name, setup.incarnation)
        self.storage = StorageStream(*who, shards) if shards else None
        journal = Journal(self.storage or path, config.rollout.journal_steps)
        resident_max, share = int(extra["resident_max"]), extra["memory_share"]
        self.engine = make_engine(config, extra["device"], resident_max, share, journal)
        self.epochs: dict[RequestId, int] = {}
        self.loads = Loads(setup, self.engine, self.say)
        folder = Path(extra["transfer_root"])
        self.moves = Moves(self.name, self.engine, self.epochs, folder, key, send, self.say)
        self.warming = Warming(self.engine, is_plain(self.params))
        self.awake = True
        self.reported_s = 0.0
        self.busy_s = 0.0
        self.stillness = Stillness()
        self.told_drafts = (0, 0)

    def join(self) -> None:
        extra, stats = self.setup.extra, self.engine.stats()
        tokens = stats.total_blocks * self.engine.limits.block_tokens
        sizes = (int(extra["slots_max"]), int(extra["resident_max"]), tokens)
        who = {"life": self.setup.incarnation, "elastic": bool(extra["elastic"])}
        self.send(msg.Told(ev.InstanceJoined(self.name, *sizes, **who)))

    def turn(self) -> bool:
        """One round: what has arrived, a part of a load, an engine step, a report. True if there is
        more to do at once."""
        self.moves.take_arrived()
        self.loads.go_on()
        if self.awake and self.engine.has_work():
            began = time.monotonic()
            for output in self.engine.step():
                if output.trajectory is not None and not self._asks(output.trajectory):
                    self._finish(output.trajectory)
            self.busy_s += time.monotonic() - began
        notes, self.engine.notes = self.engine.notes, []
        for line in notes:
            self.send(msg.Note(f"{self.name}: {line}"))
        self._report()
        busy = (self.awake and self.engine.has_work()) or bool(self.loads.running)
        return busy or (self.awake and self.warming.part())

    @property
    def idle_s(self) -> float:
        """How long it may wait for a message where there is nothing to do."""
        return ARRIVAL_S if self.moves.arrivals.open or self.loads.awaited else IDLE_S

    def close(self) -> None:
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
            figures = (self.name, stats.steps, stats.kv_tokens)
            self.say(ev.InstanceReport(*figures, num_waiting=stats.idle, still=still))
            self.send(msg.Usage(self.busy_s, time.process_time(), *self._new_drafts(stats)))

    def _new_drafts(self, stats: EngineStats) -> tuple[int, int]:
        """Tokens guessed since the last report, and those of them that were right."""
        counts = stats.drafts.values()
        drafted, accepted = sum(n for n, _ in counts), sum(n for _, n in counts)
        before, self.told_drafts = self.told_drafts, (drafted, accepted)
        return drafted - before[0], accepted - before[1]

    def _lengths(self) -> dict[RequestId, int]:
        """Of the requests that should be gaining tokens; -1: the engine does not know it."""
        found: dict[RequestId, int] = {}
        for rid in self.epochs:
            seq = self.engine.find(rid)
            if seq is None:
                found[rid] = -1
            elif seq.status not in (Status.IDLE, Status.PARKED) and rid not in self.moves.leaving:
                found[rid] = seq.num_tokens
        return found

    def say(self, event: ev.FromInstance) -> None:
        """What the core is told of this instance says which incarnation of it speaks."""
        self.send(msg.Told(replace(event, incarnation=self.setup.incarnation)))

    # -- orders -----------------------------------------------------------------------------------

    def hear(self, message: msg.Message) -> None:
        match message:
            case msg.Dispatched():
                self._dispatch(message)
            case msg.Exported():
                self.moves.take(message)
            case msg.Observed():
                self._observed(message)
            case msg.MoveEnded(request, done):
                self.moves.end(request, done=done)
            case msg.Shards(addresses):
                assert self.storage is not None
                self.storage.move_to(addresses)
            case msg.LoadSealed(action, checksum):
                self.loads.ask(action.version, action.attempt, checksum)
            case act.Unload():
                self.engine.retire(message.version)
            case act.Abort(request=request, epoch=epoch):
                self.moves.give_up(request, epoch)
                if self.epochs.get(request) == epoch:
                    self.engine.abort(request)
                    del self.epochs[request]
            case act.Park() | act.Unpark() | act.Reversion():
                if self.epochs.get(message.request) == message.epoch:
                    self._set_running(message)
            case act.Move():
                self.moves.begin(message)
            case act.Sleep():
                self.engine.drain()
                self.awake = False
            case act.Wake():
                self.awake = True
            case _:
                raise AssertionError(f"an instance does not hear {message!r}")

    def _set_running(self, action: act.Park | act.Unpark | act.Reversion) -> None:
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

    def _dispatch(self, message: msg.Dispatched) -> None:
        action, prompt_ids = message.action, tuple(message.prompt_ids.tolist())
        lengths, seed = self._forced_lengths(action.prompt), self.setup.config.runtime.seed
        for sample, epoch in zip(action.samples, action.epochs, strict=True):
            rid = RequestId(action.group, sample)
            if self.epochs.pop(rid, None) is not None:
                self.engine.abort(rid)  # an earlier placement that the controller gave up
            self.epochs[rid] = epoch
            saved = message.saved.get(sample)
            if saved is not None:
                request = replace(request_from_json(saved), version=action.version)
            else:
                params = self.params
                if lengths is not None:
                    params = replace(
                        params, tokens_max=lengths[sample], ignore_eos=True, stop_ids=()
                    )
                turns = {"keep": message.opens is not None, "turns": 0 if message.opens else 1}
                request = Request(rid, action.version, prompt_ids, params, seed, **turns)
            self.engine.submit(request)

    def _forced_lengths(self, prompt: int) -> list[int] | None:
        """Of the samples of a prompt, where the configuration draws them."""
        rollout, seed = self.setup.config.rollout, self.setup.config.runtime.seed
        if not rollout.forced_length_median:
            return None
        lengths = LogNormal(
            rollout.forced_length_median, rollout.forced_length_sigma, rollout.tokens_max
        )
        return lengths.draw(uniforms(seed, prompt, rollout.num_samples)).tolist()

    # -- ends -------------------------------------------------------------------------------------

    def _finish(self, trajectory: Trajectory, reward: float | None = None) -> None:
        """A request has ended; `reward` is what its environment gave."""
        rid = trajectory.request
        epoch = self.epochs.pop(rid, None)
        if epoch is None:
            return
        if trajectory.finish in (Finish.REFUSED, Finish.ERROR):
            final = trajectory.finish is Finish.REFUSED and "resident" not in trajectory.error
            self.say(ev.SampleFailed(rid, epoch, self.name, trajectory.error, final))
            return
        ids, segments = trajectory.token_ids, trajectory.segments
        event = ev.SampleFinished(
            rid,
            epoch,
            self.name,
            len(ids),
            trajectory.finish,
            segments,
            digest=digest_of(trajectory),
            incarnation=self.setup.incarnation,
        )
        said = msg.Finished(event, (replace(trajectory, reward=reward),))
        if self.storage is not None:
            self.storage.put(rid.group, msg.pack(said))
        else:
            self.send(said)

    def _asks(self, trajectory: Trajectory) -> bool:
        """True if only a turn ended; the environment is asked."""
        rid = trajectory.request
        seq = self.engine.find(rid)
        if trajectory.finish not in (Finish.STOP, Finish.LENGTH) or seq is None:
            return False
        if not seq.request.keep:
            return False
        epoch = self.epochs.get(rid)
        if epoch is not None and seq.status is Status.IDLE and seq.turns == trajectory.turns:
            # Not the output, which may lie here while the session is replaced.
            self.send(msg.TurnEnded(epoch, (replace(seq.trajectory(), expert_ids=None),)))
        return True

    def _observed(self, message: msg.Observed) -> None:
        """An environment has answered."""
        rid, epoch = message.request, message.epoch
        seq = self.engine.find(rid)
        if self.epochs.get(rid) != epoch or seq is None or rid in self.moves.leaving:
            return
        if seq.status is not Status.IDLE or seq.turns != message.turn:
            return
        answer = message.answer
        if answer.error:
            self.engine.abort(rid)
            del self.epochs[rid]
            self.say(ev.SampleFailed(rid, epoch, self.name, answer.error))
            return
        trajectory = apply_answer(self.engine, rid, answer, self.params)
        if trajectory is not None:
            self._finish(trajectory, answer.reward)
