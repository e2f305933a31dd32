"""Instances on the GPUs of one machine: which ones, how much memory, no others in sight."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.config import RunConfig
from dora_rl.controller.recovery import GpuUse
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.tensors.cache import derive_num_blocks
from dora_rl.model.directory import read_spec
from dora_rl.setup.devices import Place, place_instances
from dora_rl.setup.layout import plan_layout
from dora_rl.types import UserError
from dora_rl.workers.messages import Note
from dora_rl.workers.pool import LocalProcesses, WorkerPool
from dora_rl.worlds.hosts import demand_of
from tests.kit.places import MODEL

SEEN = """
import os
from dora_rl.workers.messages import Note

NAMES = "VISIBLE_DEVICES", "MPS_ACTIVE_THREAD_PERCENTAGE", "MPS_CLIENT_PRIORITY"

def say(setup, channel):
    channel.send(Note(" ".join(str(os.environ.get(f"CUDA_{name}")) for name in NAMES)))
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
    given = place_instances(config(), ("a", "b"), (), ("3", "4", "5", "6", "7", "8"))
    assert given == {"a": Place(("4", "5")), "b": Place(("6", "7"))}
    with pytest.raises(UserError, match="need 5 GPUs, 4 are visible"):
        place_instances(config(), ("a", "b"), (), ("0", "1", "2", "3"))


def narrow(ranks: int = 1) -> RunConfig:
    return config(resources={"learner_ranks": ranks})


def gpus_of(places: dict[str, Place]) -> str:
    return " ".join(place.gpus[0] for place in places.values())


@pytest.mark.parametrize(
    ("ranks", "gpus", "elastic", "placed", "shares"),
    [
        (1, "0", "", "0 0 0", [0.4 / 3] * 3),  # one GPU for everything
        (1, "4 5", "", "5 5 5", [1 / 3] * 3),
        (1, "4 5 6", "", "5 6 5", [0.5, 1.0, 0.5]),
        (2, "4 5 6 7 8", "", "6 7 8", [1.0] * 3),
        (2, "4 5", "", "4 5 4", [0.2, 0.4, 0.2]),
        (1, "4 5 6", "abc", "4 5 6", [0.4, 1.0, 1.0]),  # sync: all GPUs in both phases
        (1, "4 5 6", "a", "4 5 6", [0.4, 1.0, 1.0]),
        (2, "4 5 6", "ab", "4 5 6", [0.4, 0.4, 1.0]),
    ],
)
def test_instances_spread_over_the_gpus_that_the_learner_leaves(
    ranks: int, gpus: str, elastic: str, placed: str, shares: list[float]
) -> None:
    places = place_instances(narrow(ranks), "abc", elastic, gpus.split())
    assert gpus_of(places) == placed
    assert [place.memory_share for place in places.values()] == pytest.approx(shares)


def test_every_rank_needs_a_gpu() -> None:
    with pytest.raises(UserError, match="learner_ranks = 3: every rank needs a GPU, 2 are visible"):
        place_instances(narrow(3), "ab", "", ("0", "1"))


def test_a_device_with_a_number_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6")
    layout = plan_layout(narrow(), "cuda:1")
    extra = layout.instance_extra("instance1")
    assert (extra["device"], extra["gpus"]) == ("cuda:1", []), "the worker counts as we do"
    assert extra["memory_share"] == pytest.approx(0.2) and layout.crowd == 2


def test_a_cluster_leaves_room_for_the_learner_where_an_instance_shares_its_gpu() -> None:
    split = config(runtime={"world": "ray"}, resources={"elastic_instances": 1})
    layout = plan_layout(split, "cuda")
    shares = [layout.instance_extra(name)["memory_share"] for name in layout.instances]
    assert shares == pytest.approx([0.4, 1.0])


def test_the_cache_stays_within_the_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours that have not taken their memory yet are left theirs."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (90 << 20, 100 << 20))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 10 << 20)
    spec = read_spec(MODEL)

    def kv_bytes(share: float) -> int:
        options = EngineOptions(device="cuda", memory_share=share, seqs_max=1000)
        return derive_num_blocks(spec, options) * options.block_bytes(spec)

    mib = 1 << 20
    assert 0.84 * 90 * mib < kv_bytes(1.0) <= 0.85 * 90 * mib
    assert 0.84 * 30 * mib < kv_bytes(0.4) <= 0.85 * 30 * mib
    with pytest.raises(UserError, match="hold 0 KV blocks"):
        kv_bytes(0.05)


def test_the_layout_hands_them_out_on_one_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4")
    layout = plan_layout(config(), "cuda")
    assert [layout.instance_extra(name)["gpus"] for name in layout.instances] == [
        ["1", "2"],
        ["3", "4"],
    ]
    cluster = config(runtime={"world": "ray"})
    layout = plan_layout(cluster, "cuda")
    assert layout.instance_extra("instance0")["gpus"] == [], "Ray gives them out"
    assert demand_of(cluster, layout, "instance", "instance0") == {"GPU": 2.0}
    assert demand_of(cluster, plan_layout(cluster, "cpu"), "instance", "instance0") == {"CPU": 2.0}


def test_a_worker_sees_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gpus_seen.py").write_text(SEEN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    pool = WorkerPool(config(), tmp_path, LocalProcesses(tmp_path))
    limits = {"mps_percent": 40, "mps_yields": True}
    for name, extra in (("a", {"gpus": ["2", "3"]}), ("b", limits)):
        pool.start("gpus_seen:say", name, extra)
    said = {}
    while len(said) < 2:
        envelope = pool.inbox.get(timeout=60)
        assert isinstance(envelope.message, Note)
        said[envelope.name] = envelope.message.line
    pool.end(10.0)
    assert said == {"a": "2,3 None None", "b": "0,1,2,3 40 1"}


def test_only_a_learner_beside_instances_is_held_back() -> None:
    runtime = {"mps_learner_percent": 40, "mps_learner_yields": True}
    beside = plan_layout(config(runtime=runtime), "cpu").learner_extra("learner", Path("m"))
    assert (beside["mps_percent"], beside["mps_yields"]) == (40, True)
    alternate = config(runtime=runtime, orchestration={"mode": "sync"}, resources={})
    extra = plan_layout(alternate, "cpu").learner_extra("learner", Path("m"))
    assert (extra["mps_percent"], extra["mps_yields"]) == (100, False)


def test_without_mps_a_run_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # no control program there
    GpuUse("cuda", mps="auto").end(None, 0.0)
    assert "runtime.mps" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"runtime\.mps"):
        GpuUse("cuda", mps=True)
