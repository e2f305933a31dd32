"""The learner: takes groups as a stream, makes micro-batches as they fill, steps, publishes.

    learner = Learner("path/to/model", AlgorithmOptions(loss="grpo"), TrainerOptions(lr=1e-4),
                      batch_groups=32)
    learner.begin_step(0)              # step s trains version s ...
    learner.feed([group, group])       # any number of calls, any number of groups
    metrics = learner.finish_step()
    learner.publish(store, 1)          # ... and makes version s + 1

With U = `updates_per_step`, update i takes the i-th B/U groups; it closes by itself when they have
been fed (`batch_groups` given; the last one with the step), or when `finish_update` is called.
Losses that need statistics of
the whole batch, `canonical_order` and `streaming = False` buffer the step instead: nothing runs
before `finish_step`.

Never updates from a non-finite loss or gradient (the update is skipped and counted), and never
scores old log-probs under weights in motion. Invariant: the gradient applied is that of the whole
update's loss, whatever the packs it was cut into, and however often memory ran out meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora_rl.out_of_memory import free_cached, maybe_fail, shortage
from dora_rl.ports import WeightStore
from dora_rl.trainer import distributed
from dora_rl.trainer.allocator import keep_freed_memory
from dora_rl.trainer.assembly import assemble, attention_crossover_tokens
from dora_rl.trainer.attention.layout import Layout
from dora_rl.trainer.checkpoints import state
from dora_rl.trainer.checkpoints.publish import Publisher, compute_canary
from dora_rl.trainer.critic import critic_pass, fill_old_values
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.intake import take_in
from dora_rl.trainer.losses.aggregate import denominator
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.meters import Meters
from dora_rl.trainer.optim import learning_rate
from dora_rl.trainer.options import (
    AlgorithmOptions,
    CheckpointOptions,
    TrainerOptions,
    check_published,
    from_section,
)
from dora_rl.trainer.packing import pack_balanced, pack_stream
from dora_rl.trainer.passes import policy_pass
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.lora import load_published_adapter, published_adapter
from dora_rl.trainer.policy.model import Policy, load_weights, pick_dtype
from dora_rl.trainer.prepare import group_documents, per_group_advantages, whole_batch_advantages
from dora_rl.trainer.room import Room
from dora_rl.trainer.scoring import SealedScorer, score
from dora_rl.types import Group, StepIndex, UserError, Version

_PACK_TOKENS = {"cpu": 4096, "cuda": 32768}
_PACK_PARTS = 4  # a pack that is full by one part is run where the learner would wait instead


class OpenUpdate:
    """What the update being filled has seen so far; denominators are known only at its end."""

    def __init__(self, device: torch.device) -> None:
        self.num_groups = 0
        self.num_tokens = 0
        self.num_sequences = 0
        self.forget_passes(device)

    def forget_passes(self, device: torch.device) -> None:
        """As if no pack had been run."""
        self.loss: Tensor | None = None
        self.meters = Meters(device)  # of its packs
        self.documents: list[Document] = []  # that were run

    def add_loss(self, total: Tensor) -> None:
        self.loss = total if self.loss is None else self.loss + total


class Learner:
    """See the module's docstring. One per rank; every rank is fed the same groups."""

    def __init__(
        self,
        model: str | Path | Policy,
        algorithm: object = None,
        trainer: object = None,
        *,
        batch_groups: int | None = None,
        store: WeightStore | None = None,
    ) -> None:
        algorithm = algorithm or AlgorithmOptions()
        trainer = trainer or TrainerOptions()
        if not isinstance(algorithm, AlgorithmOptions):
            algorithm = from_section(AlgorithmOptions, algorithm)
        if not isinstance(trainer, TrainerOptions):
            trainer = from_section(TrainerOptions, trainer)
        self.objective, self.options = resolve(algorithm), trainer
        if trainer.threads:
            torch.set_num_threads(trainer.threads)
        self.directory = Path(model) if isinstance(model, str | Path) else None
        source: Any = self.directory or model
        made = assemble(source, self.objective, trainer, self.directory)
        self.policy, self.reference, self.critic = made.policy, made.reference, made.critic
        self.optimizer, self.critic_optimizer = made.optimizer, made.critic_optimizer
        self.device = next(self.policy.parameters()).device
        on_gpu = self.device.type != "cpu"
        check_published(trainer.compute_dtype, trainer.publish_dtype, on_gpu=on_gpu)
        if not on_gpu:
            keep_freed_memory()
        self.rank, self.num_ranks = distributed.world()
        self.room = Room(trainer.pack_tokens or _PACK_TOKENS.get(self.device.type, 16384))
        self.notes: list[str] = []  # for whoever watches the run
        self.quadratic = attention_crossover_tokens(self.policy)
        self.groups_per_update = self._groups_per_update(batch_groups)
        self.scorer = SealedScorer(
            store,
            made.make_twin,
            made.make_adapted,
            self.objective.options.temperature,
            self.room,
            tell=self._note_shortage,
        )
        self.meters = Meters(self.device)
        self.publisher = Publisher()
        self.base = ""  # checksum of the frozen weights, for versions that are adapters
        self.step: StepIndex | None = None
        self.next_step: StepIndex = 0
        self.num_updates = 0
        self.num_skipped = 0  # updates in a row
        self.skip_reason = ""
        self._buffer: list[Group] = []
        self._pending: list[Document] = []
        self._update = OpenUpdate(self.device)
        self._updates_in_step = 0

    @property
    def pack_tokens(self) -> int:
        """Of one pack; fewer once memory has run out."""
        return self.room.pack_tokens

    @property
    def holds_gradients(self) -> bool:
        """From the first pack of an update until it is applied."""
        return any(p.grad is not None for p in self.optimizer.parameters)

    # -- one step ---------------------------------------------------------------------------------

    def begin_step(self, step: StepIndex) -> None:
        """Open step `step`, which trains version `step`."""
        assert self.step is None, f"step {self.step} is still open"
        self.step, self._updates_in_step = step, 0
        adapters = self.options.lora_rank and self.options.lora_publish == "adapters"
        if self.num_ranks > 1 and adapters and self.objective.options.old_logprobs != "rollout":
            self.scorer.hold_base()  # ranks score different packs, but begin a step together
        self._update, self._pending, self._buffer = OpenUpdate(self.device), [], []

    def feed(self, groups: Sequence[Group]) -> None:
        """Take groups. Bad samples are counted and left out; see `intake.admit`."""
        assert self.step is not None, "begin_step first"
        limit = self.options.document_tokens_max or self.policy.positions_max
        for group in groups:
            assert not self._is_over(), "the step has all its groups"
            kept = take_in(group, self.step, limit, self.policy.vocab, self.meters)
            if self.buffered:
                self._buffer.extend([] if kept is None else [kept])
            elif kept is None:
                self._update.num_groups += 1
            else:
                self._take(kept)
                self._run_packs(flush=False)
            self._close_if_full()

    def may_go_on(self) -> bool:
        """Whether documents wait for a pack to fill up that are worth one of their own."""
        waiting = sum(d.num_tokens for d in self._pending)
        return self.num_ranks == 1 and waiting * _PACK_PARTS >= self.pack_tokens

    def go_on(self) -> None:
        """Run what waits for a pack to fill up, instead of waiting too."""
        self._run_packs(flush=True)

    @property
    def buffered(self) -> bool:
        """Whether the step runs only once all its groups are there."""
        o = self.options
        return o.canonical_order or not o.streaming or self.objective.needs_whole_batch

    def finish_update(self) -> None:
        """Run what is left of the update, normalise, clip, step."""
        assert self.step is not None and not self.buffered
        self._finish_update()

    def finish_step(self) -> dict[str, float]:
        """Close the step: every update done, metrics as plain numbers."""
        assert self.step is not None
        if self.buffered:
            self._run_buffer()
        elif self._update.num_groups or self._updates_in_step == 0:
            self._finish_update()
        metrics = self.meters.read(distributed.add_up if self.num_ranks > 1 else None)
        self.next_step, self.step = self.step + 1, None
        return metrics

    def skipped_too_many(self) -> bool:
        """Whether so many updates in a row were skipped that no more are worth a try."""
        return self.num_skipped >= self.options.skipped_updates_max

    def raise_skipped(self) -> None:
        raise UserError(
            f"{self.num_skipped} updates in a row were skipped (trainer.skipped_updates_max): "
            f"{self.skip_reason}; look at the rewards, algorithm.loss and trainer.lr, then --resume"
        )

    # -- versions and checkpoints -----------------------------------------------------------------

    def publish(
        self,
        store: WeightStore,
        version: Version,
        background: bool = False,
        exact: WeightStore | None = None,
        turn: Callable[[], None] = lambda: None,
    ) -> Future[str]:
        """Seal the weights as `version`; the result is the checksum. The weights are copied before
        this returns, so with `background` the next step may begin while the store still writes.
        `turn` is called before it does, and returns when it may.
        What rounding takes from the masters, and what is never published, goes to `exact`, under
        the same number and before the version is sealed: see `adopt`."""
        assert self.step is None, "weights in motion are never published"
        name, first = self.options.publish_dtype, self.rank == 0
        dtype = self.policy.compute_dtype if name == "auto" else pick_dtype(name, self.device)
        canary = compute_canary(self.policy, self.policy.vocab, self.policy.positions_max)
        adapters = self.options.lora_rank and self.options.lora_publish == "adapters"
        lost: dict[str, Tensor] = {}
        if adapters:
            tensors = published_adapter(self.policy, self.options, dtype, distributed.gathered)
        else:
            whole = exact is not None and not self.options.lora_rank
            tensors, lost = self.publisher.snapshot(self.policy, dtype, first, exact=whole)
        rest = state.unpublished(self, first) if exact is not None else {}
        if not first:
            done: Future[str] = Future()
            done.set_result("")
            return done
        base = self.base if adapters else ""
        beside = (exact, list((lost | rest).items())) if exact is not None else None
        return self.publisher.publish(
            store, version, tensors, canary, background, base, beside, turn
        )

    def save(self, directory: str | Path, options: CheckpointOptions | None = None) -> Path:
        """Write a checkpoint (see `checkpoint`) atomically under this very name."""
        assert self.step is None, "a checkpoint is taken between steps"
        return state.save(self, Path(directory), options or CheckpointOptions())

    def adopt(self, store: WeightStore, version: Version, exact: WeightStore | None = None) -> None:
        """Take the weights of a sealed version and go on from there, with the moments as they are:
        what a restart does. With the store that `publish` gave the rest to, masters, critic,
        counters, schedule and generators are those of the version, bit for bit; without it, the
        masters are what was published and nothing else is known."""
        assert self.step is None, "weights in motion are not replaced"
        sealed = store.open(version)
        if exact is not None:
            state.adopt(self, sealed, exact.open(version))
        elif self.options.lora_rank:
            load_published_adapter(self.policy, sealed)
        else:
            load_weights(self.policy, sealed.tensor)
        self.next_step = version

    @classmethod
    def resume(
        cls,
        directory: str | Path,
        algorithm: object = None,
        trainer: object = None,
        *,
        batch_groups: int | None = None,
        store: WeightStore | None = None,
    ) -> Learner:
        """Go on from a checkpoint, bit for bit on a CPU."""
        learner = cls(directory, algorithm, trainer, batch_groups=batch_groups, store=store)
        state.restore(learner, Path(directory))
        return learner

    # -- inside -----------------------------------------------------------------------------------

    def _groups_per_update(self, batch_groups: int | None) -> int | None:
        updates = self.options.updates_per_step
        if updates < 1:
            raise UserError("trainer.updates_per_step must be at least 1")
        if batch_groups is None:
            return None
        if batch_groups % updates:
            raise UserError(
                f"trainer.updates_per_step {updates} does not divide batch_groups {batch_groups}"
            )
        return batch_groups // updates

    def _take(self, group: Group) -> None:
        """A group of the open update: documents, advantages, counts for the denominators."""
        assert not self.objective.needs_whole_batch
        documents = group_documents(group, self.objective.options)
        if self.objective.options.kl_in == "reward":
            self._score_reference(documents)
        per_group_advantages(documents, self.objective)
        self._enqueue(documents, num_groups=1)

    def _enqueue(self, documents: Sequence[Document], num_groups: int) -> None:
        update = self._update
        update.num_groups += num_groups
        update.num_sequences += len(documents)
        update.num_tokens += sum(d.num_trained for d in documents)
        self.meters.count("train/tokens", sum(d.num_tokens for d in documents))
        if isinstance(self.policy, Decoder):
            adapters = self.optimizer.num_parameters if self.options.lora_rank else 0
            flops = self.policy.arch.train_flops([d.num_tokens for d in documents], adapters)
            self.meters.count("train/flops", flops)
        for d in documents:
            if self.objective.may_skip_zero_advantage and not bool(d.advantages.any()):
                self.meters.count("train/tokens_skipped", d.num_tokens)
            else:
                self._pending.append(d)

    def _score_reference(self, documents: Sequence[Document]) -> None:
        unscored = [d for d in documents if d.ref_logprobs is None]
        if self.reference is None or not unscored:
            return
        options = self.objective.options
        # A penalty in the reward is taken off on the host, before there are advantages.
        there = options.kl_in != "reward"
        found = score(
            self.reference,
            unscored,
            options.temperature,
            self.room,
            self._note_shortage,
            on_device=there,
        )
        for d, logprobs in zip(unscored, found, strict=True):
            d.ref_logprobs = logprobs

    def _run_packs(self, flush: bool) -> None:
        """Run the packs that are full; with `flush` also what is left over.

        Where memory runs out, all of the update is run again in smaller packs: what a backward pass
        that failed has added to the gradients cannot be taken out of them.
        """
        while packs := self._next_packs(flush):
            for place, documents in enumerate(packs):
                missing = self._try_pack(documents)
                if missing:
                    waiting = [d for pack in packs[place:] for d in pack]
                    self._pending = [*self._update.documents, *waiting, *self._pending]
                    self.make_room([d.num_tokens for d in documents], missing)
                    break
            else:
                return

    def _next_packs(self, flush: bool) -> list[list[Document]]:
        """Taken from what is pending. With several ranks a pack is run by each: the same plan
        everywhere, each takes its own."""
        pending, lengths = self._pending, [d.num_tokens for d in self._pending]
        if self.num_ranks > 1:
            if not lengths or not (flush or sum(lengths) >= self.num_ranks * self.pack_tokens):
                return []
            packs = pack_balanced(lengths, self.pack_tokens, self.num_ranks, self.quadratic)
            packs, rest = packs[self.rank :: self.num_ranks], []
        else:
            packs, rest = pack_stream(lengths, self.pack_tokens)
            if flush and rest:
                packs, rest = [*packs, rest], []
        self._pending = [pending[i] for i in rest]
        return [[pending[i] for i in indices] for indices in packs]

    def _try_pack(self, documents: list[Document]) -> str:
        """Run it; where there was not enough memory, say what was missing. Returns outside of the
        handler, whose traceback holds the activations."""
        try:
            self._run_pack(documents)
        except (RuntimeError, UserError) as error:
            missing = shortage(error)
            if not missing:
                raise
        else:
            self._update.documents += documents
            return ""
        return missing

    def make_room(self, lengths: Sequence[int], missing: str) -> None:
        """A pack of such documents did not fit: drop the gradients and whatever torch holds on to,
        and let the next packs be smaller. Raises where nothing is smaller."""
        if self.num_ranks > 1:  # the others are in the middle of a collective
            raise UserError(
                f"out of memory in a pack of {sum(lengths):,} tokens ({missing}); set "
                f"trainer.pack_tokens below {self.pack_tokens}, then --resume"
            )
        recomputed = bool(self.policy.checkpointing) or self.room.recomputes(sum(lengths))
        self._note_shortage(self.room.shrink(lengths, missing, recomputed=recomputed))
        self._update.forget_passes(self.device)
        for optimizer in (self.optimizer, self.critic_optimizer):
            if optimizer is not None:
                optimizer.zero_grad()
        free_cached()

    def _note_shortage(self, line: str) -> None:
        self.notes.append(line)
        self.meters.count("memory/retries")

    def _run_pack(self, documents: list[Document]) -> None:
        if not documents:
            self._run_nothing()
            return
        assert self.step is not None
        maybe_fail("pack")
        self._fill_old(documents)
        self._score_reference(documents)
        pack, update = collate(documents, self.device), self._update
        with self._recomputing(sum(d.num_tokens for d in documents)):
            loss = policy_pass(self.policy, pack, self.objective, update.meters, self.step)
            update.add_loss(loss)
            if self.critic is not None:
                options = self.objective.options
                update.add_loss(critic_pass(self.critic, pack, options, update.meters) * 0.0)
        update.meters.count("train/packs")

    @contextmanager
    def _recomputing(self, num_tokens: int) -> Iterator[None]:
        """A pack of so many tokens computes its layers again if it has to."""
        bodies = [self.policy, *([self.critic.body] if self.critic is not None else [])]
        if self.policy.checkpointing or not self.room.recomputes(num_tokens):
            bodies = []
        for body in bodies:
            body.checkpointing = True
        try:
            yield
        finally:
            for body in bodies:
                body.checkpointing = False

    def _run_nothing(self) -> None:
        """Take part in the collectives of a pack that fell to other ranks only."""
        ids = torch.zeros(2, dtype=torch.int64, device=self.device)
        row, layout = ids[:1], Layout([2], self.device)
        (self.policy(ids, layout, row, row).logprobs_N.sum() * 0.0).backward()
        if self.critic is not None:
            (self.critic(ids, layout, row).sum() * 0.0).backward()

    def _fill_old(self, documents: Sequence[Document]) -> None:
        """Old log-probs: the engine's, or this engine's under a sealed version. Before the step's
        first update the live weights *are* version `step`, at rest; `None` says to use them."""
        assert self.step is not None
        kind = self.objective.options.old_logprobs
        at_rest = self._updates_in_step == 0
        sealed: list[tuple[Document, Version]] = []
        for d in documents:
            version = self.step if kind == "proximal" else d.version
            # No single version gave a mixed trajectory its tokens; only the engine knows them.
            if kind == "rollout" or (kind == "behaviour" and d.mixed):
                d.old_logprobs = d.rollout_logprobs
            elif not (at_rest and version == self.step):
                sealed.append((d, version))
        found = self.scorer.score([d for d, _ in sealed], [v for _, v in sealed], on_device=True)
        for (d, _), logprobs in zip(sealed, found, strict=True):
            d.old_logprobs = logprobs

    def _is_over(self) -> bool:
        return not self.buffered and self._is_full() and self._is_last()

    def _is_full(self) -> bool:
        size = self.groups_per_update
        return size is not None and self._update.num_groups >= size

    def _is_last(self) -> bool:
        return self._updates_in_step + 1 >= self.options.updates_per_step

    def _close_if_full(self) -> None:
        """The step's last update is computed here and applied by `finish_step`: until then a
        learner with one update per step, stopped at any point, still has the moments of its last
        version."""
        if not self._is_full():
            return
        if self._is_last():
            self._run_packs(flush=True)
        else:
            self._finish_update()

    def _finish_update(self) -> None:
        self._run_packs(flush=True)
        update, self._update = self._update, OpenUpdate(self.device)
        self.meters.add(update.meters)
        self._updates_in_step += 1
        if not update.num_sequences:
            self.meters.count("update/empty")
            return
        o = self.objective
        den = denominator(
            o.aggregation, update.num_tokens, update.num_sequences, o.options.constant_tokens
        )
        total = torch.zeros((), device=self.device) if update.loss is None else update.loss
        total = distributed.add_up_scalar(total)
        norm = self.optimizer.apply(self.num_ranks / den, self.num_updates, total)
        if self.critic_optimizer is not None:
            scale = self.num_ranks / update.num_tokens
            # The two move together or not at all.
            poisoned = total if norm is not None else total * float("nan")
            critic_norm = self.critic_optimizer.apply(scale, self.num_updates, poisoned)
            if critic_norm is not None:
                self.meters.add_sum("critic/grad_norm", torch.tensor(critic_norm), 1)
        if norm is None:
            self._note_skipped(total)
            return
        self.num_skipped = 0
        self.meters.count("update/applied" if norm else "update/without_gradient")
        self.meters.add_sum("grad_norm", torch.tensor(norm), 1)
        self.meters.add_sum("lr", torch.tensor(learning_rate(self.options, self.num_updates)), 1)
        self.meters.add_sum("loss", total / den, 1)
        self.num_updates += 1

    def _note_skipped(self, loss: Tensor) -> None:
        self.num_skipped += 1
        self.meters.count("update/skipped_non_finite")
        finite = bool(torch.isfinite(loss))
        what = "the gradient is not finite" if finite else f"the loss is {float(loss):g}"
        self.skip_reason = f"in step {self.step} {what}"

    def _run_buffer(self) -> None:
        groups, self._buffer = self._buffer, []
        if self.options.canonical_order:
            groups.sort(key=lambda g: g.id)
        documents = [group_documents(g, self.objective.options) for g in groups]
        everything = [d for ds in documents for d in ds]
        if self.objective.options.kl_in == "reward":
            self._score_reference(everything)
        if self.critic is not None:
            fill_old_values(self.critic, everything, self.room, self._note_shortage)
        if self.objective.needs_whole_batch and everything:
            whole_batch_advantages(everything, self.objective.options)
        else:
            for ds in documents:
                per_group_advantages(ds, self.objective)
        updates = self.options.updates_per_step
        for i in range(updates):
            mine = documents[i * len(groups) // updates : (i + 1) * len(groups) // updates]
            self._enqueue([d for ds in mine for d in ds], len(mine))
            self._finish_update()
