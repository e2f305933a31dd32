"""What the views show, against the audit and the log itself."""

from __future__ import annotations

import base64
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dora_rl.config import ModelConfig, RunConfig
from dora_rl.controller.records import PROMPT_MAX, PromptTexts
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.dashboard.documents import TEXT_MAX, configuration, pieces
from dora_rl.dashboard.run_files import RunFiles
from dora_rl.dashboard.timeline import COLOURS, STAYS_MAX
from dora_rl.dashboard.watcher import Watcher
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import Entry, encode_entry
from dora_rl.observe.plots import draw_run
from dora_rl.store.table import Row, Table, peek
from dora_rl.types import Mode, RequestId
from tests.unit.dashboard.made_runs import simulated, write_log, write_run


@pytest.fixture(scope="module")
def entries() -> list[Entry]:
    return simulated()


@pytest.fixture(scope="module")
def run_dir(entries: list[Entry], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "my_run"
    write_run(folder, entries)
    return folder


@pytest.fixture(scope="module")
def watcher(run_dir: Path) -> Watcher:
    watcher = Watcher(run_dir, audit=False)
    watcher.look()
    return watcher


def shown(watcher: Watcher, name: str, **query: Any) -> Any:
    text = watcher.document(name, {key: str(value) for key, value in query.items()})
    assert text is not None
    return json.loads(text)


def test_the_overview_agrees_with_the_audit(watcher: Watcher, entries: list[Entry]) -> None:
    found, figures = shown(watcher, "overview"), audit(entries).figures
    assert (found["name"], found["status"], found["mode"]) == ("my_run", "finished", figures.mode)
    assert found["step"] == figures.steps == found["num_steps"]
    assert found["states"]["trained"] == figures.groups_trained
    assert sum(found["states"].values()) == figures.groups_issued
    # The run's own count goes before the log's, which has an environment's tokens in it.
    assert found["tokens_trained"] == figures.tokens_trained - 10 * figures.steps
    assert found["tokens_per_s"] == pytest.approx(found["tokens_trained"] / (2 * figures.steps))
    assert found["migrations"] == figures.migrations
    assert found["num_entries"] == figures.num_entries
    promises = found["promises"]
    assert promises["staleness_max"] == figures.staleness_max
    assert promises["staleness_mean"] == pytest.approx(figures.staleness_mean)
    assert (promises["mixed"], promises["discarded"]) == (0, figures.groups_discarded)
    assert found["evaluation"]["eval/sampled"] == 0.25


def test_groups_are_told_by_their_prompts(tmp_path: Path, entries: list[Entry]) -> None:
    """Live ones too: what is written later is found later, and a damaged line hides one prompt."""
    write_run(tmp_path, entries)
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    rows = shown(watcher, "groups", order="oldest", size=3)["groups"]
    assert [row["text"] for row in rows] == ["", "", ""]
    first, second, third = (row["prompt"] for row in rows)
    path = tmp_path / "prompts.jsonl"
    texts = PromptTexts(path, print)
    texts.add(first, "What is 1+1?")
    texts.add(second, "long " * 1000)
    texts.close()
    watcher.revision += 1
    rows = shown(watcher, "groups", order="oldest", size=3)["groups"]
    assert [row["text"][:9] for row in rows] == ["What is 1", "long long", ""]
    assert len(rows[1]["text"]) == TEXT_MAX
    assert shown(watcher, "group", group=rows[1]["group"])["text"] == ("long " * 1000)[:PROMPT_MAX]
    with path.open("a") as file:
        file.write(f'{{"prompt": {first}, "te\n')  # the line before it stands
        file.write('["prompt"]\n{"prompt": ')
    told: list[str] = []
    watcher.revision += 1
    assert shown(watcher, "groups", order="oldest", size=1)["groups"][0]["text"] == "What is 1+1?"
    texts = PromptTexts(path, told.append)  # the run is resumed
    texts.add(first, "again")
    texts.add(third, "new")
    texts.close()
    assert len(told) == 2 and all("prompts.jsonl at" in line for line in told)
    assert len(path.read_text().splitlines()) == 3
    watcher.revision += 1
    rows = shown(watcher, "groups", order="oldest", size=3)["groups"]
    assert [row["text"][:9] for row in rows] == ["What is 1", "long long", "new"]


def test_what_is_damaged_is_left_out_and_read_once(tmp_path: Path, entries: list[Entry]) -> None:
    write_run(tmp_path, entries)
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    before = len(watcher.files.steps)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 900}\n{"step": 901}\nnull\n5\n{"st\n{"step": "x"}\n{"step": 902}\n')
    for _ in range(3):
        watcher.look()
    assert [line["step"] for line in watcher.files.steps[before:]] == [900, 901, 902]
    (tmp_path / "totals.json").write_bytes(b"\xff")
    (tmp_path / "config.json").write_text("[]")
    watcher.revision += 1
    assert shown(watcher, "config") == [] and shown(watcher, "overview")["tokens_generated"] > 0


def test_curves_can_be_drawn_over_time_and_tokens(watcher: Watcher, entries: list[Entry]) -> None:
    found, figures = shown(watcher, "metrics"), audit(entries).figures
    commits = [e.now for e in entries if isinstance(e.event, ev.StepCommitted)]
    assert found["axes"]["seconds"]["y"] == pytest.approx(commits, rel=1e-5)
    assert found["axes"]["seconds"]["x"] == found["steps"]["reward/mean"]["x"]
    tokens = found["axes"]["tokens"]["y"]
    assert tokens == sorted(tokens) and len(tokens) == figures.steps
    assert tokens[-1] == pytest.approx(figures.tokens_trained, rel=1e-5)


def test_the_configuration_is_told_with_its_defaults(tmp_path: Path, entries: list[Entry]) -> None:
    write_run(tmp_path, entries)
    config = {
        "model": {"path": "somewhere"},
        "orchestration": {"num_steps": 7, "mode": "multi_version"},
        "rollout": {"stop": ["a", "b"], "of_another_release": 3},
        "of_another_release": {"key": 1},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    found = {
        row["key"]: (row["value"], row["default"], row["changed"])
        for row in shown(watcher, "config")
    }
    assert found["model.path"] == ("somewhere", None, True)
    assert found["orchestration.mode"] == ("multi_version", "multi_version", False)
    assert found["orchestration.num_steps"][0] == 7 and found["orchestration.num_steps"][2]
    assert found["rollout.of_another_release"] == (3, None, True)
    assert found["of_another_release.key"] == (1, None, True)
    (tmp_path / "config.json").unlink()
    watcher = Watcher(tmp_path, audit=False)
    assert shown(watcher, "config") == []


def test_a_whole_configuration_of_a_run_shows_what_was_changed(tmp_path: Path) -> None:
    """As `train` writes it: lists and tables equal their defaults although JSON has no tuples."""
    path = tmp_path / "config.json"
    config = RunConfig(model=ModelConfig(path="m"), orchestration={"num_steps": 3})  # pyright: ignore
    path.write_text(config.model_dump_json())
    rows = configuration(RunFiles(tmp_path))
    assert {row["key"] for row in rows if row["changed"]} == {
        "model.path",
        "orchestration.num_steps",
    }


def test_a_failed_evaluation_is_no_zero_and_a_second_try_replaces_it(
    tmp_path: Path, entries: list[Entry]
) -> None:
    write_run(tmp_path, entries)
    failed = {"version": 3, "eval/sampled": None, "eval/num_failed": 8.0}
    failed |= {"eval/num_answers": 8.0, "eval/failure": "ValueError: boom"}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    assert shown(watcher, "overview")["evaluation"]["eval/sampled"] is None
    curves = shown(watcher, "metrics")["evaluations"]
    assert curves["eval/sampled"] == {"x": [0, 3], "y": [0.25, None]}
    assert "eval/failure" not in curves
    draw_run(tmp_path, tmp_path / "run.png")
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"version": 3, "eval/sampled": 0.5}) + "\n")
    watcher.look()
    assert shown(watcher, "metrics")["evaluations"]["eval/sampled"]["y"] == [0.25, 0.5]


def test_a_step_without_its_figures_makes_the_sum_unknown(
    entries: list[Entry], tmp_path: Path
) -> None:
    write_run(tmp_path, entries)
    path = tmp_path / "metrics.jsonl"
    with path.open("a") as file:
        file.write('{"step": 1000, "loss": 0.5}\n')
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    found = shown(watcher, "overview")
    assert found["tokens_trained"] is None and found["tokens_per_s"] is None
    assert found["tokens_generated"] > 0


@pytest.mark.parametrize("mode", [Mode.PARTIAL, Mode.REPLICATION])
def test_what_a_baseline_gives_up_is_shown(mode: Mode, tmp_path: Path) -> None:
    entries = simulated(mode)
    write_log(tmp_path / "events", entries)
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    promises, figures = shown(watcher, "overview")["promises"], audit(entries).figures
    assert promises["mixed"] == round(figures.mixed_version_frac * figures.samples_trained)
    assert promises["discarded"] == figures.groups_discarded
    assert promises["discarded_tokens"] == figures.discarded_tokens
    assert promises["mixed_given_up"] == (mode is Mode.PARTIAL)
    assert promises["discarded_given_up"] == (mode is Mode.REPLICATION)
    assert shown(watcher, "metrics")["evaluations"] == {}  # no files beside the log, and no fault


def test_curves_are_those_of_the_log_and_of_the_metrics(
    watcher: Watcher, entries: list[Entry]
) -> None:
    found = shown(watcher, "metrics")
    step_of = {
        action.group: action.step
        for entry in entries
        for action in entry.actions
        if isinstance(action, act.EndGroup)
    }
    rewards: dict[int, list[float]] = {}
    for entry in entries:
        if isinstance(entry.event, ev.Scored):
            step = step_of[entry.event.request.group]
            assert step is not None
            rewards.setdefault(step, []).append(entry.event.reward)
    plain = [sum(rewards[step]) / len(rewards[step]) for step in range(6)]
    assert found["steps"]["reward/mean"]["y"] == pytest.approx(plain, rel=1e-5)
    assert found["steps"]["entropy"]["y"] == [0.5] * 6
    assert found["evaluations"]["eval/sampled"] == {"x": [0], "y": [0.25]}


def test_distributions_count_every_sample(watcher: Watcher, entries: list[Entry]) -> None:
    found, figures = shown(watcher, "distributions"), audit(entries).figures
    assert found["staleness"] == list(figures.staleness_counts)
    finished = Counter(e.event.finish for e in entries if isinstance(e.event, ev.SampleFinished))
    assert {name: sum(counts) for name, counts in found["lengths"].items()} == dict(finished)
    assert sum(found["rewards"]) == figures.samples_trained


def test_a_wide_window_has_bins_and_a_narrow_one_single_stays(watcher: Watcher) -> None:
    history = watcher.history
    few = shown(watcher, "timeline", begin=1, end=1.5, width=800)
    assert few["num_stays"] == len(few["stays"]["begin"]) <= STAYS_MAX
    spans = history.placements.all_spans(history.now_s)
    inside = (spans["end"] > 1) & (spans["begin"] < 1.5)
    assert few["num_stays"] == int(inside.sum())
    assert few["instances"] == sorted(history.names)


def test_bins_hold_the_time_that_stays_take(tmp_path: Path) -> None:
    write_log(tmp_path / "events", simulated(batch_groups=192, group_size=8))
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    found, history = shown(watcher, "timeline", width=1000), watcher.history
    assert found["num_stays"] > STAYS_MAX and "stays" not in found
    bins = found["bins"]
    shape = (len(found["instances"]), COLOURS, bins["num"])
    levels = np.frombuffer(base64.b64decode(bins["data"]), np.uint8).reshape(shape)
    running = levels.sum(axis=1) / 255 * bins["most"]
    spans = history.placements.all_spans(history.now_s)
    for row, name in enumerate(found["instances"]):
        here = spans["instance"] == history.names[name]
        total = (spans["end"] - spans["begin"])[here].sum()
        assert running[row].sum() * history.now_s / bins["num"] == pytest.approx(total, rel=0.03)
    assert found["moves"]["num"] == len(history.moves)


def test_the_timeline_says_why_groups_were_held_back(tmp_path: Path) -> None:
    entries = simulated(freshness=True)
    write_log(tmp_path / "events", entries)
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    held = shown(watcher, "timeline", width=1000)["held"]
    logged = [a for entry in entries for a in entry.actions if isinstance(a, act.HoldBack)]
    assert held and [row[0] for row in held] == [action.step for action in logged]
    assert all(begin < end for _, begin, end, _ in held)
    assert f"{logged[0].ahead} of them ahead of step {logged[0].step};" in held[0][3]


def test_groups_are_paged_filtered_and_ordered(watcher: Watcher) -> None:
    history = watcher.history
    first = shown(watcher, "groups", size=10)
    assert first["total"] == len(history.groups) and len(first["groups"]) == 10
    assert [g["group"] for g in first["groups"]] == list(range(first["total"]))[::-1][:10]
    last = shown(watcher, "groups", size=10, page=10_000)
    assert last["groups"][-1]["group"] == 0
    one = shown(watcher, "groups", version=2, state="trained", size=200)
    assert one["total"] == int((history.groups["version"] == 2).sum())
    assert {g["version"] for g in one["groups"]} == {2}
    assert shown(watcher, "groups", state="failed")["groups"] == []
    long = [g["tokens"] for g in shown(watcher, "groups", order="longest")["groups"]]
    assert long == sorted(long, reverse=True) and long[0] == int(history.groups["tokens"].max())


def test_one_group_and_one_trajectory(watcher: Watcher) -> None:
    group = shown(watcher, "group", group=5)
    assert [s["sample"] for s in group["samples"]] == list(range(4))
    assert group["state"] == "trained" and group["staleness"] == group["step"] - group["version"]
    for sample in group["samples"]:
        assert sample["stays"][-1]["ended"] == "finished"
        assert all(stay["version"] == group["version"] for stay in sample["stays"])
    read = shown(watcher, "trajectory", group=5, sample=2)
    assert (read["group"], read["sample"], read["step"]) == (5, 2, group["step"])
    assert read["reward"] == pytest.approx(group["samples"][2]["reward"])
    assert len(read["pieces"]) == len(read["token_ids"]) and all(read["pieces"])
    assert read["turns"] == [[0, 2, 1], [2, 4, 0], [4, 6, 1]]
    assert shown(watcher, "group", group=10_000) is None
    assert shown(watcher, "trajectory", group=5, sample=40) is None


def test_every_sample_is_found_in_the_rollouts(watcher: Watcher, run_dir: Path) -> None:
    files = RunFiles(run_dir)
    lines = [json.loads(line) for line in (run_dir / "rollouts.jsonl").read_text().splitlines()]
    for line in lines[::7]:
        found = files.rollout(line["step"], line["group"], line["sample"])
        assert found == line
    assert files.rollout(99, 1, 0) is None and files.rollout(0, 99_999, 0) is None


def test_a_live_run_is_followed_without_reading_again(entries: list[Entry], tmp_path: Path) -> None:
    path = tmp_path / "events" / "000000000000.jsonl"
    write_log(tmp_path / "events", entries[:200])
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    before = shown(watcher, "overview")
    assert before["status"] == "live" and before["num_entries"] == 200
    states = before["states"]
    assert states["generating"] > 0
    read = watcher.tail.num_bytes
    with path.open("ab") as file:
        file.write(b"".join(map(encode_entry, entries[200:400])))
    watcher.look()
    assert shown(watcher, "overview")["num_entries"] == 400
    assert watcher.tail.num_bytes == path.stat().st_size > read
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 1.0}\n{"step": 1, "lo')
    watcher.look()
    assert shown(watcher, "metrics")["steps"]["loss"]["y"] == [1.0]
    anew = tmp_path / "metrics.tmp"  # as a resume does that takes a step back
    anew.write_text('{"version": 0, "eval/score": NaN}\n')
    anew.replace(tmp_path / "metrics.jsonl")
    watcher.look()
    assert shown(watcher, "overview")["evaluation"] == {"version": 0, "eval/score": None}
    os.utime(path, (1, 1))  # nobody has written for a long time, and nobody said stop
    watcher.look()
    assert shown(watcher, "overview")["status"] == "silent"


def test_a_sample_is_read_before_its_group_is_trained(entries: list[Entry], tmp_path: Path) -> None:
    write_log(tmp_path / "events", entries[:150])
    table = Table(tmp_path / "table.log")
    columns = {
        "token_ids": np.array([4, 5, 6], np.int32),
        "logprobs": np.array([-0.5, -1.0, -2.0], np.float32),
        "loss_mask": np.array([1, 0, 1], np.int8),
        "text": "abc",
    }
    first, second = RequestId(1, 2), RequestId(1, 3)
    table.put([Row(first, 0, columns), Row(second, 0, columns | {"text": "d"})])
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    found = shown(watcher, "trajectory", group=1, sample=2)
    assert (found["text"], found["logprobs"]) == ("abc", [-0.5, -1.0, -2.0])
    assert found["turns"] == [[0, 1, 1], [1, 2, 0], [2, 3, 1]]
    assert shown(watcher, "trajectory", group=1, sample=0) is None
    torn = (tmp_path / "table.log").read_bytes()[:-5]
    (tmp_path / "table.log").write_bytes(torn)  # being written: nothing is cut off, nothing fails
    assert peek(tmp_path / "table.log", first) is None
    assert (tmp_path / "table.log").read_bytes() == torn
    table.close()


def test_a_sample_of_a_cluster_is_read_from_its_shard(entries: list[Entry], tmp_path: Path) -> None:
    write_log(tmp_path / "events", entries[:150])
    request, arrays = RequestId(1, 2), {"token_ids": np.array([4, 5], np.int32)}
    arrays |= {"logprobs": np.array([-0.5, -1.0], np.float32), "loss_mask": np.ones(2, np.uint8)}
    for name, columns in (("table.log", {"num_tokens": 2}), ("table.1.log", arrays)):
        table = Table(tmp_path / name)
        table.put([Row(request, 0, columns)])
        table.close()
    watcher = Watcher(tmp_path, audit=False)
    watcher.look()
    found = shown(watcher, "trajectory", group=1, sample=2)
    assert (found["token_ids"], found["turns"]) == ([4, 5], [[0, 2, 1]])


def test_tokens_that_share_a_character_are_shown_together() -> None:
    text = {1: b"a", 2: "é".encode()[:1], 3: "é".encode()[1:], 4: b"b", 5: b"\xff"}

    def decode(ids: Any) -> str:
        return b"".join(text[i] for i in ids).decode(errors="replace")

    assert pieces([1, 2, 3, 4], decode) == ["a", "é", "", "b"]
    assert pieces([1, 5], decode) == ["a", "�"]
    assert pieces([], decode) == []
