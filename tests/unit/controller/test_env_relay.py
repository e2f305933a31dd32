"""The turn relay with workers that are not there: addresses, limits, losses and time-outs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from dora_rl.config import RunConfig
from dora_rl.controller.scoring import EnvRelay
from dora_rl.envs.host import Answer
from dora_rl.setup.prepare import with_environments
from dora_rl.types import Prompt, RequestId, Trajectory, UserError
from dora_rl.workers.messages import Forget, Message, Observed, Ready, Step, Stepped, TurnEnded
from dora_rl.workers.pool import Worker


@dataclass
class Post:
    """Stands for the pool: keeps what was sent, restarts nobody."""

    closing: bool = False
    time_s: float = 0.0
    sent: list[tuple[str, Message]] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    started: list[str] = field(default_factory=list)

    def start(self, role: str, name: str, extra: Mapping[str, Any]) -> None:
        assert role == "env" and extra
        self.started.append(name)

    def now(self) -> float:
        return self.time_s

    def send(self, name: str, message: Message) -> None:
        self.sent.append((name, message))

    def restart(self, name: str) -> None:
        self.restarted.append(name)

    def take(self, kind: type[Any]) -> list[tuple[str, Any]]:
        found = [(name, message) for name, message in self.sent if isinstance(message, kind)]
        self.sent = [entry for entry in self.sent if not isinstance(entry[1], kind)]
        return found


def env_worker(name: str) -> Worker:
    return Worker("env", name, 0, None, {}, 0.0)  # type: ignore[arg-type]


class Bench:
    """A relay, a clock to turn, and the two sides of a conversation."""

    def __init__(self, **entry: Any) -> None:
        self.post, self.ended = Post(), set[RequestId]()
        env = {"environments": [{"name": "calculator", "timeout_s": 5, **entry}], "num_workers": 2}
        config = RunConfig.model_validate({"model": {"path": "x"}, "env": env})
        self.relay = EnvRelay(self.post, config, self.prompt)  # type: ignore[arg-type]
        self.relay.start()
        assert self.post.started == ["env0", "env1"]
        for name in self.post.started:
            self.relay.hear(env_worker(name), Ready())

    def prompt(self, rid: RequestId, epoch: int) -> Prompt | None:
        assert epoch >= 0
        return None if rid in self.ended else Prompt(rid.group, (1,), "1+1\n", "2")

    def turn(self, instance: str, sample: int, *ids: int, turn: int = 1, epoch: int = 0) -> None:
        payload = (ids, [0.0] * len(ids), [1] * len(ids))
        so_far = Trajectory(RequestId(0, sample), 0, *payload, turns=turn)
        self.relay.turn_ended(instance, TurnEnded(epoch, (so_far,)))

    def answer(self, worker: str, number: int, **more: Any) -> None:
        self.relay.hear(env_worker(worker), Stepped(number, Answer((9,), **more)))

    def steps(self) -> list[tuple[str, int]]:
        return [(name, message.id) for name, message in self.post.take(Step)]


def test_a_question_goes_to_one_worker_and_its_answer_back() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5, 6)
    bench.turn("instance1", 1, 7)
    (first, second) = bench.steps()
    assert (first[0], second[0]) == ("env0", "env1")
    bench.answer(*first, reward=0.5, done=True)
    ((where, body),) = bench.post.take(Observed)
    assert where == "instance0" and body.request.sample == 0 and body.turn == 1
    assert body.answer.reward == 0.5 and body.answer.done and not body.answer.error


def test_the_same_question_from_elsewhere_changes_the_address_only() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5, 6)
    bench.turn("instance1", 0, 5, 6, epoch=1)
    ((worker, number),) = bench.steps()
    bench.answer(worker, number)
    ((where, body),) = bench.post.take(Observed)
    assert (where, body.epoch) == ("instance1", 1)


def test_other_tokens_are_another_question() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5, 6)
    bench.turn("instance0", 0, 5, 7, epoch=1)
    old, new = bench.steps()
    bench.answer(*old)
    assert not bench.post.take(Observed), "nobody asks that any more"
    bench.answer(*new)
    assert len(bench.post.take(Observed)) == 1


def test_no_more_steps_at_once_than_allowed() -> None:
    bench = Bench(concurrent_max=2)
    for sample in range(5):
        bench.turn("instance0", sample, sample)
    first, second = bench.steps()
    bench.answer(*first)
    (third,) = bench.steps()
    bench.answer(*second)
    bench.answer(*third)
    assert len(bench.steps()) == 2


def test_a_lost_worker_is_replaced_and_asked_again() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5)
    bench.turn("instance0", 1, 6)
    assert len(bench.steps()) == 2
    bench.relay.lost("env0")
    assert bench.post.restarted == ["env0"] and not bench.steps(), "it is not ready yet"
    bench.relay.hear(env_worker("env0"), Ready())
    ((worker, number),) = bench.steps()
    assert worker == "env0"
    bench.answer(worker, number)
    assert len(bench.post.take(Observed)) == 1


def test_a_question_that_costs_three_workers_fails_its_sample() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5)
    for _ in range(3):
        assert len(bench.steps()) == 1
        bench.relay.lost("env0")
        bench.relay.hear(env_worker("env0"), Ready())
    ((where, body),) = bench.post.take(Observed)
    assert where == "instance0" and "ended its process" in body.answer.error
    assert not bench.steps()


def test_a_hung_worker_is_replaced_and_the_others_are_asked_again() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5)
    bench.turn("instance0", 2, 6)
    stuck, other = bench.steps()
    bench.answer(*stuck, error="did not answer within 5 s", hung=True)
    assert bench.post.restarted == ["env0"]
    bench.relay.hear(env_worker("env0"), Ready())
    assert [number for _, number in bench.steps()] == [other[1]]
    ((_, body),) = bench.post.take(Observed)
    assert "did not answer" in body.answer.error


def test_silence_has_a_deadline_and_a_name() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5)
    bench.steps()
    bench.post.time_s = 20.0
    bench.relay.check_time()
    assert not bench.post.restarted, "reset and step, 5 s each, and slack"
    (line,) = bench.relay.waits()
    assert "calculator" in line and "since 20 s" in line
    bench.post.time_s = 21.0
    bench.relay.check_time()
    assert bench.post.restarted == ["env0"]
    ((_, body),) = bench.post.take(Observed)
    assert "does not answer" in body.answer.error
    assert not bench.relay.waits()


def test_an_ended_group_is_forgotten() -> None:
    bench = Bench()
    bench.turn("instance0", 0, 5)
    ((worker, number),) = bench.steps()
    bench.relay.forget(0)
    assert bench.post.take(Forget) == [("env0", Forget(0))]
    bench.answer(worker, number)
    assert not bench.post.take(Observed)
    bench.ended.add(RequestId(0, 1))
    bench.turn("instance0", 1, 5)
    assert not bench.steps()


def test_environments_are_mixed_by_their_weights() -> None:
    sources = [
        {"path": "a", "env": "calculator"},
        {"path": "b", "env": "calculator", "weight": 3.0},
        {"path": "c", "env": "guess"},
    ]
    environments = [{"name": "calculator", "weight": 2.0}, "guess"]
    config = RunConfig.model_validate(
        {
            "model": {"path": "x"},
            "data": {"train": sources},
            "env": {"environments": environments},
        }
    )
    mixed = with_environments(config)
    assert [source.weight for source in mixed.data.train] == [0.5, 1.5, 1.0]
    assert with_environments(mixed) == mixed, "a resumed run mixes in the same way"


@pytest.mark.parametrize(
    ("env", "environments", "line"),
    [
        ("", ["calculator", "guess"], "a source without one"),
        ("other", ["calculator"], "no environment is called 'other'"),
        ("calculator", [], "env.environments is empty"),
    ],
)
def test_a_source_names_its_environment(env: str, environments: list[str], line: str) -> None:
    data = {"train": [{"path": "a", "env": env}]}
    config = RunConfig.model_validate(
        {"model": {"path": "x"}, "data": data, "env": {"environments": environments}}
    )
    with pytest.raises(UserError, match=line):
        with_environments(config)


@pytest.mark.parametrize("num_workers", [1, 3])
def test_without_environments_there_are_no_workers(num_workers: int) -> None:
    env = {"num_workers": num_workers}
    config = RunConfig.model_validate({"model": {"path": "x"}, "env": env})
    post = Post()
    relay = EnvRelay(post, config, lambda rid, epoch: None)  # type: ignore[arg-type]
    relay.start()
    assert not post.started and relay.opens(Prompt(0, (1,))) is None
