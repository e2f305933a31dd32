"""The watchdog speaks when nothing moves, names the waits and their age, and not before."""

from __future__ import annotations

import json
from pathlib import Path

from dora_rl.controller.watchdog import Watchdog
from dora_rl.core.events import LearnerJoined, Started
from dora_rl.core.params import Params
from dora_rl.core.step import initial, step


def test_it_names_who_waits_for_whom_since_when(tmp_path: Path) -> None:
    now = 0.0
    params = Params()
    state = initial(params)
    step(state, Started(params), now)
    dog = Watchdog(tmp_path / "watchdog.jsonl", 10.0, lambda: now)
    assert dog.look(state) == []
    now = 9.0
    assert dog.look(state) == []
    now = 12.0
    assert dog.look(state) == [
        "no progress for 12 s",
        "controller waits for a learner to join since 12 s",
    ]
    now = 13.0
    assert dog.look(state) == [], "once per period"
    step(state, LearnerJoined(0, 0), now)
    dog.look(state, extra=1)  # a reward came: progress
    now = 22.0
    assert dog.look(state, extra=1) == []
    now = 24.0
    head, *lines = dog.look(state, extra=1)
    assert head == "no progress for 11 s"
    assert lines == [
        "step 0 waits for 8 more groups (0 generating, 0 with rewards outstanding) since 11 s"
    ]
    records = [json.loads(line) for line in (tmp_path / "watchdog.jsonl").read_text().splitlines()]
    assert [record["no_progress_s"] for record in records] == [12.0, 11.0]
    assert records[0]["waits"] == [
        {"who": "controller", "for": "a learner to join", "since_s": 12.0}
    ]
