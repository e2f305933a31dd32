"""A log of a release that said trainer where we say learner: read, replayed, audited, resumed.

`tests/vectors/log_that_says_trainer` was written by that release: a small run whose learner
reports, is lost once, and is restarted once because it made no progress. Its second segment begins
with a snapshot.
"""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path

import numpy as np

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.step import step
from dora_rl.io.append_log import text_of, whole_lines
from dora_rl.io.codec import encode, loads
from dora_rl.observe.audit import audit_run
from dora_rl.observe.columns import columns
from dora_rl.observe.eventlog import (
    Entry,
    FileLog,
    Snapshot,
    parse_line,
    read,
    recover,
    replay,
    segments,
)

OLD = Path(__file__).parents[2] / "vectors" / "log_that_says_trainer"
LINES = [line for path in segments(OLD) for line in whole_lines(path.read_bytes())]
NAMES = {
    "TrainerJoined": ev.LearnerJoined,
    "TrainerLost": ev.LearnerLost,
    "TrainerReport": ev.LearnerReport,
    "RestartTrainer": act.RestartLearner,
}


def test_every_old_name_is_read_as_the_new_one() -> None:
    found: Counter[str] = Counter()
    for line in LINES:
        record = parse_line(line)
        assert record is not None
        plain = loads(text_of(line) or b"")
        if not isinstance(record, Entry):
            continue
        values = zip([plain["e"], *plain["a"]], [record.event, *record.actions], strict=True)
        for written, value in values:
            kind = NAMES.get(written["is"])
            if kind is not None:
                found[written["is"]] += 1
                assert type(value) is kind
                again = encode(ev.Event if written is plain["e"] else act.Action, value)
                assert again == written | {"is": kind.__name__}
    assert found == {"TrainerJoined": 3, "TrainerLost": 1, "TrainerReport": 1, "RestartTrainer": 1}


def test_it_replays_to_the_same_actions_and_states() -> None:
    result = replay(read(OLD))
    assert result.ok, result.difference
    assert result.num_snapshots == 1


def test_the_audit_reads_it() -> None:
    report = audit_run(OLD)
    assert not report.findings


def test_its_snapshot_has_the_learner() -> None:
    """A field that has another name now is not lost with its default."""
    (snapshot,) = [record for record in read(OLD) if isinstance(record, Snapshot)]
    assert snapshot.state["trainer"]["alive"] and snapshot.state["trainer"]["incarnation"] == 3
    learner = snapshot.restore().learner
    assert learner.alive and learner.incarnation == 3


def test_a_run_goes_on_from_it(tmp_path: Path) -> None:
    """Cut in the middle of a step, it is resumed, and what is written then is one log with it."""
    folder = tmp_path / "events"
    shutil.copytree(OLD, folder)
    last = segments(folder)[-1]
    kept = whole_lines(last.read_bytes())[:12]
    last.write_bytes(b"".join(kept))
    log, state = FileLog.resume(folder)
    event = ev.LearnerLost("died", incarnation=state.learner.incarnation)
    log.append(1e6, event, step(state, event, 1e6))
    log.close()
    again, number, _, _ = recover(folder)
    assert number == 40 + len(kept) and not again.learner.alive
    assert replay(read(folder)).ok


def test_the_columns_of_a_picture_know_it() -> None:
    rare = [r.value for path in segments(OLD) for r in columns(path.read_bytes()).rare]
    kinds = Counter(type(value) for value in rare)
    assert kinds[ev.LearnerJoined] == 3 and kinds[ev.LearnerLost] == 1
    assert kinds[act.RestartLearner] == 1 and kinds[ev.LearnerReport] == 0, "reports are left out"
    tables = [columns(path.read_bytes()).tables[ev.Scored] for path in segments(OLD)]
    assert np.concatenate([table["reward"] for table in tables]).size == 12
