"""LoRA versions on one base: the same answers as merged weights, several versions in one batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request
from dora_rl.engine.transfer import move
from dora_rl.model.directory import read_spec
from dora_rl.model.names import HEAD, PREFIX, SCALE
from dora_rl.types import Finish, RequestId, SamplingParams, Trajectory, UserError
from tests.kit.engines import Saved, finish_all, random_prompts
from tests.kit.random_adapters import Tensors, merge, random_adapter

GREEDY = SamplingParams(tokens_max=12, temperature=0, ignore_eos=True)
DRAWN = SamplingParams(tokens_max=12, temperature=1.0, ignore_eos=True)
SMALL = {"block_tokens": 16, "num_blocks": 64, "context_max": 128, "seqs_max": 16}


def lora_engine(path: Path, versions: int = 3, **options: object) -> Engine:
    values = SMALL | {"versions_max": 3, "lora_rank": 4} | options
    engine = Engine(read_spec(path), EngineOptions(**values))
    engine.load_base(path)
    for version in range(versions):
        engine.load(version, random_adapter(path, version))
    return engine


def merged_engine(path: Path, versions: int = 3) -> Engine:
    engine = Engine(read_spec(path), EngineOptions(**SMALL, versions_max=3))
    for version in range(versions):
        engine.load(version, merge(path, random_adapter(path, version)))
    return engine


def generate(
    engine: Engine, params: SamplingParams, versions: int = 3, each: int = 2
) -> dict[RequestId, Trajectory]:
    prompts = random_prompts((5, 17, 9, 22, 3, 11)[: versions * each])
    for index, prompt in enumerate(prompts):
        engine.submit(Request(RequestId(index, 0), index % versions, prompt, params, seed=3))
    return finish_all(engine)


@pytest.mark.parametrize(
    "family",
    ["llama-bias", "qwen2", "qwen3", "qwen3-moe-mixed", "olmo2", "phi3-long", "glm4"],
)
def test_adapters_equal_merged_weights(family: str, saved: Saved) -> None:
    _, path = saved(family)
    ours = generate(lora_engine(path), GREEDY)
    theirs = generate(merged_engine(path), GREEDY)
    assert len({tuple(t.token_ids) for t in ours.values()}) > 1
    for key, trajectory in ours.items():
        assert trajectory.token_ids.tolist() == theirs[key].token_ids.tolist()
        pairs = zip(trajectory.logprobs, theirs[key].logprobs, strict=True)
        assert max(abs(a - b) for a, b in pairs) < 1e-4


def test_a_version_does_not_depend_on_the_others(saved: Saved) -> None:
    _, path = saved("qwen3")
    together = generate(lora_engine(path), DRAWN)
    engine = lora_engine(path)
    for key, prompt in zip(sorted(together), random_prompts((5, 17, 9, 22, 3, 11)), strict=True):
        engine.submit(Request(key, key.group % 3, prompt, DRAWN, seed=3))
        assert finish_all(engine)[key] == together[key]
    plain = generate(lora_engine(path, one_pass=False), DRAWN)
    assert plain == together


def test_a_slot_is_clean_when_the_next_version_takes_it(saved: Saved) -> None:
    _, path = saved("qwen3")
    engine = lora_engine(path, versions_max=1, versions=1)
    engine.retire(0)
    whole = random_adapter(path, 1)
    kept = {n: t for n, t in whole.tensors.items() if n == SCALE or "q_proj" in n}
    engine.load(1, Tensors(kept))
    fresh = lora_engine(path, versions_max=1, versions=0)
    fresh.load(1, Tensors(kept))
    for each in (engine, fresh):
        each.submit(Request(RequestId(0, 0), 1, random_prompts((9,))[0], DRAWN, seed=1))
    assert finish_all(engine) == finish_all(fresh)


def test_requests_move_between_engines_of_adapters(saved: Saved) -> None:
    _, path = saved("qwen3")
    a, b = lora_engine(path), lora_engine(path)
    request = Request(RequestId(0, 0), 2, random_prompts((9,))[0], DRAWN, seed=1)
    a.submit(request)
    for _ in range(4):
        a.step()
    move(a, b, request.id)
    moved = finish_all(b)[request.id]
    a.submit(request)
    assert moved == finish_all(a)[request.id]


@pytest.mark.parametrize("family", ["qwen3", "qwen3-tied"])
def test_the_output_matrix_may_have_an_adapter_too(family: str, saved: Saved) -> None:
    """As merged weights; another version in the batch has none, and its slot is clean again."""
    _, path = saved(family)
    spec = read_spec(path)
    generator = torch.Generator().manual_seed(5)
    a = torch.randn(3, spec.hidden, generator=generator) * 0.1
    b = torch.randn(spec.vocab, 3, generator=generator) * 0.3
    name = f"{PREFIX}{HEAD}.lora_"
    plain = random_adapter(path, 0)
    headed = Tensors(plain.tensors | {f"{name}A.weight": a, f"{name}B.weight": b})
    engine = lora_engine(path, versions=0, lora_head=True)
    engine.load(0, headed)
    engine.load(1, random_adapter(path, 1))
    found = generate(engine, GREEDY, versions=2)
    whole = merge(path, plain).tensors
    head = whole.get("lm_head.weight", whole["model.embed_tokens.weight"])
    for key, trajectory in found.items():
        states = hidden_states(path, whole, [*prompt_of(key), *trajectory.token_ids.tolist()])
        logits = states @ (head + 2.0 * b @ a).t()
        expected = logits.log_softmax(-1).argmax(-1)[len(prompt_of(key)) - 1 : -1]
        same = expected.tolist() == trajectory.token_ids.tolist()
        assert same == (key.group % 2 == 0), "the version with the adapter, and it alone"
    other = lora_engine(path, versions=2)
    assert {k: t for k, t in found.items() if k.group % 2} == {
        k: t for k, t in generate(other, GREEDY, versions=2).items() if k.group % 2
    }
    engine.retire(0)
    engine.load(2, plain)
    engine.submit(Request(RequestId(9, 0), 2, (1, 2, 3), GREEDY))
    other.submit(Request(RequestId(9, 0), 0, (1, 2, 3), GREEDY))
    again, bare = (finish_all(one)[RequestId(9, 0)] for one in (engine, other))
    assert again.token_ids.tolist() == bare.token_ids.tolist()
    assert again.logprobs.tolist() == bare.logprobs.tolist()


def prompt_of(key: RequestId) -> list[int]:
    return list(random_prompts((5, 17, 9, 22, 3, 11)[:4])[key.group])


@torch.no_grad()
def hidden_states(path: Path, weights: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path)
    model.load_state_dict(weights, strict=False)
    return model.model(torch.tensor([ids])).last_hidden_state[0]


def test_adapters_of_the_output_matrix_are_for_a_cpu() -> None:
    with pytest.raises(UserError, match="run on a CPU alone"):
        EngineOptions(device="cuda", lora_rank=4, lora_head=True)


def test_what_is_refused(saved: Saved) -> None:
    _, path = saved("qwen3")
    engine = Engine(read_spec(path), EngineOptions(**SMALL, versions_max=1, lora_rank=4))
    with pytest.raises(UserError, match="base is not loaded"):
        engine.load(0, random_adapter(path, 0))
    engine.load_base(path)
    with pytest.raises(UserError, match="not a published adapter"):
        engine.load(0, merge(path, random_adapter(path, 0)))
    with pytest.raises(UserError, match="was expected"):
        engine.load(0, random_adapter(path, 0, rank=8))
    odd = Tensors(random_adapter(path, 0).tensors | {"lm_head.lora_A.weight": torch.zeros(4, 64)})
    with pytest.raises(UserError, match="belongs to no adapter"):
        engine.load(0, odd)
    engine.load(0, random_adapter(path, 0))
    with pytest.raises(UserError, match="retire one"):
        engine.load(1, random_adapter(path, 1))
    engine.submit(Request(RequestId(0, 0), 1, (1, 2), GREEDY))
    assert engine.step()[0].trajectory.finish is Finish.REFUSED
