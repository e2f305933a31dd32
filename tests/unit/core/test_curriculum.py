"""Pools of prompts: none is lost, none starves, and what tells nothing comes less often."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.core.curriculum import Curriculum, draw, note, wait_max
from dora_rl.core.params import Params
from dora_rl.io.codec import decode, encode
from dora_rl.observe.audit import audit
from dora_rl.observe.eventlog import encode_entry, encode_snapshot, recover_lines
from dora_rl.types import RequestId, UserError
from tests.kit.hand_driven import Hand, only


def params(**changes: Any) -> Params:
    return replace(Params(), **({"pools": 4, "pool_recent": 4} | changes))


@settings(max_examples=60, deadline=None)
@given(
    pools=st.integers(1, 60),
    share_min=st.sampled_from([0.03, 0.1, 0.3, 1.0]),
    recent=st.sampled_from([1, 2, 16]),
    weights=st.sampled_from([(), (1.0, 0.3), (0.5, 1.0, 0.7)]),
    seed=st.integers(0, 1000),
)
def test_prompts_of_a_pool_come_in_order_and_no_pool_starves(
    pools: int, share_min: float, recent: int, weights: tuple[float, ...], seed: int
) -> None:
    """Whatever the groups tell, and however late."""
    rules = params(pools=pools, pool_share_min=share_min, pool_recent=recent, pool_weights=weights)
    curriculum, rng = Curriculum(), Random(seed)
    rates = [rng.random() for _ in range(pools)]
    following = list(range(pools))
    last = [0] * pools
    late: list[int] = []
    for number in range(1, 6 * wait_max(rules) if pools < 20 else 2 * wait_max(rules)):
        prompt = draw(curriculum, rules)
        pool = prompt % pools
        assert prompt == following[pool]
        following[pool] += pools
        assert number - last[pool] <= wait_max(rules)
        last[pool] = number
        late.append(prompt)
        while len(late) > 5:
            told = rng.random() < rates[late[0] % pools]
            note(curriculum, rules, late.pop(rng.randrange(3)), told=told)
    assert all(number - at <= wait_max(rules) for at in last)
    again: Any = decode(Curriculum, encode(Curriculum, curriculum))
    assert again == curriculum
    assert [draw(again, rules) for _ in range(20)] == [draw(curriculum, rules) for _ in range(20)]


def drawn(tells: dict[int, bool], num: int, **changes: Any) -> Counter[int]:
    rules = params(pools=len(tells), **changes)
    curriculum = Curriculum()
    counts: Counter[int] = Counter()
    for _ in range(num):
        prompt = draw(curriculum, rules)
        pool = prompt % rules.pools
        counts[pool] += 1
        note(curriculum, rules, prompt, told=tells[pool])
    return counts


def test_pools_that_tell_nothing_come_at_their_least_share() -> None:
    counts = drawn({0: True, 1: False, 2: True, 3: False}, 2_000, pool_share_min=0.1)
    for pool in (1, 3):
        assert 0.09 < counts[pool] / counts[0] < 0.13
    assert abs(counts[0] - counts[2]) <= 1


def test_the_weights_of_sources_hold_among_pools_that_tell_as_much() -> None:
    for tells, share in ((True, 0.5), (False, 0.5)):
        counts = drawn(dict.fromkeys(range(4), tells), 3_000, pool_weights=(1.0, 0.5))
        assert abs((counts[1] + counts[3]) / (counts[0] + counts[2]) - share) < 0.05


def test_where_no_pool_tells_anything_all_come_as_often() -> None:
    counts = drawn(dict.fromkeys(range(5), False), 2_000)
    assert max(counts.values()) - min(counts.values()) <= 200
    assert drawn(dict.fromkeys(range(1_000), False), 10_000).total() == 10_000


def test_a_pool_that_tells_something_again_is_drawn_again() -> None:
    rules, curriculum = params(pools=2), Curriculum()
    shares: list[float] = []
    for tells in (False, True):
        counts: Counter[int] = Counter()
        for _ in range(400):
            prompt = draw(curriculum, rules)
            counts[prompt % 2] += 1
            note(curriculum, rules, prompt, told=tells or prompt % 2 == 0)
        shares.append(counts[1] / counts.total())
    assert shares[0] < 0.15 and shares[1] > 0.45


def curriculum_run(**changes: Any) -> Hand:
    """Rewards of pool 1 are all alike."""
    hand = Hand(
        **(
            {
                "batch_groups": 4,
                "group_size": 2,
                "num_steps": 6,
                "inflight_groups": 4,
                "filter_equal": True,
                "pools": 3,
                "pool_recent": 2,
            }
            | changes
        )
    )
    hand.begin({"a": 8})
    return hand


def answer(hand: Hand, group: int) -> None:
    prompt = hand.state.groups[group].prompt
    for sample in range(hand.params.group_size):
        hand.finish(group, sample)
        reward = float(sample) if prompt % hand.params.pools != 1 else 0.0
        hand.tell(ev.Scored(RequestId(group, sample), 0, reward))


def go_on(hand: Hand, until: int) -> None:
    while hand.state.stopped is None and hand.state.committed < until:
        hand.settle()
        for group in hand.running():
            if group.id in hand.state.groups:
                answer(hand, group.id)
        batch = hand.state.batches.get(hand.state.committed)
        if batch is not None and batch.close_sent:
            hand.train()


def test_a_run_with_a_curriculum_is_audited_and_goes_on_from_its_log() -> None:
    hand = curriculum_run()
    go_on(hand, 3)
    lines = [encode_entry(entry) for entry in hand.entries]
    for log in (lines, [encode_snapshot(len(lines), hand.now, hand.state)]):
        found = recover_lines(log)
        assert found is not None and found[1] == len(lines)
        assert found[0].curriculum == hand.state.curriculum
    go_on(hand, 6)
    hand.audit()
    issued = Counter(
        action.prompt % 3 for e in hand.entries for action in only(e.actions, act.IssueGroup)
    )
    assert issued[1] < min(issued[0], issued[2])
    ends = [a for e in hand.entries for a in only(e.actions, act.EndGroup)]
    assert {a.end for a in ends if a.group not in hand.state.groups} >= {act.End.FILTERED}


def test_the_audit_finds_a_prompt_that_was_left_out_and_a_pool_that_starved() -> None:
    hand = curriculum_run()
    go_on(hand, 6)
    issues = [
        (n, place)
        for n, entry in enumerate(hand.entries)
        for place, action in enumerate(entry.actions)
        if isinstance(action, act.IssueGroup) and action.prompt % 3 == 1
    ]
    n, place = issues[1]
    entry = hand.entries[n]
    wrong = list(entry.actions)
    wrong[place] = replace(wrong[place], prompt=wrong[place].prompt + 3)
    entries = [*hand.entries[:n], replace(entry, actions=wrong), *hand.entries[n + 1 :]]
    found = [str(f) for f in audit(entries).findings]
    assert any("is next" in line for line in found), found
    strict = replace(hand.params, pool_share_min=1.0, pools=3)
    told = replace(hand.entries[0], event=ev.Started(strict))
    found = [str(f) for f in audit([told, *hand.entries[1:]]).findings]
    assert any("pool 1 waited" in line for line in found), found


def test_another_number_of_pools_is_refused_on_resume() -> None:
    hand = curriculum_run()
    with pytest.raises(UserError, match=r"4 pools of prompts: this run has 3"):
        hand.tell(ev.Resumed(replace(hand.params, pools=4)))


def test_logs_of_releases_without_pools_are_decided_without() -> None:
    assert not Params().pools
    hand = Hand(batch_groups=2, group_size=1, num_steps=2)
    hand.begin()
    hand.to_the_end()
    prompts = [a.prompt for e in hand.entries for a in only(e.actions, act.IssueGroup)]
    assert prompts == list(range(len(prompts)))
    assert not hand.state.curriculum.pools
