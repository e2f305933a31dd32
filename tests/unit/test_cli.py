"""The command line: what it writes, and one clear line for every kind of wrong input."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from dora_rl import __version__
from dora_rl.cli import PIPE_CLOSED, build_parser, main, while_read
from dora_rl.commands.testbed import preset_of
from dora_rl.core.actions import Feed
from dora_rl.data.lengths import Pareto
from dora_rl.observe.eventlog import Entry, encode_entry, parse_line
from dora_rl.sim.presets import PRESETS, Preset
from dora_rl.types import UserError


def sim(*args: str) -> int:
    return main(["sim", "small", "--steps", "5", "--jobs", "1", *args])


BAD_SIM = {
    ("sim", "papr-64"): "unknown preset 'papr-64'; did you mean 'paper-64'?",
    ("sim", "zzz"): "unknown preset 'zzz'; there are paper-64",
    ("sim", "small", "--mode", "snyc"): "unknown mode 'snyc'; did you mean 'sync'?",
    ("sim", "small", "--set", "max_stalenes=1"): "did you mean 'max_staleness'?",
    ("sim", "small", "--set", "device.nic_byte_per_s=1"): "did you mean 'device.nic_bytes_per_s'?",
    ("sim", "small", "--set", "max_staleness"): "write key=value",
    ("sim", "small", "--set", "max_staleness=-1"): "max_staleness: must be 0 or more, not -1",
    ("sim", "small", "--set", "max_staleness=two"): "'two' is not a whole number",
    ("sim", "small", "--set", "inflight_share=nan"): "'nan' is not finite",
    ("sim", "small", "--set", "streaming=maybe"): "'maybe' is not true or false",
    ("sim", "small", "--set", "device.nic_bytes_per_s=-5e9"): "nic_bytes_per_s: must be positive",
    ("sim", "small", "--set", "device.hbm_bytes_per_s=0"): "hbm_bytes_per_s: must be positive",
    ("sim", "small", "--set", "batch_groups=0"): "batch_groups: must be positive",
    ("sim", "small", "--set", "efficiency.training=1.5"): "must be at most 1",
    ("sim", "small", "--set", "oversample=0.5"): "oversample: must be at least 1",
    ("sim", "small", "--set", "batch_groups=3"): "multiple of updates_per_step",
    ("sim", "paper-64", "--set", "resident_max=9"): "9 resident versions of Qwen2.5-32B need",
    ("sim", "small", "--set", "lengths=lognorm:1,2,3"): "did you mean 'lognormal'?",
    ("sim", "small", "--set", "lengths=lognormal:400"): "lognormal:MEAN,SIGMA,MAX",
    ("sim", "small", "--set", "lengths=lognormal:5000,1,4096"): "must be less than MAX",
    ("sim", "small", "--set", "lengths=lognormal:4000,2,4096"): "the mean cannot be 4000",
    ("sim", "small", "--set", "lengths=pareto:1.2,-4,100"): "must be positive",
    ("sim", "small", "--set", "lengths=pareto:1.2,400,100"): "MIN must be from 1 to MAX",
    ("sim", "small", "--set", "lengths=file:/nowhere/at/all"): "does not exist",
    ("sim", "small", "--gpus", "1"): "needs at least 2 GPUs",
    ("sim", "paper-64", "--gpus", "66"): "must be a multiple of that, not 66",
    ("sim", "small", "--gpus", "0"): "must be at least 1, not 0",
    ("sim", "small", "--gpus", "many"): "invalid whole number value: 'many'",
    ("sim", "small", "--split", "8"): "between 1 and 7, not 8",
    ("sim", "paper-64", "--split", "30"): "must be a multiple of 4",
    ("sim", "small", "--mode", "sync", "--split", "4"): "--split is for one_step_off",
    ("sim", "small", "--steps", "2"): "num_steps must be more than",
    ("sim", "small", "--batch-scale", "-1"): "--batch-scale must be positive",
    ("sim", "small", "--match", "one_step_off"): "write MODE=SHARE",
    ("sim", "small", "--match", "one_step_off=3"): "from 0 to 1",
    ("sim", "small", "--picture", "x.bmp"): "the name must end in .png",
    ("sim", "small", "--log", "somewhere"): "choose one --mode",
    ("sim", "small", "--gpu", "4"): "unknown argument '--gpu'; did you mean '--gpus'?",
    ("sim",): "PRESET",
    ("train",): "arguments are required: config\n",
    ("plan", "smal"): "did you mean 'small'?",
    ("plan", "small", "--gpus", "1"): "needs at least 2 GPUs",
    ("audit", "/nowhere"): "/nowhere is not a run directory",
    ("replay", "/nowhere"): "/nowhere is not a run directory",
    ("simm", "small"): "unknown command 'simm'; did you mean 'sim'?",
}


@pytest.mark.parametrize("argv", BAD_SIM, ids=" ".join)
def test_wrong_input_gets_one_line_and_status_2(argv, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(list(argv)) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("dora-rl: error: ") and said.err.count("\n") == 1
    assert BAD_SIM[argv] in said.err
    assert not list(tmp_path.iterdir())  # nothing was begun


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"", "is empty"), (b"12\nlong\n", "line 2: 'long'"), (b"\xff\xfe\x00", "is not text")],
)
def test_bad_length_files(tmp_path, capsys, content, expected):
    path = tmp_path / "lengths.txt"
    path.write_bytes(content)
    assert sim("--set", f"lengths=file:{path}") == 2
    assert expected in capsys.readouterr().err


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")
def test_unreadable_and_unwritable_files(tmp_path, capsys):
    path = tmp_path / "lengths.txt"
    path.write_text("5\n")
    path.chmod(0)
    assert sim("--set", f"lengths=file:{path}") == 2
    assert "cannot read the length file" in capsys.readouterr().err
    tmp_path.chmod(0o500)
    assert sim("--json", str(tmp_path / "out.json")) == 2
    assert "permission denied" in capsys.readouterr().err


def test_results_that_cannot_be_written_are_refused_first(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert sim("--json", str(tmp_path / "file" / "out.json")) == 2
    assert "cannot make the folder" in capsys.readouterr().err
    assert sim("--json", str(tmp_path)) == 2
    assert "it is a folder" in capsys.readouterr().err


def test_a_folder_without_a_log_is_no_run(tmp_path, capsys):
    for command in ("audit", "replay"):
        assert main([command, str(tmp_path)]) == 2
        assert "holds no event log" in capsys.readouterr().err


def test_debug_shows_the_traceback():
    with pytest.raises(UserError):
        main(["sim", "papr-64", "--debug"])


def test_version_and_help(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0 and __version__ in capsys.readouterr().out
    assert main([]) == 0
    text = capsys.readouterr().out
    assert all(command in text for command in ("sim", "plan", "audit", "replay"))


def test_starting_up_imports_nothing_heavy():
    heavy = "numpy torch matplotlib rich.table pydantic"
    code = (
        "import sys; from dora_rl.cli import main; main([]);"
        f"print('loaded:', *[m for m in {heavy.split()!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "loaded:", done.stderr


def test_sim_writes_json_and_prints_every_mode(tmp_path, capsys):
    path = tmp_path / "new" / "sim.json"
    assert sim("--json", str(path), "--gpus", "4", "--seed", "5") == 0
    document = json.loads(path.read_text())
    assert (document["preset"], document["gpus"], document["seed"]) == ("small", 4, 5)
    text = capsys.readouterr().out
    assert all(mode in text for mode in document["modes"]) and len(document["modes"]) == 5


def test_same_seed_same_figures(tmp_path):
    for name in ("a", "b"):
        assert sim("--mode", "multi_version,sync", "--json", str(tmp_path / name)) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sim("--mode", "multi_version,sync", "--seed", "1", "--json", str(tmp_path / "c")) == 0
    assert (tmp_path / "a").read_bytes() != (tmp_path / "c").read_bytes()


@pytest.mark.full
def test_the_number_of_processes_changes_nothing(tmp_path):
    for jobs in ("1", "2"):
        path = str(tmp_path / jobs)
        assert main(["sim", "small", "--jobs", jobs, "--json", path]) == 0
    assert (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def preset_from(*args: str) -> Preset:
    parser, _ = build_parser()
    return preset_of(parser.parse_args(["sim", "small", *args]))


def test_switches_and_settings_change_the_preset():
    assert preset_from() == PRESETS["small"]
    preset = preset_from("--no-kv-moves", "--no-repartition", "--no-streaming")
    assert not (preset.kv_moves or preset.repartition or preset.streaming)
    preset = preset_from("--gpus", "12", "--batch-scale", "2", "--set", "max_staleness=3")
    assert (preset.num_devices, preset.batch_groups, preset.max_staleness) == (12, 32, 3)
    preset = preset_from("--set", "device.nic_bytes_per_s=25e9", "--set", "resident_max=2")
    assert preset.device.nic_bytes_per_s == 25e9 and preset.resident_max == 2
    preset = preset_from("--set", "lengths=pareto:1.5,10,100", "--set", "streaming=false")
    assert preset.lengths == Pareto(1.5, 10, 100) and not preset.streaming


def test_lengths_reach_the_run(tmp_path):
    def step_s(lengths: str) -> float:
        path = tmp_path / "out.json"
        assert sim("--mode", "sync", "--json", str(path), "--set", f"lengths={lengths}") == 0
        return json.loads(path.read_text())["modes"]["sync"]["step_s"]

    observed = tmp_path / "lengths.txt"
    observed.write_text("50\n60\n")
    short, long = step_s(f"file:{observed}"), step_s("lognormal:1500,0.5,4096")
    assert short < step_s("pareto:2,200,4096") < long


def test_a_split_that_is_given_is_used(tmp_path):
    path = tmp_path / "out.json"
    assert sim("--mode", "one_step_off", "--split", "3", "--json", str(path)) == 0
    entry = json.loads(path.read_text())["modes"]["one_step_off"]
    assert entry["split"] == {"rollout": 3, "train": 5} and "best" not in entry


def test_match_shows_two_splits(tmp_path, capsys):
    path = tmp_path / "out.json"
    slow = ("--set", "engine.launch_s=7e-5")  # so that too few instances can be felt
    match = ("--mode", "multi_version", "--match", "multi_version=1.0")
    assert sim(*match, *slow, "--json", str(path)) == 0
    entry = json.loads(path.read_text())["modes"]["multi_version"]
    assert entry["matched"] is True and entry["split"]["rollout"] == 1
    assert entry["best"]["split"]["rollout"] > 1
    text = capsys.readouterr().out
    assert "matched" in text and "best" in text


def test_picture(tmp_path):
    png, svg = tmp_path / "sim.png", tmp_path / "sim.svg"
    assert sim("--picture", str(png), "--mode", "sync") == 0
    assert png.read_bytes().startswith(b"\x89PNG") and png.stat().st_size > 20_000
    assert sim("--picture", str(svg)) == 0
    text = svg.read_text()
    for words in ("multi_version: ", "one_step_off", "replication", "version 3", "trainer", "idle"):
        assert words in text


def test_plan_prints_and_writes_its_reasons(tmp_path, capsys):
    path = tmp_path / "plan.json"
    assert main(["plan", "small", "--gpus", "3", "--jobs", "1", "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["best"]["split"]["rollout"] in (1, 2)
    text = capsys.readouterr().out
    assert "Bottleneck" in text and "Staleness" in text
    assert all(reason.split(":")[0] in text for reason in document["reasons"])


@pytest.fixture
def logged(tmp_path) -> Path:
    run = tmp_path / "run"
    assert sim("--mode", "multi_version", "--split", "4", "--log", str(run)) == 0
    return run


def rewrite(run: Path, change) -> None:
    """Put `change(entry)` in the place of the first entry for which it is not None."""
    (segment,) = (run / "events").glob("*.jsonl")
    lines = segment.read_bytes().splitlines(keepends=True)
    for place, line in enumerate(lines):
        entry = parse_line(line)
        changed = change(entry) if isinstance(entry, Entry) else None
        if changed is not None:
            lines[place] = encode_entry(changed)
            segment.write_bytes(b"".join(lines))
            return
    raise AssertionError("nothing to change")


def test_a_simulated_log_passes_audit_and_replay(logged, tmp_path, capsys):
    path = tmp_path / "audit.json"
    assert main(["audit", str(logged), "--json", str(path)]) == 0
    document = json.loads(path.read_text())
    assert document["ok"] and document["figures"]["groups_trained"] == 5 * 16
    assert "every promise was kept" in capsys.readouterr().out
    assert main(["replay", str(logged)]) == 0
    assert "the same actions" in capsys.readouterr().out
    assert main(["replay", str(logged / "events")]) == 0


def test_audit_says_what_a_baseline_does_not_promise(tmp_path, capsys):
    assert sim("--mode", "partial", "--log", str(tmp_path)) == 0
    assert main(["audit", str(tmp_path)]) == 0
    assert "does not promise C1" in capsys.readouterr().out


def test_audit_and_replay_find_a_changed_log(logged, tmp_path, capsys):
    def drop_feed(entry: Entry) -> Entry | None:
        kept = [action for action in entry.actions if not isinstance(action, Feed)]
        return replace(entry, actions=kept) if len(kept) < len(entry.actions) else None

    rewrite(logged, drop_feed)
    path = tmp_path / "audit.json"
    assert main(["audit", str(logged), "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    assert not document["ok"] and document["findings"]
    assert "findings" in capsys.readouterr().out
    assert main(["replay", str(logged)]) == 1
    assert "entry" in capsys.readouterr().out


def test_an_existing_log_is_not_overwritten(logged, capsys):
    assert sim("--mode", "multi_version", "--split", "4", "--log", str(logged)) == 2
    assert "already holds a run" in capsys.readouterr().err


def test_a_reader_that_has_enough_is_no_error() -> None:
    """As in `dora-rl check | head -n 1`."""
    argv = [sys.executable, "-m", "dora_rl.cli", "check"]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait() == PIPE_CLOSED
    process.stderr.close()


def test_another_broken_pipe_is_not_kept_quiet() -> None:
    def breaks() -> int:
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        while_read(breaks)
