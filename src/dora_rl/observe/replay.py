"""`dora-rl replay RUN`: feed the log to the core again; it must give the same actions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dora_rl.core.state import State
from dora_rl.core.step import step
from dora_rl.io.codec import encode
from dora_rl.observe.eventlog import Entry, Snapshot, initial_of


@dataclass(frozen=True, slots=True)
class ReplayResult:
    num_entries: int
    num_snapshots: int
    difference: str | None

    @property
    def ok(self) -> bool:
        return self.difference is None


def replay(records: Iterable[Entry | Snapshot]) -> ReplayResult:
    """Drive the core with a run's events. Stops at the first difference."""
    state: State | None = None
    num_entries = num_snapshots = 0
    for record in records:
        if isinstance(record, Snapshot):
            num_snapshots += 1
            written = record.restore()
            if state is not None and encode(State, state) != encode(State, written):
                text = f"the snapshot before entry {record.number} is another state"
                return ReplayResult(num_entries, num_snapshots, text)
            state = state if state is not None else written
            continue
        state = state if state is not None else initial_of(record)
        actions = step(state, record.event, record.now)
        if actions != record.actions:
            return ReplayResult(num_entries, num_snapshots, _difference(record, actions))
        num_entries += 1
    return ReplayResult(num_entries, num_snapshots, None)


def _difference(record: Entry, actions: Sequence[object]) -> str:
    for place, (now, then) in enumerate(zip(actions, record.actions, strict=False)):
        if now != then:
            return f"entry {record.number} action {place}: logged {then!r}, replayed {now!r}"
    return (
        f"entry {record.number}: {len(record.actions)} actions were logged, {len(actions)} replayed"
    )
