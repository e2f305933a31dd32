"""After a step that raised the engine starts over: nothing is left but its versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.runner import make_runner
from dora_rl.engine.sequence import Request
from dora_rl.model.directory import read_spec
from dora_rl.types import RequestId, SamplingParams
from tests.kit.engines import Saved, finish_all, random_prompts
from tests.unit.engine.ahead_runner import AheadRunner

OPTIONS = EngineOptions(
    block_tokens=16, num_blocks=14, context_max=64, seqs_max=4, host_blocks_max=4
)
PROMPTS = random_prompts((9, 20, 31, 40, 12, 33))
PARAMS = SamplingParams(tokens_max=12, ignore_eos=True)


class Raising(AheadRunner):
    """Raises at one of its launches or collects."""

    def __init__(self, inner, burst: int) -> None:
        super().__init__(inner, burst)
        self.depth = int(burst > 1)
        self.fails: dict[str, int] = {}  # what -> after so many more

    def launch(self, plan, slots):
        self._count("launch")
        return super().launch(plan, slots)

    def collect(self, launched):
        self._count("collect")
        return super().collect(launched)

    def _count(self, what: str) -> None:
        if what in self.fails:
            self.fails[what] -= 1
            if not self.fails[what]:
                del self.fails[what]
                raise ValueError(f"at {what}")


def make(path: Path, burst: int = 1) -> tuple[Engine, Raising]:
    spec = read_spec(path)
    runner = Raising(make_runner(spec, OPTIONS), burst)
    engine = Engine(spec, OPTIONS, runner=runner)  # type: ignore[arg-type]
    engine.load(0, path)
    return engine, runner


def submit_all(engine: Engine) -> None:
    for group, prompt in enumerate(PROMPTS):
        keep = group == 0
        engine.submit(Request(RequestId(group, 0), 0, prompt, PARAMS, seed=5, keep=keep))


def answers_of(engine: Engine) -> dict[RequestId, list[int]]:
    return {name: done.token_ids.tolist() for name, done in finish_all(engine).items()}


@pytest.mark.parametrize("burst", [1, 4])
@pytest.mark.parametrize("where", ["launch", "collect"])
@pytest.mark.parametrize("after", [1, 2, 5, 9])
def test_it_answers_as_if_nothing_had_been(
    saved: Saved, burst: int, where: str, after: int
) -> None:
    """Whatever ran, waited, was spilled or idle; also twice in a row."""
    path = saved("qwen3")[1]
    fresh, _ = make(path)
    submit_all(fresh)
    expected = answers_of(fresh)
    engine, runner = make(path, burst)
    for _ in range(2):
        submit_all(engine)
        runner.fails[where] = after
        with pytest.raises(ValueError, match=where):
            finish_all(engine)
        engine.start_over()
        assert not engine.has_work() and not list(engine.sequences()) and engine.versions() == (0,)
        engine.scheduler.pool.check()
        stats = engine.stats()
        assert stats.free_blocks == stats.total_blocks and not stats.host_blocks
        assert len(engine.scheduler.free_slots) == OPTIONS.seqs_max
    submit_all(engine)
    assert answers_of(engine) == expected
    engine.scheduler.pool.check()
