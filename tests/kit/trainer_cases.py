"""Tiny models and random groups shared by the trainer's tests."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dora_rl.config import TrainerConfig
from dora_rl.histories import ROOT
from dora_rl.model.directory import write_model
from dora_rl.model.spec import MoeSpec
from dora_rl.trainer.learner import Learner
from dora_rl.trainer.policy.decoder import Decoder
from dora_rl.trainer.policy.model import build_decoder, lean_spec, named_weights
from dora_rl.types import Branch, Finish, Group, RequestId, Segment, Trajectory

torch.set_num_threads(1)

VOCAB = 23
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "hidden_act": "silu",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "qwen3_tied": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "tie_word_embeddings": True,
    },
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "llama3_rope": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "olmo2": {
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "attention_bias": True,
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "olmo3": {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "attention_bias": True,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "phi3": {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": 9,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.25, 1.5],
            "long_factor": [2.0, 4.0, 6.0],
        },
        "original_max_position_embeddings": 64,
        "pad_token_id": None,
        "eos_token_id": None,
    },
    "glm": {
        "architectures": ["GlmForCausalLM"],
        "model_type": "glm",
        "attention_bias": True,
        "pad_token_id": None,
    },
    "glm4": {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "attention_bias": True,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
        },
    },
    # Windows shorter than the documents, every switch on.
    "mistral": {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 5,
    },
    "ministral": {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "sliding_window": 18,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "smollm3": {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "no_rope_layers": [1, 0],
        "use_sliding_window": True,
        "sliding_window": 5,
        "attention_bias": True,
        "mlp_bias": True,
        "pad_token_id": None,
    },
    "gemma3": {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "pad_token_id": None,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 24,
        "sliding_window": 5,
        "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 2.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        "attention_bias": True,
    },
}


@torch.no_grad()
def initialise(decoder: Decoder, seed: int) -> None:
    """Random weights, the same for the same seed: norms 1, biases 0, matrices normal."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    for name, p in decoder.named_parameters():
        if p.dim() == 1:
            p.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            p.copy_(torch.randn(p.shape, generator=generator) * 0.2)


def write_tiny_model(directory: Path, family: str, seed: int = 0, **shape: Any) -> Path:
    """A model directory with random weights large enough that attention matters."""
    config = {"tie_word_embeddings": False, **SHAPE, **FAMILIES[family], **shape}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    arch = lean_spec(config)
    assert arch is not None
    decoder = build_decoder(arch, TrainerConfig(device="cpu"))
    initialise(decoder, seed)
    write_model(directory, named_weights(decoder), 1 << 30)
    return directory


def sample(
    token_ids: list[int],
    logprobs: list[float],
    loss_mask: list[int],
    reward: float | None,
    segments: tuple[Segment, ...] = (),
    truncated: bool = False,
) -> Trajectory:
    """One response; which group it is of does not matter to the learner."""
    finish = Finish.LENGTH if truncated else Finish.STOP
    request = RequestId(0, 0)
    return Trajectory(request, 0, token_ids, logprobs, loss_mask, finish, segments, reward=reward)


def make_groups(
    seed: int, count: int, samples: int = 4, version: int = 0, tokens_max: int = 20
) -> list[Group]:
    """Random groups with masks that have holes, as multi-turn data does."""
    rng = random.Random(seed)
    groups = []
    for g in range(count):
        made = []
        for _ in range(samples):
            n = rng.randint(1, tokens_max)
            mask = [1] + [int(rng.random() < 0.8) for _ in range(n - 1)]
            made.append(
                sample(
                    token_ids=[rng.randrange(VOCAB) for _ in range(n)],
                    logprobs=[-3.0 + rng.gauss(0, 0.3) for _ in range(n)],
                    loss_mask=mask,
                    reward=float(rng.random()),
                )
            )
        prompt = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 6))]
        groups.append(Group(g, version, prompt, tuple(made)))
    return groups


def routed(group: Group, seed: int, moe: MoeSpec) -> Group:
    """Its samples with choices that no router made; those of the newest token are not known."""
    rng = np.random.default_rng(seed)

    def chosen(sample: Trajectory) -> NDArray[np.uint8]:
        count = len(group.prompt_ids) + len(sample.token_ids)
        shape = (count, len(moe.sparse_layers), moe.num_experts)
        every = rng.permuted(np.broadcast_to(np.arange(moe.num_experts), shape), axis=-1)
        found = every[..., : moe.top_k].astype(np.uint8)
        found[-1] = np.iinfo(np.uint8).max
        return found

    return replace(group, samples=tuple(replace(s, expert_ids=chosen(s)) for s in group.samples))


def forked(group: Group) -> Group:
    """Its samples with a branch in the middle of each that is long enough."""
    samples = []
    for place, sample in enumerate(group.samples):
        num, half = len(sample.token_ids), len(sample.token_ids) // 2
        cut = -1 if len(group.prompt_ids) > 1 else 0  # something is left to predict a token from
        branch = Branch(half, 0, (half // 2) if place % 2 else cut)
        there = (ROOT, branch) if half and sample.loss_mask[half:].any() else ()
        samples.append(replace(sample, branches=there if num > 3 else ()))
    return replace(group, samples=tuple(samples))


def flat(learner: Learner) -> torch.Tensor:
    """All its weights, one behind the other."""
    return torch.cat([p.detach().reshape(-1) for p in learner.policy.parameters()])


# AdamW's first step is the sign of every gradient well above eps: it hides a wrong scale, and a
# gradient near zero moves its weight one way or the other as sums are rounded on this machine.
# With this eps an update is nearly the gradient itself, so two ways to compute it can be compared.
SMOOTH_EPS = 1e-2


def changed(options: TrainerConfig, **changes: Any) -> TrainerConfig:
    """The section with other values."""
    return options.model_copy(update=changes)
