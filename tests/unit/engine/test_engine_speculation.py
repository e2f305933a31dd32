"""What drafts must not change, what they must not break, and that they are counted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.plan import Plan
from dora_rl.engine.runner import make_runner
from dora_rl.engine.sequence import Output, Request
from dora_rl.engine.sequence import Sequence as Seq
from dora_rl.engine.speculation import Speculation
from dora_rl.model.directory import HfDirectory, read_spec
from dora_rl.types import Finish, RequestId, SamplingParams, Version
from tests.kit.engines import Saved, random_prompts
from tests.kit.random_adapters import random_adapter
from tests.unit.engine.any_drafts import AnyDrafts

OPTIONS: dict[str, Any] = {
    "block_tokens": 16,
    "num_blocks": 40,
    "context_max": 96,
    "seqs_max": 6,
    "versions_max": 2,
}
PROMPTS = random_prompts((9, 20, 31, 40, 17, 33))
PARAMS = {
    "plain": SamplingParams(tokens_max=40, ignore_eos=True),
    "stop ids": SamplingParams(tokens_max=40, stop_ids=tuple(range(0, 90, 9))),
    "stop strings": SamplingParams(tokens_max=40, ignore_eos=True, stop_strings=("A", "BC", "!#")),
    "filters": SamplingParams(tokens_max=40, top_k=9, top_p=0.9, min_p=0.01, temperature=0.8),
    "raw and top": SamplingParams(
        tokens_max=40, raw_logprobs=True, logprobs_top_n=3, temperature=1.2, ignore_eos=True
    ),
    "greedy": SamplingParams(tokens_max=40, temperature=0.0, raw_logprobs=True, ignore_eos=True),
    "forced": SamplingParams(tokens_max=40, forced_ids=(3, 1, 4, 1, 5), ignore_eos=True),
}


def text_of(ids: Sequence[int]) -> str:
    return "".join(chr(33 + i) for i in ids)


def requests_of(params: SamplingParams, versions: int = 1) -> list[Request]:
    return [
        Request(RequestId(group, sample), group % versions, prompt, params, seed=3)
        for group, prompt in enumerate(PROMPTS)
        for sample in range(2)
    ]


def finish(engine: Engine, requests: Sequence[Request]) -> dict[RequestId, list[Output]]:
    """Everything that was handed out, by request, as one output each."""
    found: dict[RequestId, list[Output]] = {request.id: [] for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            found[output.id].append(output)
        engine.scheduler.pool.check()
    assert not engine.stats().used_blocks and not engine.scheduler.num_host_blocks
    return found


def told(outputs: Sequence[Output]) -> tuple[object, ...]:
    """The tokens as they were handed out, and the trajectory at the end."""
    ends = [output.trajectory for output in outputs if output.trajectory is not None]
    columns = [
        [value for output in outputs for value in column(output)]
        for column in (lambda o: o.token_ids, lambda o: o.logprobs, lambda o: o.top_logprobs)
    ]
    return (*columns, ends)


def drafted(
    make: Callable[[Speculation | None], Engine], requests: Sequence[Request]
) -> tuple[dict[RequestId, tuple[object, ...]], dict[RequestId, tuple[object, ...]], Engine]:
    """What an engine tells without drafts, and with drafts of every kind."""
    plain = {rid: told(outputs) for rid, outputs in finish(make(None), requests).items()}

    def truth(seq: Seq) -> list[int]:
        tokens: Any = plain[seq.id][0]
        return [*seq.request.prompt_ids, *tokens]

    engine = make(AnyDrafts(7, truth))
    found = {rid: told(outputs) for rid, outputs in finish(engine, requests).items()}
    return plain, found, engine


def maker(path: Path, **changes: Any) -> Callable[[Speculation | None], Engine]:
    def make(speculation: Speculation | None) -> Engine:
        options = EngineOptions(**OPTIONS | {"speculation": "off"} | changes)
        engine = Engine(read_spec(path), options, decode=text_of, speculation=speculation)
        engine.load(0, path)
        return engine

    return make


@pytest.mark.parametrize("kind", PARAMS)
@pytest.mark.parametrize("compiled", [True, False])
def test_every_token_and_log_prob_is_the_same(saved: Saved, kind: str, compiled: bool) -> None:
    make = maker(saved("qwen3")[1], compiled_kernels=compiled)
    plain, found, engine = drafted(make, requests_of(PARAMS[kind]))
    assert found == plain
    ((number, accepted),) = engine.stats().drafts.values()
    assert number > accepted > 50
    assert engine.stats().steps < 0.8 * sum(len(one[0]) for one in plain.values()) / 6  # type: ignore[arg-type]


@pytest.mark.parametrize("family", ["llama-bias", "qwen2-tied", "qwen3-moe-mixed"])
def test_of_every_kind_of_model(saved: Saved, family: str) -> None:
    plain, found, _ = drafted(maker(saved(family)[1]), requests_of(PARAMS["plain"]))
    assert found == plain


def test_of_versions_that_are_adapters(saved: Saved) -> None:
    path = saved("qwen3")[1]

    def make(speculation: Speculation | None) -> Engine:
        options = EngineOptions(**OPTIONS, lora_rank=4, speculation="off")
        engine = Engine(read_spec(path), options, speculation=speculation)
        engine.load_base(path)
        for version in range(2):
            engine.load(version, random_adapter(path, version))
        return engine

    plain, found, engine = drafted(make, requests_of(PARAMS["plain"], versions=2))
    assert found == plain
    assert set(engine.stats().drafts) == {0, 1}


class Hopeless(HfDirectory):
    """One token's embedding is NaN: who computes its row has nothing finite left."""

    def __init__(self, path: Path, token: int) -> None:
        super().__init__(path)
        self._token = token

    def tensor(self, name: str) -> torch.Tensor:
        data = super().tensor(name)
        if name == "model.embed_tokens.weight":
            data = data.clone()
            data[self._token] = float("nan")
        return data


class Always(Speculation):
    """The same draft for everybody."""

    def __init__(self, draft: tuple[int, ...]) -> None:
        super().__init__(fixed=True)
        self.draft = draft

    def propose(self, seq: Seq, length: int) -> tuple[int, ...]:
        return self.draft[:length] if seq.id in self.drafts else ()


@pytest.mark.parametrize("compiled", [True, False])
def test_a_draft_that_is_not_finite_harms_nobody(saved: Saved, compiled: bool) -> None:
    """Its request starts again without drafts; who really draws such a token fails as without."""
    path = saved("qwen3")[1]
    bad, params = 11, SamplingParams(tokens_max=40, ignore_eos=True)

    def make(speculation: Speculation | None) -> Engine:
        options = EngineOptions(**OPTIONS, speculation="off", compiled_kernels=compiled)
        engine = Engine(read_spec(path), options, speculation=speculation)
        engine.load(0, Hopeless(path, bad))
        return engine

    requests = [r for r in requests_of(params) if bad not in r.prompt_ids]
    plain = {rid: told(outputs) for rid, outputs in finish(make(None), requests).items()}
    finishes = {one.finish for _, _, _, ends in plain.values() for one in ends}  # type: ignore[attr-defined]
    assert finishes == {Finish.ERROR, Finish.LENGTH}
    found = finish(make(Always((1, bad, 2))), requests)
    assert {rid: told(outputs) for rid, outputs in found.items()} == plain


class Short:
    """Memory runs out at some launches."""

    def __init__(self, inner: Any, at: set[int]) -> None:
        self.inner, self._at, self._count = inner, at, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def launch(self, plan: Plan, slots: Mapping[Version, int]) -> Any:
        self._count += 1
        if self._count in self._at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return self.inner.launch(plan, slots)


def test_memory_that_runs_out_changes_nothing(saved: Saved) -> None:
    path, at = saved("qwen3")[1], {3, 8, 9}

    def make(speculation: Speculation | None) -> Engine:
        options = EngineOptions(**OPTIONS, step_tokens_max=256, speculation="off")
        runner: Any = Short(make_runner(read_spec(path), options), at if speculation else set())
        engine = Engine(read_spec(path), options, runner=runner, speculation=speculation)
        engine.load(0, path)
        return engine

    plain, found, engine = drafted(make, requests_of(PARAMS["plain"]))
    assert found == plain
    assert len(engine.notes) == len(at)


def test_samples_of_a_group_draft_for_each_other(saved: Saved) -> None:
    """With the same random stream they say the same, the second behind the first: every draft is
    right, and the tail takes a fraction of the steps."""
    make, params = maker(saved("qwen3")[1], speculation="on"), PARAMS["plain"]
    engine = make(None)
    first = Request(RequestId(0, 0), 0, PROMPTS[0], params, seed=3)
    again = Request(RequestId(0, 1), 0, PROMPTS[0], params, seed=3, stream=first.id)
    one = finish(engine, [first])
    steps, before = engine.stats().steps, engine.stats().drafts.get(0, (0, 0))
    other = finish(engine, [again])
    assert [o.token_ids for o in one[first.id]] != []
    assert told(one[first.id])[:3] == told(other[again.id])[:3]
    number, accepted = engine.stats().drafts[0]
    assert accepted - before[1] >= 30 and engine.stats().steps - steps <= 12
    assert number - before[0] <= 1.2 * (accepted - before[1])


@pytest.mark.parametrize(
    ("speculation", "dtype", "is_there"),
    [
        ("auto", "float32", True),
        ("auto", "bfloat16", False),
        ("on", "bfloat16", True),
        ("off", "float32", False),
    ],
)
def test_where_it_is_switched_on(
    saved: Saved, speculation: str, dtype: str, is_there: bool
) -> None:
    """By itself only where a row is the same whoever stands beside it."""
    engine = maker(saved("qwen3")[1], speculation=speculation, dtype=dtype)(None)
    assert (engine.speculation is not None) == is_there
    if is_there:
        done = finish(engine, requests_of(PARAMS["plain"]))
        assert all(len(told(outputs)[0]) == 40 for outputs in done.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("host_blocks", [0, 4])
def test_requests_that_lose_their_blocks_lose_no_token(saved: Saved, host_blocks: int) -> None:
    """Pre-empted with nowhere to go: they start again from tokens, some of which were drafted."""
    make = maker(saved("qwen3")[1], num_blocks=9, host_blocks_max=host_blocks)
    plain, found, engine = drafted(make, requests_of(PARAMS["plain"]))
    assert found == plain
    assert engine.stats().preemptions > 0 and engine.stats().drafts[0][1] > 50
