"""The tensors behind the block ledger: KV pools on the device, spilled blocks on the host.

Knows nothing of requests beyond the key their spilled blocks are stored under. The pool is one
tensor, [layer, 2, block, kv head, token, head dim], keys first, then values; the last block is a
scrap block that padding rows write into. Of a mixture of experts there may be a second pool,
[1, 1, block, token, sparse layer, choice]: which experts each token went to. It goes wherever keys
and values go, so whoever has a token's block has its routing, of the pass that computed them.
Invariant: content only changes through the plan's cache operations, the runner's writes and
`import_block`.
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
ROUTING_DTYPES = {"uint8": torch.uint8, "int16": torch.int16}
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


def make_routing(spec: ModelSpec, options: EngineOptions, num_blocks: int) -> Tensor | None:
    """The second pool, where there is one; nothing is recorded in it."""
    if not options.record_routing or (moe := spec.moe) is None:
        return None
    dtype = ROUTING_DTYPES[moe.routing_dtype]
    shape = (1, 1, num_blocks, options.block_tokens, len(moe.sparse_layers), moe.top_k)
    return torch.full(shape, torch.iinfo(dtype).max, dtype=dtype, device=options.device)


def _chunk(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


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
        self.routing = make_routing(spec, options, self.num_blocks + 1)
        self.pools = [pool for pool in (self.kv, self.routing) if pool is not None]
        self._host: dict[RequestId, list[Tensor]] = {}

    @torch.inference_mode()
    def perform(self, plan: Plan) -> None:
        """A plan's cache operations, in the order they were decided and that of the stream."""
        for op in plan.cache_ops:
            match op:
                case Copy(source, target):
                    for pool in self.pools:
                        pool[:, :, target] = pool[:, :, source]
                case Spill(seq, blocks):
                    self._host[seq.id] = [self._spilled(pool, blocks) for pool in self.pools]
                case Restore(seq, blocks):
                    for pool, kept in zip(self.pools, self._host.pop(seq.id), strict=True):
                        data = kept[:, :, : len(blocks)].to(pool.device, non_blocking=True)
                        pool.index_copy_(2, self._index(blocks), data)
                case Scrub(blocks):
                    self.kv.index_fill_(2, self._index(blocks), 0)

    def _spilled(self, pool: Tensor, blocks: Sequence[int]) -> Tensor:
        data = pool.index_select(2, self._index(blocks))
        if data.is_cuda:
            host = torch.empty(data.shape, dtype=data.dtype, pin_memory=True)
            data = host.copy_(data, non_blocking=True)
        return data

    def _index(self, blocks: Sequence[int]) -> Tensor:
        return torch.tensor(blocks, device=self.kv.device)

    def drop_host(self, key: RequestId) -> None:
        self._host.pop(key, None)

    # A chunk is all that is kept of one block: its keys and values, or, where routing is recorded,
    # the bytes of both.

    def block(self, block: int) -> Tensor:
        """A chunk, where the pool is."""
        return _chunk([pool[:, :, block] for pool in self.pools])

    def host_block(self, key: RequestId, index: int) -> Tensor:
        self._wait_for_spills()
        return _chunk([kept[:, :, index] for kept in self._host[key]])

    def put_host(self, key: RequestId, chunks: Sequence[Tensor]) -> None:
        """Store chunks that arrived from elsewhere as if they had been spilled here."""
        parts = zip(*(self._parts(chunk) for chunk in chunks), strict=True)
        self._host[key] = [torch.stack(blocks, 2) for blocks in parts]

    def import_block(self, block: int, data: Tensor) -> None:
        for pool, part in zip(self.pools, self._parts(data), strict=True):
            pool[:, :, block].copy_(part, non_blocking=True)

    def empty_chunk(self) -> Tensor:
        """On the host. Pinned memory comes back from a cache of torch, after the copies out of it:
        no page is ever touched for the first time here, which is what made this path slow."""
        pinned = self.kv.is_cuda
        if self.routing is not None:
            return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=pinned)
        shape = (self.kv.shape[0], 2, *self.kv.shape[3:])
        return torch.empty(shape, dtype=self.kv.dtype, pin_memory=pinned)

    def _parts(self, chunk: Tensor) -> list[Tensor]:
        """Of each pool its own."""
        if self.routing is None:
            return [chunk]
        shapes = [(*pool.shape[:2], *pool.shape[3:]) for pool in self.pools]
        sizes = [pool[:, :, 0].nbytes for pool in self.pools]
        return [
            part.view(pool.dtype).view(shape)
            for part, pool, shape in zip(chunk.split(sizes), self.pools, shapes, strict=True)
        ]

    def _wait_for_spills(self) -> None:
        if self.kv.is_cuda:
            torch.cuda.current_stream().synchronize()  # the spill may still be on its way

    # ------------------------------------------------------------------ routing

    def write_routing(self, blocks: Tensor, tokens: Tensor, layers: Sequence[Tensor]) -> None:
        """Of rows at these places, the experts that each chose in each sparse layer."""
        assert self.routing is not None
        chosen = torch.stack(tuple(layers), 1).to(self.routing.dtype)
        self.routing[0, 0].index_put_((blocks, tokens), chosen)

    def read_routing(self, key: RequestId, blocks: Sequence[int]) -> Tensor:
        """What is recorded of a request's tokens, [token, sparse layer, choice]: of those in
        `blocks`, or where it has none, of those that are spilled."""
        assert self.routing is not None
        if blocks:
            found = self.routing[0, 0].index_select(0, self._index(blocks)).cpu()
        else:
            self._wait_for_spills()
            found = self._host[key][1][0, 0]
        return found.flatten(0, 1)
