"""`dora-rl audit --files RUN`: what lies beside the log is what the log tells of.

The log says of every sample what its digest and reward were, of every step what its line of metrics
was, of every version what its checksum was, and what the configuration was. Each is compared with
the file that holds it. Reads only. What cannot be compared is named in `notes`, never passed over.
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from dora_rl.config import RunConfig
from dora_rl.controller.records import Totals, best_of
from dora_rl.data.prompts import PromptSource, open_data
from dora_rl.io.append_log import shape_problem
from dora_rl.observe.audit import Auditor
from dora_rl.observe.audit_books import Finding, Findings, Promise, TrainedSample
from dora_rl.setup.settings import core_params, load_config
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.store.samples import Samples
from dora_rl.store.table import TableError
from dora_rl.store.trajectories import (
    branches_of,
    digest_of,
    routing_from_json,
    sample_digest,
    text_digest,
)
from dora_rl.types import RequestId, UserError, Version
from dora_rl.weights.format import SealedFile, WeightsError
from dora_rl.weights.proof import checkpoint_problem, seals_whole_models

# Of the parameters that the log has, those a configuration decides alone (the rest follows from
# the model or is a limit of time).
FROM_CONFIG = (
    "mode",
    "max_staleness",
    "batch_groups",
    "group_size",
    "num_steps",
    "samples_min",
    "updates_per_step",
    "filter_equal",
    "attempts_max",
)
T = TypeVar("T")
# What a file that is not as it was written makes of whoever reads it.
DAMAGE = (
    *(ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, OSError),
    struct.error,
)
NEVER_COMPARED = (
    "journals, totals.json, learner.json, parts of rewards, score.json of a checkpoint, "
    "logs of workers: the log does not know of them"
)
# What the run counts as it goes, and the log can count again where no life was killed.
COUNTED = ("migrations", "kv_bytes_moved", "samples_mismatched", "discarded_tokens")
CLOSE = 1e-6
LOGPROB_SUM_CLOSE = 1e-4  # per token: rollouts.jsonl has log-probs to four decimals


@dataclass(slots=True)
class FileAudit:
    """Compares the files of one run directory with what an auditor has read in its log."""

    run: Path
    auditor: Auditor
    prompts: PromptSource | None = None  # the run's, opened again
    decode: Callable[[Sequence[int]], str] | None = None
    notes: list[str] = field(default_factory=list[str])
    book: Findings = field(default_factory=Findings)
    totals: Totals | None = None  # by metrics.jsonl
    by_step: dict[int, list[TrainedSample]] = field(default_factory=dict[int, list[TrainedSample]])

    def check(self) -> tuple[Finding, ...]:
        """Every comparison there is; returns what was found."""
        self.book.entry = -1
        for sample in self.trained.values():
            self.by_step.setdefault(sample.step, []).append(sample)
        config = self._section("config.json", self._config)
        for name, check, *given in (
            ("data.json", self._data, config),
            ("rollouts.jsonl", self._rollouts, config),
            ("metrics.jsonl", self._metrics),
            ("summary.json", self._summary, config),
            ("table", self._tables),
            ("weights", self._sealed),
            ("learner", self._learner),
            ("checkpoints", self._checkpoints, config),
        ):
            self._section(name, check, *given)
        self.notes += [NEVER_COMPARED]
        return tuple(self.book.kept)

    def _section(self, name: str, check: Callable[..., T], *given: Any) -> T | None:
        """A file that cannot be read, or is of another shape than was written, is a finding."""
        try:
            return check(*given)
        except (*DAMAGE, UserError) as error:
            self._add(name, shape_problem(error))
            return None

    def _add(self, subject: str, message: str) -> None:
        self.book.add(Promise.FILES, subject, message)

    def _is_there(self, path: Path) -> bool:
        if not path.is_file():
            self._add(path.name, "is missing")
        return path.is_file()

    @property
    def trained(self) -> Mapping[RequestId, TrainedSample]:
        return self.auditor.books.trained or {}

    @property
    def _is_of_older(self) -> bool:
        """Whether an older release wrote the log, before its lines were chained."""
        return not self.auditor.chain.num_chained

    # -- config.json ------------------------------------------------------------------------------

    def _config(self) -> RunConfig | None:
        path, books = self.run / "config.json", self.auditor.books
        if not self._is_there(path):
            return None
        same = text_digest(path.read_bytes().decode(errors="replace")) == books.config
        if books.config and not same:
            self._add("config.json", "is not the configuration that the log was begun with")
        elif not books.config:
            self.notes.append("config.json: the log has no digest of it; only K, B and the like")
        try:
            config = load_config(path)
            params = core_params(config)
        except UserError as error:
            if same:  # what it names has moved, say
                self.notes.append(f"config.json: as it was, and cannot be used: {error}")
            else:
                self._add("config.json", f"cannot be read: {error}")
            return None
        for name in FROM_CONFIG:
            asked, logged = getattr(params, name), getattr(books.params, name)
            waits_for_all = name == "samples_min" and not logged and self._is_of_older
            if asked != logged and not waits_for_all:
                self._add("config.json", f"{name} is {asked}, the log was run with {logged}")
        return config

    def _data(self, config: RunConfig | None) -> None:
        """Opens the data as the run read them, if they are still there."""
        path, begun_with = self.run / "data.json", None
        if self._is_there(path):
            begun_with = json.loads(path.read_bytes())["fingerprint"]
        if config is None:
            self.notes.append("prompts, there is no configuration to open the data by")
            return
        try:
            prompts, decode = open_run_data(config)
        except (UserError, OSError, ImportError) as error:
            self.notes.append(f"prompts, the data cannot be opened: {error}")
            return
        self.decode = decode
        if begun_with is not None and not prompts.began_with(begun_with):
            self._add("data.json", "the data are not those that the run began with")
            return
        self.prompts = prompts

    # -- rollouts.jsonl ---------------------------------------------------------------------------

    def _rollouts(self, config: RunConfig | None) -> None:
        path = self.run / "rollouts.jsonl"
        if config is not None and not config.logging.rollouts:
            self.notes.append("rollouts.jsonl: this run wrote none (logging.rollouts)")
            return
        seen: set[RequestId] = set()
        num_undigested = 0
        for number, line in self._lines(path):
            name = f"rollouts.jsonl line {number}"
            try:
                rid = RequestId(int(line["group"]), int(line["sample"]))
            except DAMAGE as error:
                self._add(name, shape_problem(error))
                continue
            if (known := self.trained.get(rid)) is None or rid in seen:
                what = "stands there twice" if rid in seen else "was not trained, the log says"
                self._add(name, f"sample {rid.sample} of group {rid.group} {what}")
                continue
            seen.add(rid)
            num_undigested += not known.digest
            try:
                problems = [*self._rollout(rid, line, known)]
            except DAMAGE as error:
                problems = [shape_problem(error)]
            for problem in problems:
                self._add(name, f"sample {rid.sample} of group {rid.group}: {problem}")
        if missing := [rid.group for rid in self.trained if rid not in seen]:
            text = f"{len(missing)} trained samples are missing, the first of group {missing[0]}"
            self._add("rollouts.jsonl", text)
        if num_undigested:
            self.notes.append(
                f"rollouts.jsonl: {num_undigested} samples without a digest in the log (an older "
                "release); their tokens are not compared"
            )

    def _rollout(self, rid: RequestId, line: dict[str, Any], known: TrainedSample) -> Iterator[str]:
        for name, value in {
            "step": known.step,
            "version": known.version,
            "num_tokens": known.num_tokens,
            "reward": known.reward,
            "finish": known.finish,
            "segments": len(known.segments),
        }.items():
            if line[name] != value:
                yield f"{name} is {line[name]}, the log says {value}"
        token_ids, logprobs = line["token_ids"], line["logprobs"]
        mask = [m for begin, end, m in line["turns"] for _ in range(begin, end)]
        routing, _ = routing_from_json(line.get("experts", ()))
        more = (branches_of(line.get("branches", ())), line.get("turn_rewards", ()), routing)
        digest = sample_digest(rid, known.segments, token_ids, logprobs, mask, *more)
        if known.digest and digest != known.digest:
            yield (
                "its tokens, log-probs, turns, their rewards or experts are not those that were "
                "generated"
            )
        if abs(sum(logprobs) - line["logprob_sum"]) > LOGPROB_SUM_CLOSE * (1 + len(logprobs)):
            yield f"logprob_sum is {line['logprob_sum']}, its log-probs add up to {sum(logprobs)}"
        if self.prompts is not None:
            prompt = self.prompts.prompt(known.prompt)
            if line["prompt"] != prompt.text or line["num_prompt"] != len(prompt.token_ids):
                yield f"its prompt is not number {known.prompt} of the data"
        if self.decode is not None and self.decode(token_ids) != line["text"]:
            yield "its text is not that of its tokens"

    def _lines(self, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
        """Whole lines. A torn last one, and one that is no object of JSON, is a finding."""
        if not self._is_there(path):
            return
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                try:
                    line = json.loads(raw)
                except ValueError as error:
                    self._add(f"{path.name} line {number}", shape_problem(error))
                    continue
                if isinstance(line, dict):
                    yield number, line
                else:
                    self._add(f"{path.name} line {number}", "is damaged (not an object)")

    # -- metrics.jsonl and summary.json -----------------------------------------------------------

    def _metrics(self) -> None:
        books = self.auditor.books
        steps: list[int] = []
        self.totals = totals = Totals()
        for number, line in self._lines(self.run / "metrics.jsonl"):
            name = f"metrics.jsonl line {number}"
            try:
                totals.add(line)
            except DAMAGE as error:
                self._add(name, shape_problem(error))
                self.totals = None
            if "step" not in line:
                continue  # an evaluation
            steps.append(line["step"])
            digest = books.metrics.get(line["step"], "")
            if digest and text_digest(json.dumps(line)) != digest:
                self._add(name, f"is not the line that was written for step {line['step']}")
            for problem in self._step_figures(line):
                self._add(name, f"step {line['step']}: {problem}")
        if steps != list(range(books.committed)):
            text = f"has lines of steps {_short(steps)}, the log commits {books.committed} steps"
            self._add("metrics.jsonl", text)
        if totals.evaluations:
            self.notes.append(
                f"metrics.jsonl: its {len(totals.evaluations)} evaluations, the log does not know "
                "of them"
            )
        without = sum(not books.metrics.get(step) for step in range(books.committed))
        if without:
            self.notes.append(
                f"metrics.jsonl: {without} steps without a digest in the log; only rewards and "
                "lengths compared"
            )

    def _step_figures(self, line: dict[str, Any]) -> Iterator[str]:
        samples = self.by_step.get(line["step"])
        if not samples:
            return
        stale = [s.step - s.version for s in samples]
        figures = {
            "num_samples": len(samples),
            "reward/mean": float(np.mean([s.reward or 0.0 for s in samples])),
            "staleness/mean": sum(stale) / len(stale),
            "staleness/max": max(stale),
            "response_length/mean": float(np.mean([s.num_tokens for s in samples])),
            "response_length/max": max(s.num_tokens for s in samples),
        }
        # Where the log has a digest of the line, that says which figures belong in it.
        yield from _differences(line, {n: v for n, v in figures.items() if n in line})

    def _summary(self, config: RunConfig | None) -> None:
        stop, path = self.auditor.stop, self.run / "summary.json"
        if stop is None:
            self.notes.append("summary.json, it is written at an end and this life has none")
            return
        if not self._is_there(path):
            return
        summary = json.loads(path.read_bytes())
        if not isinstance(summary, dict):
            self._add("summary.json", "is damaged (not an object)")
            return
        figures = self._from_log(config) | self._from_metrics(config)
        if self._is_of_older:  # it counted prompts as trained
            figures.pop("tokens_trained", None)
        missing = [name for name in figures if name not in summary]
        if missing and self._is_of_older:
            self.notes.append(f"summary.json: {', '.join(missing)}: it has none")
            figures = {name: value for name, value in figures.items() if name in summary}
        for problem in _differences(summary, figures):
            self._add("summary.json", problem)
        if not str(summary.get("stopped", "")).startswith(stop.reason):
            self._add("summary.json", f"stopped is {summary.get('stopped')!r}, not {stop.reason!r}")
        aside = self.auditor.groups.set_aside
        if {one["prompt"]: one["reason"] for one in summary.get("set_aside", [])} != aside:
            self._add("summary.json", f"set_aside is not prompts {sorted(aside)} of the log")
        compared = {*figures, "stopped", "set_aside"}
        if lost := [name for name in COUNTED if name in summary and name not in compared]:
            self.notes.append(
                f"summary.json: {', '.join(lost)}: a life was killed and its counts with it, or "
                "the storage shards counted"
            )
        rest = [name for name in summary if name not in {*compared, *lost}]
        self.notes.append(f"summary.json: {', '.join(rest)}: measured, not in the log")

    def _from_log(self, config: RunConfig | None) -> dict[str, Any]:
        """Figures of the summary by the log."""
        books, samples = self.auditor.books, list(self.trained.values())
        stale = [s.step - s.version for s in samples]
        figures: dict[str, Any] = {
            "mode": books.params.mode.value,
            "steps": books.committed,
            "num_resumes": self.auditor.books.figures.num_resumes,
        }
        if not self.auditor.num_killed:  # a life that was killed leaves the counts of its last step
            figures |= {
                "migrations": self.auditor.num_imported,
                "kv_bytes_moved": self.auditor.bytes_imported,
                "samples_mismatched": self.auditor.num_mismatched,
            }
            if config is not None and config.runtime.world != "ray":
                figures["discarded_tokens"] = books.figures.discarded_tokens
        if samples:
            figures |= {
                "staleness_mean": sum(stale) / len(stale),
                "staleness_max": max(stale),
                "mixed_version_frac": sum(len(s.segments) > 1 for s in samples) / len(samples),
                "reward_first": self._mean_reward(0),
                "reward_last": self._mean_reward(books.committed - 1),
            }
        return figures

    def _from_metrics(self, config: RunConfig | None) -> dict[str, Any]:
        """Figures of the summary by metrics.jsonl, whose lines of steps the log has digests of."""
        totals = self.totals
        if totals is None:
            return {}
        evaluations = [totals.evaluations[v] for v in sorted(totals.evaluations)]
        figures: dict[str, Any] = {
            "tokens_trained": totals.tokens_trained,
            "updates_applied": totals.updates_applied,
            "updates_skipped": totals.updates_skipped,
            "eval_first": evaluations[0] if evaluations else None,
            "eval_last": evaluations[-1] if evaluations else None,
        }
        if config is not None:
            figures["best"] = best_of(totals.evaluations, config.checkpoint)
        return figures

    def _mean_reward(self, step: int) -> float:
        rewards = [s.reward or 0.0 for s in self.by_step.get(step, [])]
        return float(np.mean(rewards)) if rewards else 0.0

    # -- the sample table -------------------------------------------------------------------------

    def _tables(self) -> None:
        """Rows of groups that are still outstanding. What ended has left the table, or will."""
        held: set[RequestId] = set()
        paths = sorted(self.run.glob("table*.log"))
        if not paths:
            self._add("table.log", "is missing")
        if len(paths) > 1:
            paths = [path for path in paths if path.name != "table.log"]  # the rest has no tokens
        with tempfile.TemporaryDirectory() as folder:
            for path in paths:
                # Opening a table may cut its torn end off: that is done to a copy.
                copy = Path(shutil.copy(path, Path(folder) / path.name))
                try:
                    held |= self._table(path.name, copy)
                except (TableError, *DAMAGE) as error:
                    self._add(path.name, f"cannot be read: {error}")
                    return
        for gid, record in self.auditor.books.live.items():
            for place, sample in enumerate(record.samples):
                if sample.asked >= 0 and RequestId(gid, place) not in held:
                    self._add("table", f"sample {place} of group {gid} finished and has no row")

    def _table(self, name: str, path: Path) -> set[RequestId]:
        samples = Samples(path)
        held: set[RequestId] = set()
        for gid in samples.groups():
            record = self.auditor.books.live.get(gid)
            for found in samples.trajectories(gid):
                rid = found.request
                held.add(rid)
                if record is None or rid.sample >= len(record.samples):
                    continue  # ended; its rows go with the next resume
                sample = record.samples[rid.sample]
                if sample.asked < 0 or not sample.digest:
                    continue  # written just before a crash, or by an older release
                which = f"sample {rid.sample} of group {gid}"
                if digest_of(found) != sample.digest:
                    self._add(name, f"{which} is not what was generated")
                if sample.reward is not None and found.reward != sample.reward:
                    self._add(name, f"{which}: its reward is {found.reward}, not {sample.reward}")
        samples.close()
        return held

    # -- weights ----------------------------------------------------------------------------------

    def _verified(self, folder: Path, name: str) -> dict[Version, SealedFile | None]:
        """Every byte of every version that is there is hashed again; None where it is damaged."""
        found: dict[Version, SealedFile | None] = {}
        for path in sorted(folder.iterdir()) if folder.is_dir() else ():
            if not path.name.isdigit():
                continue
            version = int(path.name)
            found[version] = None
            try:
                sealed = SealedFile(path, version)
                sealed.verify()
                found[version] = sealed
            except (WeightsError, *DAMAGE) as error:
                self._add(f"{name} {version}", str(error))
        return found

    def _learner(self) -> None:
        """Each is sealed for itself; the log has no checksum of them."""
        self._verified(self.run / "learner" / "masters", "masters of version")
        self._verified(self.run / "learner" / "moments", "moments of version")

    def _sealed(self) -> None:
        known, newest = self.auditor.books.weights, self.auditor.books.committed
        there = self._verified(self.run / "weights", "version")
        for version, sealed in there.items():
            if sealed is not None and version > newest:
                self.notes.append(f"version {version}: sealed, and not in the log yet")
            elif sealed is not None and not known.get(version):
                self.notes.append(f"version {version}: the log has no checksum of it")
            elif sealed is not None and known[version] != sealed.checksum:
                self._add(f"version {version}", "its weights are not those that the log committed")
        if newest not in there:
            self.notes.append(f"version {newest}: its sealed weights are not there")

    def _checkpoints(self, config: RunConfig | None) -> None:
        known = self.auditor.books.weights
        if config is None or not seals_whole_models(config):
            known = {}
            self.notes.append("checkpoints: not sealed as they are; compared with themselves only")
        for path in sorted((self.run / "checkpoints").glob("step_*")):
            if (step := int(path.name.removeprefix("step_"))) >= self.auditor.books.committed:
                self.notes.append(f"{path.name}: its version is not in the log yet")
                continue
            try:
                problem = checkpoint_problem(path, step, known.get(step + 1, ""), trainer=True)
            except (UserError, *DAMAGE) as error:
                problem = f"cannot be read: {error}"
            if problem:
                self._add(path.name, problem)


def open_run_data(config: RunConfig) -> tuple[PromptSource, Callable[[Sequence[int]], str]]:
    """The prompts of a run as it read them, and what gives the text of tokens."""
    tokenizer = open_tokenizer(Path(config.model.path), config.model.trust_remote_code)
    prompts, _ = open_data(config.data, tokenizer, ".")
    return prompts, partial(tokenizer.decode, skip_special_tokens=True)


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[str]:
    """Figures that are others, or are not there."""
    for name, value in expected.items():
        there = found.get(name)
        same = there == value
        if isinstance(value, float) and isinstance(there, (int, float)):
            same = abs(there - value) <= CLOSE * max(1.0, abs(value))
        if not same or name not in found:
            is_ = f"is {there}" if name in found else "is missing"
            yield f"{name} {is_}, the log gives {value}"


def _short(steps: Sequence[int]) -> str:
    return f"{steps[:3]} … {steps[-3:]}" if len(steps) > 6 else str(list(steps))
