"""The learner: takes groups as a stream, makes micro-batches as they fill, steps, publishes.

    learner = Learner("path/to/model", AlgorithmConfig(loss="grpo"), TrainerConfig(lr=1e-4),
                      batch_groups=32)
    learner.begin_step(0)              # step s trains version s ...
    learner.feed([group, group])       # any number of calls, any number of groups
    metrics = learner.finish_step()
    learner.publish(store, 1)          # ... and makes version s + 1

With U = `updates_per_step`, update i takes the i-th B/U groups; it closes by itself when they have
been fed (`batch_groups` given; the last one with the step), or when `finish_update` is called.
Losses that need statistics of the whole batch, `canonical_order` and `streaming = False` buffer the
step instead: nothing runs before `finish_step`.

How an update runs is in `updates`. Invariant: weights are published, saved and replaced between
steps only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch

from dora_rl.config import AlgorithmConfig, CheckpointConfig, TrainerConfig
from dora_rl.ports import WeightStore
from dora_rl.trainer import distributed
from dora_rl.trainer.checkpoints import state
from dora_rl.trainer.checkpoints.finite import check_canary
from dora_rl.trainer.checkpoints.publish import Drafts, Publisher, compute_canary, fill
from dora_rl.trainer.checks import check_published
from dora_rl.trainer.documents import (
    Document,
    admit,
    group_documents,
    per_group_advantages,
    whole_batch_advantages,
)
from dora_rl.trainer.losses.registry import resolve
from dora_rl.trainer.policy.lora import load_published_adapter, published_adapter
from dora_rl.trainer.policy.model import Policy, load_weights, pick_dtype
from dora_rl.trainer.scoring import fill_old_values
from dora_rl.trainer.updates import OpenUpdate, Updates
from dora_rl.types import Group, StepIndex, Version
from dora_rl.user_code import require

_PACK_PARTS = 4  # a pack that is full by one part is run where the learner would wait instead


class Learner(Updates):
    """See the module's docstring. One per rank; every rank is fed the same groups."""

    def __init__(
        self,
        model: str | Path | Policy,
        algorithm: AlgorithmConfig | None = None,
        trainer: TrainerConfig | None = None,
        *,
        batch_groups: int | None = None,
        store: WeightStore | None = None,
    ) -> None:
        trainer = trainer or TrainerConfig()
        super().__init__(
            Path(model) if isinstance(model, str) else model,
            resolve(algorithm or AlgorithmConfig()),
            trainer,
            store,
        )
        check_published(
            trainer.compute_dtype, trainer.publish_dtype, on_gpu=self.device.type != "cpu"
        )
        updates = trainer.updates_per_step
        require(
            (
                not batch_groups or batch_groups % updates == 0,
                f"trainer.updates_per_step {updates} does not divide batch_groups {batch_groups}",
            )
        )
        self.groups_per_update = None if batch_groups is None else batch_groups // updates
        self.publisher = Publisher()
        self.base = ""  # checksum of the frozen weights, for versions that are adapters
        self.next_step: StepIndex = 0
        self._buffer: list[Group] = []

    @property
    def publishes_adapters(self) -> bool:
        return self.options.lora_rank > 0 and self.options.lora_publish == "adapters"

    @property
    def published_dtype(self) -> torch.dtype:
        name = self.options.publish_dtype
        return self.policy.compute_dtype if name == "auto" else pick_dtype(name, self.device)

    # -- one step ---------------------------------------------------------------------------------

    def begin_step(self, step: StepIndex) -> None:
        """Open step `step`, which trains version `step`."""
        assert self.step is None, f"step {self.step} is still open"
        self.step, self._updates_in_step = step, 0
        recomputes = self.objective.options.old_logprobs != "rollout"
        if self.num_ranks > 1 and self.publishes_adapters and recomputes:
            self.scorer.hold_base()  # ranks score different packs, but begin a step together
        self._update, self._pending, self._buffer = OpenUpdate(self.device), [], []

    def feed(self, groups: Sequence[Group]) -> None:
        """Take groups. Bad samples are counted and left out; see `documents.admit`."""
        assert self.step is not None, "begin_step first"
        limit = self.options.document_tokens_max or self.policy.positions_max
        asked = self.objective.distils_in_advantage and self.teacher is None
        for group in groups:
            over = not self.buffered and self._is_full() and self._is_last()
            assert not over, "the step has all its groups"
            kept = admit(group, self.step, limit, self.policy.vocab, self.meters, asked)
            if self.buffered:
                self._buffer.extend([] if kept is None else [kept])
            elif kept is None:
                self._update.num_groups += 1
            else:
                (documents,) = self._documents([kept])
                self.enqueue(documents, num_groups=1)
                self.run_packs(flush=False)
            self._close_if_full()

    def may_go_on(self) -> bool:
        """Whether documents wait for a pack to fill up that are worth one of their own."""
        waiting = sum(d.num_tokens for d in self._pending)
        return self.num_ranks == 1 and waiting * _PACK_PARTS >= self.pack_tokens

    def go_on(self) -> None:
        """Run what waits for a pack to fill up, instead of waiting too."""
        self.run_packs(flush=True)

    @property
    def buffered(self) -> bool:
        """Whether the step runs only once all its groups are there."""
        o = self.options
        return o.canonical_order or not o.streaming or self.objective.needs_whole_batch

    def finish_update(self) -> None:
        """Run what is left of the update, normalise, clip, step."""
        assert self.step is not None and not self.buffered
        self.end_update()

    def finish_step(self) -> dict[str, float]:
        """Close the step: every update done, metrics as plain numbers."""
        assert self.step is not None
        if self.buffered:
            self._run_buffer()
        elif self._update.num_groups or self._updates_in_step == 0:
            self.end_update()
        metrics = self.meters.read()
        self.next_step, self.step = self.step + 1, None
        return metrics

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
        first, dtype = self.rank == 0, self.published_dtype
        canary = compute_canary(self.policy, self.policy.vocab, self.policy.positions_max)
        check_canary(canary, version)
        drafts = self.publisher.begin(version, store, exact) if first else None
        try:
            self._copy_to(drafts, dtype, version, exact=exact is not None)
        except BaseException:
            self.publisher.settle()
            if drafts is not None:
                drafts.discard()
            raise
        if drafts is None:
            done: Future[str] = Future()
            done.set_result("")
            return done
        return self.publisher.seal(
            drafts, canary, background, self.base if self.publishes_adapters else "", turn
        )

    def _copy_to(
        self, drafts: Drafts | None, dtype: torch.dtype, version: Version, *, exact: bool
    ) -> None:
        """What is published, and beside it what makes it exact. All ranks take part."""
        if self.publishes_adapters:
            tensors = published_adapter(self.policy, self.options, dtype, distributed.gathered)
            if drafts is not None:
                fill(drafts.version, tensors, version)
        else:
            # The masters of adapters are kept as they are, and the weights under them are not.
            rounds = drafts if not self.options.lora_rank or drafts is None else drafts.alone()
            self.publisher.snapshot(self.policy, dtype, version, rounds)
        rest = state.unpublished(self, drafts is not None) if exact else {}
        if drafts is not None and drafts.exact is not None:
            fill(drafts.exact, rest.items(), version)

    def save(self, directory: str | Path, options: CheckpointConfig | None = None) -> Path:
        """Write a checkpoint (see `checkpoint`) atomically under this very name."""
        assert self.step is None, "a checkpoint is taken between steps"
        return state.save(self, Path(directory), options or CheckpointConfig())

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
        algorithm: AlgorithmConfig | None = None,
        trainer: TrainerConfig | None = None,
        *,
        batch_groups: int | None = None,
        store: WeightStore | None = None,
    ) -> Learner:
        """Go on from a checkpoint, bit for bit on a CPU. Raises `CheckpointDamaged`."""
        state.check_saved(Path(directory))
        learner = cls(directory, algorithm, trainer, batch_groups=batch_groups, store=store)
        state.restore(learner, Path(directory))
        return learner

    # -- inside -----------------------------------------------------------------------------------

    def _documents(self, groups: Sequence[Group]) -> list[list[Document]]:
        """Those of each group, with their advantages."""
        options = self.objective.options
        documents = [group_documents(group, options) for group in groups]
        everything = [d for of_group in documents for d in of_group]
        if options.kl_in == "reward":
            self.score_reference(everything)
        if self.critic is not None:
            fill_old_values(self.critic, everything, self.room)
        if self.objective.needs_whole_batch:
            whole_batch_advantages(everything, options)
        else:
            for group, of_group in zip(groups, documents, strict=True):
                turn_rewards = [sample.turn_rewards for sample in group.samples]
                per_group_advantages(of_group, self.objective, turn_rewards)
        return documents

    def _is_full(self) -> bool:
        size = self.groups_per_update
        return size is not None and self._update.num_groups >= size

    def _is_last(self) -> bool:
        return self._updates_in_step + 1 >= self.options.updates_per_step

    def _close_if_full(self) -> None:
        """The step's last update is computed here and applied by `finish_step`: until then a
        learner with one update per step, stopped at any point, still has the moments of its last
        version."""
        if self._is_full() and self._is_last():
            self.run_packs(flush=True)
        elif self._is_full():
            self.end_update()

    def _run_buffer(self) -> None:
        groups, self._buffer = self._buffer, []
        if self.options.canonical_order:
            groups.sort(key=lambda g: g.id)
        documents, updates = self._documents(groups), self.options.updates_per_step
        for i in range(updates):
            mine = documents[i * len(groups) // updates : (i + 1) * len(groups) // updates]
            self.enqueue([d for of_group in mine for d in of_group], len(mine))
            self.end_update()
