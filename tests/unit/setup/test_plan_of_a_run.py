"""The memory plan of a run: who sits where, what each worker is told, what to change."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dora_rl.cli import main
from dora_rl.config import RunConfig
from dora_rl.controller.run_dir import write_config
from dora_rl.setup.devices import Card, read_rows
from dora_rl.setup.layout import Layout, plan_layout
from dora_rl.setup.memory import CONTEXT_BYTES, GB, num_params, shelf_bytes
from dora_rl.setup.plan import RunPlan, memory_problems, plan_run, planned
from dora_rl.setup.prepare import Prepared
from dora_rl.types import UserError
from dora_rl.workers.worker import gpu_index, read_setup

QWEN = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 151_936,
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return tmp_path


def config_of(model: Path, **sections: dict[str, Any]) -> RunConfig:
    data: dict[str, Any] = {
        "model": {"path": str(model)},
        "data": {"train": ["a"], "eval": ["b"], "prompt_tokens_max": 512},
        "rollout": {"tokens_max": 768, "seqs_max": 512},
        "orchestration": {"batch_groups": 64},
    }
    for name, values in sections.items():
        data[name] = data.get(name, {}) | values
    return RunConfig.model_validate(data)


def lay_out(config: RunConfig, *sizes_gb: float, used_gb: float = 0.0) -> Layout:
    """On GPUs of these sizes."""
    cards = {str(i): Card(int(s * GB), int((s - used_gb) * GB)) for i, s in enumerate(sizes_gb)}
    layout = plan_layout(config, "cuda", tuple(cards))
    plan = plan_run(config, layout, cards)
    assert plan is not None
    return planned(layout, plan)


def memory_of(layout: Layout) -> RunPlan:
    assert layout.memory is not None
    return layout.memory


def test_every_size_that_is_open_reaches_its_worker(model: Path) -> None:
    layout = lay_out(config_of(model), 80)
    learner = layout.learner_extra("learner", Path("m"))["sizes"]["trainer"]
    assert learner["pack_tokens"] > 0 and learner["logits_chunk_tokens"] > 0
    assert learner["activation_checkpointing"] == "layer"
    instance = layout.instance_extra("instance0")["sizes"]["rollout"]
    assert instance["kv_bytes_max"] > 8 * GB
    evaluator = layout.evaluator_extra()["sizes"]["rollout"]
    assert 0 < evaluator["kv_bytes_max"] < instance["kv_bytes_max"]
    assert evaluator["seqs_max"] == 128
    assert layout.resident_max == 3


def test_a_worker_reads_its_sizes_and_the_run_keeps_the_users(model: Path, tmp_path: Path) -> None:
    config = config_of(model)
    layout = lay_out(config, 80)
    extra = layout.learner_extra("learner", Path("m"))
    line = {"role": "learner", "name": "learner", "incarnation": 0, "address": "", "key": ""}
    line |= {"run_dir": "", "config": config.model_dump(mode="json"), "extra": extra}
    trainer = read_setup(json.dumps(line)).config.trainer
    assert trainer.pack_tokens == extra["sizes"]["trainer"]["pack_tokens"]
    assert (trainer.activation_checkpointing, trainer.device) == ("layer", "cuda")
    write_config(config, tmp_path)
    kept = json.loads((tmp_path / "config.json").read_text())
    assert kept["trainer"]["pack_tokens"] == kept["rollout"]["kv_bytes_max"] == 0
    assert kept["trainer"]["activation_checkpointing"] == "auto"


def test_what_the_user_set_is_told_to_nobody_else(model: Path) -> None:
    config = config_of(
        model,
        trainer={"pack_tokens": 5000, "activation_checkpointing": "layer"},
        rollout={"kv_bytes_max": 3 * GB, "versions_max": 2},
    )
    layout = lay_out(config, 80)
    assert memory_of(layout).sizes("learner")["trainer"]["pack_tokens"] == 5000
    assert memory_of(layout).sizes("instance0")["rollout"]["kv_bytes_max"] == 3 * GB
    assert layout.resident_max == 2
    # The evaluator's cache is its own, not a second one of the instances' size.
    assert memory_of(layout).sizes("evaluator")["rollout"]["kv_bytes_max"] < 3 * GB


def test_on_several_gpus_each_has_its_own_plan(model: Path) -> None:
    config = config_of(model, rollout={"num_instances": 2})
    plan = memory_of(lay_out(config, 80, 80))
    first, second = plan.devices
    assert (first.seats.names, second.seats.names) == (
        ["learner", "evaluator"],
        ["instance0", "instance1"],
    )
    assert not first.need.num_instances and not second.need.learner
    assert second.memory.of("instance0") == second.memory.of("instance1") > 20 * GB


def test_ranks_share_the_state_and_have_the_same_sizes(model: Path) -> None:
    """The first rank's GPU has the evaluator too, and so the least room."""
    config = config_of(model, resources={"learner_ranks": 2})
    plan = memory_of(lay_out(config, 40, 40))
    assert plan.sizes("learner") == plan.sizes("learner.1")
    whole = memory_of(lay_out(config_of(model), 80)).devices[0]
    half = plan.device_of("learner.1")
    assert half is not None and half.memory.of("learner.1") < whole.memory.of("learner")


def test_a_smaller_card_is_planned_and_enforced(model: Path) -> None:
    config = config_of(model, runtime={"device_memory_gb": 60})
    layout = lay_out(config, 150)
    plan, names = memory_of(layout), ("learner", "instance0", "evaluator")
    device = plan.devices[0]
    assert plan.fits and device.memory.total_bytes == 60 * GB
    limits = [plan.limit(name) * 150 * GB + CONTEXT_BYTES for name in names]
    version = shelf_bytes(num_params(device.need.spec), device.need.item_bytes)
    assert device.memory.handover
    assert sum(limits) + version == pytest.approx(60 * GB), "what is handed over is not torch's"
    for name, limit in zip(names, [limits[0] + version, *limits[1:]], strict=True):
        assert limit >= device.memory.of(name)
    assert layout.instance_extra("instance0")["memory_limit"] > 0


def test_workers_that_share_a_card_keep_to_their_part(model: Path) -> None:
    plan, names = memory_of(lay_out(config_of(model), 150)), ("learner", "instance0", "evaluator")
    memory = plan.devices[0].memory
    limits = {name: plan.limit(name) * 150 * GB + CONTEXT_BYTES for name in names}
    assert memory.handover, "the version that instances take over is not torch's"
    version = next(line for line in memory.lines if "take over" in line.what).num_bytes
    limits["learner"] += version
    assert sum(limits.values()) == pytest.approx(150 * GB)
    assert all(limits[name] >= memory.of(name) for name in names)
    alone = memory_of(lay_out(config_of(model), 150, 150))
    assert not alone.limit("instance0"), "a card of one's own has no limit"


def test_what_other_programs_use_is_theirs(model: Path) -> None:
    plan = memory_of(lay_out(config_of(model), 80, used_gb=20))
    memory = plan.devices[0].memory
    assert memory.of("others") == 20 * GB and memory.planned_bytes < 80 * GB
    shares = [plan.share(name) for name in ("learner", "instance0", "evaluator")]
    assert sum(share or 0 for share in shares) == pytest.approx(60 / 80)
    # A smaller card lies in what they leave.
    small = config_of(model, runtime={"device_memory_gb": 50})
    assert not memory_of(lay_out(small, 80, used_gb=20)).devices[0].memory.of("others")
    assert memory_of(lay_out(small, 80, used_gb=40)).devices[0].memory.of("others") == 10 * GB


def test_fewer_versions_where_memory_is_short(model: Path) -> None:
    config = config_of(model, orchestration={"max_staleness": 8})
    layout = lay_out(config, 48)
    assert memory_of(layout).fits and 1 <= layout.resident_max < 9
    assert lay_out(config, 150).resident_max == 9


def test_what_does_not_fit_says_what_would(model: Path) -> None:
    """Every way out that is named is one: it is planned again."""
    config = config_of(model)
    layout = lay_out(config, 24)
    (line,) = memory_problems(config, layout)
    assert line.startswith("GPU 0 has 24.0 GB and the run needs ") and "learner" in line
    assert "trainer.lora_rank=32" in line and "\n" not in line
    lora = config_of(model, trainer={"lora_rank": 32})
    assert memory_of(lay_out(lora, 24)).fits
    with pytest.raises(UserError, match="GPU 0 has 24"):
        Prepared(config, layout, None, None, str).check_memory()  # type: ignore[arg-type]
    assert memory_problems(lora, lay_out(lora, 24)) == []


def test_what_the_user_fixed_too_large_is_the_cheapest_way_out(model: Path) -> None:
    config = config_of(model, rollout={"kv_bytes_max": 60 * GB})
    (line,) = memory_problems(config, lay_out(config, 80))
    assert "set rollout.kv_bytes_max=0" in line
    config = config_of(model, trainer={"activation_checkpointing": "none", "pack_tokens": 32_768})
    (line,) = memory_problems(config, lay_out(config, 80))
    assert "trainer.activation_checkpointing=layer or trainer.pack_tokens=0" in line


def test_several_changes_together_and_none_at_all(model: Path) -> None:
    config = config_of(model, trainer={"pack_tokens": 32_768}, rollout={"kv_bytes_max": 60 * GB})
    (line,) = memory_problems(config, lay_out(config, 24))
    assert "rollout.kv_bytes_max=0 and " in line and "trainer.lora_rank=32" in line
    (line,) = memory_problems(config_of(model), lay_out(config_of(model), 6))
    assert "no setting of this program makes it fit" in line


def test_frozen_copies_are_counted(model: Path) -> None:
    def learner(**algorithm: object) -> int:
        plan = memory_of(lay_out(config_of(model, algorithm=algorithm), 150))
        return sum(row.num_bytes for row in plan.devices[0].memory.lines if "frozen" in row.what)

    one = 2 * 1_543_000_000
    assert learner() == 0
    assert learner(kl_coef=0.01) == pytest.approx(one, rel=0.01)
    assert learner(old_logprobs="behaviour", kl_coef=0.01) == pytest.approx(3 * one, rel=0.01)


def test_on_a_cpu_nothing_is_planned(model: Path) -> None:
    layout = plan_layout(config_of(model), "cpu")
    assert layout.memory is None and layout.memory_extra("learner") == {}
    assert "sizes" not in layout.instance_extra("instance0")


def test_vllm_is_given_its_share(model: Path) -> None:
    plan = memory_of(lay_out(config_of(model, rollout={"backend": "vllm"}), 80))
    assert plan.sizes("instance0") == {}
    extra = lay_out(config_of(model, rollout={"backend": "vllm"}), 80).instance_extra("instance0")
    assert 0.1 < extra["memory_share"] < 0.9


def test_an_unknown_model_is_left_to_itself(model: Path) -> None:
    (model / "config.json").write_text(json.dumps(QWEN | {"architectures": ["OtherForCausalLM"]}))
    config = config_of(model, rollout={"backend": "vllm"})
    layout = replace(plan_layout(config, "cpu"), device="cuda")
    assert plan_run(config, layout, {"0": Card(80 * GB, 80 * GB)}) is None


def test_check_plans_for_a_card_that_is_not_here(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped model is tiny; a cache that the user wants larger than the card is not."""
    recipe, report = "recipes/quickstart.toml", tmp_path / "plan.json"
    words = ["check", recipe, "runtime.device=cuda", f"--json={report}"]
    assert main([*words, "--device-memory-gb", "24"]) == 0
    said = capsys.readouterr().out
    assert "memory of GPU 0" in said and "KV cache" in said and "this run fits" in said
    (device,) = json.loads(report.read_text())["plan"]["memory"]
    assert device["fits"] and device["sizes"]["learner"]["trainer"]["pack_tokens"] == 32_768
    assert {"who", "what", "bytes"} == set(device["lines"][0])
    assert main([*words, "rollout.kv_bytes_max=30000000000", "--device-memory-gb", "24"]) == 1
    said = capsys.readouterr().out
    assert "problem: GPU 0 has 24.0 GB" in said and "set rollout.kv_bytes_max=0" in said


def test_the_drivers_tool_is_read() -> None:
    rows = read_rows("0, GPU-5f, 143771, 143160\n1, GPU-6a, [N/A], [N/A]\nnonsense\n")
    assert rows == [("0", "GPU-5f", Card(143_771 << 20, 143_160 << 20))]


@pytest.mark.parametrize(
    ("role", "device", "trainer", "rank", "index"),
    [
        ("learner", "cuda", "auto", 0, 0),
        ("learner", "cuda", "auto", 1, 1),
        ("learner", "cuda", "cuda:2", 0, 2),  # another GPU than the rest of the run
        ("learner", "cuda:1", "auto", 0, 1),
        ("instance", "cuda", "cuda:2", None, 0),
        ("evaluator", "cuda:1", "auto", None, 1),
    ],
)
def test_the_limit_is_that_of_the_gpu_the_worker_is_on(
    model: Path, role: str, device: str, trainer: str, rank: int | None, index: int
) -> None:
    config = config_of(model, trainer={"device": trainer})
    extra = {"device": device, "memory_limit": 0.5} | ({} if rank is None else {"rank": rank})
    line = {"role": role, "name": role, "incarnation": 0, "address": "", "key": "", "run_dir": ""}
    line |= {"config": config.model_dump(mode="json"), "extra": extra}
    assert gpu_index(read_setup(json.dumps(line))) == index


def test_every_worker_of_a_smaller_card_is_limited(model: Path) -> None:
    layout = lay_out(config_of(model, runtime={"device_memory_gb": 60}), 150)
    extras = [
        layout.learner_extra("learner", Path("m")),
        layout.instance_extra("instance0"),
        layout.evaluator_extra(),
    ]
    assert all(0 < extra["memory_limit"] < 0.4 for extra in extras)


def test_a_frozen_version_takes_the_place_of_the_gradients(model: Path) -> None:
    """With full weights it is smaller than they are; beside adapters it is not."""

    def learner(share: float, **trainer: object) -> int:
        config = config_of(model, audit={"recompute_share": share}, trainer=trainer)
        return memory_of(lay_out(config, 80)).devices[0].memory.of("learner")

    small = {"activation_checkpointing": "layer", "pack_tokens": 4096, "logits_chunk_tokens": 256}
    assert learner(0.01, **small) == learner(0.0, **small)
    grown = learner(0.01, lora_rank=32, **small) - learner(0.0, lora_rank=32, **small)
    assert grown > 1.5 * GB
    config = config_of(model, trainer={"lora_rank": 32, **small})
    table = memory_of(lay_out(config, 80)).table()
    assert any("frozen version (audit.recompute_share)" in row for row in table)
    # Where nothing can be computed again, nothing is kept free for it.
    filtered = config_of(model, rollout={"top_k": 5}, trainer={"lora_rank": 32, **small})
    assert not any("audit.recompute" in row for row in memory_of(lay_out(filtered, 80)).table())
