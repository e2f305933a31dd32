"""`dora_rl.train` and the run that it returns.

    run = dora_rl.train("model", rows, reward, orchestration__num_steps=20)
    run.metrics["reward/mean"], next(iter(run.samples))["text"], run.model()

A run is what its directory says: `Run(directory)` opens any, whoever began it. The controller works
in the thread that calls `train`, which returns when the run has ended; its workers are processes
of their own, which never import the program.

Invariant: whatever ends a run early (a callback, its exception, Ctrl-C), the run directory is
complete and can be resumed.
"""

from __future__ import annotations

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from dora_rl.api.settings import ARGUMENTS, merged, settle
from dora_rl.api.words import in_words_of_python, mending
from dora_rl.commands.train import INTERRUPTED, conduct
from dora_rl.config import RunConfig
from dora_rl.controller.run_dir import check_run_dir
from dora_rl.io.append_log import read_lines
from dora_rl.observe.audit import AuditReport, audit_run
from dora_rl.setup.settings import read_config, resolve
from dora_rl.types import UserError
from dora_rl.user_code import hint, one_line
from dora_rl.weights.run_models import export_model, find_model, is_run, run_config
from dora_rl.worlds.start import starting

Line: TypeAlias = dict[str, Any]
Callback: TypeAlias = Callable[[Line], Any]
"""Gets a line of metrics.jsonl. The run stops if it returns True; anything else is ignored."""
BY_CALLBACK = "a callback stopped it"


class RunStopped(UserError):
    """The run ended before its last step, and nobody had asked for that. `run` can be resumed."""

    def __init__(self, reason: str, run: Run) -> None:
        mend = mending(run.config, reason)
        way = f"{mend}, then run.resume()" if mend else f"{run.directory} can be resumed"
        super().__init__(f"{reason}; {way}")
        self.run = run


class Lines(list[Line]):
    """Lines of metrics: `lines[-1]` is one of them, `lines["reward/mean"]` a column, in which
    None stands for a line without it."""

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            known = {name for line in self for name in line}
            if self and key not in known:
                raise KeyError(f"no line has {key!r}{hint(key, sorted(known))}")
            return [line.get(key) for line in self]
        return super().__getitem__(key)


class Samples:
    """Every trained sample, in the order of training. Read from the disk as it is gone through."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __iter__(self) -> Iterator[Line]:
        return read_lines(self._path)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"<{len(self)} samples in {self._path}; go through them, or take list(...)>"


class Run:
    """A run directory, read whenever it is asked."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).absolute()
        if not is_run(self.directory):
            raise UserError(f"{directory} is not a run directory (no events/)")

    def __repr__(self) -> str:
        steps = len(self.metrics)
        return f"<Run {self.directory}: {steps} steps, {self.summary.get('stopped', 'not ended')}>"

    @property
    def config(self) -> RunConfig:
        return run_config(self.directory)

    @property
    def metrics(self) -> Lines:
        """A line for each step."""
        return Lines(line for line in self._lines() if "step" in line)

    @property
    def evaluations(self) -> Lines:
        """A line for each evaluation, by `version`."""
        return Lines(line for line in self._lines() if "step" not in line)

    def _lines(self) -> Iterator[Line]:
        return read_lines(self.directory / "metrics.jsonl")

    @property
    def samples(self) -> Samples:
        """Every trained sample: prompt, text, reward, version, token_ids, logprobs and more."""
        return Samples(self.directory / "rollouts.jsonl")

    @property
    def summary(self) -> Line:
        """The figures of the whole run; empty before its first end."""
        path = self.directory / "summary.json"
        return json.loads(path.read_text()) if path.is_file() else {}

    @property
    def done(self) -> bool:
        """All its steps are trained."""
        return len(self.metrics) >= self.config.orchestration.num_steps

    def audit(self) -> AuditReport:
        """What the event log proves; `findings` is empty where every promise was kept."""
        return audit_run(self.directory / "events")

    def model(self, step: int | str = "last") -> Any:
        """The weights as a model of transformers. `step`: steps trained, "best" or "last"."""
        from transformers import AutoModelForCausalLM

        with tempfile.TemporaryDirectory(prefix="dora-rl-model-") as folder:
            out = self.export(Path(folder) / "model", step)
            trusted = self.config.model.trust_remote_code
            model = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=trusted)
            # Its tensors may be mapped from files that go with the folder.
            for tensor in (*model.parameters(), *model.buffers()):
                tensor.data = tensor.data.clone()
            return model

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        section = self.config.model
        return AutoTokenizer.from_pretrained(
            section.path, trust_remote_code=section.trust_remote_code
        )

    def export(self, out: str | Path, step: int | str = "last") -> Path:
        """Write the weights as a Hugging Face directory, which must be new or empty."""
        with in_words_of_python():
            found = find_model(self.directory, str(step))
        export_model(found, Path(out), self.config.checkpoint.shard_bytes_max)
        return Path(out)

    def resume(
        self,
        *,
        on_step: Callback | None = None,
        on_evaluation: Callback | None = None,
        **config: Any,
    ) -> Run:
        """Go on, with other values of keys that may change: `orchestration__num_steps=50`. Returns
        the same run when it has ended again."""
        self._refuse_what_stays(config)
        here = {"runtime.run_dir": str(self.directory)}
        tables = merged(
            read_config(self.directory / "config.json"), {**config, **here}, "Run.resume"
        )
        _go(resolve(tables, "Run.resume"), _Hearing(on_step, on_evaluation), resume=True)
        return self

    def _refuse_what_stays(self, config: Mapping[str, Any]) -> None:
        """Model, data and functions are those that the run began with; a function is mended in
        place."""
        for name in ARGUMENTS:
            if name not in config or isinstance(config[name], Mapping):
                continue
            mend = mending(self.config) if name == "reward" else ""
            way = f"{mend}, then run.resume()" if mend else "begin a new run with dora_rl.train"
            raise UserError(f"Run.resume: {name} stays what the run began with; {way}")


def train(
    model: str | Path | Mapping[str, Any] | None = None,
    data: Any = None,
    reward: Any = None,
    *,
    eval_data: Any = None,
    run_dir: str | Path | None = None,
    config: str | Path | Mapping[str, Any] | None = None,
    on_step: Callback | None = None,
    on_evaluation: Callback | None = None,
    **keywords: Any,
) -> Run:
    """Train a model and return the run, from any thread, script or notebook.

    `model`: a Hugging Face directory, or the id of a model of the hub. `data` and `eval_data`: rows
    (a list of dictionaries, a Dataset), a path, or a list of paths. `reward`: a function, a name as
    in a configuration file, or a list of these. `config`: a file (or its tables) to begin with.
    `keywords`: any key of the configuration, as `section__key=value` or `section={...}`.
    `run_dir`: a new directory; if not given, one below `runs/`, named after the time.

    `on_step` and `on_evaluation` get each line of metrics.jsonl as it is written, and end the run
    by returning True; an exception in one ends it too, and is raised here. Ctrl-C ends the run
    after saving, a second one at once.
    """
    arguments = {
        "model": model,
        "data": data,
        "eval_data": eval_data,
        "reward": reward,
        "run_dir": run_dir,
    }
    settings, given = settle(arguments, config, keywords)
    run_dir = Path(settings.runtime.run_dir)
    with in_words_of_python():
        check_run_dir(run_dir, resume=False)
    try:
        given.put_down()
        _go(settings, _Hearing(on_step, on_evaluation), resume=False)
    except BaseException as error:
        if is_run(run_dir):
            raise
        given.take_back()
        if not isinstance(error, UserError):
            raise
        raise UserError(given.in_words(str(error))) from None
    return Run(run_dir)


class _Hearing:
    """The callbacks of a run, which are called in its own thread. The first that ends it is the
    last that is called."""

    def __init__(self, on_step: Callback | None, on_evaluation: Callback | None) -> None:
        self._callbacks = {"on_step": on_step, "on_evaluation": on_evaluation}
        self.why = ""
        self.error: Exception | None = None

    def hear(self, line: Line) -> None:
        name = "on_step" if "step" in line else "on_evaluation"
        callback = self._callbacks[name]
        if callback is None or self.why:
            return
        try:
            wish = callback(dict(line))
            if isinstance(wish, (bool, np.bool_)) and wish:
                self.why = f"{BY_CALLBACK} ({name})"
        except Exception as error:  # noqa: BLE001 - raised again where the run has ended
            self.why, self.error = f"{name} raised {one_line(error)}", error


def _go(settings: RunConfig, hearing: _Hearing, *, resume: bool) -> None:
    """To the end of a run, whose given things are in its directory."""
    run_dir = settings.runtime.run_dir
    with contextlib.ExitStack() as signals, starting(settings, resume=resume) as start:
        _, stop = conduct(start, signals, hearing.hear, lambda: hearing.why)
    if hearing.error is not None:
        hearing.error.add_note(f"the run has stopped and can be resumed: {run_dir}")
        raise hearing.error
    if stop.done:
        return
    if not hearing.why and not stop.reason.startswith(INTERRUPTED):
        raise RunStopped(stop.reason, Run(run_dir))
    print(f"dora-rl: stopped: {stop.reason}; go on with run.resume()", file=sys.stderr)
