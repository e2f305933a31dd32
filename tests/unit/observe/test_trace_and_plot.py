"""The trace for Perfetto and the picture: whole, in order, and true to the log."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.observe.eventlog import Entry, encode_entry
from dora_rl.observe.trace import FIRST_INSTANCE, LEARNER, REWARDS
from dora_rl.types import Mode
from tests.kit.simulated_logs import resumed_run, whole_run


def write(folder: Path, entries: list[Entry]) -> None:
    folder.mkdir(parents=True)
    (folder / "000000000000.jsonl").write_bytes(b"".join(map(encode_entry, entries)))


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return whole_run(Mode.MULTI_VERSION, 2, inflight_groups=1_000, ready_max=1_000)


@pytest.fixture(scope="module")
def events(entries: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("run")
    write(folder / "events", entries)
    assert main(["trace", str(folder), "-o", str(folder / "trace.json")]) == 0
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def slices(events: list[dict[str, Any]], pid: int) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and e["pid"] == pid]


def test_every_step_load_and_sample_is_a_slice(
    events: list[dict[str, Any]], entries: list[Entry]
) -> None:
    names = Counter(e["name"].split()[0] for e in slices(events, LEARNER))
    assert names["train"] == 6 and names["fill"] == 6
    loads = sum(isinstance(a, act.Load) for e in entries for a in e.actions)
    assert sum(e["ph"] == "X" and e["name"].startswith("load v") for e in events) == loads
    finished = {tuple(e.event.request) for e in entries if isinstance(e.event, ev.SampleFinished)}
    ended = {
        (e["args"]["group"], e["args"]["sample"])
        for e in events
        if e["ph"] == "X" and e["args"].get("ended") == "finished"
    }
    assert ended == finished
    assert len(slices(events, REWARDS)) == 24


def test_migrations_are_flows_between_slices(
    events: list[dict[str, Any]], entries: list[Entry]
) -> None:
    begins = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    moved = sum(isinstance(e.event, ev.Moved) for e in entries)
    assert 0 < len(begins) <= moved and begins.keys() == ends.keys()
    for key, begin in begins.items():
        assert begin["pid"] != ends[key]["pid"]
        for end in (begin, ends[key]):
            tracks = [
                e
                for e in slices(events, end["pid"])
                if e["tid"] == end["tid"] and e["ts"] <= end["ts"] <= e["ts"] + e["dur"]
            ]
            assert tracks, "a flow that hangs in the air"


def test_slices_of_one_track_do_not_overlap(events: list[dict[str, Any]]) -> None:
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for e in events:
        if e["ph"] == "X" and e["pid"] >= FIRST_INSTANCE and e["tid"] > 0:
            tracks.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["ts"] + e["dur"]))
    for spans in tracks.values():
        spans.sort()
        assert all(a[1] <= b[0] + 0.3 for a, b in pairwise(spans))


def test_counters_never_go_below_zero(events: list[dict[str, Any]]) -> None:
    counters = {e["name"] for e in events if e["ph"] == "C"}
    assert counters == {"ready groups", "running requests", "staleness"}
    levels = [e["args"]["count"] for e in events if e["ph"] == "C" and "count" in e["args"]]
    assert min(levels) >= 0 and max(levels) > 1


def test_a_resumed_run_is_compressed_too(tmp_path: Path) -> None:
    write(tmp_path / "events", resumed_run(Mode.MULTI_VERSION))
    target = tmp_path / "trace.json.gz"
    assert main(["trace", str(tmp_path), "--output", str(target)]) == 0
    found = json.loads(gzip.decompress(target.read_bytes()))["traceEvents"]
    assert any(e["ph"] == "i" and e["name"].startswith("resumed") for e in found)


@pytest.mark.parametrize("name", ["picture.png", "picture.svg"])
def test_a_picture_is_drawn_from_the_log_alone(
    name: str, tmp_path: Path, entries: list[Entry]
) -> None:
    write(tmp_path / "events", entries)
    target = tmp_path / name
    assert main(["plot", str(tmp_path), "-o", str(target)]) == 0
    data = target.read_bytes()
    assert data.startswith(b"\x89PNG") if name.endswith("png") else b"who worked on" in data


def test_curves_of_evaluations_with_any_names(tmp_path: Path, entries: list[Entry]) -> None:
    write(tmp_path / "events", entries)
    lines = [{"version": 0, "eval/score": 0.1}, {"version": 4, "eval/score": 0.9}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "a.svg"), "--only", "curves"]) == 0
    text = (tmp_path / "a.svg").read_text()
    assert ">score<" in text and "who worked on" not in text


@pytest.mark.filterwarnings("error")
def test_responses_without_a_token_are_drawn_without_a_warning(
    tmp_path: Path, entries: list[Entry]
) -> None:
    write(tmp_path / "events", entries)
    (tmp_path / "metrics.jsonl").write_text(
        json.dumps({"step": 0, "reward/mean": 0.0, "response_length/mean": 0.0}) + "\n"
    )
    assert main(["plot", str(tmp_path), "-o", str(tmp_path / "a.svg"), "--only", "curves"]) == 0


def test_a_wrong_name_is_one_line(
    tmp_path: Path, entries: list[Entry], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path / "events", entries)
    assert main(["plot", str(tmp_path), "-o", "picture.gif"]) == 2
    assert "must end in .png" in capsys.readouterr().err
    assert main(["trace", str(tmp_path / "none"), "-o", str(tmp_path / "t.json")]) == 2
    assert "not a run directory" in capsys.readouterr().err
