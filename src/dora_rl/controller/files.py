"""What a run has on disk: opened for a new run, or taken up again by a resumed one.

Invariant: whatever must survive a crash (a sample's row, a step's records) is written before the
log entry that relies on it, and what is written without that entry is recognised on resume.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.controller.records import open_records
from dora_rl.controller.run_dir import RunLock, learner_ended
from dora_rl.controller.world import Notify
from dora_rl.core.state import State
from dora_rl.core.step import initial
from dora_rl.io.system_errors import system_line
from dora_rl.observe.eventlog import FileLog
from dora_rl.setup.settings import core_params
from dora_rl.store.journals import Journals
from dora_rl.store.samples import Samples
from dora_rl.types import GroupId, Version
from dora_rl.weights.versions import Versions
from dora_rl.workers.last_words import DISK_ERRORS, full_line, is_full
from dora_rl.workers.user_errors import UserErrors


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
        # The version to go back to, where the newest was lost with its host.
        self.goes_back_to = self._find_lost(self.state) if resume else None
        committed = self.state.committed if resume else None
        if self.goes_back_to is not None:
            committed = self.goes_back_to
        self.lineage = self.state.lineage + (self.goes_back_to is not None)
        self.records = open_records(config, committed, notify, self.log, samples.num_written)
        self.user_errors = UserErrors(self.run_dir, notify)
        self.journals = Journals(self.run_dir / "journal")
        self.dropped: Counter[str] = Counter()  # groups that ended untrained since the last step

    def _find_lost(self, state: State) -> Version | None:
        """A learner that was given up and still writes is waited for."""
        if state.durable == state.committed:
            return None
        with learner_ended(self.run_dir):
            return self.versions.lost(state)

    def clear(self, wanted: Collection[Version]) -> None:
        """Before the start: what no group of the log, no version of it and nothing that is wanted
        stands for goes."""
        if not self.is_resumed:
            self.versions.clear()
            return
        self.samples.keep_only(self.state.groups.keys())
        self.journals.collect(alive=set(self.state.groups))
        self.versions.keep_only(self.state, wanted)

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
