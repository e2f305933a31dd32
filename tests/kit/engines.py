"""Engines over tiny models, driven to the end, and `transformers` as their oracle."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import PreTrainedModel

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.model.directory import read_spec
from dora_rl.types import RequestId, Trajectory
from tests.kit.tiny_models import VOCAB

Saved = Callable[..., tuple[PreTrainedModel, Path]]
SMALL = {"block_tokens": 16, "num_blocks": 64, "context_max": 256, "seqs_max": 8}


def make_engine(path: Path, **options: int | bool) -> Engine:
    engine = Engine(read_spec(path), EngineOptions(**(SMALL | {"step_tokens_max": 64} | options)))
    engine.load(0, path)
    return engine


def finish_all(engine: Engine) -> dict[RequestId, Trajectory]:
    done: dict[RequestId, Trajectory] = {}
    while engine.has_work():
        for output in engine.step():
            if output.trajectory is not None:
                done[output.id] = output.trajectory
        engine.scheduler.pool.check()
    return done


def random_prompts(lengths: tuple[int, ...], seed: int = 0) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(0, VOCAB, (n,), generator=generator).tolist()) for n in lengths]


@torch.no_grad()
def check_against(model: PreTrainedModel, trajectory: Trajectory) -> None:
    """Every token is the model's best (up to a tie), every log-prob the model's."""
    prompt, response = trajectory.prompt_ids.tolist(), trajectory.token_ids.tolist()
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1].float()
    chosen = torch.tensor(response)[:, None]
    gap = logits.amax(-1) - logits.gather(1, chosen)[:, 0]
    assert gap.max() <= 1e-5
    logprobs = torch.log_softmax(logits, -1).gather(1, chosen)[:, 0]
    assert (logprobs - torch.tensor(trajectory.logprobs)).abs().max() < 1e-4
