"""What each key of [trainer] alone allows and several together do not. Never imports torch."""

from __future__ import annotations

from dora_rl.config import TrainerConfig
from dora_rl.types import UserError


def check_attention(name: str, *, on_gpu: bool, dtype: str) -> None:
    """Whether a backend computes on such a device in this dtype ("auto": the device's own)."""
    if name == "varlen" and (not on_gpu or dtype == "float32"):
        raise UserError("trainer.attention 'varlen' needs CUDA and bfloat16; use 'auto'")
    if name == "flex" and not on_gpu:
        raise UserError("trainer.attention 'flex' needs CUDA; use 'auto'")
    if name == "blocks" and (on_gpu or dtype not in ("auto", "float32")):
        raise UserError("trainer.attention 'blocks' is for float32 on a CPU; use 'auto'")


def check_published(compute: str, published: str, *, on_gpu: bool) -> None:
    """A version holds all bits that the learner computes with: instances run the same weights."""
    usual = "bfloat16" if on_gpu else "float32"
    own = usual if compute == "auto" else compute
    if published not in ("auto", "float32", own):
        raise UserError(
            f"trainer.publish_dtype = {published}: the learner computes in {own}, so instances "
            f"would run other weights than it trains; set trainer.compute_dtype = {published} too, "
            "or leave publish_dtype at auto"
        )


def check_trainer(options: TrainerConfig) -> None:
    """A schedule that ends needs to know when."""
    if options.schedule != "constant" and options.num_updates <= options.warmup_updates:
        raise UserError(
            f"trainer.schedule '{options.schedule}' needs trainer.num_updates above "
            f"warmup_updates ({options.warmup_updates})"
        )
