"""What a learner stands on when it starts: the newest sealed version, its masters, its moments.

    learner/masters/   of the newest version: what makes its masters, critic and counters exact
    learner/moments/   of the newest version that they were written for

Invariant: however the incarnation before ended, this one has the masters, the critic, the counters
and the schedule of the newest sealed version, bit for bit; after a clean end the moments too. On
another host it has those of the newest durable one.
"""

from __future__ import annotations

from concurrent.futures import Executor
from pathlib import Path
from typing import Any

from dora_rl.controller.run_dir import learner_lock
from dora_rl.model.sealed import check_base
from dora_rl.setup.settings import learner_algorithm
from dora_rl.trainer import distributed
from dora_rl.trainer.checkpoints import state
from dora_rl.trainer.checkpoints.digests import CheckpointDamaged
from dora_rl.trainer.checkpoints.state import Checkpoints, Saved
from dora_rl.trainer.learner import Learner
from dora_rl.types import UserError, Version
from dora_rl.weights.lora_base import run_base
from dora_rl.weights.mending import ready_newest
from dora_rl.weights.store import WeightsError
from dora_rl.workers.publication import Moments, Publication
from dora_rl.workers.worker import Setup


class LearnerStart:
    """Every rank has one; the first one writes."""

    def __init__(self, setup: Setup, executor: Executor | None = None) -> None:
        """`executor`: who writes versions and moments, in place of threads."""
        self._setup = setup
        config, extra, run_dir = setup.config, setup.extra, Path(setup.run_dir)
        self.rank, self.num_ranks = int(extra["rank"]), int(extra["num_ranks"])
        self.lock = learner_lock(run_dir) if self.rank == 0 else None
        distributed.join(extra["rendezvous"], self.rank, self.num_ranks, str(extra.get("ip", "")))
        self.publication = Publication(setup, self.lock, executor)
        shared, disk = self.publication.sealed, self.publication.on_disk
        self.shared, self.disk, self.exact = self.publication.store, disk.versions, disk.masters
        self.checkpoints = Checkpoints(run_dir / "checkpoints", config.checkpoint)
        self.notes: list[str] = []
        if self.rank == 0:
            self.notes += ready_newest(shared, disk, run_dir, self.checkpoints.root)
        distributed.wait_for_all()  # now the disk has the newest version, for every rank
        every_s = config.checkpoint.state_every_s
        make_way = self.publication.sealing.make_way
        moments_dir = run_dir / "learner" / "moments"
        self.moments = Moments(moments_dir, every_s, executor=executor, make_way=make_way)
        self.version: Version = max(self.disk.versions(), default=-1)
        self.publication.prepare_first(self.version + 1)
        self.learner, self.optimizer_version = self._open_learner(self.version)
        self.learner.publisher = self.publication.publisher
        self.notes += self.publication.share_device(self.learner)
        hint = "put runtime.run_dir on a file system that all learner ranks share"
        distributed.agree("the newest sealed version to be", self.version, hint)
        self._check_base()

    def _open_learner(self, sealed: Version) -> tuple[Learner, Version]:
        """The learner at the newest sealed version, and the version its moments are of."""
        config = self._setup.config
        kwargs: dict[str, Any] = {
            "algorithm": learner_algorithm(config),
            "trainer": config.trainer,
            "batch_groups": config.orchestration.batch_groups,
            "store": self.disk if self.rank else self.shared,  # ranks may be on other hosts
        }
        if self.rank == 0:
            self._forget_unsealed(sealed)
        saved = [c for c in self.checkpoints.saved() if c.step + 1 <= sealed]
        if sealed in self.exact.versions():
            learner = Learner(config.model.path, **kwargs)
            learner.adopt(self.disk, sealed, self.exact)
            return learner, self._find_moments(learner, sealed, saved)
        # A new run, or one whose versions an older release has sealed, or whose masters are gone.
        learner, optimizer_version = self._newest_whole(saved, kwargs)
        if max(0, sealed) > optimizer_version:
            learner.adopt(self.disk, sealed)
            self.notes.append(
                f"version {sealed} has no masters beside it: it goes on from the published "
                f"weights, with the learning-rate schedule of version {optimizer_version}"
            )
        return learner, optimizer_version

    def _newest_whole(self, saved: list[Saved], kwargs: dict[str, Any]) -> tuple[Learner, Version]:
        """From the newest checkpoint that is what was saved, or from the model."""
        model = self._setup.config.model.path
        for checkpoint in reversed(saved):
            try:
                learner = Learner.resume(checkpoint.path, **kwargs)
            except CheckpointDamaged as error:
                self.notes.append(f"{error}; the one before it is used")
                continue
            # A checkpoint is pruned one day; what is copied beside later ones is the model's.
            learner.directory = Path(model)
            return learner, checkpoint.step + 1
        return Learner(model, **kwargs), 0

    def _forget_unsealed(self, sealed: Version) -> None:
        """What an incarnation that ended before it sealed the version left beside it, and what is
        left of a version that was lost with its host."""
        for store in (self.exact, self.publication.seals_to.masters):
            store.discard(version for version in store.versions() if version > sealed)
        self.moments.forget_after(sealed)

    def _find_moments(self, learner: Learner, sealed: Version, saved: list[Saved]) -> Version:
        """The newest that are whole, beside the versions or in a checkpoint; 0: none."""
        checkpoints = {c.step + 1: c.path for c in saved}
        there = {v for v in self.moments.store.versions() if v <= sealed}
        for version in sorted(there | checkpoints.keys(), reverse=True):
            try:
                if version in checkpoints:
                    state.load_saved_moments(learner, checkpoints[version])
                else:
                    self.moments.load(learner, version)
                return version
            except (WeightsError, UserError) as error:
                self.notes.append(f"the optimizer's moments cannot be used: {error}")
        return 0

    def _check_base(self) -> None:
        """What versions that are adapters belong on: the same on every rank, and as it was."""
        base = self.learner.base = run_base(self._setup.config)
        hint = "model.path must hold the same weights on every host"
        distributed.agree("the weights of model.path to be", int(base[:15] or "0", 16), hint)
        if self.version >= 0:
            check_base(self.disk.map(self.version), base, self._setup.config.model.path)
