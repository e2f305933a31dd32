"""The tensors behind the block ledger: KV pools on the device, spilled blocks on the host.

Knows nothing of requests beyond the key their spilled blocks are stored under. The pool is one
tensor, [layer, 2, block, kv head, token, head dim], keys first, then values; the last block is a
scrap block that padding rows write into. Invariant: content only changes through the plan's cache
operations, the runner's writes and `import_block`.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Copy, Plan, Restore, Scrub, Spill
from dora_rl.model.spec import ModelSpec
from dora_rl.types import RequestId

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HUGE_PAGE = 2 << 20


def derive_num_blocks(spec: ModelSpec, options: EngineOptions) -> int:
    """The pool size: as asked, else what the memory allows."""
    if options.num_blocks:
        return options.num_blocks
    on_gpu = options.device.startswith("cuda")
    budget = options.kv_bytes_max or (_gpu_budget(options) if on_gpu else 1 << 30)
    num_blocks = options.blocks_in(budget, spec)
    # More blocks than every slot at full length could never be used.
    context = options.context_limit(spec.context_max)
    return min(num_blocks, options.seqs_max * (-(-context // options.block_tokens) + 1))


def _gpu_budget(options: EngineOptions) -> int:
    """Most of what is free now, and of what neighbours leave that have not taken theirs yet."""
    device = torch.device(options.device)
    free, total = torch.cuda.mem_get_info(device)
    own = int(total * options.memory_share) - torch.cuda.memory_allocated(device)
    return int(0.85 * max(0, min(free, own)))


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    """`torch.empty`, and on the CPU in huge pages, where the system has them.

    Reading a KV cache of many megabytes costs a third less time so: fewer misses of the address
    table, and the hardware reads ahead over longer stretches. A wish, never a need: errors are
    ignored.
    """
    tensor = torch.empty(shape, dtype=dtype, device=device)
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is not None and tensor.device.type == "cpu" and tensor.nbytes >= 2 * HUGE_PAGE:
        first = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        whole = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_PAGE * HUGE_PAGE
        address, size = ctypes.c_void_p(first), ctypes.c_size_t(whole)
        ctypes.CDLL(None).madvise(address, size, ctypes.c_int(advice))
    return tensor


class KvCache:
    """Pools plus the host store; `num_blocks` 0: as many as the options say."""

    def __init__(self, spec: ModelSpec, options: EngineOptions, num_blocks: int = 0) -> None:
        self.num_blocks = self.scrap_block = num_blocks or derive_num_blocks(spec, options)
        self.block_bytes = options.block_bytes(spec)
        shape = (
            spec.num_layers,
            2,
            self.num_blocks + 1,
            spec.num_kv_heads,
            options.block_tokens,
            spec.head_dim,
        )
        self.kv = empty(shape, DTYPES[options.dtype], options.device).zero_()
        self._host: dict[RequestId, Tensor] = {}

    @torch.inference_mode()
    def perform(self, plan: Plan) -> None:
        """A plan's cache operations, in the order they were decided and that of the stream."""
        for op in plan.cache_ops:
            match op:
                case Copy(source, target):
                    self.kv[:, :, target] = self.kv[:, :, source]
                case Spill(seq, blocks):
                    data = self.kv.index_select(2, self._index(blocks))
                    if data.is_cuda:
                        host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
                        data = host.copy_(data, non_blocking=True)
                    self._host[seq.id] = data
                case Restore(seq, blocks):
                    data = self._host.pop(seq.id)[:, :, : len(blocks)]
                    data = data.to(self.kv.device, non_blocking=True)
                    self.kv.index_copy_(2, self._index(blocks), data)
                case Scrub(blocks):
                    self.kv.index_fill_(2, self._index(blocks), 0)

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.kv.device)

    def drop_host(self, key: RequestId) -> None:
        self._host.pop(key, None)

    def host_block(self, key: RequestId, index: int) -> Tensor:
        if self.kv.is_cuda:
            torch.cuda.current_stream().synchronize()  # the spill may still be on its way
        return self._host[key][:, :, index]

    def put_host(self, key: RequestId, chunks: Sequence[Tensor]) -> None:
        """Store chunks that arrived from elsewhere as if they had been spilled here."""
        self._host[key] = torch.stack(tuple(chunks), 2)

    def import_block(self, block: int, data: Tensor) -> None:
        self.kv[:, :, block].copy_(data, non_blocking=True)
