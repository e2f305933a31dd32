"""What a comparison runs: the same but for what it says it changes."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from dora_rl.bench.paradigms import (
    ABLATIONS,
    ALTERNATING,
    Case,
    Split,
    case_config,
    ratios,
    splits_of,
)
from dora_rl.commands.compare import _split
from dora_rl.config import ModelConfig, RunConfig
from dora_rl.observe.meters import CpuMeter
from dora_rl.types import Mode, UserError

BASE = RunConfig(model=ModelConfig(path="m"))


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_every_split_of_an_alternating_mode_uses_all_cores_in_both_phases(mode, num_cores):
    splits = splits_of(mode, num_cores)
    assert len(set(splits)) == len(splits) > 0
    for split in splits:
        if mode in ALTERNATING:
            assert split.num_instances * split.threads == num_cores == split.learner_threads
        assert split.num_instances * split.threads <= num_cores


def test_two_runs_differ_only_where_they_say_so():
    split = Split(2, 1, 1)
    one, two = (
        case_config(BASE, Case(mode.value, mode), split, 3, 20, Path("r")).model_dump()
        for mode in (Mode.SYNC, Mode.MULTI_VERSION)
    )
    assert one["orchestration"].pop("mode") is Mode.SYNC
    assert two["orchestration"].pop("mode") is Mode.MULTI_VERSION
    assert one == two
    assert one["runtime"]["seed"] == one["data"]["seed"] == one["trainer"]["seed"] == 3
    assert one["data"]["eval"] == ()


def test_an_ablation_changes_its_switch_and_nothing_else():
    split = Split(2, 1, 1)
    plain = case_config(BASE, Case("x", Mode.MULTI_VERSION), split, 0, 20, Path("r"))
    for case in ABLATIONS:
        config = case_config(BASE, case, split, 0, 20, Path("r"))
        for section, values in case.changes.items():
            assert getattr(config, section) != getattr(plain, section)
            config = config.model_copy(update={section: getattr(plain, section)})
            assert values
        assert config == plain


def test_ratios_are_of_mean_speeds():
    rows = [
        {"name": name, "mean": {"tokens_per_s": speed}}
        for name, speed in (("sync", 100.0), ("multi_version", 150.0), ("no streaming", 120.0))
    ]
    assert ratios({"rows": rows}) == {"sync": 1.5}
    assert ratios({"rows": rows[:1]}) == {}


def test_a_split_is_read_and_wrong_ones_are_refused():
    assert _split("2x1+4") == Split(2, 1, 4)
    for text in ("2", "2x1", "axb+c", "0x1+1"):
        with pytest.raises(UserError, match="--split"):
            _split(text)


def test_the_meter_sees_what_a_process_uses():
    import os

    meter = CpuMeter(os.getpid())
    meter.start()
    begin = time.monotonic()
    while time.process_time() < 0.6 or time.monotonic() - begin < 0.9:
        sum(range(1000))
    meter.end()
    used = meter.between(begin, time.monotonic())
    assert sum(used.values()) > 0
    assert meter.between(begin + 1e6, begin + 2e6) == {}


@pytest.mark.parametrize(
    ("command", "still"), [("exec sleep 60", 1.0), ("while :; do :; done", 0.0)]
)
def test_the_meter_sees_whether_anything_runs(command: str, still: float):
    child = subprocess.Popen(["sh", "-c", command])
    while not begun(child.pid, still):
        time.sleep(0.02)
    meter = CpuMeter(child.pid)
    meter.start()
    while len(meter.looks) < 12:
        time.sleep(0.05)
    meter.end()
    child.kill()
    child.wait()
    first = meter.looks[0][0]
    assert meter.still_between(first, time.monotonic()) == still
    assert meter.still_between(first + 1e6, first + 2e6) is None


def begun(pid: int, still: float) -> bool:
    """A sleep that sleeps, or a shell that has been busy."""
    name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition(" (")[2].rpartition(") ")
    fields = rest.split()
    return (name == "sleep" and fields[0] == "S") if still else int(fields[11]) > 0
