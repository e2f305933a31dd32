"""Where metrics go beside metrics.jsonl: a tracking service, or a file of the user's, if asked for.

Each sink works in a thread of its own behind a bounded queue, so that a slow or hanging service
never holds up the run. A sink that fails is reported once and is off from then on; the run and the
other sinks go on. Packages are imported only for the sinks that are named in `logging.sinks`.

Every service has a writer, which is made, written to and closed in the thread of its sink. A line
of a step has `step`; a line of an evaluation has `version` and comes late, when later steps are
already written, so services that insist on rising steps get their own axes. After a resume the same
run of the service goes on: its id is kept in `sinks.json` beside the run.
"""

from __future__ import annotations

import html
import importlib.util
import json
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, cast

from dora_rl.io.append_log import replace_text
from dora_rl.types import UserError
from dora_rl.user_code import load_object

LINES_MAX = 1_000  # waiting for one sink; more are left out and reported
CLOSE_S = 15.0

PROJECT = "dora-rl"

_keeping = threading.Lock()  # of sinks.json: services start at once


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a writer is told of the run. `first_step`: steps before it were written earlier;
    `options`: what the user has set for this sink in `logging.sink_options`."""

    run_dir: Path
    config: dict[str, Any]
    first_step: int
    options: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def name(self) -> str:
        return self.run_dir.resolve().name

    def kept_id(self, service: str) -> str | None:
        """The run's id at a service, if it has one from before a resume."""
        return _read(self.run_dir / "sinks.json").get(service) if self.first_step else None

    def keep_id(self, service: str, value: str) -> None:
        path = self.run_dir / "sinks.json"
        with _keeping:
            replace_text(path, json.dumps(_read(path) | {service: value}) + "\n")


def _read(path: Path) -> dict[str, str]:
    """The run's ids at its services; raises where the file is not what was written."""
    try:
        found: Any = json.loads(path.read_text()) if path.is_file() else {}
        if all(isinstance(kept, str) for kept in found.values()):
            return found
    except (ValueError, AttributeError):
        pass
    raise UserError(f"{path} is damaged; delete it, and the services begin a new run")


class Writer(Protocol):
    """May raise anything; the sink catches it. One that shows samples has `samples` too."""

    def write(self, line: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


class SampleWriter(Writer, Protocol):
    """A writer that also shows some samples of each step, as rows with the same columns."""

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None: ...


def as_markdown(rows: Sequence[dict[str, Any]]) -> str:
    """A table for services that show text."""
    lines = [" | ".join(rows[0]), " | ".join("---" for _ in rows[0])]
    for row in rows:
        cells = (html.escape(str(value), quote=False) for value in row.values())
        lines.append(" | ".join(c.replace("|", "&#124;").replace("\n", "<br>") for c in cells))
    return "\n".join(f"| {line} |" for line in lines) + "\n"


def figures_of(line: dict[str, Any]) -> tuple[int, dict[str, float]]:
    """The place of a line on the axis of steps, and its numbers."""
    place = int(line["step"] if "step" in line else line["version"])
    return place, {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and name not in ("step", "version")
    }


class TensorBoardWriter:
    """Event files in RUN/tensorboard, written by the `tensorboard` package alone (no torch)."""

    def __init__(self, facts: RunFacts) -> None:
        # The names of these two modules are made when they are imported.
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.summary_v2 import text_pb
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        events: Any = event_pb2
        summaries: Any = summary_pb2
        self._event, self._summary, self._text = events.Event, summaries.Summary, text_pb
        options: dict[str, Any] = {"logdir": str(facts.run_dir / "tensorboard")} | facts.options
        self._file: Any = EventFileWriter(**options)
        if facts.first_step:  # what a crash left of later steps is not shown
            start = events.SessionLog(status=events.SessionLog.SessionStatus.START)
            self._add(step=facts.first_step, session_log=start)

    def _add(self, **parts: Any) -> None:
        self._file.add_event(self._event(wall_time=time.time(), **parts))

    def write(self, line: dict[str, Any]) -> None:
        step, figures = figures_of(line)
        value = self._summary.Value
        values = [value(tag=name, simple_value=number) for name, number in figures.items()]
        self._add(step=step, summary=self._summary(value=values))
        self._file.flush()

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self._add(step=step, summary=self._text("samples", as_markdown(rows)))

    def close(self) -> None:
        self._file.close()


class WandbWriter:
    """Offline with WANDB_MODE=offline, as anywhere. Files lie in RUN/wandb. Options: those of
    `wandb.init`."""

    def __init__(self, facts: RunFacts) -> None:
        import wandb

        self._table: Any = wandb.Table
        usual: dict[str, Any] = {"project": PROJECT, "name": facts.name, "dir": str(facts.run_dir)}
        self._run: Any = wandb.init(
            **(usual | facts.options),
            id=facts.kept_id("wandb"),
            resume="allow",
            config=facts.config,
        )
        facts.keep_id("wandb", self._run.id)
        self._run.define_metric("step")
        self._run.define_metric("version")
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="version")

    def write(self, line: dict[str, Any]) -> None:
        self._run.log({name: value for name, value in line.items() if value is not None})

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"samples": table, "step": step})

    def close(self) -> None:
        self._run.finish()


class MlflowWriter:
    """To MLflow's own tracking address (MLFLOW_TRACKING_URI), experiment `dora-rl`. Options:
    `tracking_uri`, `experiment`, `run_name`."""

    def __init__(self, facts: RunFacts) -> None:
        import mlflow
        from mlflow.entities import Metric, Param

        self._metric = Metric
        self._client: Any = mlflow.MlflowClient(facts.options.get("tracking_uri"))
        kept, name = facts.kept_id("mlflow"), facts.options.get("experiment", PROJECT)
        if kept is None:
            experiment = self._client.get_experiment_by_name(name)
            where = (
                experiment.experiment_id
                if experiment is not None
                else self._client.create_experiment(name)
            )
            run_name = facts.options.get("run_name", facts.name)
            kept = self._client.create_run(where, run_name=run_name).info.run_id
            facts.keep_id("mlflow", kept)
            params = [Param(name, str(value)[:500]) for name, value in flat(facts.config).items()]
            for begin in range(0, len(params), 100):  # the most MLflow takes at once
                self._client.log_batch(kept, params=params[begin : begin + 100])
        else:
            self._client.set_terminated(kept, status="RUNNING")
        self._id = kept

    def write(self, line: dict[str, Any]) -> None:
        step, figures = figures_of(line)
        now = int(1000 * time.time())
        metrics = [self._metric(name, value, now, step) for name, value in figures.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        self._client.log_text(self._id, as_markdown(rows), f"samples/step_{step:06d}.md")

    def close(self) -> None:
        self._client.set_terminated(self._id)


class TrackioWriter:
    """To trackio's local store, or where its own settings say; project `dora-rl`. Options: those
    of `trackio.init`."""

    def __init__(self, facts: RunFacts) -> None:
        import trackio

        self._table: Any = trackio.Table
        made = f"{facts.name}-{time.strftime('%Y%m%d-%H%M%S')}"
        name = facts.kept_id("trackio") or str(facts.options.get("name", made))
        resume = "allow" if facts.first_step else "never"
        options = {"project": PROJECT} | facts.options | {"name": name, "resume": resume}
        self._run: Any = trackio.init(config=flat(facts.config), **options)
        facts.keep_id("trackio", name)

    def write(self, line: dict[str, Any]) -> None:
        step, figures = figures_of(line)
        self._run.log(figures, step=step)

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        table = self._table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self._run.log({"samples": table}, step=step)

    def close(self) -> None:
        self._run.finish()


WRITERS: dict[str, Callable[[RunFacts], Writer]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
    "trackio": TrackioWriter,
}


def flat(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"a": {"b": 1}}` as `{"a.b": 1}`."""
    found: dict[str, Any] = {}
    for name, value in config.items():
        found |= (
            flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return found


# What a service's own settings may not say: the run says it, so that a resume finds its place.
OURS = {"wandb": {"id", "resume", "config"}, "trackio": {"config", "resume"}}


def check_sinks(names: Sequence[str], options: Mapping[str, Mapping[str, Any]]) -> None:
    """Before anything starts: is there a package, or a file of the user's, for each sink, and a
    sink for all options?"""
    for name, section in options.items():
        if name not in names:
            known = ", ".join(names) or "empty"
            raise UserError(f"logging.sink_options.{name}: logging.sinks has no {name} ({known})")
        if ours := sorted(OURS.get(name, set()) & set(section)):
            raise UserError(f"logging.sink_options.{name}.{ours[0]}: the run sets it")
    for name in names:
        writer_of(name)
        if name in WRITERS and importlib.util.find_spec(name) is None:
            raise UserError(
                f"logging.sinks: {name} is not installed; pip install {name}, "
                "or take it out of the list"
            )


def writer_of(name: str) -> Callable[[RunFacts], Writer]:
    """What writes to a service, or what the user names as `path/to/file.py:Name`."""
    if name in WRITERS:
        return WRITERS[name]
    if ":" not in name:
        known = ", ".join(WRITERS)
        raise UserError(f"logging.sinks: {name} is none of {known}, nor path/to/file.py:Name")
    found = load_object(name, Path("."), section="logging", key="logging.sinks")
    if not callable(found):
        raise UserError(f"logging.sinks: {name} is not a class; see docs/extending.md")
    return cast(Callable[[RunFacts], Writer], found)


class Sinks:
    """All sinks of a run. `tell` gets one line about a sink that failed."""

    def __init__(
        self,
        names: Sequence[str],
        facts: RunFacts,
        tell: Callable[[str], None],
        find: Callable[[str], Callable[[RunFacts], Writer]] = writer_of,
    ) -> None:
        given = facts.config.get("logging", {}).get("sink_options", {})
        self._sinks = [
            _Sink(name, find(name), replace(facts, options=given.get(name, {})), tell)
            for name in dict.fromkeys(names)
        ]

    def write(self, line: dict[str, Any]) -> None:
        """A line of metrics.jsonl: of a step (it has `step`) or of an evaluation (`version`)."""
        for sink in self._sinks:
            sink.put(dict(line))

    def samples(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        """Some samples of a step, for the sinks that show them."""
        for sink in self._sinks:
            sink.put((step, rows))

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Let every sink finish what it has; one that does not in time is left behind."""
        for sink in self._sinks:
            sink.end()
        for sink in self._sinks:
            sink.join(timeout_s)


# A line, or a step with rows of samples.
_Put = dict[str, Any] | tuple[int, Sequence[dict[str, Any]]]


class _Sink:
    def __init__(
        self,
        name: str,
        make: Callable[[RunFacts], Writer],
        facts: RunFacts,
        tell: Callable[[str], None],
    ) -> None:
        self._name, self._make, self._facts, self._tell = name, make, facts, tell
        self._lines: queue.Queue[_Put | None] = queue.Queue(LINES_MAX)
        self._off = threading.Event()
        self._thread: threading.Thread | None = None

    def put(self, line: _Put) -> None:
        """The service is opened with the first line: a run that fails to start leaves no trace."""
        if self._off.is_set():
            return
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._work, name=f"sink {self._name}", daemon=True
            )
            self._thread.start()
        self._offer(line)

    def end(self) -> None:
        self._offer(None)

    def _offer(self, line: _Put | None) -> None:
        try:
            self._lines.put_nowait(line)
        except queue.Full:
            self._fail(f"takes nothing any more ({LINES_MAX} lines wait for it)")

    def join(self, timeout_s: float) -> None:
        if self._off.is_set() or self._thread is None:
            return
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            self._fail(f"was not done {timeout_s:.0f} s after the end")

    def _work(self) -> None:
        try:
            writer = self._make(self._facts)
            while not self._off.is_set():
                line = self._lines.get()
                if line is None:
                    writer.close()
                    return
                if isinstance(line, dict):
                    writer.write(line)
                elif hasattr(writer, "samples"):
                    cast(SampleWriter, writer).samples(*line)
        except Exception as error:  # noqa: BLE001 - a tracking service may raise anything
            first = next(iter(str(error).splitlines()), "")
            self._fail(f"failed: {type(error).__name__}: {first}")

    def _fail(self, why: str) -> None:
        if not self._off.is_set():
            self._off.set()
            self._tell(f"logging.sinks: {self._name} {why}; it is off, the run goes on")
