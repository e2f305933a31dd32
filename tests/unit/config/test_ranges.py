"""Every number of [algorithm], [trainer] and [rollout] has a range, and one line for what is
outside of it: the key, the value, the range."""

from __future__ import annotations

import math
import types
import typing
from typing import Any

import pytest
from pydantic import BaseModel

from dora_rl.config import AlgorithmConfig, RolloutConfig, TrainerConfig
from dora_rl.engine.options import EngineOptions
from dora_rl.setup.learner_check import check_learner
from dora_rl.setup.settings import resolve
from dora_rl.trainer.losses.recipes import fill
from dora_rl.types import UserError
from tests.kit.places import ROOT

MODEL = str(ROOT / "recipes" / "models" / "tiny")
SECTIONS: dict[str, type[BaseModel]] = {
    "algorithm": AlgorithmConfig,
    "trainer": TrainerConfig,
    "rollout": RolloutConfig,
}
NAN, INF = math.nan, math.inf

# key -> (values that make no sense, values at the edge that do, the range in words)
NOT_NEGATIVE = ((-1e-9, NAN, INF), (0, 1e-9), "at least 0")
POSITIVE = ((0.0, -1.0, NAN, INF), (1e-9,), "above 0")
SHARE = ((-0.01, 1.01, NAN), (0, 1), "at least 0 and at most 1")
BELOW_ONE = ((-0.01, 1.0, NAN), (0, 0.99), "at least 0 and below 1")
FROM_ONE = ((0.99, -1.0, NAN, INF), (1, 9.0), "at least 1")
COUNT = ((-1,), (0, 1), "at least 0")
NUMBER = ((0, -1), (1,), "at least 1")
FREE = ((NAN, INF), (-1.0, 1.0), "finite")
TABLE: dict[str, tuple[tuple[Any, ...], tuple[Any, ...], str]] = {
    "algorithm.constant_tokens": NUMBER,
    "algorithm.clip_low": SHARE,
    "algorithm.clip_high": NOT_NEGATIVE,
    "algorithm.dual_clip": ((0.5, 1.0, -3.0, NAN, INF), (0, 1.01), ""),
    "algorithm.token_ratio_max": FROM_ONE,
    "algorithm.token_ratio_min": SHARE,
    "algorithm.sequence_ratio_max": FROM_ONE,
    "algorithm.sequence_ratio_min": SHARE,
    "algorithm.geometric_ratio_max": FROM_ONE,
    "algorithm.geometric_ratio_min": SHARE,
    "algorithm.behaviour_ratio_max": ((0.5, -1.0, NAN), (0, 1), ""),
    "algorithm.kl_coef": NOT_NEGATIVE,
    "algorithm.distill_coef": (NOT_NEGATIVE[0], (0,), "at least 0"),
    "algorithm.distill_top_k": ((-1,), (0,), "at least 0"),
    "algorithm.distill_clip": NOT_NEGATIVE,
    "algorithm.entropy_coef": FREE,
    "algorithm.temperature": ((-1.0, NAN, INF), (0, 1.0), "at least 0"),
    "algorithm.overlong_tokens_max": COUNT,
    "algorithm.overlong_buffer_tokens": ((-1,), (0,), "at least 0"),
    "algorithm.overlong_penalty": NOT_NEGATIVE,
    "algorithm.gamma": SHARE,
    "algorithm.gae_lambda": SHARE,
    "algorithm.value_coef": NOT_NEGATIVE,
    "algorithm.value_clip": NOT_NEGATIVE,
    "algorithm.critic_lr": NOT_NEGATIVE,
    "trainer.skipped_updates_max": NUMBER,
    "trainer.lr": NOT_NEGATIVE,
    "trainer.betas": (((-0.1, 0.9), (0.9, 1.0), (NAN, 0.9)), ((0, 0.99),), "at least 0 and below"),
    "trainer.eps": POSITIVE,
    "trainer.weight_decay": NOT_NEGATIVE,
    "trainer.warmup_updates": COUNT,
    "trainer.num_updates": COUNT,
    "trainer.lr_floor_ratio": SHARE,
    "trainer.grad_norm_max": NOT_NEGATIVE,
    "trainer.updates_per_step": NUMBER,
    "trainer.pack_tokens": COUNT,
    "trainer.document_tokens_max": COUNT,
    "trainer.threads": COUNT,
    "trainer.logits_chunk_tokens": COUNT,
    "trainer.lora_rank": COUNT,
    "trainer.lora_alpha": POSITIVE,
    "trainer.lora_dropout": BELOW_ONE,
    "trainer.router_aux_coef": ((-0.1, NAN, INF), (0.0,), "at least 0"),  # the model has no experts
    "trainer.seed": ((), (-1, 0, 7), ""),
    "rollout.num_instances": NUMBER,
    "rollout.threads": NUMBER,
    "rollout.num_samples": ((0, -1), (2,), "at least 1"),
    "rollout.tokens_max": NUMBER,
    "rollout.temperature": ((-0.1, NAN, INF), (1e-3, 1.0), "at least 0"),
    "rollout.top_k": ((-1,), (0,), "at least 0"),
    "rollout.top_p": ((0.0, 1.1, -0.5, NAN), (1.0,), "above 0 and at most 1"),
    "rollout.min_p": ((-0.1, 1.1, NAN), (0.0,), "at least 0 and at most 1"),
    "rollout.stop_ids": (((-1,), (3, -2)), ((0, 5),), "at least 0"),
    "rollout.forced_length_median": NOT_NEGATIVE,
    "rollout.forced_length_sigma": POSITIVE,
    "rollout.block_tokens": ((0, 5, 24), (16, 64), "a power of two"),
    "rollout.num_blocks": COUNT,
    "rollout.kv_bytes_max": ((-1,), (0,), "at least 0"),
    "rollout.host_blocks_max": COUNT,
    "rollout.seqs_max": NUMBER,
    "rollout.step_tokens_max": NUMBER,
    "rollout.context_max": COUNT,
    "rollout.versions_max": COUNT,
    "rollout.burst_max": NUMBER,
    "rollout.journal_steps": NUMBER,
}


def is_number(kind: Any) -> bool:
    """Whether a key holds numbers, alone or in a list."""
    if kind in (int, float):
        return True
    if typing.get_origin(kind) in (types.UnionType, typing.Union, tuple, typing.Annotated):
        return any(is_number(inner) for inner in typing.get_args(kind))
    return False


NUMERIC = [
    f"{name}.{key}"
    for name, section in SECTIONS.items()
    for key, field in section.model_fields.items()
    if is_number(field.annotation)
]


def try_value(key: str, value: Any) -> None:
    """As `train` does, before anything starts."""
    section, _, name = key.partition(".")
    # A cap on decoupled PPO's weight has to be one of decoupled PPO.
    loss = "decoupled_ppo" if name == "behaviour_ratio_max" else "grpo"
    data: dict[str, Any] = {"model": {"path": MODEL}, "algorithm": {"loss": loss}}
    if name == "lora_rank":
        data["trainer"] = {"lora_rank": value}
    data.setdefault(section, {})[name] = value
    config = resolve(data, "a.toml")
    check_learner(config)
    EngineOptions(**config.engine_options("cpu", 2))


def test_no_number_is_left_out() -> None:
    assert sorted(NUMERIC) == sorted(TABLE)


@pytest.mark.parametrize("key", TABLE)
def test_a_number_outside_its_range_is_one_line(key: str) -> None:
    bad, good, words = TABLE[key]
    for value in bad:
        with pytest.raises(UserError) as caught:
            try_value(key, value)
        line = str(caught.value)
        assert "\n" not in line and key in line and words in line, line
        shown = [str(part) for part in value] if isinstance(value, tuple) else [str(value)]
        assert any(part in line for part in shown), line
    for value in good:
        try_value(key, value)


@pytest.mark.parametrize("key", [k for k in TABLE if not k.startswith("rollout.")])
def test_sections_made_by_hand_are_held_to_the_same(key: str) -> None:
    section, _, name = key.partition(".")
    for value in TABLE[key][0]:
        with pytest.raises(UserError, match=rf"{section}\.{name} = "):
            if section == "algorithm":
                fill(AlgorithmConfig(**{name: value}))
            else:
                TrainerConfig(**{name: value})
