"""`dora-rl audit --recompute N RUN`: stored samples computed again from their sealed version.

What the engine decoded token by token the learner's model runs as one document, from the weights on
disk that the log names. Only versions that are still sealed can be reached; how many samples that
is, is said. So is the power of the test, measured: how many of the same samples would have been
found out had they come from the neighbouring version. Reads only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dora_rl.config import RunConfig
from dora_rl.core.events import Recomputed
from dora_rl.data.prompts import PromptSource, open_data
from dora_rl.observe.audit import Auditor
from dora_rl.observe.audit_report import Finding, Promise
from dora_rl.runtime.recheck import EXACT, ROUNDED, is_recomputable
from dora_rl.runtime.settings import load_config
from dora_rl.runtime.tokenizer import open_tokenizer
from dora_rl.runtime.weights import DiskWeightStore
from dora_rl.trainer.batch import GroupBatch, Sample
from dora_rl.trainer.documents import Document, document_of
from dora_rl.trainer.lora import add_lora
from dora_rl.trainer.model import clone_adapted, clone_architecture, load_policy
from dora_rl.trainer.options import TrainerOptions, from_section
from dora_rl.trainer.scoring import SealedScorer
from dora_rl.types import RequestId, UserError, Version

PACK_TOKENS = 8192
SEED = 0  # of the choice


@dataclass(slots=True)
class Recomputation:
    """`num_noticed` of `num_neighbours` would be found out under the version beside theirs."""

    num_stored: int = 0
    num_reached: int = 0
    found: list[Recomputed] = field(default_factory=list[Recomputed])
    num_neighbours: int = 0
    num_noticed: int = 0
    neighbour_gap: float = 0.0  # mean over them

    @property
    def findings(self) -> list[Finding]:
        return [
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
            return [f"computed again now: {reached}; {sealed}"]
        gap, tolerance = max(event.gap_max for event in self.found), self.found[0].tolerance
        mean = sum(event.gap_mean for event in self.found) / len(self.found)
        first = (
            f"computed again now: {reached} ({sealed}); log-probs {mean:.2g} apart on average, "
            f"{gap:.2g} at most, tolerance {tolerance:g}"
        )
        if not self.num_neighbours:
            return [first, "power of this test: not known, no neighbouring version is sealed"]
        return [
            first,
            f"power of this test: {self.num_noticed} of {self.num_neighbours} would be found out "
            f"if a neighbouring version had made them ({self.neighbour_gap:.2g} apart on average)",
        ]


def recompute(run: Path, auditor: Auditor, num: int) -> Recomputation:
    """`num` of the samples that can be reached, chosen at random but always the same."""
    config = load_config(run / "config.json")
    if not is_recomputable(config):
        raise UserError("--recompute: the run drew from a part of the vocabulary (top_k, top_p)")
    store = DiskWeightStore(run / "weights")
    there = {*store.versions()}
    found = Recomputation()
    lines = _reachable(run / "rollouts.jsonl", there, found)
    chosen = random.Random(SEED).sample(lines, min(num, len(lines)))
    if not chosen:
        return found
    documents = _documents(chosen, _prompts(config), auditor)
    versions: list[Version] = [line["version"] for line in chosen]
    scorer, exact = _scorer(config, store, versions[0])
    tolerance = config.audit.tolerance or (EXACT if exact else ROUNDED)

    def compare(places: Sequence[int], under: Sequence[Version]) -> list[Recomputed]:
        scores = scorer.score([documents[place] for place in places], under)
        return [
            _outcome(chosen[place], documents[place], logprobs, version, tolerance)
            for place, version, logprobs in zip(places, under, scores, strict=True)
        ]

    found.found = compare(range(len(chosen)), versions)
    beside = {v: next((w for w in (v + 1, v - 1) if w in there), None) for v in {*versions}}
    known = [(place, w) for place, v in enumerate(versions) if (w := beside[v]) is not None]
    others = compare([place for place, _ in known], [w for _, w in known]) if known else []
    found.num_neighbours = len(others)
    found.num_noticed = sum(not event.is_same for event in others)
    found.neighbour_gap = sum(event.gap_mean for event in others) / max(1, len(others))
    return found


def _reachable(path: Path, there: set[Version], found: Recomputation) -> list[dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"--recompute: {path} is not there; the run kept no samples")
    lines: list[dict[str, Any]] = []
    with path.open() as file:
        for line in map(json.loads, file):
            found.num_stored += 1
            if line["version"] in there and line["segments"] == 1 and line["token_ids"]:
                lines.append(line)
    found.num_reached = len(lines)
    return lines


def _prompts(config: RunConfig) -> PromptSource:
    tokenizer = open_tokenizer(Path(config.model.path), config.model.trust_remote_code)
    return open_data(config.data, tokenizer, ".")[0]


def _documents(
    lines: Sequence[dict[str, Any]], prompts: PromptSource, auditor: Auditor
) -> list[Document]:
    """The log knows which prompt a group had; the data have its tokens."""
    documents: list[Document] = []
    for line in lines:
        known = (auditor.books.trained or {}).get(RequestId(line["group"], line["sample"]))
        if known is None:
            text = f"sample {line['sample']} of group {line['group']}"
            raise UserError(f"--recompute: {text} is in no batch of the log; see audit --files")
        mask = [m for begin, end, m in line["turns"] for _ in range(begin, end)]
        sample = Sample(line["token_ids"], line["logprobs"], mask, line["reward"])
        prompt_ids = prompts.prompt(known.prompt).token_ids
        group = GroupBatch(line["group"], line["version"], prompt_ids, (sample,))
        documents.append(document_of(group, sample, 0.0))
    return documents


def _scorer(
    config: RunConfig, store: DiskWeightStore, version: Version
) -> tuple[SealedScorer, bool]:
    """The learner's model without a learner; and whether all was computed in float32."""
    directory, options = Path(config.model.path), from_section(TrainerOptions, config.trainer)
    policy = load_policy(directory, options)
    if options.lora_rank:
        add_lora(policy, options)
    scorer = SealedScorer(
        store,
        lambda: clone_architecture(policy, options, directory),
        lambda: clone_adapted(policy, options, directory),
        config.rollout.temperature or 1.0,
        PACK_TOKENS,
    )
    _, tensor = next(iter(store.open(version).tensors()))
    decoded = config.engine_dtype("cpu")
    exact = decoded == "float32" and tensor.dtype == policy.compute_dtype == torch.float32
    return scorer, exact


def _outcome(
    line: dict[str, Any],
    document: Document,
    logprobs: torch.Tensor,
    version: Version,
    tolerance: float,
) -> Recomputed:
    gap = (logprobs.float() - document.rollout_logprobs).abs()
    request = RequestId(line["group"], line["sample"])
    figures = (float(gap.mean()), float(gap.max()), tolerance)
    return Recomputed(request, version, document.num_trained, *figures)
