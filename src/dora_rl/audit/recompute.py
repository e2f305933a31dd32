"""`dora-rl audit --recompute N RUN`: stored samples computed again from their sealed version.

What the engine decoded token by token the learner's model runs as one document, from the weights on
disk that the log names. Only versions that are still sealed can be reached; how many samples that
is, is said. So is the power of the test, measured: how many of the same samples would have been
found out had they come from the neighbouring version. Reads only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dora_rl.audit.files import open_run_data
from dora_rl.config import RunConfig
from dora_rl.core.events import Recomputed
from dora_rl.io.append_log import shape_problem
from dora_rl.observe.audit import Auditor
from dora_rl.observe.audit_books import Finding, Promise, TrainedSample
from dora_rl.setup.settings import load_config
from dora_rl.store.trajectories import branches_of, routing_from_json
from dora_rl.trainer.documents import Document, documents_of
from dora_rl.trainer.policy.lora import add_lora
from dora_rl.trainer.policy.model import clone_adapted, clone_architecture, load_policy
from dora_rl.trainer.scoring import SealedScorer
from dora_rl.types import Group, RequestId, Trajectory, UserError, Version
from dora_rl.weights.store import DiskWeightStore
from dora_rl.workers.recheck import EXACT, ROUNDED, gaps_of, is_recomputable

PACK_TOKENS = 8192
SEED = 0  # of the choice
# What a damaged line of rollouts.jsonl may raise.
UNREADABLE = (UserError, ValueError, KeyError, TypeError, AttributeError, OverflowError)


@dataclass(slots=True)
class Recomputation:
    """`num_noticed` of `num_neighbours` would be found out under the version beside theirs."""

    num_stored: int = 0
    num_reached: int = 0
    damaged: list[Finding] = field(default_factory=list[Finding])  # lines nobody can read
    found: list[Recomputed] = field(default_factory=list[Recomputed])
    num_neighbours: int = 0
    num_noticed: int = 0
    neighbour_gap: float = 0.0  # mean over them

    @property
    def findings(self) -> list[Finding]:
        return self.damaged + [
            Finding(
                Promise.C1,
                -1,
                f"group {event.request.group}",
                f"sample {event.request.sample} is not what version {event.version} gives: "
                f"log-probs {event.gap_mean:.2g} apart on average, {event.gap_max:.2g} at most",
            )
            for event in self.found
            if not event.is_same
        ]

    def lines(self) -> list[str]:
        """What was reached, and what it is worth."""
        reached = f"{len(self.found)} of {self.num_stored} stored samples"
        sealed = f"the versions of {self.num_reached} are still sealed"
        if not self.found:
            return [f"nothing could be recomputed: {reached}; {sealed}"]
        gap, tolerance = max(event.gap_max for event in self.found), self.found[0].tolerance
        mean = sum(event.gap_mean for event in self.found) / len(self.found)
        power = (
            f"{self.num_noticed} of {self.num_neighbours} would be found out if a neighbouring "
            f"version had made them ({self.neighbour_gap:.2g} apart on average)"
            if self.num_neighbours
            else "not known, no neighbouring version is sealed"
        )
        return [
            f"computed again now: {reached} ({sealed}); log-probs {mean:.2g} apart on average, "
            f"{gap:.2g} at most, tolerance {tolerance:g}",
            f"power of this test: {power}",
        ]


def recompute(run: Path, auditor: Auditor, num: int) -> Recomputation:
    """`num` of the samples that can be reached, chosen at random but always the same."""
    config = load_config(run / "config.json")
    if not is_recomputable(config):
        raise UserError("--recompute: the run drew from a part of the vocabulary (top_k, top_p)")
    store = DiskWeightStore(run / "weights")
    there = {*store.versions()}
    found = Recomputation()
    stored = reachable(run / "rollouts.jsonl", there, auditor.books.trained or {}, found)
    chosen = random.Random(SEED).sample(stored, min(num, len(stored)))
    if not chosen:
        return found
    prompts, _ = open_run_data(config)  # the log knows which prompt a group had
    documents: list[list[Document]] = []
    for one in chosen:
        prompt_ids = np.array(prompts.prompt(one.prompt).token_ids, np.int32)
        group = Group(one.request.group, one.version, prompt_ids, (one.sample,))
        documents.append(documents_of(group, one.sample, 0.0))
    versions = [one.version for one in chosen]
    scorer, exact = _scorer(config, store, versions[0])
    tolerance = config.audit.tolerance or (EXACT if exact else ROUNDED)

    def compare(places: Sequence[int], under: Sequence[Version]) -> list[Recomputed]:
        asked = [(d, v) for place, v in zip(places, under, strict=True) for d in documents[place]]
        scores = iter(scorer.score([d for d, _ in asked], [v for _, v in asked]))
        gaps = [
            gaps_of(documents[place], [next(scores) for _ in documents[place]]) for place in places
        ]
        return [
            _outcome(chosen[place], gap, version, tolerance)
            for place, version, gap in zip(places, under, gaps, strict=True)
        ]

    found.found = compare(range(len(chosen)), versions)
    beside = {v: next((w for w in (v + 1, v - 1) if w in there), None) for v in {*versions}}
    known = [(place, w) for place, v in enumerate(versions) if (w := beside[v]) is not None]
    others = compare(*zip(*known, strict=True)) if known else []
    found.num_neighbours = len(others)
    found.num_noticed = sum(not event.is_same for event in others)
    found.neighbour_gap = sum(event.gap_mean for event in others) / max(1, len(others))
    return found


@dataclass(frozen=True, slots=True)
class Stored:
    """A line of rollouts.jsonl, and the one version that its tokens come from, by the log."""

    request: RequestId
    version: Version
    prompt: int
    sample: Trajectory


def reachable(
    path: Path,
    there: set[Version],
    trained: Mapping[RequestId, TrainedSample],
    found: Recomputation,
) -> list[Stored]:
    """Stored samples of one sealed version. A line that cannot be read is a finding."""
    if not path.is_file():
        raise UserError(f"--recompute: {path} is not there; the run kept no samples")
    stored: list[Stored] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            found.num_stored += 1
            try:
                one = _stored(json.loads(raw), trained)
            except UNREADABLE as error:
                found.damaged.append(
                    Finding(
                        Promise.FILES,
                        -1,
                        f"{path.name} line {number}",
                        str(error) if isinstance(error, UserError) else shape_problem(error),
                    )
                )
                continue
            if one is not None and one.version in there:
                stored.append(one)
    found.num_reached = len(stored)
    return stored


def _stored(line: dict[str, Any], trained: Mapping[RequestId, TrainedSample]) -> Stored | None:
    """None where several versions made it, it has no token, or its experts are not there."""
    request = RequestId(int(line["group"]), int(line["sample"]))
    if (known := trained.get(request)) is None:
        text = f"sample {request.sample} of group {request.group} is in no batch of the log"
        raise UserError(f"{text}; see audit --files")
    mask = np.array([m for begin, end, m in line["turns"] for _ in range(begin, end)], np.uint8)
    ids = np.fromiter(map(int, line["token_ids"]), np.int32)
    logprobs = np.fromiter(map(float, line["logprobs"]), np.float32)
    if not len(ids) == len(logprobs) == len(mask):
        raise ValueError("tokens, log-probs and turns are of several lengths")
    routing, experts = routing_from_json(line.get("experts", ()))
    if len(known.segments) != 1 or not any(mask) or (routing and experts is None):
        return None
    version = known.segments[0].version
    more = {"reward": float(line["reward"]), "branches": branches_of(line.get("branches", ()))}
    sample = Trajectory(request, version, ids, logprobs, mask, expert_ids=experts, **more)
    return Stored(request, version, known.prompt, sample)


def _scorer(
    config: RunConfig, store: DiskWeightStore, version: Version
) -> tuple[SealedScorer, bool]:
    """The learner's model without a learner; and whether all was computed in float32."""
    directory, options = Path(config.model.path), config.trainer
    policy = load_policy(directory, options)
    if options.lora_rank:
        add_lora(policy, options)
    scorer = SealedScorer(
        store.open,
        lambda: clone_architecture(policy, options, directory),
        lambda: clone_adapted(policy, options, directory),
        config.rollout.temperature or 1.0,
        PACK_TOKENS,
    )
    _, tensor = next(iter(store.open(version).tensors()))
    decoded = config.engine_dtype("cpu")
    return scorer, (decoded == "float32" and tensor.dtype == policy.compute_dtype == torch.float32)


def _outcome(one: Stored, gap: torch.Tensor, version: Version, tolerance: float) -> Recomputed:
    figures = (float(gap.mean()), float(gap.max()), tolerance)
    return Recomputed(one.request, version, len(gap), *figures)
