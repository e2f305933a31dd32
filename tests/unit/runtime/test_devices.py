"""Instances of several GPUs on one machine: which ones, and that the worker sees no others."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.config import RunConfig
from dora_rl.runtime.cluster_run import demand_of
from dora_rl.runtime.crew import Crew
from dora_rl.runtime.devices import assign_gpus
from dora_rl.runtime.layout import plan_layout
from dora_rl.types import UserError

SEEN = """
import os

def say(setup, channel):
    channel.send("seen", {"gpus": os.environ.get("CUDA_VISIBLE_DEVICES")})
    channel.receive()
"""


def config(**sections: dict[str, object]) -> RunConfig:
    data = {
        "model": {"path": "unused"},
        "rollout": {"backend": "vllm", "num_instances": 2},
        "resources": {"devices_per_instance": 2},
    }
    return RunConfig.model_validate(data | sections)


def test_every_instance_has_gpus_of_its_own_behind_the_learners() -> None:
    given = assign_gpus(config(), ("a", "b"), ("3", "4", "5", "6", "7", "8"))
    assert given == {"a": ("4", "5"), "b": ("6", "7")}
    with pytest.raises(UserError, match="need 5 GPUs, 4 are visible"):
        assign_gpus(config(), ("a", "b"), ("0", "1", "2", "3"))


def test_the_layout_hands_them_out_on_one_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    layout = plan_layout(config(), "cuda")
    assert [layout.instance_extra(name)["gpus"] for name in layout.instances] == [
        ["1", "2"],
        ["3", "4"],
    ]
    cluster = config(runtime={"kind": "ray"})
    layout = plan_layout(cluster, "cuda")
    assert layout.instance_extra("instance0")["gpus"] == [], "Ray gives them out"
    assert demand_of(cluster, layout, "instance", "instance0") == {"GPU": 2.0}
    assert demand_of(cluster, plan_layout(cluster, "cpu"), "instance", "instance0") == {"CPU": 2.0}


def test_a_worker_sees_the_gpus_that_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gpus_seen.py").write_text(SEEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    crew = Crew(config(), tmp_path)
    for name, gpus in (("a", ["2", "3"]), ("b", [])):
        crew.start("gpus_seen:say", name, {"gpus": gpus})
    said = {}
    while len(said) < 2:
        letter = crew.inbox.get(timeout=60)
        assert letter.message is not None
        said[letter.name] = letter.message.body["gpus"]
    crew.end(10.0)
    assert said == {"a": "2,3", "b": "0,1,2,3"}
