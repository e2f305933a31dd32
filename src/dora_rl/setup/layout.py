"""Who runs where on one machine: instances, learner threads, resident versions, shared memory.

Same devices for every mode: the colocated ones (sync, partial, replication) give all cores to the
learner while the instances sleep; the others share the cores all the time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.config import RunConfig
from dora_rl.core.params import policy_of
from dora_rl.setup.devices import EVALUATOR_SHARE, Place, local_places, shared_place
from dora_rl.setup.settings import core_params
from dora_rl.weights.leftovers import transfer_of
from dora_rl.weights.store import shared_memory_root
from dora_rl.workers.engines import COLOCATED, resident_limit

if TYPE_CHECKING:
    from dora_rl.setup.plan import RunPlan


@dataclass(frozen=True, slots=True)
class Layout:
    """The processes of a local run."""

    device: str
    num_cores: int
    instances: tuple[str, ...]
    learners: tuple[str, ...]  # one per rank
    resident_max: int
    slots_max: int  # requests an instance may have: those it decodes and those that wait
    elastic: bool  # every instance is, in a mode that alternates
    num_elastic: int  # so many of them are
    learner_threads: int
    weights_root: Path
    transfer_root: Path
    learner_percent: int  # of a GPU's processors, under MPS
    learner_yields: bool
    places: Mapping[str, Place]  # of instances on GPUs; on a cluster Ray decides
    memory: RunPlan | None = None  # of the GPUs of this machine (setup/plan.py)

    def is_elastic(self, name: str) -> bool:
        """Whether an instance sits on the learner's devices and sleeps while that computes."""
        return name in self.instances[: self.num_elastic]

    @property
    def crowd(self) -> int:
        """The most instances that share one device."""
        owners = Counter(place.gpus for place in self.places.values())
        return max(owners.values(), default=len(self.instances))

    def place_of(self, name: str) -> Place:
        return self.places.get(name) or shared_place(self.is_elastic(name))

    def memory_extra(self, name: str) -> dict[str, Any]:
        """A worker's part of its GPU: sizes that the configuration leaves open, and limits."""
        if (plan := self.memory) is None:
            return {}
        share = {} if (part := plan.share(name)) is None else {"memory_share": part}
        return {"sizes": plan.sizes(name), "memory_limit": plan.limit(name), **share}

    def evaluator_extra(self) -> dict[str, Any]:
        extra = self.memory_extra("evaluator")
        return {"device": self.device, "memory_share": EVALUATOR_SHARE, **extra}

    def instance_extra(self, name: str) -> dict[str, Any]:
        place = self.place_of(name)
        return {
            "device": self.device,
            "resident_max": self.resident_max,
            "slots_max": self.slots_max,
            "elastic": self.is_elastic(name),
            "beside_learner": self.is_elastic(name) and not self.elastic,
            "weights_root": str(self.weights_root),
            "transfer_root": str(self.transfer_root),
            "gpus": list(place.gpus),
            "memory_share": place.memory_share,
            **self.memory_extra(name),
        }

    def learner_extra(self, name: str, rendezvous: Path) -> dict[str, Any]:
        return {
            **self.memory_extra(name),
            "device": self.device,
            "rank": self.learners.index(name),
            "num_ranks": len(self.learners),
            "rendezvous": str(rendezvous),
            "threads": max(1, self.learner_threads // len(self.learners)),
            "weights_root": str(self.weights_root),
            "mps_percent": self.learner_percent,
            "mps_yields": self.learner_yields,
        }


def rank_names(num_ranks: int) -> tuple[str, ...]:
    """The first rank is "the" learner: it alone seals, saves and reports.

    >>> rank_names(3)
    ('learner', 'learner.1', 'learner.2')
    """
    return ("learner", *(f"learner.{rank}" for rank in range(1, num_ranks)))


def plan_layout(config: RunConfig, device: str, gpus: Sequence[str] | None = None) -> Layout:
    """Derive what the configuration leaves open. `gpus`: as if there were these; None: as it is."""
    staleness = policy_of(core_params(config)).max_staleness
    num_cores = len(os.sched_getaffinity(0))
    colocated = config.orchestration.mode in COLOCATED
    root = shared_memory_root(config.weights, config.runtime.run_dir)
    factor = config.env.slots_factor if config.env.environments else 1.0
    names = tuple(f"instance{i}" for i in range(config.rollout.num_instances))
    wanted = len(names) if colocated else config.resources.elastic_instances
    return Layout(
        device=device,
        num_cores=num_cores,
        instances=names,
        learners=rank_names(config.resources.learner_ranks),
        resident_max=resident_limit(config, config.rollout.versions_max or staleness + 1),
        elastic=colocated,
        slots_max=int(config.rollout.seqs_max * factor),
        num_elastic=min(wanted, len(names)),
        learner_threads=config.trainer.threads or (num_cores if colocated else 1),
        weights_root=root,
        transfer_root=transfer_of(root),
        learner_percent=100 if colocated else config.runtime.mps_learner_percent,
        learner_yields=config.runtime.mps_learner_yields and not colocated,
        # On a cluster Ray gives devices out.
        places={}
        if config.runtime.world == "ray"
        else local_places(config, device, names, names[:wanted], gpus),
    )
