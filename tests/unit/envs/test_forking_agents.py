"""Agents whose history forks, with the official clients: every token that the policy wrote is
trained exactly once, counted from the engine's own count to what reached the loss."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from dora_rl.config import AlgorithmConfig, EnvConfig, EnvironmentEntry, TrainerConfig
from dora_rl.engine.engine import Engine
from dora_rl.engine.options import EngineOptions
from dora_rl.engine.sequence import Request, Status
from dora_rl.envs.base import Row, TurnText
from dora_rl.envs.host import Answer, Host, load_environments
from dora_rl.histories import Tree
from dora_rl.model.directory import read_spec
from dora_rl.setup.tokenizer import open_tokenizer
from dora_rl.trainer import updates
from dora_rl.trainer.documents import Pack
from dora_rl.trainer.learner import Learner
from dora_rl.types import Group, RequestId, SamplingParams, Trajectory
from dora_rl.workers.environment import apply_answer, ask_of
from tests.kit.places import MODEL, ROOT

pytest.importorskip("openai")
pytest.importorskip("anthropic")

TOKENIZER = open_tokenizer(MODEL, False)
PROMPT = "03:271\n"
PARAMS = SamplingParams(tokens_max=12, ignore_eos=False)
STOPS = {1}
AGENTS = ROOT / "tests" / "kit" / "forking_agents.py"


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text))


def host_of(function: str) -> Host:
    where = f"{AGENTS}:{function}"
    one = EnvironmentEntry(name="agent", options={"agent": where}, timeout_s=60.0, turns_max=9)
    return Host(load_environments(EnvConfig(environments=(one,))), TurnText(TOKENIZER, STOPS))


def engine_of() -> Engine:
    torch.set_num_threads(1)
    engine = Engine(read_spec(MODEL), EngineOptions(kv_bytes_max=16 << 20, seqs_max=16))
    engine.load(0, MODEL)
    return engine


class Play:
    """The run's part, without a run: sessions of an engine and the host that has the agents."""

    def __init__(self, function: str, samples: int = 1) -> None:
        self.engine, self.host = engine_of(), host_of(function)
        self.function = function
        self.row = Row(PROMPT, PROMPT, "637", {}, ids(PROMPT))
        self.done: dict[RequestId, Trajectory] = {}
        for sample in range(samples):
            rid = RequestId(7, sample)
            request = Request(rid, 0, self.row.token_ids, PARAMS, seed=3, keep=True, turns=0)
            self.engine.submit(request)

    async def to_the_end(self, turns_max: int = 99) -> None:
        """Each idle session asks its agent, as an instance's would."""
        asked: dict[asyncio.Task[Answer], RequestId] = {}
        while True:
            self._decode()
            busy = set(asked.values())
            for seq in list(self.engine.sequences()):
                if seq.status is Status.IDLE and seq.id not in busy and seq.turns < turns_max:
                    asked[asyncio.create_task(self.host.answer(self.ask(seq.id)))] = seq.id
            if not asked:
                return
            ready, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            for task in ready:
                self._apply(asked.pop(task), task.result())

    def ask(self, rid: RequestId) -> Any:
        seq = self.engine.find(rid)
        assert seq is not None
        return ask_of(seq.trajectory(), "agent", self.row, 5)

    def _decode(self) -> None:
        while self.engine.has_work():
            self.engine.step()
            self.engine.scheduler.pool.check()

    def _apply(self, rid: RequestId, answer: Answer) -> None:
        assert not answer.error, answer.error
        ended = apply_answer(self.engine, rid, answer, PARAMS)
        if ended is not None:
            self.done[rid] = replace(ended, reward=answer.reward)


def played(function: str, samples: int = 1) -> Play:
    play = Play(function, samples)
    try:
        asyncio.run(play.to_the_end())
    finally:
        play.host.close()
    return play


def histories(sample: Trajectory) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What each turn read and wrote."""
    ask = ask_of(sample, "agent", Row(PROMPT, token_ids=ids(PROMPT)), 0)
    found: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    number = 1
    for start, end, mask in _spans(sample):
        if mask:
            found.append((ask.read_by(number), tuple(sample.token_ids[start:end].tolist())))
            number += 1
    return found


def _spans(sample: Trajectory) -> list[tuple[int, int, int]]:
    from dora_rl.store.samples import spans_of

    return spans_of(sample)


@pytest.mark.parametrize("function", ["with_openai", "with_responses", "with_anthropic"])
def test_each_turn_read_what_the_agent_sent(function: str) -> None:
    (sample,) = played(function).done.values()
    turns = histories(sample)
    assert len(turns) == 7 and len(sample.turn_rewards) == 7
    (read_1, first), (read_2, _), (read_3, second), (read_4, _), (read_5, _), *both = turns
    assert read_1 == ids(PROMPT)
    assert read_2 == ids("02:513\n"), "the sub-agent knows nothing of the main one"
    assert read_3 == (*read_1, *first, *ids("03:271\n")), "nothing is tokenised again"
    assert read_4 == ids("01:15\n")
    text = TOKENIZER.decode(first, skip_special_tokens=True)
    assert read_5 == ids(PROMPT + text.replace("1", "2") + "7" + "03:271\n")
    assert [read for read, _ in both] == [ids("01:15\n01:15\n")] * 2
    assert both[0][1] != both[1][1], "two answers are drawn for themselves"
    assert second != first


@pytest.mark.parametrize("function", ["with_openai", "with_anthropic"])
def test_every_token_that_was_written_is_trained_exactly_once(
    function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = played(function, samples=3)
    samples = tuple(play.done[rid] for rid in sorted(play.done))
    written = play.engine.stats().decode_tokens
    assert written == sum(sample.num_trained for sample in samples)
    expected: Counter[tuple[tuple[int, ...], int]] = Counter()
    for sample in samples:
        for read, wrote in histories(sample):
            for place, token in enumerate(wrote):
                expected[(*read, *wrote[:place]), token] += 1
    assert expected.total() == written
    packs: list[Pack] = []
    real = updates.policy_pass

    def seen(policy: Any, pack: Pack, *rest: Any) -> torch.Tensor:
        packs.append(pack)
        return real(policy, pack, *rest)

    monkeypatch.setattr(updates, "policy_pass", seen)
    learner = Learner(
        MODEL,
        AlgorithmConfig(advantage="turn", skip_zero_advantage=False),
        TrainerConfig(threads=1),
        batch_groups=1,
    )
    learner.begin_step(0)
    learner.feed([Group(7, 0, np.array(ids(PROMPT)), samples)])
    metrics = learner.finish_step()
    trained: Counter[tuple[tuple[int, ...], int]] = Counter()
    for pack in packs:
        for document in pack.documents:
            tokens = document.token_ids.tolist()
            for row in document.rows.tolist():
                trained[tuple(tokens[: row + 1]), tokens[row + 1]] += 1
    assert trained == expected
    assert sum(pack.num_trained for pack in packs) == written
    assert sum(len(pack.documents) for pack in packs) > 3, "some history branched"
    # The learner's own log-probs behind each history are those that the engine reported.
    assert metrics["mismatch_abs"] < 1e-4 and metrics["update/applied"] == 1


def test_a_lost_episode_with_branches_goes_on() -> None:
    """The agent runs again elsewhere, its two last requests may come in another order, and the tree
    is that of the trajectory."""
    whole = played("with_openai").done[RequestId(7, 0)]
    for stopped_after in (2, 6):
        play = Play("with_openai")

        async def story(play: Play = play, turns_max: int = stopped_after) -> None:
            await play.to_the_end(turns_max)
            play.host.close()
            play.host = host_of("with_openai")
            await play.to_the_end()

        asyncio.run(story())
        play.host.close()
        assert play.done[RequestId(7, 0)] == whole


def test_the_tree_of_an_episode_is_that_of_its_trajectory() -> None:
    (sample,) = played("with_openai").done.values()
    tree = Tree(ids(PROMPT))
    branches = []
    for read, wrote in histories(sample):
        branch, new_ids = tree.place(read)
        tree.grow(branch, new_ids, wrote)
        branches += [branch] if branch is not None else []
    assert tuple(branches) == sample.branches[1:]
