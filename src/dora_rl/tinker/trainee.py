"""The base that everybody shares, and what each training client has of its own on top of it.

    Base: frozen weights, once  ──▶  Trainee: adapters, gradients, moments; one per client

A trainee's layers are its own objects around the base's tensors. Never changes the base. Runs
one call at a time, in one thread, with one number of threads. Invariant: what a trainee computes
depends on its own calls alone, bit for bit, whoever else is there; a pass that raises leaves no
gradient behind.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from dora_rl.config import TrainerConfig
from dora_rl.model.names import ATTENTION_LAYERS
from dora_rl.ports import WeightStore
from dora_rl.tinker.losses import TARGETS, check_data, loss_named, side_by_side
from dora_rl.tinker.messages import Array, Datum, TrainingPass
from dora_rl.trainer.attention import Layout, send
from dora_rl.trainer.checkpoints.publish import compute_canary
from dora_rl.trainer.documents import pack_balanced
from dora_rl.trainer.optim import Optimizer
from dora_rl.trainer.policy.logprobs import Output, TokenScores, scores_of
from dora_rl.trainer.policy.lora import (
    LoraLinear,
    adapter_tensors,
    add_lora,
    load_adapter_tensors,
    low_rank,
    published_adapter,
)
from dora_rl.trainer.policy.model import Policy, load_policy
from dora_rl.types import UserError, Version

ALPHA = 32.0  # adapters are scaled by ALPHA / rank, so that a learning rate fits every rank
PACK_TOKENS = {"cpu": 4096, "cuda": 32768}
QUADRATIC = 8192.0  # tokens from which attention costs more than the rest


@dataclass(frozen=True, slots=True)
class AdapterShape:
    """Which adapters a client trains."""

    rank: int
    seed: int = 0
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def layers(self) -> tuple[str, ...]:
        """By the names of any family, of which a base has some: fused layers or their parts."""
        attention = (*ATTENTION_LAYERS, "qkv_proj") * self.train_attn
        return attention + ("gate_proj", "up_proj", "gate_up_proj", "down_proj") * self.train_mlp


@dataclass(frozen=True, slots=True)
class AdamStep:
    """The numbers of one update; `clip` 0: the gradient is taken as it is."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    clip: float


class Base:
    """The frozen weights of a model directory, in what they are computed in."""

    def __init__(self, directory: Path, device: str, dtype: Literal["float32", "bfloat16"]) -> None:
        self.directory = directory
        self.options = TrainerConfig(
            device=device, compute_dtype=dtype, compile="off", lora_rank=1, lora_alpha=ALPHA
        )
        self.policy: Policy = load_policy(directory, self.options).requires_grad_(False)

    @property
    def vocab(self) -> int:
        return self.policy.vocab

    @property
    def is_sparse(self) -> bool:
        arch = getattr(self.policy, "arch", None)
        return arch is not None and arch.moe is not None

    def layers(self) -> set[str]:
        """The last parts of the names of its linear layers."""
        linear = (n for n, m in self.policy.named_modules() if isinstance(m, nn.Linear))
        return {name.rpartition(".")[2] for name in linear}

    def shared(self) -> Policy:
        """The same layers as other objects around the same tensors."""
        tensors = itertools.chain(self.policy.parameters(), self.policy.buffers())
        return copy.deepcopy(self.policy, {id(tensor): tensor for tensor in tensors})


class Adapted(nn.Module):
    """The base with one client's adapters; `lm_head` is that of the output matrix, if it has one.

    It has the call of a policy, so that a canary can be computed of it."""

    def __init__(self, base: Base, shape: AdapterShape, options: TrainerConfig) -> None:
        super().__init__()
        self.inner = base.shared()
        self.compute_dtype = self.inner.compute_dtype
        if shape.layers():
            add_lora(self.inner, options)
        self.lm_head = _head_adapter(self.inner.output(), options) if shape.train_unembed else None

    def forward(
        self,
        token_ids_P: Tensor,
        layout: Layout,
        rows_T: Tensor,
        target_T: Tensor,
        temperature: float = 1.0,
    ) -> TokenScores:
        states_TH = self.inner.states(token_ids_P, layout).index_select(0, rows_T)
        output = self.inner.output()
        if self.lm_head is not None:
            # [x A·x]·[W B]ᵀ: both parts in one product, whose logits never exist as a whole.
            head = self.lm_head
            down = low_rank(states_TH, head.down(states_TH.dtype))
            states_TH = torch.cat((states_TH, down), dim=1)
            weight = output.weight_VH.to(states_TH.dtype)
            output = output._replace(weight_VH=torch.cat((weight, head.up(states_TH.dtype)), dim=1))
        return scores_of(states_TH, output, target_T, temperature, 0)


def _head_adapter(output: Output, options: TrainerConfig) -> LoraLinear:
    """An adapter around the output matrix, which may be the embedding."""
    rows, width = output.weight_VH.shape
    layer = nn.Linear(width, rows, bias=False, device="meta")
    layer.weight = nn.Parameter(output.weight_VH, requires_grad=False)  # the same memory
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed + 1)  # another draw than those of the layers
        return LoraLinear(layer, options)


class Trainee:
    """One training client's model."""

    def __init__(self, base: Base, shape: AdapterShape) -> None:
        self.base, self.shape = base, shape
        layers = tuple(name for name in shape.layers() if name in base.layers())
        self.options = base.options.model_copy(
            update={"lora_rank": shape.rank, "seed": shape.seed, "lora_targets": layers}
        )
        self.policy = Adapted(base, shape, self.options)
        self.device = next(self.policy.parameters()).device
        self._optimizer = Optimizer(self.policy, self.options)

    # -- passes ----------------------------------------------------------------------------------

    def run(self, asked: TrainingPass) -> tuple[list[Array], float]:
        """The log-probs of each datum's targets, and the loss; its gradient is added to the others,
        unless it is a forward pass."""
        loss = loss_named(asked.loss)
        config = loss.configured(asked.loss, asked.config)
        check_data(asked.data, asked.loss, self.base.vocab, self.base.policy.positions_max)
        found: list[Array] = [np.empty(0)] * len(asked.data)
        total = torch.zeros((), dtype=torch.float64)
        pack_tokens = PACK_TOKENS.get(self.device.type, 4096)
        lengths = [len(datum.token_ids) for datum in asked.data]
        try:
            for pack in pack_balanced(lengths, pack_tokens, 1, QUADRATIC):
                data = [asked.data[index] for index in pack]
                with torch.set_grad_enabled(not asked.forward_only):
                    logprobs_T = self._logprobs(data)
                    counts = [datum.inputs[TARGETS].size for datum in data]
                    given = side_by_side(data, self.device)
                    value = loss.function(logprobs_T, given, config, counts)
                if not asked.forward_only:
                    value.backward()
                total += value.detach().double().cpu()
                parts = logprobs_T.detach().cpu().split(counts)
                for index, datum, part in zip(pack, data, parts, strict=True):
                    found[index] = part.numpy().reshape(datum.inputs[TARGETS].shape)
        except BaseException:
            self._optimizer.zero_grad()  # a part of a batch must not become an update
            raise
        return found, float(total)

    def _logprobs(self, data: Sequence[Datum]) -> Tensor:
        """Of every target of every position, in order."""
        layout = Layout([len(datum.token_ids) for datum in data], self.device)
        ids = np.concatenate([datum.token_ids for datum in data]).astype(np.int64)
        targets = [datum.inputs[TARGETS] for datum in data]
        each = np.concatenate([np.full(len(t), t[0].size, np.int64) for t in targets])
        rows = np.repeat(np.arange(len(ids)), each)
        flat = np.concatenate([one.ravel() for one in targets])
        tensors = (send(torch.from_numpy(values), self.device) for values in (ids, rows, flat))
        token_ids_P, rows_T, target_T = tensors
        return self.policy(token_ids_P, layout, rows_T, target_T).logprobs_T

    def step(self, params: AdamStep) -> float:
        """One update from the gradients so far; returns their norm before it was clipped."""
        values = {"lr": params.lr, "betas": params.betas, "eps": params.eps}
        values |= {"weight_decay": params.weight_decay, "grad_norm_max": params.clip}
        self._optimizer.retune(self.options.model_copy(update=values))
        norm = self._optimizer.apply(1.0, self._optimizer.num_applied)
        if norm is None:
            raise UserError("the gradient is not finite: nothing was updated, and it is dropped")
        return norm

    # -- states ----------------------------------------------------------------------------------

    def adapters(self) -> dict[str, Tensor]:
        return adapter_tensors(self.policy)

    def moments(self) -> dict[str, Tensor]:
        return self._optimizer.state_tensors()

    def load(self, adapters: dict[str, Tensor], moments: dict[str, Tensor] | None) -> None:
        """Go on from a saved state; without its moments the optimizer is a new one."""
        wanted = {name: tensor.shape for name, tensor in self.adapters().items()}
        if wanted != {name: tensor.shape for name, tensor in adapters.items()}:
            raise UserError("the saved state has other adapters: rank and layers must be the same")
        load_adapter_tensors(self.policy, adapters)
        self._optimizer = Optimizer(self.policy, self.options)
        if moments:
            self._optimizer.load_state_tensors(moments)

    def publish(self, store: WeightStore, version: Version, base: str) -> None:
        """As a sealed version."""
        _publish(self.policy, self.options, store, version, base)


def publish_base(base: Base, store: WeightStore, version: Version, checksum: str) -> None:
    """A version without an adapter."""
    bare = AdapterShape(1, train_mlp=False, train_attn=False, train_unembed=False)
    _publish(Adapted(base, bare, base.options), base.options, store, version, checksum)


def _publish(
    policy: Adapted, options: TrainerConfig, store: WeightStore, version: Version, base: str
) -> None:
    """With a canary, so that what samples is known to have what was trained."""
    inner = policy.inner
    canary = compute_canary(policy, inner.vocab, inner.positions_max)
    tensors = published_adapter(policy, options, policy.compute_dtype, lambda tensor: tensor)
    store.publish(version, tensors, canary, base)
