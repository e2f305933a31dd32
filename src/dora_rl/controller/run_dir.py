"""The directory of a run: which may be begun or resumed, by whom, with what configuration; and what
is in it, opened for a new run or taken up again by a resumed one.

One controller has a run directory. The lock lives as long as any process that inherited it, so a
resumed run begins only when the last worker of the one before is gone. Every key of the
configuration has a rule for a resume (`config.on_resume`); the data are told by a fingerprint.

Invariant: whatever must survive a crash (a sample's row, a step's records) is written before the
log entry that relies on it, and what is written without that entry is recognised on resume.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.config.on_resume import check_changes
from dora_rl.controller.records import open_records
from dora_rl.controller.world import Notify
from dora_rl.core.state import Phase, State
from dora_rl.core.step import initial
from dora_rl.data.prompts import PromptSource
from dora_rl.io.system_errors import system_line
from dora_rl.observe.eventlog import FileLog, config_digests
from dora_rl.setup.settings import core_params
from dora_rl.store.journals import Journals
from dora_rl.store.samples import Samples
from dora_rl.store.trajectories import text_digest
from dora_rl.types import GroupId, UserError, Version
from dora_rl.weights.versions import Versions
from dora_rl.workers.last_words import DISK_ERRORS, UserErrors, full_line, is_full

WAIT_S = 10.0
POLL_S = 0.05
LEARNER_LOCK = ".learner-lock"
GIVEN = "given"  # what a program gave as objects: rows, functions
AS_GOOD_AS_EMPTY = (".gitkeep", ".gitignore", "lost+found", GIVEN)


def _open_lock(path: Path) -> int:
    """Who may open it may hold it: nobody else, where an older release made the file either."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    with suppress(PermissionError):
        os.fchmod(handle, 0o600)
    return handle


def _take(path: Path, wait_s: float, refusal: str) -> int:
    """The handle of a lock that is held from now on, or a line that says who still has it."""
    handle = _open_lock(path)
    until = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return handle
        except BlockingIOError:
            if time.monotonic() > until:
                os.close(handle)
                raise UserError(refusal) from None
        time.sleep(POLL_S)


class RunLock:
    """Taken when made; `fd` is what workers inherit."""

    def __init__(self, run_dir: Path, wait_s: float = WAIT_S) -> None:
        make_run_dir(run_dir)
        self._path = run_dir / ".lock"
        refusal = f"{run_dir} is in use by another dora-rl; end it, or set runtime.run_dir"
        self.fd = _take(self._path, wait_s, refusal)

    def is_there(self) -> bool:
        """False: the run directory was deleted or moved under the run."""
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self.fd))
        except OSError:
            return False

    def release(self) -> None:
        os.close(self.fd)


@contextmanager
def learner_ended(run_dir: Path, wait_s: float = WAIT_S) -> Iterator[None]:
    """While no learner of this run lives: one that was given up may still be writing a version."""
    refusal = f"a learner of {run_dir} is still there; end it, then --resume"
    handle = _take(run_dir / LEARNER_LOCK, wait_s, refusal)
    try:
        yield
    finally:
        os.close(handle)


def learner_lock(run_dir: Path) -> int:
    """Held until this process ends: a learner that was given up and lives on never meets us."""
    handle = _open_lock(run_dir / LEARNER_LOCK)
    fcntl.flock(handle, fcntl.LOCK_EX)
    return handle


def check_run_dir(run_dir: Path, *, resume: bool) -> None:
    """A run is begun in a directory without one and resumed in a directory with one."""
    used, found = _holds_run(run_dir), _foreign(run_dir)
    weights, events = run_dir / "weights", run_dir / "events"
    problems = (
        (
            not used and any(weights.glob("[0-9]*")),
            f"{events} is gone and {weights} is there; restore it from a copy of the run, or begin "
            "a new one in another directory (runtime.run_dir=DIRECTORY)",
        ),
        (resume and not used, f"{run_dir} holds no run to resume; leave --resume out to begin one"),
        (
            used and not resume,
            f"{run_dir} already holds a run; add --resume, or set runtime.run_dir=DIRECTORY",
        ),
        (
            found and not used,
            f"runtime.run_dir: {run_dir} is not empty and not of a run (it has {found}); "
            "give a new or empty directory",
        ),
    )
    for is_there, problem in problems:
        if is_there:
            raise UserError(problem)


def check_not_moved(config_file: Path, run_dir: Path) -> None:
    """The config.json of a run that was moved or copied still names its old place."""
    here = config_file.parent
    if config_file.name != "config.json" or not _holds_run(here):
        return
    if here.resolve() != run_dir.resolve():
        raise UserError(
            f"{here} holds a run that began in {run_dir}; if it was moved or copied, "
            f"add runtime.run_dir={here}"
        )


def _holds_run(run_dir: Path) -> bool:
    return any((run_dir / "events").glob("*.jsonl"))


def _foreign(run_dir: Path) -> str:
    """A name in a directory that is not ours; empty: it is, or has nothing but logs (of the shell
    that starts us). `data.json` is the first that a run writes."""
    if not run_dir.is_dir() or (run_dir / "events").is_dir() or _fingerprint(run_dir / "data.json"):
        return ""
    names = sorted(path.name for path in run_dir.iterdir() if path.suffix != ".log")
    return next((name for name in names if name not in AS_GOOD_AS_EMPTY), "")


def _fingerprint(path: Path) -> str | None:
    """Of the data that a run began with; None: the file does not say it."""
    try:
        return json.loads(path.read_text())["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def make_run_dir(run_dir: Path) -> None:
    """Where it cannot be made or written to, one line says so."""
    try:
        run_dir.parent.mkdir(parents=True, exist_ok=True)
        run_dir.mkdir(mode=0o700, exist_ok=True)  # whoever makes it before says who may read it
    except OSError as error:
        raise UserError(
            f"runtime.run_dir: cannot make {run_dir} ({error.strerror}); choose another directory"
        ) from None
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise UserError(f"runtime.run_dir: {run_dir} may not be written to; choose another")


def check_same_run(config: RunConfig, run_dir: Path) -> None:
    """Refuse to continue a run as another one."""
    path = run_dir / "config.json"
    if not path.is_file():
        return
    defaults = RunConfig(model=config.model).model_dump(mode="json")
    try:
        text = path.read_text()
        old: dict[str, Any] = json.loads(text)
        for section, values in defaults.items():  # keys that came with a later release
            old[section] = values | old.get(section, {})
    except (ValueError, TypeError, AttributeError):
        raise UserError(
            f"{path} is damaged; restore it, or delete it and resume with the file that the run "
            "began with"
        ) from None
    known = config_digests(run_dir / "events")
    if known and text_digest(text) not in known:
        raise UserError(
            f"{path} is not what the run was begun with: it was damaged or edited; restore it, or "
            "delete it and resume with the file that the run began with (keys are changed on the "
            "command line: section.key=value)"
        )
    check_changes(old, config.model_dump(mode="json"))


def check_same_data(train: PromptSource, run_dir: Path) -> None:
    """The prompts of a run are remembered by a fingerprint."""
    path = run_dir / "data.json"
    if not path.is_file():
        path.write_text(json.dumps({"fingerprint": train.fingerprint()}) + "\n")
        return
    begun_with = _fingerprint(path)
    if begun_with is None:
        raise UserError(f"{path} is damaged; restore it, or begin a new run")
    if not train.began_with(begun_with):
        raise UserError(
            f"the training data is not what {run_dir} began with, by {path}; restore it, or begin "
            "a new run"
        )


def config_digest(config: RunConfig) -> str:
    """Of what config.json holds, for the log."""
    return text_digest(_config_text(config))


def _config_text(config: RunConfig) -> str:
    return config.model_dump_json(indent=1) + "\n"


def write_config(config: RunConfig, run_dir: Path) -> None:
    temporary = run_dir / "config.json.tmp"
    temporary.write_text(_config_text(config))
    temporary.replace(run_dir / "config.json")


class RunFiles:
    """The files of one run directory, whose lock is held. `state` is that of the log's end."""

    def __init__(
        self,
        config: RunConfig,
        weights_root: Path,
        lock: RunLock,
        samples: Samples,
        notify: Notify,
        *,
        resume: bool,
    ) -> None:
        self.run_dir = Path(config.runtime.run_dir)
        self.lock, self.samples, self.is_resumed = lock, samples, resume
        self.params = core_params(config)
        events = self.run_dir / "events"
        if resume:
            self.log, self.state = FileLog.resume(events)
        else:
            self.log, self.state = FileLog.create(events), initial(self.params)
        self.log.before_sync = samples.sync
        self.versions = Versions(self.run_dir, weights_root)
        if resume:  # before anything is changed
            self.versions.check_log(self.state)
            self._check_rows(self.state)
        # What the log committed of the versions that may still be loaded.
        self.checksums = self.versions.committed(self.state) if resume else dict[Version, str]()
        # The version to go back to, where the newest was lost with its host.
        self.goes_back_to = self._find_lost(self.state) if resume else None
        committed = self.state.committed if self.goes_back_to is None else self.goes_back_to
        self.checksums = {v: c for v, c in self.checksums.items() if v <= committed}
        self.lineage = self.state.lineage + (self.goes_back_to is not None)
        self.records = open_records(
            config, committed if resume else None, notify, self.log, samples.num_written
        )
        self.user_errors = UserErrors(self.run_dir, notify)
        self.journals = Journals(self.run_dir / "journal")
        self.dropped: Counter[str] = Counter()  # groups that ended untrained since the last step

    def _check_rows(self, state: State) -> None:
        """What the log says is ready to be trained is in the table."""
        for group in state.groups.values():
            for request in group.requests:
                if request.phase is Phase.SCORED and self.samples.row(request.id) is None:
                    raise UserError(
                        f"{self.samples.path} does not have sample {request.id.sample} of group "
                        f"{request.id.group}, which waits to be trained; restore it from a copy "
                        "of the run, or begin a new run"
                    )

    def _find_lost(self, state: State) -> Version | None:
        """A learner that was given up and still writes is waited for."""
        if state.durable == state.committed:
            return None
        with learner_ended(self.run_dir):
            return self.versions.lost(state, self.checksums.get(state.committed, ""))

    def clear(self, wanted: Collection[Version]) -> list[str]:
        """Before the start: what no group of the log, no version of it and nothing that is wanted
        stands for goes. Returns what there is to say about it."""
        if not self.is_resumed:
            self.versions.clear()
            return []
        self.samples.keep_only(self.state.groups.keys())
        self.journals.collect(alive=set(self.state.groups))
        return self.versions.keep_only(self.state, wanted)

    def forget(self, group: GroupId) -> None:
        """A group has ended."""
        self.samples.drop(group)
        self.journals.forget(group, self.params.group_size)

    def refused(self, error: BaseException) -> str | None:
        """What the machine refused a run, in one line; None: it was not the machine."""
        if not self.lock.is_there():
            return self.gone_line()
        return full_line(self.run_dir, error) if is_full(error) else system_line(error)

    def gone_line(self) -> str:
        return (
            f"the run directory {self.run_dir} was deleted or moved while the run was going on; "
            "it cannot go on there"
        )

    def close(self) -> None:
        self.user_errors.close()
        self.records.close()
        self.samples.close()
        self.log.close()

    def may_be_unwritten(self, error: BaseException) -> bool:
        """Whether there was no room for it, or no directory any more."""
        return isinstance(error, DISK_ERRORS) and (is_full(error) or not self.lock.is_there())
