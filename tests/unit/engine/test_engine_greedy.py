"""Greedy decoding equals `transformers`, and so do the log-probs."""

from __future__ import annotations

import pytest
import torch

from dora_rl.engine.sequence import Request
from dora_rl.types import Finish, RequestId, SamplingParams
from tests.kit.engines import Saved, check_against, finish_all, make_engine, random_prompts
from tests.kit.tiny_models import FAMILIES

OPTIONS = {
    "roomy": {},
    "chunked": {"step_tokens_max": 9},
    "pre-empted": {"num_blocks": 9, "host_blocks_max": 4},
    "chunked-torch": {"step_tokens_max": 9, "compiled_kernels": False},
    "pre-empted-torch": {"num_blocks": 9, "host_blocks_max": 4, "compiled_kernels": False},
}


def is_full(family: str, name: str) -> bool:
    """Of families with parts of their own every runner is tested, and all of this at length."""
    return not family.startswith(("llama", "qwen")) and name not in ("chunked", "pre-empted-torch")


@pytest.mark.parametrize(
    ("family", "options"),
    [
        pytest.param(
            family,
            options,
            id=f"{family}-{name}",
            marks=[pytest.mark.full] if is_full(family, name) else [],
        )
        for family in FAMILIES
        for name, options in OPTIONS.items()
    ],
)
def test_equals_transformers(family: str, options: dict[str, int], saved: Saved) -> None:
    model, path = saved(family)
    engine = make_engine(path, **options)
    params = SamplingParams(tokens_max=24, temperature=0, ignore_eos=True)
    for group, prompt in enumerate(random_prompts((1, 5, 17, 40, 33))):
        for sample in range(2):
            engine.submit(Request(RequestId(group, sample), 0, prompt, params))
    done = finish_all(engine)
    assert len(done) == 10
    for trajectory in done.values():
        assert trajectory.finish is Finish.LENGTH
        assert len(trajectory.token_ids) == 24
        check_against(model, trajectory)
    if "num_blocks" in options:
        assert engine.stats().preemptions > 0


def test_tokens_equal_generate(saved: Saved) -> None:
    model, path = saved("qwen3")
    engine = make_engine(path)
    prompt = random_prompts((21,))[0]
    params = SamplingParams(tokens_max=40, temperature=0, ignore_eos=True)
    engine.submit(Request(RequestId(0, 0), 0, prompt, params))
    response = finish_all(engine)[RequestId(0, 0)].token_ids.tolist()
    expected = model.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )
    assert list(response) == expected[0, len(prompt) :].tolist()


def test_samples_of_a_prompt_are_prefilled_once(saved: Saved) -> None:
    _, path = saved("llama")
    engine = make_engine(path)
    prompt = random_prompts((40,))[0]
    params = SamplingParams(tokens_max=4, temperature=0, ignore_eos=True)
    for sample in range(6):
        engine.submit(Request(RequestId(0, sample), 0, prompt, params))
    done = finish_all(engine)
    assert engine.stats().prefill_tokens == 40
    assert len({tuple(trajectory.token_ids) for trajectory in done.values()}) == 1
