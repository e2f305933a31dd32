"""Greedy decoding equals `transformers`, and so do the log-probs."""

from __future__ import annotations

import pytest
import torch

from dora_rl.engine.sequence import Request
from dora_rl.types import Finish, RequestId, SamplingParams
from tests.kit.engines import Saved, check_against, finish_all, make_engine, random_prompts
from tests.kit.tiny_models import FAMILIES


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"step_tokens_max": 9},
        {"num_blocks": 9, "host_blocks_max": 4},
        {"step_tokens_max": 9, "compiled_kernels": False},
        {"num_blocks": 9, "host_blocks_max": 4, "compiled_kernels": False},
    ],
    ids=["roomy", "chunked", "pre-empted", "chunked-torch", "pre-empted-torch"],
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
