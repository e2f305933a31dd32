"""The tensors behind the block ledger: KV pools on the device, spilled blocks on the host.

Knows nothing of requests beyond the key their spilled blocks are stored under. The pool is one
tensor, [layer, 2, block, kv head, token, head dim], keys first, then values; the last block is a
scrap block that padding rows write into. Invariant: content only changes through the plan's cache
operations, the runner's writes and `import_block`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Copy, Plan, Restore, Scrub, Spill
from dora_rl.engine.tensors import pages
from dora_rl.model.spec import ModelSpec
from dora_rl.types import RequestId

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def derive_num_blocks(spec: ModelSpec, options: EngineOptions) -> int:
    """The pool size: as asked, else what the memory allows."""
    if options.num_blocks:
        return options.num_blocks
    budget = options.kv_bytes_max
    if not budget and options.device.startswith("cuda"):
        budget = int(0.85 * _gpu_bytes_left(options))
    elif not budget:
        budget = 1 << 30
    num_blocks = options.blocks_in(budget, spec)
    # More blocks than every slot at full length could never be used.
    context = options.context_limit(spec.context_max)
    return min(num_blocks, options.seqs_max * (-(-context // options.block_tokens) + 1))


def _gpu_bytes_left(options: EngineOptions) -> int:
    """What is free now, and what neighbours leave that have not taken theirs yet."""
    device = torch.device(options.device)
    free, total = torch.cuda.mem_get_info(device)
    own = int(total * options.memory_share) - torch.cuda.memory_allocated(device)
    return max(0, min(free, own))


class KvCache:
    """Pools plus the host store."""

    def __init__(self, spec: ModelSpec, options: EngineOptions, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.scrap_block = num_blocks
        self.block_bytes = options.block_bytes(spec)
        shape = (
            spec.num_layers,
            2,
            num_blocks + 1,
            spec.num_kv_heads,
            options.block_tokens,
            spec.head_dim,
        )
        self.kv = pages.empty(shape, DTYPES[options.dtype], options.device).zero_()
        self._host: dict[RequestId, Tensor] = {}
        self._pinned = options.device.startswith("cuda")

    def copy(self, source: int, target: int) -> None:
        self.kv[:, :, target] = self.kv[:, :, source]

    def scrub(self, blocks: Sequence[int]) -> None:
        """Zero blocks that may hold NaN: masked keys are multiplied by zero, and 0 * NaN is NaN."""
        for block in blocks:
            self.kv[:, :, block] = 0

    def spill(self, key: RequestId, blocks: Sequence[int]) -> None:
        """Device to host. The copy is ordered with the compute stream."""
        index = torch.tensor(blocks, device=self.kv.device)
        self._host[key] = self._to_host(self.kv.index_select(2, index))

    def restore(self, key: RequestId, blocks: Sequence[int]) -> None:
        data = self._host.pop(key)[:, :, : len(blocks)].to(self.kv.device, non_blocking=True)
        self.kv.index_copy_(2, torch.tensor(blocks, device=self.kv.device), data)

    def drop_host(self, key: RequestId) -> None:
        self._host.pop(key, None)

    def block(self, block: int) -> Tensor:
        """[layer, 2, kv head, token, head dim]: the content of one block, on the device."""
        return self.kv[:, :, block]

    def host_block(self, key: RequestId, index: int) -> Tensor:
        if self._pinned:
            torch.cuda.current_stream().synchronize()  # the spill may still be on its way
        return self._host[key][:, :, index]

    def put_host(self, key: RequestId, chunks: Sequence[Tensor]) -> None:
        """Store chunks that arrived from elsewhere as if they had been spilled here."""
        self._host[key] = torch.stack(tuple(chunks), 2)

    def import_block(self, block: int, data: Tensor) -> None:
        self.kv[:, :, block].copy_(data, non_blocking=True)

    def _to_host(self, data: Tensor) -> Tensor:
        if not self._pinned:
            return data
        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
        return host.copy_(data, non_blocking=True)


def perform(plan: Plan, cache: KvCache) -> None:
    """A plan's cache operations, in the order they were decided."""
    for op in plan.cache_ops:
        match op:
            case Copy(source, target):
                cache.copy(source, target)
            case Spill(seq, blocks):
                cache.spill(seq.id, blocks)
            case Restore(seq, blocks):
                cache.restore(seq.id, blocks)
            case Scrub(blocks):
                cache.scrub(blocks)
