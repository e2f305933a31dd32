"""Samples computed again while their version lives, by another path than the one that made them.

An instance decodes token by token from its paged cache; here the learner reads the sealed version
that the log names and runs prompt and response as one document. A runtime that decodes under other
weights than it says shows as log-probs that differ. Done by the learner while it waits for work and
holds no gradients: the twin that reads a version is smaller than they are, so that it needs no room
of its own. Which samples are taken follows from their number alone. Never changes what is trained,
and never ends a run: where there is no memory for it, it stops and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from dora_rl.config import RunConfig
from dora_rl.core import events as ev
from dora_rl.out_of_memory import shortage
from dora_rl.ports import SealedWeights
from dora_rl.setup.settings import is_recomputable
from dora_rl.trainer.documents import Document, documents_of
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.memory import Room
from dora_rl.trainer.scoring import SealedScorer
from dora_rl.types import Group, RequestId, UserError, Version
from dora_rl.weights.store import SharedMemoryWeightStore, VersionMissing

PENDING_MAX = 32  # so many may wait for an idle moment; then the end of a step is one
EXACT, ROUNDED = 1e-4, 0.05  # mean difference of a log-prob: all float32, or anything shorter


def is_chosen(seed: int, request: RequestId, share: float) -> bool:
    """The same samples in every life of a run."""
    found = blake2b(f"{seed}/{request.group}/{request.sample}".encode(), digest_size=8).digest()
    return int.from_bytes(found, "little") < share * 2**64


def tolerance_of(config: RunConfig, learner: torch.dtype, device: str) -> float:
    """How far two right computations may lie apart, per token on average."""
    exact = config.engine_dtype(device) == "float32" and learner == torch.float32
    return config.audit.tolerance or (EXACT if exact else ROUNDED)


def gaps_of(documents: Sequence[Document], scores: Sequence[torch.Tensor]) -> torch.Tensor:
    """How far the log-probs of one sample lie apart, of each trained token."""
    pairs = zip(documents, scores, strict=True)
    return torch.cat([(found.float() - one.rollout_logprobs).abs() for one, found in pairs])


@dataclass(slots=True)
class Taken:
    """A sample that waits to be computed again, and its weights, kept although they may retire."""

    request: RequestId
    documents: list[Document]
    sealed: SealedWeights


class Recheck:
    """What the learner computes again. `tell` gets the outcome for the log."""

    def __init__(
        self,
        learner: Learner,
        store: SharedMemoryWeightStore,
        config: RunConfig,
        device: str,
        tell: Callable[[ev.Recomputed], None],
        note: Callable[[str], None] = lambda line: None,
    ) -> None:
        audit = config.audit
        works = learner.num_ranks == 1 and is_recomputable(config)
        self._share = audit.recompute_share if works else 0.0
        self._seed = config.runtime.seed
        self._learner, self._store, self._tell, self._note = learner, store, tell, note
        self._tolerance = tolerance_of(config, learner.policy.compute_dtype, device)
        self._kept: dict[Version, SealedWeights] = {}
        self._scorer = SealedScorer(
            self._kept.__getitem__,
            learner.scorer.make_twin,
            learner.scorer.make_adapted,
            config.rollout.temperature or 1.0,
            Room(learner.pack_tokens, note),
            models_max=1,
        )
        self._waiting: list[Taken] = []

    @property
    def is_waiting(self) -> bool:
        """Whether there is something to do, and room for it."""
        return bool(self._waiting) and not self._learner.holds_gradients

    def offer(self, group: Group) -> None:
        for sample in group.samples:
            request = sample.request
            if (
                sample.mixed
                or not sample.num_trained
                or not is_chosen(self._seed, request, self._share)
            ):
                continue
            try:
                # In partial mode a request may begin under a later version than its group's.
                sealed = self._store.map(sample.segments[0].version)
            except VersionMissing:
                continue  # counted by its absence: the log has no word of this sample
            self._waiting.append(Taken(request, documents_of(group, sample, 0.0), sealed))

    def catch_up(self) -> None:
        """At the end of a step: a learner that never waits has no idle moment."""
        while len(self._waiting) >= PENDING_MAX:
            self.go_on()

    def go_on(self) -> None:
        """Those of one version."""
        if not self._waiting:
            return
        version = self._waiting[0].sealed.version
        mine = [taken for taken in self._waiting if taken.sealed.version == version]
        self._waiting = [taken for taken in self._waiting if taken.sealed.version != version]
        self._kept[version] = mine[0].sealed
        try:
            documents = [document for taken in mine for document in taken.documents]
            scored = iter(self._scorer.score(documents, [version] * len(documents)))
        except (RuntimeError, UserError) as error:
            missing = shortage(error)
            if not missing:
                raise
            self._share, self._waiting = 0.0, []
            self._note(
                f"out of memory while samples were computed again ({missing}); no more are in this "
                "life of the learner (audit.recompute_share)"
            )
            return
        finally:
            self._scorer.release()  # a twin is as large as the model
            self._kept.clear()
        for taken in mine:
            gap = gaps_of(taken.documents, [next(scored) for _ in taken.documents])
            self._tell(
                ev.Recomputed(
                    taken.request,
                    version,
                    len(gap),
                    float(gap.mean()),
                    float(gap.max()),
                    self._tolerance,
                )
            )

    def finish(self) -> None:
        """All that wait."""
        while self._waiting:
            self.go_on()
