"""What a run writes for people: metrics.jsonl, rollouts.jsonl, prompts.jsonl, summary.json.

Only adds up what it is told; never decides. Names are those that other trainers use.

A step's lines are written before its log record. Invariant: after a resume the files hold exactly
the steps that the log calls committed, each once; totals go over the whole run, not over the time
since the last resume. Totals that are not in metrics.jsonl are kept in totals.json every second,
with the number of the next log entry: after a kill they go on from there, with what the log has
since. What the figures mean is in `observe.measures`.
"""

from __future__ import annotations

import json
import resource
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from dora_rl.config import CheckpointConfig, RunConfig
from dora_rl.controller.sinks import RunFacts, Sinks
from dora_rl.core import events as ev
from dora_rl.io.append_log import Damaged, cut_lines, keep_lines, read_lines, replace_text
from dora_rl.observe.eval_figures import Figures, best_evaluated
from dora_rl.observe.eventlog import FileLog, entries_since
from dora_rl.observe.measures import (
    WINDOW_STEPS,
    idle_ratio,
    rollout_busy_s,
    tokens_of_line,
    tokens_per_s,
    tokens_written,
    trainer_busy_s,
)
from dora_rl.types import Branch, RequestId, StepIndex, Version


@dataclass(frozen=True, slots=True)
class TrainedSample:
    """One sample as it was trained."""

    group: int
    sample: int
    version: Version
    num_prompt: int
    num_tokens: int
    reward: float
    finish: str
    text: str
    prompt: str
    segments: int
    logprobs: list[float]  # of each response token, rounded
    logprob_sum: float
    token_ids: list[int]
    # What each reward function gave, by its label.
    parts: dict[str, float] = field(default_factory=dict[str, float])
    env: str = ""  # label of its environment, where the run has several
    # (start, end, 1 where the policy wrote, 0 where an environment did) over the token ids
    turns: list[tuple[int, int, int]] = field(default_factory=list[tuple[int, int, int]])
    # (start, parent, fork) of each branch, where the history branched; see `dora_rl.histories`
    branches: list[Branch] = field(default_factory=list[Branch])
    # What the environment gave for each turn, where it gave anything
    turn_rewards: list[float] = field(default_factory=list[float])
    # Of a mixture whose routing was recorded (`store.trajectories.routing_to_json`)
    experts: list[Any] = field(default_factory=list[Any])


@dataclass(slots=True)
class Totals:
    """Of the whole run. The second half is not in metrics.jsonl and is kept in totals.json."""

    tokens_trained: int = 0
    mixed: float = 0.0
    samples: int = 0
    samples_failed: int = 0  # left out of groups that were trained
    tokens_failed: int = 0  # which they had generated
    staleness_sum: float = 0.0
    staleness_max: int = 0
    rewards: list[float] = field(default_factory=list[float])
    updates_applied: int = 0
    updates_without_gradient: int = 0  # it was exactly zero: nothing to learn from
    updates_skipped: int = 0  # their loss or gradient was not finite
    evaluations: dict[Version, Figures] = field(default_factory=dict[Version, Figures])
    steps_s: float = 0.0  # sum of time/step
    wall_s: float = 0.0  # before the last resume
    startup_s: float = 0.0
    cut_s: float = 0.0  # training time of steps that an end of the run cut short
    tokens_generated: int = 0
    discarded_tokens: int = 0
    drafted_tokens: int = 0  # guessed by instances
    accepted_tokens: int = 0  # of them, those that were right
    migrations: int = 0
    kv_bytes_moved: int = 0
    num_resumes: int = 0
    num_user_errors: int = 0  # what the user's code raised; see user_errors.log
    samples_mismatched: int = 0  # computed again, and not what their version gives
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    busy_s: dict[str, float] = field(default_factory=dict[str, float])

    def add(self, line: dict[str, Any]) -> None:
        """One line of metrics.jsonl."""
        if "step" not in line:
            self.evaluations[line["version"]] = {
                name.removeprefix("eval/"): value
                for name, value in line.items()
                if name.startswith("eval/")
            }
            return
        self.tokens_trained += tokens_of_line(line)
        self.steps_s += line["time/step"]
        self.samples += line["num_samples"]
        self.samples_failed += line.get("num_samples_failed", 0)
        self.tokens_failed += line.get("num_tokens_failed", 0)
        self.staleness_sum += line["staleness/mean"] * line["num_samples"]
        self.staleness_max = max(self.staleness_max, line["staleness/max"])
        self.mixed += line["mixed_version_frac"] * line["num_samples"]
        self.rewards.append(line["reward/mean"])
        without = int(line.get("update/without_gradient", 0))
        # Lines of releases before this count have the gradient's norm where one was applied.
        is_old = "grad_norm" in line and not without
        self.updates_applied += int(line.get("update/applied", is_old))
        self.updates_without_gradient += without
        self.updates_skipped += int(line.get("update/skipped_non_finite", 0))


CELL_MAX = 4_000


def table_row(sample: TrainedSample) -> dict[str, Any]:
    """What a tracking service shows of a sample."""
    names = ("group", "sample", "version", "reward", "finish", "num_tokens")
    cut = {
        name: text if len(text) <= CELL_MAX else f"{text[:CELL_MAX]}…"
        for name, text in (("prompt", sample.prompt), ("response", sample.text))
    }
    return {name: getattr(sample, name) for name in names} | cut


def means_by_label(samples: Sequence[TrainedSample]) -> dict[str, float]:
    """What each reward function gave, over the samples it scored; the reward of each of several
    environments; turns of the policy, where there are any beside the first."""
    given: defaultdict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for label, score in sample.parts.items():
            given[f"rewards/{label}/mean"].append(score)
        if sample.env:
            given[f"env/{sample.env}/reward"].append(sample.reward)
    turns = [sum(mask for _, _, mask in sample.turns) for sample in samples]
    found = {"turns/mean": float(np.mean(turns)), "turns/max": max(turns)} if max(turns) > 1 else {}
    return found | {name: float(np.mean(values)) for name, values in given.items()}


KEEP_S = 1.0
KEPT = (
    "wall_s startup_s cut_s tokens_generated discarded_tokens drafted_tokens accepted_tokens "
    "migrations kv_bytes_moved num_resumes num_user_errors samples_mismatched cpu_s busy_s"
)


def _read_totals(path: Path, tell: Callable[[str], None]) -> dict[str, Any]:
    """Nothing where it is damaged."""
    try:
        kept: dict[str, Any] = json.loads(path.read_text())
        begun, at = Totals(), kept.get("log")
        sums = {name: value for name, value in kept.items() if name != "log"}
        whole = all(
            isinstance(value, dict if isinstance(getattr(begun, name), dict) else int | float)
            for name, value in sums.items()
        )
        times = [] if at is None else [at["number"], at["now"], at["open_s"] or 0.0]
        if whole and all(isinstance(time_s, int | float) for time_s in times):
            return kept
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    tell(f"{path} is damaged: sums over the whole run that nothing else has begin anew")
    return {}


def _is_whole(line: dict[str, Any]) -> bool:
    """Whether a line of metrics.jsonl has what sums are made of."""
    try:
        Totals().add(line)
    except (KeyError, TypeError, ValueError, AttributeError):
        return False
    return isinstance(line.get("step", line.get("version")), int)


class Records:
    """The files of one run directory. `committed`: how many steps a resumed run's log holds."""

    def __init__(
        self,
        run_dir: Path,
        *,
        rollouts: bool,
        prompts: bool = False,
        committed: int | None = None,
        sinks: Sinks | None = None,
        samples_shown: int = 0,
        log: FileLog | None = None,
        written: Callable[[RequestId], int | None] = lambda request: None,
        tell: Callable[[str], None] = lambda line: None,
    ) -> None:
        """`written`: how many tokens of a sample the policy wrote, where that is known; `tell`
        hears what is damaged: nothing here is needed to go on."""
        self.run_dir, self._tell = run_dir, tell
        self._sinks, self._log, self._written = sinks, log, written
        self._samples_shown = samples_shown
        metrics, samples = run_dir / "metrics.jsonl", run_dir / "rollouts.jsonl"
        self.totals = Totals()
        # Tokens and seconds of the last steps.
        self._recent: deque[tuple[int, float]] = deque(maxlen=WINDOW_STEPS)
        if committed is not None:
            self._cut(metrics, samples, committed)
        self._metrics = metrics.open("a")
        self._rollouts = samples.open("a") if rollouts else None
        self._prompts = PromptTexts(run_dir / "prompts.jsonl", tell) if prompts else None
        self.began = self.step_began = self._kept_at = time.monotonic()
        self.training_began: float | None = None
        self._is_training = False  # a step is open
        self._cpu_s = cpu_time_s()
        # Of each worker its incarnation, and what it had used before.
        self._lives: dict[str, tuple[int, float, float]] = {}
        self._told_drafts = (self.totals.drafted_tokens, self.totals.accepted_tokens)
        self.keep()

    def _cut(self, metrics: Path, samples: Path, committed: int) -> None:
        """To what the log calls committed. What is damaged is left out."""

        def damaged(error: Damaged) -> None:
            self._tell(f"{error}; the line is left out")

        def is_of_log(line: dict[str, Any]) -> bool:
            step = line.get("step")
            return isinstance(step, int) and step < committed

        cut_lines(samples, is_of_log, damaged)
        for line in read_lines(metrics, damaged):
            if not _is_whole(line):
                damaged(Damaged(f"a line of {metrics} is damaged"))
            elif line.get("step", -1) >= committed:
                # The time of a step that was recorded and not committed is spent all the same.
                self.totals.cut_s += line["time/step"]

        def stays(line: dict[str, Any]) -> bool:
            # An evaluation of a version that was lost with its host goes too.
            number = line.get("step", line.get("version", 0) - 1) if _is_whole(line) else committed
            return number < committed

        keep_lines(metrics, stays, lambda error: None)
        for line in read_lines(metrics):
            self.totals.add(line)
            if "step" in line:
                self._recent.append((tokens_of_line(line), line["time/step"]))
        self._recall()

    def _recall(self) -> None:
        """What totals.json has."""
        path, cut_s = self.run_dir / "totals.json", self.totals.cut_s
        kept = _read_totals(path, self._tell)
        at = kept.pop("log", None)
        for name, value in kept.items():
            setattr(self.totals, name, value)
        self.totals.cut_s += cut_s
        self.totals.num_resumes += 1
        if at is not None and self._log is not None:
            self._catch_up(self._log, at["number"], at["now"], at["open_s"])

    def _catch_up(self, log: FileLog, number: int, now: float, open_s: float | None) -> None:
        """What a killed life did after it last kept its totals, up to its last log entry."""
        totals, entries = self.totals, entries_since(log.folder, number)
        lost_s = max(0.0, entries[-1].now - now) if entries else 0.0
        totals.wall_s += lost_s
        if open_s is not None:
            totals.cut_s += open_s + lost_s
        for entry in entries:
            match entry.event:
                case ev.SampleFinished() as event:
                    count = self._written(event.request)
                    totals.tokens_generated += event.num_tokens if count is None else count
                case ev.Moved(num_bytes=num_bytes):
                    totals.migrations += 1
                    totals.kv_bytes_moved += num_bytes
                case ev.Recomputed() as event:
                    totals.samples_mismatched += not event.is_same

    @property
    def has_rollouts(self) -> bool:
        """Whether every trained sample is written out."""
        return self._rollouts is not None

    @property
    def wall_s(self) -> float:
        return self.totals.wall_s + time.monotonic() - self.began

    def work_begins(self) -> None:
        """A request or a group is given out. With the first one the start-up is over."""
        if self.training_began is None:
            self.training_began = self.step_began = time.monotonic()
            self.totals.startup_s += self.training_began - self.began
            self._is_training = True
            self.keep()

    def step(
        self,
        step: StepIndex,
        metrics: dict[str, float],
        samples: Sequence[TrainedSample],
        dropped: dict[str, int],
        failed: tuple[int, int] = (0, 0),
    ) -> dict[str, float]:
        """A step is about to be committed: its line of metrics.jsonl.

        `failed`: samples that its groups were trained without, and tokens of them.
        """
        now = time.monotonic()
        took, self.step_began = now - self.step_began, now
        stale = [step - s.version for s in samples]
        lengths = np.array([s.num_tokens for s in samples])
        rewards = [s.reward for s in samples]
        tokens = sum(tokens_written(s.num_tokens, s.turns) for s in samples)
        self._recent.append((tokens, took))
        if "lr" in metrics:  # the learner adds up in single precision
            metrics = metrics | {"lr": float(f"{metrics['lr']:.7g}")}
        line = {
            "step": step,
            **metrics,
            "tokens_trained": tokens,
            "num_tokens": int(lengths.sum()) + sum(s.num_prompt for s in samples),
            "num_samples": len(samples),
            "reward/mean": float(np.mean(rewards)),
            "reward/std": float(np.std(rewards)),
            "staleness/mean": sum(stale) / len(stale),
            "staleness/max": max(stale),
            "mixed_version_frac": sum(s.segments > 1 for s in samples) / len(samples),
            "response_length/mean": float(lengths.mean()),
            "response_length/median": float(np.median(lengths)),
            "response_length/p99": float(np.percentile(lengths, 99)),
            "response_length/max": int(lengths.max()),
            **means_by_label(samples),
            "time/step": took,
            "perf/tokens_per_s": tokens_per_s(*zip(*self._recent, strict=True)) or 0.0,
            **self._drafts_of_step(),
            **{f"dropped/{name}": count for name, count in dropped.items()},
            **(
                {"num_samples_failed": failed[0], "num_tokens_failed": failed[1]}
                if failed[0]
                else {}
            ),
        }
        self._show(step, samples)
        if self._rollouts is not None:
            for sample in samples:
                record = {name: getattr(sample, name) for name in TrainedSample.__slots__}
                self._rollouts.write(json.dumps({"step": step, **record}) + "\n")
        self._write(line)
        self.keep()
        return line

    def _show(self, step: StepIndex, samples: Sequence[TrainedSample]) -> None:
        """Some of a step's samples, from the best to the worst, to the sinks; none where the
        controller has no texts."""
        ranked = sorted((s for s in samples if s.text), key=lambda s: -s.reward)
        if self._sinks is None or not ranked or not self._samples_shown:
            return
        places = np.linspace(0, len(ranked) - 1, min(self._samples_shown, len(ranked)))
        rows = [table_row(ranked[place]) for place in np.round(places).astype(int).tolist()]
        self._sinks.samples(step, rows)

    def evaluation(self, version: Version, figures: Figures) -> None:
        self._write({"version": version, **{f"eval/{k}": v for k, v in figures.items()}})

    def issued(self, prompt: int, text: str) -> None:
        """A group of this prompt is generated."""
        if self._prompts is not None:
            self._prompts.add(prompt, text)

    def continued(self, record: dict[str, Any]) -> None:
        """A request goes on from its journal: a line of continued.jsonl."""
        with (self.run_dir / "continued.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")

    def _write(self, line: dict[str, Any]) -> None:
        if self._rollouts is not None:
            self._rollouts.flush()
        self._metrics.write(json.dumps(line) + "\n")
        self._metrics.flush()
        self.totals.add(line)
        if self._sinks is not None:
            self._sinks.write(line)

    def usage(self, name: str, life: int, busy_s: float, cpu_s: float) -> None:
        """What a worker has used since it was started; a new life begins at zero."""
        busy, cpu, known = self.totals.busy_s, self.totals.cpu_s, self._lives.get(name)
        if known is None or known[0] != life:
            known = self._lives[name] = (life, busy.get(name, 0.0), cpu.get(name, 0.0))
        busy[name], cpu[name] = known[1] + busy_s, known[2] + cpu_s

    def _drafts_of_step(self) -> dict[str, int]:
        """Since the line before; nothing where nothing was guessed in the whole run."""
        now = (self.totals.drafted_tokens, self.totals.accepted_tokens)
        drafted, accepted = (a - b for a, b in zip(now, self._told_drafts, strict=True))
        self._told_drafts = now
        return {"draft/drafted": drafted, "draft/accepted": accepted} if now[0] else {}

    def drafts(self, drafted: int, accepted: int) -> None:
        """Tokens that an instance guessed, and of them those that were right."""
        self.totals.drafted_tokens += drafted
        self.totals.accepted_tokens += accepted

    def tick(self, *, is_training: bool) -> None:
        """Time passes. `is_training` false: all steps are done, and evaluations go on."""
        self._is_training = self._is_training and is_training
        if time.monotonic() - self._kept_at >= KEEP_S:
            self.keep()

    def keep(self) -> None:
        now = self._kept_at = time.monotonic()
        body = {name: getattr(self.totals, name) for name in KEPT.split()}
        body["wall_s"] = self.wall_s
        if self._log is not None:
            open_s = now - self.step_began if self._is_training else None
            body["log"] = {"number": self._log.number, "now": now, "open_s": open_s}
        self._replace("totals.json", body)

    def summary(
        self,
        mode: str,
        steps: int,
        reason: str,
        num_cores: int,
        idle: float | None = None,
        best: CheckpointConfig | None = None,
        set_aside: Mapping[int, str] | None = None,
    ) -> dict[str, Any]:
        """The figures of the whole run; written to summary.json. `idle`: of its GPU, if any;
        `num_cores` 0: its processes are not all on this machine."""
        totals, training_s = self.totals, self.totals.steps_s + self.totals.cut_s
        evaluations = [totals.evaluations[v] for v in sorted(totals.evaluations)]
        figures = {
            "mode": mode,
            "steps": steps,
            "stopped": reason,
            "num_resumes": totals.num_resumes,
            "wall_s": self.wall_s,
            "startup_s": totals.startup_s,
            "training_s": training_s,
            "tokens_trained": totals.tokens_trained,
            "tokens_generated": totals.tokens_generated,
            "updates_applied": totals.updates_applied,
            "updates_without_gradient": totals.updates_without_gradient,
            "updates_skipped": totals.updates_skipped,
            "tokens_per_s": tokens_per_s([totals.tokens_trained], [training_s]),
            "reward_first": totals.rewards[0] if totals.rewards else None,
            "reward_last": totals.rewards[-1] if totals.rewards else None,
            "eval_first": evaluations[0] if evaluations else None,
            "eval_last": evaluations[-1] if evaluations else None,
            "best": best_of(totals.evaluations, best or CheckpointConfig()),
            "staleness_mean": totals.staleness_sum / max(1, totals.samples),
            "staleness_max": totals.staleness_max,
            "mixed_version_frac": totals.mixed / max(1, totals.samples),
            "samples_trained": totals.samples,
            "samples_failed": totals.samples_failed,
            "discarded_tokens": totals.discarded_tokens + totals.tokens_failed,
            "samples_mismatched": totals.samples_mismatched,
            "device_idle_ratio": idle,
            "cpu_unused_ratio": self._cpu_unused(num_cores),
            "rollout_idle_ratio": idle_ratio(rollout_busy_s(totals.busy_s), training_s),
            "trainer_idle_ratio": idle_ratio(trainer_busy_s(totals.busy_s), training_s),
            "drafted_tokens": totals.drafted_tokens,
            "accepted_tokens": totals.accepted_tokens,
            "migrations": totals.migrations,
            "kv_bytes_moved": totals.kv_bytes_moved,
            "num_user_errors": totals.num_user_errors,
            "set_aside": [{"prompt": p, "reason": r} for p, r in (set_aside or {}).items()],
        }
        self.keep()
        self._replace("summary.json", figures)
        return figures

    def _cpu_unused(self, num_cores: int) -> float | None:
        """Since the last start: the CPU time of a controller that was killed is not known."""
        lasted = time.monotonic() - self.began
        if not num_cores or lasted <= 0:
            return None
        return max(0.0, 1 - (cpu_time_s() - self._cpu_s) / (lasted * num_cores))

    def cut_short(self) -> None:
        """The run ends in the middle of a step: the time is spent, whatever becomes of it."""
        if self._is_training:
            self.totals.cut_s += time.monotonic() - self.step_began
            self._is_training = False

    def _replace(self, name: str, body: dict[str, Any]) -> None:
        replace_text(self.run_dir / name, json.dumps(body, indent=1) + "\n")

    def close(self) -> None:
        if self._sinks is not None:
            self._sinks.close()
        self._metrics.close()
        for file in (self._rollouts, self._prompts):
            if file is not None:
                file.close()


PROMPT_MAX = 1_000


class PromptTexts:
    """prompts.jsonl: the beginning of each prompt, once, so that a group can be told by what it
    was asked before it is trained. Only for people: what is damaged is left out."""

    def __init__(self, path: Path, tell: Callable[[str], None]) -> None:
        keep_lines(
            path,
            lambda line: isinstance(line.get("prompt"), int),
            lambda error: tell(f"{error}; the line is left out"),
        )
        self._known = {line["prompt"] for line in read_lines(path)}
        self._file = path.open("a")

    def add(self, prompt: int, text: str) -> None:
        if prompt in self._known:
            return
        self._known.add(prompt)
        self._file.write(json.dumps({"prompt": prompt, "text": text[:PROMPT_MAX]}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


def best_of(
    evaluations: Mapping[Version, Figures], section: CheckpointConfig
) -> dict[str, Any] | None:
    """The best of a run, for its summary."""
    best = best_evaluated(evaluations, section.best_metric, is_max=section.best_is_max)
    return dict(zip(("version", "metric", "value"), best, strict=True)) if best else None


def cpu_time_s() -> float:
    """Of this process and of all workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def open_records(
    config: RunConfig,
    committed: int | None,
    tell: Callable[[str], None],
    log: FileLog,
    written: Callable[[RequestId], int | None],
) -> Records:
    """The records of a run, with the sinks it asks for; `tell` gets a line when one fails."""
    logging, run_dir = config.logging, Path(config.runtime.run_dir)
    facts = RunFacts(run_dir, config.model_dump(mode="json"), committed or 0)
    sinks = Sinks(logging.sinks, facts, tell) if logging.sinks else None
    rollouts = logging.rollouts and config.runtime.world != "ray"  # there the storage shards do it
    return Records(
        run_dir,
        rollouts=rollouts,
        prompts=logging.rollouts,
        committed=committed,
        sinks=sinks,
        samples_shown=logging.samples_shown,
        log=log,
        written=written,
        tell=tell,
    )
