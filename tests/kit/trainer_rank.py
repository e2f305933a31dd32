"""One rank of the distributed test: trains two steps, publishes, saves, writes what came out.

python -m tests.kit.trainer_rank RANK RANKS PORT MODEL OUT LOSS PACK_TOKENS [OPTIONS as JSON]
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from dora_rl.config import AlgorithmConfig, TrainerConfig
from dora_rl.trainer.checkpoints import state
from dora_rl.trainer.distributed import wait_for_all
from dora_rl.trainer.learner import Learner
from dora_rl.weights.store import DiskWeightStore, SharedMemoryWeightStore
from dora_rl.workers.publication import Moments
from tests.kit.exact_cases import move_adapters
from tests.kit.trainer_cases import SMOOTH_EPS, make_groups, routed

METRICS = ("loss", "grad_norm", "entropy", "kl", "ppo_kl", "reward/mean", "moe/mismatch")


def run_rank(
    model: Path,
    out: Path,
    loss: str,
    pack_tokens: int,
    trainer_options: dict[str, Any] | None = None,
    algorithm_options: dict[str, Any] | None = None,
    moves_adapters: bool = False,
) -> None:
    """Both steps on groups of version 0, so that losses which recompute meet an older version."""
    fixed = {
        "lr": 1e-3,
        "eps": SMOOTH_EPS,
        "device": "cpu",
        "pack_tokens": pack_tokens,
        "updates_per_step": 2,
    }
    trainer = TrainerConfig(**{**fixed, **(trainer_options or {})})
    algorithm = AlgorithmConfig(**{"loss": loss, "kl_coef": 0.05, **(algorithm_options or {})})
    store = SharedMemoryWeightStore(out / "store")
    learner = Learner(model, algorithm, trainer, batch_groups=4, store=store)
    if moves_adapters:
        move_adapters(learner)
    metrics: dict[str, float] = {}
    for step in range(2):
        learner.publish(store, step).result()
        wait_for_all()
        learner.begin_step(step)
        groups, arch = make_groups(step, 4, version=0), learner.policy.arch
        if arch is not None and arch.moe is not None:
            groups = [routed(group, group.id, arch.moe) for group in groups]
        learner.feed(groups)
        metrics = learner.finish_step()
    learner.publish(store, 2).result()
    learner.save(out / "ckpt")
    if learner.rank == 0:
        tensors = {name: tensor.clone() for name, tensor in store.open(2).tensors()}
        numbers = {n: v for n, v in metrics.items() if n in METRICS or n.startswith("clip_ratio/")}
        tensors.update({f"metric:{n}": torch.tensor(v) for n, v in numbers.items()})
        save_file(tensors, out / "result.safetensors")
    if learner.num_ranks > 1:
        again = Learner.resume(out / "ckpt", algorithm, trainer, batch_groups=4)
        for a, b in zip(again.policy.parameters(), learner.policy.parameters(), strict=True):
            assert torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]
        check_exact(learner, Learner(model, algorithm, trainer, batch_groups=4), out)


def check_exact(learner: Learner, again: Learner, out: Path) -> None:
    """A rounded version with what lies beside it, and moments, give every rank its shards back."""
    store, exact = DiskWeightStore(out / "weights"), DiskWeightStore(out / "masters")
    learner.options = learner.options.model_copy(update={"publish_dtype": "bfloat16"})
    learner.publish(store, 2, exact=exact)
    moments = Moments(out / "moments", 0.0)
    moments.save(learner, 2)
    wait_for_all()
    again.adopt(store, 2, exact)
    Moments(out / "moments", 0.0).load(again, 2)
    assert again.num_updates == learner.num_updates == 4
    for a, b in zip(trained(again), trained(learner), strict=True):
        assert torch.equal(a.full_tensor(), b.full_tensor())  # type: ignore[attr-defined]
    for a, b in zip(state.moments(again), state.moments(learner), strict=True):
        assert a[0] == b[0] and torch.equal(a[1], b[1])


def trained(learner: Learner) -> list[torch.Tensor]:
    critic = [] if learner.critic is None else list(learner.critic.parameters())
    return [*learner.policy.parameters(), *critic]


def main() -> None:
    rank, ranks, meeting = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    options = json.loads(sys.argv[8]) if len(sys.argv) > 8 else []
    run_rank(Path(sys.argv[4]), Path(sys.argv[5]), sys.argv[6], int(sys.argv[7]), *options)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # threads of torch's may abort an interpreter that is being shut down


if __name__ == "__main__":
    main()
