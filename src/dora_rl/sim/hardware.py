"""Physical constants and the cost model: seconds from bytes, operations and links.

Every number names its source. One set of constants serves all modes; only the three efficiencies
of `Efficiency` are fitted (docs/reproduction.md). Nothing here knows modes, versions or events.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dora_rl.types import UserError


@dataclass(frozen=True, slots=True)
class Accelerator:
    """Datasheet figures of one device."""

    name: str
    flops: float  # dense bf16 per second
    hbm_bytes: float
    hbm_bytes_per_s: float
    nic_bytes_per_s: float
    host_bytes_per_s: float

    def validate(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value <= 0:
                raise UserError(f"accelerator.{field.name} must be positive, not {value}")


# NVIDIA H800 SXM: the H100's compute and memory (989.4 TFLOP/s dense bf16, 80 GB HBM3 at
# 3.35 TB/s; H100 datasheet), NVLink cut to 400 GB/s. 8 x 400 Gb/s per node = 50 GB/s per device
# (DORA, testbed). Host link: PCIe 5.0 x16, 64 GB/s nominal, 50 sustained.
H800 = Accelerator("H800", 989.4e12, 80e9, 3.35e12, 50e9, 50e9)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the cost model needs of a model; `active` parameters are used per token."""

    name: str
    params: float
    params_active: float
    num_layers: int
    kv_heads: int
    head_dim: int
    weight_bytes_per_param: float = 2.0
    kv_bytes_per_value: float = 2.0
    kv_bytes_per_token_override: float = 0.0
    expert_parallel: int = 1

    @property
    def weight_bytes(self) -> float:
        return self.params * self.weight_bytes_per_param

    @property
    def kv_bytes_per_token(self) -> float:
        values = 2 * self.num_layers * self.kv_heads * self.head_dim
        return self.kv_bytes_per_token_override or values * self.kv_bytes_per_value


# Qwen2.5-32B: 32.8 B parameters, 64 layers, width 5120, 8 KV heads of 128 (its config.json).
QWEN25_32B = ModelShape("Qwen2.5-32B", 32.8e9, 32.8e9, 64, 8, 128)
# LongCat-Flash: 560 B parameters, about 27 B active per token, 28 layers with latent attention,
# (512 + 64) values per token and sub-layer, two attention sub-layers per layer (its report).
LONGCAT_560B = ModelShape(
    "LongCat-Flash-560B",
    560e9,
    27e9,
    56,
    1,
    576,
    weight_bytes_per_param=1.0,  # served in 8 bits
    kv_bytes_per_token_override=56 * 576 * 2,
    expert_parallel=16,
)
# A small dense model for tests.
TINY_100M = ModelShape("tiny-100M", 1e8, 1e8, 12, 4, 64)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The three fitted figures: achieved share of a datasheet rate."""

    decode_bandwidth: float = 0.54
    training: float = 0.20
    prefill: float = 0.50


@dataclass(frozen=True, slots=True)
class Engine:
    """Overheads of a serving engine, measured, not fitted.

    vLLM 0.25.1 on one H200 with log-probs: a step of 1 request on 28 layers takes 2.8 ms although
    its bytes need 0.3 ms, so about 0.09 ms of host and launch time per layer; from 1 to 256
    requests a step grows by 7.7 ms, about 25 us per request after the bytes are taken off.
    All-reduce of a small message over NVLink: about 12 us, two per layer.
    """

    host_s_per_layer: float = 0.9e-4
    host_s_per_request: float = 2.5e-5
    allreduce_s: float = 1.2e-5
    memory_share: float = 0.90  # of HBM, weights and KV cache together
    activation_bytes: float = 4e9  # per device
    requests_max: int = 1024  # per instance
    load_overhead_s: float = 2.0  # connect, checksum, canary, graph capture kept
    move_overhead_s: float = 0.02
    sleep_wake_s: float = 5.0  # free or restore the cache and weights of a colocated engine


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """One instance: `tensor_parallel` devices that decode together."""

    device: Accelerator
    model: ModelShape
    engine: Engine
    efficiency: Efficiency
    tensor_parallel: int
    resident_max: int = 1

    def kv_tokens_max(self) -> int:
        """Tokens of KV cache beside the weights of every resident version."""
        total = self.tensor_parallel * (
            self.device.hbm_bytes * self.engine.memory_share - self.engine.activation_bytes
        )
        if (free := total - self.model.weight_bytes * self.resident_max) <= 0:
            raise UserError(
                f"{self.resident_max} resident versions of {self.model.name} need "
                f"{self.model.weight_bytes * self.resident_max / 1e9:.0f} GB, an instance of "
                f"{self.tensor_parallel} x {self.device.name} has {total / 1e9:.0f} GB"
            )
        return int(free / self.model.kv_bytes_per_token)

    @property
    def _bytes_per_s(self) -> float:
        """Of memory, as far as decoding uses it."""
        share = self.efficiency.decode_bandwidth
        return self.device.hbm_bytes_per_s * share * self.tensor_parallel

    def step_base_s(self) -> float:
        """Host, launch and all-reduce time of one decode step."""
        layers = self.model.num_layers
        reduce = 2 * layers * self.engine.allreduce_s if self.tensor_parallel > 1 else 0.0
        return layers * self.engine.host_s_per_layer + reduce

    def weights_s(self, num_requests: int) -> float:
        """Reading the weights once; of a mixture, only the experts that the batch touches."""
        # Each token leaves an expert untouched with probability 1 - active / all.
        untouched = 1 - self.model.params_active / self.model.params
        share = 1 - untouched ** max(1, num_requests)
        return share * self.model.weight_bytes / self._bytes_per_s

    def kv_s_per_token(self) -> float:
        return self.model.kv_bytes_per_token / self._bytes_per_s

    def flops_s_per_request(self) -> float:
        rate = self.device.flops * self.efficiency.prefill * self.tensor_parallel
        return 2 * self.model.params_active / rate

    def prefill_tokens_per_s(self) -> float:
        return 1 / self.flops_s_per_request()

    def stall(self, num_requests: int) -> float:
        """Expert parallelism: all ranks meet at the all-to-all, so the fullest one sets the pace.

        KV per rank is a sum of n/R long-tailed lengths (coefficient of variation about 1.5 per
        request); the largest of R such sums exceeds the mean by about cv * sqrt(2 ln R / (n/R)).
        """
        ranks = self.model.expert_parallel
        per_rank = max(1.0, num_requests / ranks)
        excess = 1.5 * math.sqrt(2 * math.log(ranks) / per_rank) * 0.5
        return 1.0 + min(1.0, excess) if num_requests > 0 else 1.0

    def load_s(self) -> float:
        """Weights over the network, one shard per device, all NICs at once."""
        link = self.device.nic_bytes_per_s * self.tensor_parallel
        return self.engine.load_overhead_s + self.model.weight_bytes / link

    def move_s(self, num_tokens: float) -> float:
        link = self.device.nic_bytes_per_s * self.tensor_parallel
        return self.engine.move_overhead_s + num_tokens * self.model.kv_bytes_per_token / link

    def spill_s(self, num_tokens: float) -> float:
        link = self.device.host_bytes_per_s * self.tensor_parallel
        return num_tokens * self.model.kv_bytes_per_token / link


@dataclass(frozen=True, slots=True)
class TrainCost:
    """The learner on `num_devices`."""

    device: Accelerator
    model: ModelShape
    efficiency: Efficiency
    num_devices: int
    updates_per_step: int
    update_overhead_s: float = 2.0  # gradient reduction, optimizer, gather of sharded weights

    def tokens_per_s(self) -> float:
        """6 P per token to train and 2 P to recompute the old log-probs."""
        rate = self.device.flops * self.efficiency.training * self.num_devices
        return rate / (8 * self.model.params_active)

    def update_s(self) -> float:
        return self.update_overhead_s * self.updates_per_step

    def publish_s(self) -> float:
        """Gather, cast and seal: the weights leave through every device's NIC."""
        return self.model.weight_bytes / (self.device.nic_bytes_per_s * self.num_devices) + 1.0
