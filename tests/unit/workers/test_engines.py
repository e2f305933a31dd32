"""The choice of the rollout engine, and what it says when it cannot be made."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from dora_rl.config import RunConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.vllm.process import VllmOptions, vllm_arguments
from dora_rl.model.directory import read_spec
from dora_rl.model.names import LINEAR_LAYERS
from dora_rl.types import UserError
from dora_rl.workers.engines import adapter_rank, check_backend, check_guesses, resident_limit
from tests.kit.tiny_models import save_model


def config(**sections: dict[str, object]) -> RunConfig:
    return RunConfig.model_validate({"model": {"path": "somewhere"}} | sections)


def test_vllm_holds_one_version_or_adapters() -> None:
    native, vllm = config(), config(rollout={"backend": "vllm"})
    lora = {"lora_rank": 4}
    assert resident_limit(native, 3) == 3
    assert resident_limit(vllm, 3) == 1
    assert resident_limit(config(rollout={"backend": "vllm"}, trainer=lora), 3) == 3
    assert adapter_rank(config(trainer=lora)) == 4
    assert adapter_rank(config(trainer=lora | {"lora_publish": "merged"})) == 0


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vllm is installed")
def test_a_missing_vllm_is_one_line() -> None:
    check_backend(config())
    with pytest.raises(UserError, match="not installed here"):
        check_backend(config(rollout={"backend": "vllm"}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_engines_compute_as_the_learner_does_where_nothing_is_said(device: str) -> None:
    usual = {"cpu": "float32", "cuda": "bfloat16"}[device]
    assert config().engine_options(device, 1)["dtype"] == usual
    for dtype in ("float32", "bfloat16"):
        learner = config(trainer={"compute_dtype": dtype})
        assert learner.engine_options(device, 1)["dtype"] == dtype
        own = config(trainer={"compute_dtype": dtype}, rollout={"dtype": "float32"})
        assert own.engine_options(device, 1)["dtype"] == "float32"


def test_the_native_engine_has_one_device() -> None:
    with pytest.raises(UserError, match=r"devices_per_instance = 2: the native engine"):
        check_backend(config(resources={"devices_per_instance": 2}))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_several_devices_share_the_layers_of_vllm(device: str) -> None:
    told = vllm_arguments(VllmOptions("model", (), num_devices=4), EngineOptions(device=device))
    assert told["tensor_parallel_size"] == 4
    assert told["distributed_executor_backend"] == "mp", "a process for each"
    one = vllm_arguments(VllmOptions("model", ()), EngineOptions(device="cpu"))
    assert (one["tensor_parallel_size"], one["distributed_executor_backend"]) == (1, "uni")


def test_vllm_is_told_what_a_family_is_like(tmp_path: Path) -> None:
    """Factors of long texts would be another model, and a fused layer has an adapter of its own."""
    save_model("phi3-long", tmp_path)
    told = vllm_arguments(VllmOptions(str(tmp_path), (), lora_rank=8), EngineOptions())
    assert told["max_model_len"] == 256
    assert {"qkv_proj", "gate_up_proj", "o_proj"} <= set(told["lora_target_modules"])
    plain = vllm_arguments(VllmOptions("model", (), lora_rank=8), EngineOptions())
    assert plain["max_model_len"] is None
    assert plain["lora_target_modules"] == list(LINEAR_LAYERS)


def test_a_model_that_no_engine_computes_is_one_line(tmp_path: Path) -> None:
    save_model("phi3-long", tmp_path)
    spec = read_spec(tmp_path)
    EngineOptions(context_max=256).check_model(spec)
    with pytest.raises(UserError, match="longrope scaling a text beyond 256 tokens"):
        Engine(spec, EngineOptions(context_max=257))
    odd = replace(spec, head_dim=24)
    for options in ({}, {"device": "cuda", "backend": "vllm"}):
        EngineOptions(**options).check_model(odd)
    with pytest.raises(UserError, match=r"heads of 24 numbers.*vllm"):
        EngineOptions(device="cuda").check_model(odd)


def test_kv_moves_come_from_one_device() -> None:
    told = vllm_arguments(VllmOptions("model", (), kv_moves=True), EngineOptions(device="cpu"))
    assert told["kv_transfer_config"]["kv_role"] == "kv_both"
    assert not told["async_scheduling"], "nothing is computed while blocks are read"
    assert "kv_transfer_config" not in vllm_arguments(VllmOptions("model", ()), EngineOptions())


def test_a_run_on_a_gpu_does_not_guess_as_yet() -> None:
    asked = config(rollout={"speculation": "on"})
    check_guesses(asked, "cpu")
    check_guesses(config(), "cuda:0")
    with pytest.raises(UserError, match="on a GPU the engine alone guesses"):
        check_guesses(asked, "cuda:0")
