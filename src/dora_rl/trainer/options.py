"""What the learner can be told: plain frozen dataclasses, one per section of the configuration.

Never imports torch or pydantic, so a benchmark can use them on a bare machine. Invariant: the
sections `AlgorithmConfig`, `TrainerConfig` and `CheckpointConfig` of `dora_rl.config` have exactly
these fields and defaults (a test compares them, and the `ranges`); `from_section` maps one onto
the other.
`None` in `AlgorithmOptions` means "as the loss's recipe says" (see `losses.recipes`).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeAlias, TypeVar

from dora_rl.trainer.ranges import TRAINER, check_ranges
from dora_rl.types import UserError

Scalar: TypeAlias = bool | int | float | str

SCHEDULES = ("constant", "linear", "cosine")

_Options = TypeVar("_Options")


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else raise with the nearest known name."""
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
    raise UserError(f"unknown {what} '{name}': {hint}")


def from_section(kind: type[_Options], section: object) -> _Options:
    """Build options from any object that has the same attributes (a pydantic section, say)."""
    assert isinstance(kind, type)
    values: dict[str, Any] = {f.name: getattr(section, f.name) for f in fields(kind)}  # type: ignore[arg-type]
    return kind(**values)


@dataclass(frozen=True, slots=True)
class AlgorithmOptions:
    """[algorithm]: the loss, its corrections and the advantages."""

    loss: str = "grpo"  # a recipe, or path/to/file.py:function
    # group | group_mean | leave_one_out | batch | gae, or path/to/file.py:function
    advantage: str | None = None
    aggregation: str | None = None  # token_mean | sequence_mean | constant
    constant_tokens: int | None = None  # denominator per sequence of `constant`
    clip_low: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None  # cap on the ratio where the advantage is negative; 0: none
    old_logprobs: str | None = None  # rollout | behaviour | proximal
    corrections: tuple[str, ...] | None = None  # see `corrections`; () for none
    correction_numerator: str = "old"  # old | current
    token_ratio_max: float = 2.0
    token_ratio_min: float = 0.5
    sequence_ratio_max: float = 2.0
    sequence_ratio_min: float = 0.5
    geometric_ratio_max: float = 1.001
    geometric_ratio_min: float = 0.999
    behaviour_ratio_max: float | None = (
        None  # cap on proximal / behaviour in decoupled PPO; 0: none
    )
    reference: bool = False  # hold the reference though kl_coef is 0
    kl_coef: float = 0.0
    kl_estimator: str = "k3"  # k1 | k2 | k3
    kl_in: str = "loss"  # loss | reward
    kl_ratio_weighted: bool = False  # KL times the ratio: an unbiased gradient off-policy
    entropy_coef: float = 0.0
    temperature: float = 0.0  # of the log-probs; 0: the rollout's, 1 where there is none
    skip_zero_advantage: bool = True
    overlong_tokens_max: int = 0  # 0: no overlong shaping
    overlong_buffer_tokens: int = 0
    overlong_penalty: float = 1.0
    gamma: float = 1.0
    gae_lambda: float = 1.0
    whiten_advantages: bool = True  # of GAE, over the whole batch
    value_coef: float = 0.5
    value_clip: float | None = 0.2  # 0: none
    critic_lr: float = 1e-5
    # Arguments of a loss and of an advantage of the user's own.
    loss_args: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])
    advantage_args: Mapping[str, Scalar] = field(default_factory=dict[str, Scalar])


@dataclass(frozen=True, slots=True)
class TrainerOptions:
    """[trainer]: optimizer, packing, precision, sharding."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    schedule: str = "constant"  # constant | linear | cosine
    warmup_updates: int = 0
    num_updates: int = 0  # horizon of linear and cosine; 0 with constant
    lr_floor_ratio: float = 0.0
    grad_norm_max: float = 1.0  # 0: no clipping
    updates_per_step: int = 1
    skipped_updates_max: int = 10  # in a row, as non-finite
    pack_tokens: int = 0  # of one micro-batch; 0: 4096 on a CPU, 32768 on CUDA
    document_tokens_max: int = 0  # 0: what the model's positions allow
    streaming: bool = True
    canonical_order: bool = False
    compute_dtype: str = "auto"  # auto: float32 on a CPU, bfloat16 on CUDA
    publish_dtype: str = "auto"  # auto: the compute dtype
    device: str = "auto"
    threads: int = 0  # 0: leave torch's setting alone
    attention: str = "auto"  # auto | varlen | flex | blocks | sdpa | loop
    implementation: str = "auto"  # auto | lean | transformers
    compile: str = "auto"  # auto | on | off
    activation_checkpointing: str = "auto"  # auto | none | layer
    logits_chunk_tokens: int = 0  # 0: chosen from the vocabulary
    lora_rank: int = 0
    lora_alpha: float = 16.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] = ()  # empty: every linear layer of the blocks
    lora_publish: str = "adapters"  # adapters | merged
    trust_remote_code: bool = False
    reference_model: str = ""  # empty: the starting weights
    seed: int = 0


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


def check_trainer(options: TrainerOptions) -> None:
    """Numbers that make sense, alone and together."""
    check_ranges("trainer", options, TRAINER)
    choose("trainer.schedule", options.schedule, SCHEDULES)
    if options.schedule != "constant" and options.num_updates <= options.warmup_updates:
        raise UserError(
            f"trainer.schedule '{options.schedule}' needs trainer.num_updates above "
            f"warmup_updates ({options.warmup_updates})"
        )


@dataclass(frozen=True, slots=True)
class CheckpointOptions:
    """[checkpoint]: how often, how many, which is best."""

    every_steps: int = 10
    state_every_s: float = 60.0  # between two copies of the moments beside the sealed versions
    keep: int = 2  # newest ones; 0 keeps all
    keep_best: bool = True
    best_metric: str = "eval/greedy"
    best_is_max: bool = True
    dtype: str = "auto"  # of the model files; the float32 masters are always beside them
    shard_bytes_max: int = 4 << 30
