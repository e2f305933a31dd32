"""What each key of [trainer] alone allows and several together do not. Never imports torch."""

from __future__ import annotations

from dora_rl.config import TrainerConfig
from dora_rl.config.section import choose
from dora_rl.user_code import require


def check_attention(name: str, *, on_gpu: bool, dtype: str) -> None:
    """Whether a backend computes on such a device in this dtype ("auto": the device's own)."""
    wanted = {
        "varlen": (on_gpu and dtype != "float32", "needs CUDA and bfloat16"),
        "flex": (on_gpu, "needs CUDA"),
        "blocks": (not on_gpu and dtype in ("auto", "float32"), "is for float32 on a CPU"),
    }
    fits, needs = wanted.get(name, (True, ""))
    require((fits, f"trainer.attention '{name}' {needs}; use 'auto'"))


def check_published(compute: str, published: str, *, on_gpu: bool) -> None:
    """A version holds all bits that the learner computes with: instances run the same weights."""
    own = compute if compute != "auto" else "bfloat16" if on_gpu else "float32"
    require(
        (
            published in ("auto", "float32", own),
            f"trainer.publish_dtype = {published}: the learner computes in {own}, so instances "
            f"would run other weights than it trains; set trainer.compute_dtype = {published} too, "
            "or leave publish_dtype at auto",
        )
    )


def checkpoints_layers(options: TrainerConfig) -> bool:
    """Whether layers are computed again in the backward pass. With "auto" they are not: the memory
    plan of a run has chosen before."""
    kinds, kind = ("auto", "none", "layer"), options.activation_checkpointing
    return choose("trainer.activation_checkpointing", kind, kinds) == "layer"


def check_trainer(options: TrainerConfig) -> None:
    """A schedule that ends needs to know when, and what is balanced must be trained."""
    require(
        (
            not (options.router_aux_coef and options.lora_rank),
            f"trainer.router_aux_coef = {options.router_aux_coef:g}: routers carry no adapter, so "
            "with trainer.lora_rank none would learn to balance; set it to 0",
        ),
        (
            options.schedule == "constant" or options.num_updates > options.warmup_updates,
            f"trainer.schedule '{options.schedule}' needs trainer.num_updates above "
            f"warmup_updates ({options.warmup_updates})",
        ),
    )
