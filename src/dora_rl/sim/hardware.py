"""The cost model: seconds from bytes, operations, links and latencies.

What a constant is worth, between which bounds it may lie and who says so is in `constants`. One set
serves all modes. Nothing here knows modes, versions or events.

    a decode step   its floor (host, launches and all-reduces of every layer), which nothing makes
                    shorter; the weights, read once; the KV cache of all that run, or their
                    arithmetic if that takes longer; a part for each request
    an update       the arithmetic of all its samples; what the data-parallel rank with the most of
                    it has more than the mean; the gradients over the network; a fixed part
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
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
    attention_width: int = 0  # query heads x head_dim; 0: the work of attention is left out

    @property
    def weight_bytes(self) -> float:
        return self.params * self.weight_bytes_per_param

    @property
    def kv_bytes_per_token(self) -> float:
        values = 2 * self.num_layers * self.kv_heads * self.head_dim
        return self.kv_bytes_per_token_override or values * self.kv_bytes_per_value

    def train_flops(self, num_tokens: float) -> float:
        """To train on one sequence (6 per parameter and token) and, before, to recompute its
        log-probs (2); causal attention does 2 per layer, width and pair of tokens, 4 times."""
        attention = 8 * self.num_layers * self.attention_width * num_tokens
        return num_tokens * (8 * self.params_active + attention)


# Qwen2.5-32B: 32.8 B parameters, 64 layers, 40 query and 8 KV heads of 128 (its config.json).
QWEN25_32B = ModelShape("Qwen2.5-32B", 32.8e9, 32.8e9, 64, 8, 128, attention_width=5120)
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
    """Achieved shares of datasheet rates."""

    decode_bandwidth: float = 0.70
    training: float = 0.35
    prefill: float = 0.50
    network: float = 0.75


@dataclass(frozen=True, slots=True)
class Engine:
    """Overheads of a serving engine: those of vLLM 0.25.1, measured on one H200 with log-probs.

    A step of 1 request on 28 layers takes 2.8 ms although its bytes need 0.3 ms: launches by CUDA
    graph, the rest on the host. From 1 to 256 requests a step grows by 7.7 ms, about 25 us per
    request after the bytes are taken off.
    """

    host_s: float = 1.7e-3  # of every step: schedule, build inputs, sample, hand out
    kernels_per_layer: int = 11  # all-reduces not counted
    launch_s: float = 2.5e-6  # of a kernel, beyond its work
    host_s_per_request: float = 2.5e-5
    allreduce_s: float = 1.5e-5  # of a small message; two per layer
    memory_share: float = 0.90  # of HBM, weights and KV cache together
    activation_bytes: float = 4e9  # per device
    requests_max: int = 1024  # per instance
    load_overhead_s: float = 2.0  # connect, checksum, canary, graph capture kept
    move_overhead_s: float = 0.02
    sleep_wake_s: float = 5.0  # free or restore the cache and weights of a colocated engine
    draft_row_s: float = 1e-5  # host and kernels, of each drafted token that is verified
    draft_share: float = 1.0  # of the tokens that drafts gained in the measurement


@dataclass(frozen=True, slots=True)
class Draft:
    """What drafts of up to `length` tokens cost and bring: rows and tokens of a request a step."""

    length: int
    rows: float
    tokens: float


# Suffixes of siblings that decode in step, 84 groups of 8 of GSM8K by a 1.5 B model, 208,084 tokens
# (acceptance is exact, so this needs no engine). The longest suffix of at least 1, 2, 1, 1 tokens.
DRAFTS = (
    Draft(2, 2.51, 1.66),
    Draft(4, 2.79, 1.67),
    Draft(4, 3.75, 1.83),
    Draft(8, 5.87, 1.93),
)
NO_DRAFT = Draft(0, 1.0, 1.0)


@dataclass(frozen=True, slots=True)
class RolloutCost:
    """One instance: `tensor_parallel` devices that decode together."""

    device: Accelerator
    model: ModelShape
    engine: Engine
    efficiency: Efficiency
    tensor_parallel: int
    resident_max: int = 1
    speculation: bool = False

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
        """Host, launch and all-reduce time of one decode step: the floor of a token's latency
        beside the weights. More devices do not make it shorter."""
        engine = self.engine
        reduce_s = 2 * engine.allreduce_s if self.tensor_parallel > 1 else 0.0
        layer_s = engine.kernels_per_layer * engine.launch_s + reduce_s
        return engine.host_s + self.model.num_layers * layer_s

    def drafts(self) -> tuple[Draft, ...]:
        """What an instance chooses from at every change of its batch."""
        return (NO_DRAFT, *DRAFTS) if self.speculation else (NO_DRAFT,)

    def tokens_of(self, draft: Draft) -> float:
        """Tokens that a request gains in a step."""
        return 1 + self.engine.draft_share * (draft.tokens - 1)

    def rows_s(self, draft: Draft) -> float:
        """Per request and step, what is neither bytes nor floor."""
        drafted = self.engine.draft_row_s * (draft.rows - 1)
        return self.engine.host_s_per_request + drafted

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
        link = self._link_bytes_per_s
        return self.engine.load_overhead_s + self.model.weight_bytes / link

    @property
    def _link_bytes_per_s(self) -> float:
        return self.device.nic_bytes_per_s * self.efficiency.network * self.tensor_parallel

    def move_s(self, num_tokens: float) -> float:
        link = self._link_bytes_per_s
        return self.engine.move_overhead_s + num_tokens * self.model.kv_bytes_per_token / link

    def spill_s(self, num_tokens: float) -> float:
        link = self.device.host_bytes_per_s * self.tensor_parallel
        return num_tokens * self.model.kv_bytes_per_token / link


@dataclass(frozen=True, slots=True)
class Trainer:
    """How the learner divides its work, and what of it does not shrink with more devices."""

    model_parallel: int = 1  # devices that share one copy of the model
    balanced: float = 0.5  # of the imbalance: 0 as samples come, 1 as even as their lengths allow
    update_s: float = 2.0  # fixed, of each update: pipeline, launches, barriers
    publish_s: float = 1.0  # fixed, of each publication: gather, cast, seal


GRADIENT_BYTES = 4.0  # per parameter: reduced in float32
GATHER_BYTES = 2.0  # gathered after the update, in bfloat16


@dataclass(frozen=True, slots=True)
class TrainCost:
    """The learner on `num_devices`."""

    device: Accelerator
    model: ModelShape
    efficiency: Efficiency
    num_devices: int
    updates_per_step: int
    trainer: Trainer = Trainer()

    @property
    def num_ranks(self) -> int:
        """Data-parallel ones. Devices that are left over are shared out."""
        return max(1, self.num_devices // self.trainer.model_parallel)

    @property
    def _flops_per_s(self) -> float:
        return self.device.flops * self.efficiency.training * self.num_devices

    def samples_s(self, lengths: Sequence[int]) -> float:
        """Of these samples, if all ranks had equally much to do."""
        return sum(self.model.train_flops(n) for n in lengths) / self._flops_per_s

    def imbalance_s(self, lengths: Sequence[int]) -> float:
        """The rank with the most of an update against the mean of all: the others wait for it.

        A sample is not divided between ranks, so the longest one is a bound on its own.
        """
        work = [self.model.train_flops(n) for n in lengths]
        ranks, mean = self.num_ranks, sum(work) / self.num_ranks
        dealt = max(sum(work[rank::ranks]) for rank in range(ranks))
        balanced, share = largest_part(work, ranks), self.trainer.balanced
        fullest = share * balanced + (1 - share) * dealt
        return (fullest - mean) / (self._flops_per_s / ranks)

    def reduce_s(self) -> float:
        """Gradients scattered and weights gathered over all ranks, each device its own shard of the
        model. Grows to a limit with the ranks and never shrinks."""
        shard = self.model.params / max(1, min(self.num_devices, self.trainer.model_parallel))
        num_bytes = (GRADIENT_BYTES + GATHER_BYTES) * shard * (1 - 1 / self.num_ranks)
        return num_bytes / (self.device.nic_bytes_per_s * self.efficiency.network)

    def update_s(self) -> float:
        """Of one update, beside its samples and their imbalance."""
        return self.trainer.update_s + self.reduce_s()

    def publish_s(self) -> float:
        """Gather, cast and seal: the weights leave through every device's NIC."""
        link = self.device.nic_bytes_per_s * self.efficiency.network * self.num_devices
        return self.model.weight_bytes / link + self.trainer.publish_s


def largest_part(work: Sequence[float], parts: int) -> float:
    """Of the parts when the heaviest goes first, each to the part that is lightest by then.

    >>> largest_part([3, 1, 2, 2], 2), largest_part([9, 1, 1], 8)
    (4.0, 9.0)
    """
    heap = [0.0] * parts
    for one in sorted(work, reverse=True):
        heapq.heapreplace(heap, heap[0] + one)
    return max(heap)
