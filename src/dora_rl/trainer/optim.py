"""AdamW on float32 parameters, learning-rate schedules, and the one place a gradient is applied.

Invariant: `apply` never lets a non-finite gradient touch a parameter; it says so instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from dora_rl.config import TrainerConfig
from dora_rl.trainer.checkpoints.finite import check_moments
from dora_rl.trainer.checks import check_trainer
from dora_rl.trainer.distributed import gathered, like_shard
from dora_rl.trainer.policy.lora import name_now


def learning_rate(options: TrainerConfig, update: int, lr: float | None = None) -> float:
    """The rate of update number `update` (0 is the first).

    Linear warm-up over `warmup_updates`, then constant, or down to lr·lr_floor_ratio at
    `num_updates` along a line or half a cosine.
    """
    base = options.lr if lr is None else lr
    if update < options.warmup_updates:
        return base * (update + 1) / options.warmup_updates
    if options.schedule == "constant":
        return base
    span = max(1, options.num_updates - options.warmup_updates)
    done = min(1.0, (update - options.warmup_updates) / span)
    shape = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return base * (options.lr_floor_ratio + (1.0 - options.lr_floor_ratio) * shape)


class Optimizer:
    """AdamW over the trainable parameters of a module, by name."""

    def __init__(self, module: nn.Module, options: TrainerConfig, lr: float | None = None) -> None:
        check_trainer(options)
        self.options, self.base_lr = options, options.lr if lr is None else lr
        self.named = {n: p for n, p in module.named_parameters() if p.requires_grad}
        groups = [
            {
                "params": [p for p in self.parameters if (p.dim() >= 2) == matrices],
                "weight_decay": w,
            }
            for matrices, w in ((True, options.weight_decay), (False, 0.0))
        ]
        self.adamw = torch.optim.AdamW(
            [g for g in groups if g["params"]],
            lr=self.base_lr,
            betas=options.betas,
            eps=options.eps,
            fused=True,
        )
        self.num_applied = 0

    @property
    def parameters(self) -> Iterable[nn.Parameter]:
        return self.named.values()

    def retune(self, options: TrainerConfig) -> None:
        """Other rates from the next update on; the moments stay."""
        self.options, self.base_lr = options, options.lr
        for group in self.adamw.param_groups:
            decay = options.weight_decay if group["params"][0].dim() >= 2 else 0.0
            group |= {"betas": options.betas, "eps": options.eps, "weight_decay": decay}

    def zero_grad(self) -> None:
        self.adamw.zero_grad(set_to_none=True)

    def apply(self, scale: float, update: int, poisoned: Tensor | None = None) -> float | None:
        """Scale the summed gradients, clip, step. Returns the norm, or None if it was refused.

        `poisoned` is a sum that is non-finite if any pack's loss was.
        """
        for p in self.parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in self.parameters if p.grad is not None]
        # Of the whole model, when they are sharded.
        total_norm = gathered(torch.nn.utils.get_total_norm(grads, foreach=True))
        # Both at once: the host waits for the device a single time.
        norm, *loss = torch.stack(
            [t.detach().double() for t in (total_norm, poisoned) if t is not None]
        ).tolist()
        norm *= scale
        ok = math.isfinite(norm) and all(map(math.isfinite, loss))
        if ok:
            limit = self.options.grad_norm_max
            clip = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
            for g in grads:
                g.mul_(scale * clip)
            for group in self.adamw.param_groups:
                group["lr"] = learning_rate(self.options, update, self.base_lr)
            self.adamw.step()
            self.num_applied += 1
        self.zero_grad()
        return norm if ok else None

    def state_tensors(self) -> dict[str, Tensor]:
        """Moments and step counts by parameter name, for a checkpoint."""
        return {
            f"{name}:{kind}": value
            for name, p in self.named.items()
            for kind, value in self.adamw.state.get(p, {}).items()
        }

    def load_state_tensors(self, tensors: dict[str, Tensor]) -> None:
        """Nothing is changed where one of them cannot be used."""
        check_moments(tensors)
        for key, value in tensors.items():
            name, _, kind = key.rpartition(":")
            p = self.named[name_now(name, self.named)]
            # The fused kernel wants the step count as float32 on the parameter's device.
            state = value.to(device=p.device, dtype=torch.float32)
            self.adamw.state[p][kind] = state if kind == "step" else like_shard(state, p)
