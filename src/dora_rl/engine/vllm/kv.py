"""KV of single requests out of one vLLM and into another, as a KV connector that vLLM loads.

vLLM makes this class twice, for its scheduler and for its worker, in the process of the instance
(one device). A request is read between two steps, block by block as the blocks lie there, and laid
out at the receiver under the name of one new request; no other request ever gets it, and it is
forgotten with its request. So KV of another version cannot be served: the receiver is asked for the
version before anything is laid out. Nothing is written to a shared place, nothing is found by hash.

    scheduler   how many tokens of a new request have arrived; which of its blocks to fill
    worker      fills them, right before the step that computes the request's last token
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
)

from dora_rl.engine.vllm.process import NAME, RequestKv

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig


@dataclass(frozen=True, slots=True)
class Load:
    """Blocks of one request to be filled, the first of them number `first` of the request."""

    kv: RequestKv
    first: int
    block_ids: list[int]


@dataclass
class Loads(KVConnectorMetadata):
    """What the worker does before the next step."""

    loads: list[Load] = field(default_factory=list[Load])


arrived: dict[str, RequestKv] = {}  # by the name of the request that it is for


class RequestMover(KVConnectorBase_V1):
    """See the module docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_tokens = int(vllm_config.cache_config.block_size)
        self._num_blocks = int(kv_cache_config.num_blocks)
        self._num_groups = len(kv_cache_config.kv_cache_groups)
        self._loads: list[Load] = []
        self._caches: dict[str, Tensor] = {}  # the block is their first dimension

    # ------------------------------------------------------------------------------ the scheduler

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        if (kv := arrived.get(name_of(request))) is None:
            return 0, False
        # The last token is computed here: the next one is drawn from its logits.
        return max(0, min(kv.num_tokens, request.num_tokens - 1) - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if (kv := arrived.pop(name_of(request), None)) is None or not num_external_tokens:
            return
        ids = blocks.get_block_ids()[0]
        count = kv.layers[0].shape[0]
        last = min(kv.num_tokens, request.num_tokens - 1)
        first = (last - num_external_tokens) // self._block_tokens  # those before were cached
        self._loads.append(Load(kv, first, list(ids[first:count])))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        loads, self._loads = self._loads, []
        return Loads(loads)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        arrived.pop(name_of(request), None)
        return False, None

    # --------------------------------------------------------------------------------- the worker

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        for name, cache in kv_caches.items():
            if not isinstance(cache, Tensor) or self._num_groups != 1:
                continue
            if at := [
                dim for dim in (0, 1) if cache.shape[dim] == self._num_blocks
            ]:  # some backends have keys and values first
                self._caches[name] = cache.movedim(at[0], 0)

    def layout(self) -> list[list[Any]]:
        """What two instances must have in common; empty where KV cannot be moved."""
        if self._num_groups != 1:
            return []
        return [
            [name, str(cache.dtype), list(cache.shape[1:]), list(cache.stride()[1:])]
            for name, cache in sorted(self._caches.items())
        ]

    def read(self, block_ids: list[int], num_tokens: int) -> RequestKv:
        """Copies of the first blocks of a request that hold so many tokens."""
        ids = block_ids[: -(-num_tokens // self._block_tokens)]
        layers = []
        for _, cache in sorted(self._caches.items()):
            index = torch.tensor(ids, device=cache.device)
            copy = cache.index_select(0, index).contiguous().cpu()
            layers.append(copy.view(len(ids), -1).view(torch.uint8))
        return RequestKv(num_tokens, tuple(layers))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Loads)
        for load in metadata.loads:
            last = load.first + len(load.block_ids)
            for (_, cache), data in zip(sorted(self._caches.items()), load.kv.layers, strict=True):
                index = torch.tensor(load.block_ids, device=cache.device)
                part = data[load.first : last].contiguous().view(cache.dtype)
                blocks = part.view(len(load.block_ids), *cache.shape[1:])
                cache.index_copy_(0, index, blocks.to(cache.device))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Everything is there before the first layer begins."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Nothing is saved on the way: `read` takes what it needs from the cache."""

    def wait_for_save(self) -> None:
        """See `save_kv_layer`."""


def name_of(request: Any) -> str:
    """The name we gave a request; vLLM's own has something random at its end."""
    return (request.kv_transfer_params or {}).get(NAME, "")


def mover() -> RequestMover:
    """The worker's connector, in this process."""
    found = get_kv_transfer_group()
    assert isinstance(found, RequestMover)
    return found


def read_request(scheduler: Any, name: str) -> RequestKv | None:
    """What a vLLM has computed of the request of this name; None where that is nothing."""
    request = next((r for r in scheduler.requests.values() if name_of(r) == name), None)
    if request is None or not mover().layout():
        return None
    num_tokens = min(request.num_computed_tokens, request.num_tokens - 1)
    blocks = scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]
    return mover().read(blocks, num_tokens) if num_tokens > 0 else None
