"""The learner: takes groups as a stream, makes micro-batches as they fill, steps, publishes.

    learner = Learner("path/to/model", AlgorithmOptions(loss="grpo"), TrainerOptions(lr=1e-4),
                      batch_groups=32)
    learner.begin_step(0)              # step s trains version s ...
    learner.feed([group, group])       # any number of calls, any number of groups
    metrics = learner.finish_step()
    learner.publish(store, 1)          # ... and makes version s + 1

With U = `updates_per_step`, update i takes the i-th B/U groups; it closes by itself when they have
been fed (`batch_groups` given), or when `finish_update` is called. Losses that need statistics of
the whole batch, `canonical_order` and `streaming = False` buffer the step instead: nothing runs
before `finish_step`.

Never updates from a non-finite loss or gradient (the update is skipped and counted), and never
scores old log-probs under weights in motion. Invariant: the gradient applied is that of the whole
update's loss, whatever the packs it was cut into.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from dora_rl.ports import WeightStore
from dora_rl.trainer import distributed, state
from dora_rl.trainer.allocator import keep_freed_memory
from dora_rl.trainer.batch import GroupBatch, admit
from dora_rl.trainer.documents import Document, collate
from dora_rl.trainer.losses.aggregate import denominator
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.meters import Meters
from dora_rl.trainer.model import Policy, clone_architecture, load_policy, pick_dtype
from dora_rl.trainer.optim import Optimizer, learning_rate
from dora_rl.trainer.options import AlgorithmOptions, TrainerOptions, from_section
from dora_rl.trainer.packing import pack_stream
from dora_rl.trainer.passes import policy_pass
from dora_rl.trainer.prepare import group_documents, per_group_advantages, whole_batch_advantages
from dora_rl.trainer.publish import Publisher, compute_canary, snapshot
from dora_rl.trainer.scoring import SealedScorer, score
from dora_rl.types import StepIndex, UserError, Version

_PACK_TOKENS = {"cpu": 4096, "cuda": 32768}


class OpenUpdate:
    """What the update being filled has seen so far; denominators are known only at its end."""

    def __init__(self) -> None:
        self.num_groups = 0
        self.num_tokens = 0
        self.num_sequences = 0
        self.loss_sum: Tensor | None = None


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
        self.policy: Policy = (
            load_policy(self.directory, trainer) if self.directory else model  # type: ignore[assignment]
        )
        self.device = next(self.policy.parameters()).device
        if self.device.type == "cpu":
            keep_freed_memory()
        self.rank, self.num_ranks = distributed.world()
        self.optimizer = Optimizer(self.policy, trainer)
        self.pack_tokens = trainer.pack_tokens or _PACK_TOKENS.get(self.device.type, 16384)
        self.groups_per_update = self._groups_per_update(batch_groups)
        self.scorer = SealedScorer(
            store, self._twin, self.objective.options.temperature, self.pack_tokens
        )
        self.reference = self._make_reference()
        self.meters = Meters(self.device)
        self.publisher = Publisher()
        self.step: StepIndex | None = None
        self.next_step: StepIndex = 0
        self.num_updates = 0
        self._buffer: list[GroupBatch] = []
        self._pending: list[Document] = []
        self._update = OpenUpdate()
        self._updates_in_step = 0

    # -- one step ---------------------------------------------------------------------------------

    def begin_step(self, step: StepIndex) -> None:
        """Open step `step`, which trains version `step`."""
        assert self.step is None, f"step {self.step} is still open"
        self.step, self._updates_in_step = step, 0
        self._update, self._pending, self._buffer = OpenUpdate(), [], []

    def feed(self, groups: Sequence[GroupBatch]) -> None:
        """Take groups. Bad samples are counted and left out; see `batch.admit`."""
        assert self.step is not None, "begin_step first"
        admitted = [g for g in map(self._admit, groups) if g is not None]
        skipped = len(groups) - len(admitted)
        if self.buffered:
            self._buffer.extend(admitted)
            return
        self._update.num_groups += skipped
        self._close_if_full()
        for group in admitted:
            self._take([group])
            self._run_full_packs()
            self._close_if_full()

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

    # -- versions and checkpoints -----------------------------------------------------------------

    def publish(
        self, store: WeightStore, version: Version, background: bool = False
    ) -> Future[str]:
        """Seal the weights as `version`; the result is the checksum. The weights are copied before
        this returns, so with `background` the next step may begin while the store still writes."""
        assert self.step is None, "weights in motion are never published"
        name = self.options.publish_dtype
        dtype = self.policy.compute_dtype if name == "auto" else pick_dtype(name, self.device)
        canary = compute_canary(self.policy, self.policy.vocab, self.policy.positions_max)
        tensors = snapshot(self.policy, dtype)
        if self.rank:
            done: Future[str] = Future()
            done.set_result("")
            return done
        return self.publisher.publish(store, version, tensors, canary, background)

    def save(self, directory: str | Path) -> Path:
        """Write a checkpoint (see `checkpoint`) atomically under this very name."""
        assert self.step is None, "a checkpoint is taken between steps"
        return state.save(self, Path(directory))

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

    def _admit(self, group: GroupBatch) -> GroupBatch | None:
        assert self.step is not None
        limit = self.options.document_tokens_max or self.policy.positions_max
        kept, faults = admit(group, limit, self.policy.vocab)
        for reason, count in faults.items():
            self.meters.count(f"dropped/{reason}", count)
        if kept is None:
            return None
        assert group.version <= self.step, "a trajectory from the future"
        self.meters.observe("staleness", self.step - group.version)
        for sample in kept.samples:
            assert sample.reward is not None
            self.meters.observe("reward", sample.reward)
            self.meters.observe("response_length", len(sample.token_ids))
            mixed = len({s.version for s in sample.segments}) > 1
            self.meters.add_sum("mixed_version_frac", torch.tensor(float(mixed)), 1)
            self.meters.add_sum("truncated_frac", torch.tensor(float(sample.truncated)), 1)
        return kept

    def _take(self, groups: Sequence[GroupBatch]) -> None:
        """Groups of the open update: documents, advantages, counts for the denominators."""
        per_group = [group_documents(g, self.objective.options) for g in groups]
        everything = [d for documents in per_group for d in documents]
        self._score_reference(everything)
        if self.objective.needs_whole_batch:
            raise AssertionError("advantages over the whole batch are set before taking")
        for documents in per_group:
            per_group_advantages(documents, self.objective.options)
        self._enqueue(everything, len(groups))

    def _enqueue(self, documents: Sequence[Document], num_groups: int) -> None:
        update = self._update
        update.num_groups += num_groups
        update.num_sequences += len(documents)
        update.num_tokens += sum(d.num_trained for d in documents)
        self.meters.count("train/tokens", sum(d.num_tokens for d in documents))
        for d in documents:
            if self.objective.may_skip_zero_advantage and not bool(d.advantages.any()):
                self.meters.count("train/tokens_skipped", d.num_tokens)
            else:
                self._pending.append(d)

    def _score_reference(self, documents: Sequence[Document]) -> None:
        if self.reference is None or not documents:
            return
        temperature = self.objective.options.temperature
        found = score(self.reference, documents, temperature, self.pack_tokens)
        for d, logprobs in zip(documents, found, strict=True):
            d.ref_logprobs = logprobs

    def _run_full_packs(self) -> None:
        packs, rest = pack_stream([d.num_tokens for d in self._pending], self.pack_tokens)
        pending = self._pending
        self._pending = [pending[i] for i in rest]
        for indices in packs:
            self._run_pack([pending[i] for i in indices])

    def _run_pack(self, documents: list[Document]) -> None:
        self._fill_old(documents)
        pack = collate(documents, self.device)
        total = policy_pass(self.policy, pack, self.objective, self.meters)
        update = self._update
        update.loss_sum = total if update.loss_sum is None else update.loss_sum + total
        self.meters.count("train/packs")

    def _fill_old(self, documents: Sequence[Document]) -> None:
        """Old log-probs: the engine's, or this engine's under a sealed version. Before the step's
        first update the live weights *are* version `step`, at rest; `None` says to use them."""
        kind = self.objective.options.old_logprobs
        if kind == "rollout":
            for d in documents:
                d.old_logprobs = d.rollout_logprobs
            return
        assert self.step is not None
        want = [self.step if kind == "proximal" else d.version for d in documents]
        at_rest = self._updates_in_step == 0
        sealed = [i for i, v in enumerate(want) if not (at_rest and v == self.step)]
        found = self.scorer.score([documents[i] for i in sealed], [want[i] for i in sealed])
        for i, logprobs in zip(sealed, found, strict=True):
            documents[i].old_logprobs = logprobs

    def _close_if_full(self) -> None:
        if self.groups_per_update and self._update.num_groups >= self.groups_per_update:
            self._finish_update()

    def _finish_update(self) -> None:
        self._run_full_packs()
        if self._pending:
            self._run_pack(self._pending)
            self._pending = []
        update, self._update = self._update, OpenUpdate()
        self._updates_in_step += 1
        if not update.num_sequences:
            self.optimizer.zero_grad()
            self.meters.count("update/empty")
            return
        o = self.objective
        den = denominator(
            o.aggregation, update.num_tokens, update.num_sequences, o.options.constant_tokens
        )
        norm = self.optimizer.apply(self.num_ranks / den, self.num_updates, update.loss_sum)
        if norm is None:
            self.meters.count("update/skipped_non_finite")
            return
        self.meters.add_sum("grad_norm", torch.tensor(norm), 1)
        self.meters.add_sum("lr", torch.tensor(learning_rate(self.options, self.num_updates)), 1)
        if update.loss_sum is not None:
            self.meters.add_sum("loss", update.loss_sum / den, 1)
        self.num_updates += 1

    def _run_buffer(self) -> None:
        groups, self._buffer = self._buffer, []
        if self.options.canonical_order:
            groups.sort(key=lambda g: g.group)
        documents = [group_documents(g, self.objective.options) for g in groups]
        everything = [d for ds in documents for d in ds]
        self._score_reference(everything)
        if self.objective.needs_whole_batch and everything:
            whole_batch_advantages(everything, self.objective.options)
        else:
            for ds in documents:
                per_group_advantages(ds, self.objective.options)
        updates = self.options.updates_per_step
        for i in range(updates):
            mine = documents[i * len(groups) // updates : (i + 1) * len(groups) // updates]
            self._enqueue([d for ds in mine for d in ds], len(mine))
            self._finish_update()

    def _twin(self) -> Policy:
        return clone_architecture(self.policy, self.options, self.directory)

    def _make_reference(self) -> Policy | None:
        if not self.objective.needs_reference:
            return None
        if self.options.reference_model:
            return load_policy(Path(self.options.reference_model), self.options).requires_grad_(
                False
            )
        twin = self._twin()
        twin.load_state_dict(self.policy.state_dict())
        return twin
