"""When a device guesses, by times and gains that the test makes up; and which texts it looks in."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest

from dora_rl.engine.guessing import (
    CHANCES,
    CHOICES,
    GUESSES_MAX,
    HINT_EVERY,
    HINTS_MIN,
    LOOK_STEPS,
    PAST_MAX,
    QUEUED_STEPS,
    STEPS,
    Guessing,
    rows_for,
)
from dora_rl.engine.texts import LISTED, Texts
from dora_rl.types import RequestId

Cost = Callable[[int], float]  # of a step, by rows
Gain = Callable[[int, int], float]  # tokens of a request in a step, by requests and rows


def flat(rows: int) -> float:
    """All weights are read for up to 64 rows; beyond, rows take time."""
    return 1.0 + 0.002 * min(rows, 64) + 0.02 * max(0, rows - 64)


def promising() -> Guessing:
    """The host has seen text that was foretold."""
    guessing = Guessing(Texts(1))
    for _ in range(HINTS_MIN):
        guessing.hint(32, 16)
    return guessing


def decode(
    guessing: Guessing, count: int, steps: int, cost: Cost, gain: Gain, queued: bool = False
) -> tuple[float, float, int]:
    """Tokens, time, and steps with guesses of so many steps; what is learned comes one launch
    late."""
    made = took = 0.0
    num_guessed, done = 0, 0
    late: list[tuple[int, float, float]] = []
    while done < steps:
        rows, repeat = guessing.way(1, count, queued)
        for was, seconds, tokens in late:
            guessing.time(1, count, was, seconds)
            if was:
                guessing.make(1, count, was, tokens)
        tokens = gain(count, rows) if rows else 1.0
        late = [(rows, cost(rows or count), tokens)]
        made += tokens * repeat * count
        took += cost(rows or count) * repeat
        num_guessed += repeat if rows else 0
        done += repeat
        guessing.end(repeat)
    return made, took, num_guessed


def good(count: int, rows: int) -> float:
    return 1.0 + 0.6 * min(1.0, (rows - count) / count) + 0.1 * min(2.0, rows / count - 1)


def nothing(_count: int, _rows: int) -> float:
    return 1.0


@pytest.mark.parametrize("count", [1, 8, 32])
def test_guesses_are_used_where_they_pay(count: int) -> None:
    made, took, num_guessed = decode(promising(), count, 4000, flat, good)
    assert num_guessed > 3600
    assert made / took > 1.45 * count / flat(count)


@pytest.mark.parametrize("count", [1, 3, 8, 32, 128])
@pytest.mark.parametrize("gain", [nothing, lambda _c, _r: 1.02])
def test_text_that_cannot_be_guessed_costs_next_to_nothing(count: int, gain: Gain) -> None:
    guessing = promising()
    made, took, num_guessed = decode(guessing, count, 600, flat, gain)
    assert made / took > 0.98 * count / flat(count)
    assert num_guessed <= 48  # and fewer later on:
    assert decode(guessing, count, 8000, flat, gain)[2] <= 60


def test_nothing_is_looked_for_where_nothing_is_foretold() -> None:
    """What is decoded without guesses is decoded as without a device that could guess."""
    guessing = Guessing(Texts(1))
    assert decode(guessing, 8, 600, flat, good)[2] == 0 and not guessing.is_awake
    for _ in range(20):
        guessing.hint(32, 1)
    assert decode(guessing, 8, 600, flat, good)[2] == 0 and not guessing.is_awake
    for _ in range(10):
        guessing.hint(32, 12)
    assert guessing.is_awake and decode(guessing, 8, 2000, flat, good)[2] > 1500
    guessing.hint(0, 0)
    assert guessing.is_awake, "who has said nothing says nothing"


def test_the_host_looks_at_one_request_after_the_other() -> None:
    """Of its own text, and of others of its prompt."""
    draw, guessing = random.Random(1), Guessing(Texts(8))
    texts, prompt = guessing.texts, (1, 2, 3)
    said = [draw.randrange(1000) for _ in range(60)]
    other = [draw.randrange(1000) for _ in range(60)]
    texts.open(RequestId(0, 0), prompt, [*prompt, *said])
    texts.open(RequestId(1, 0), (4,), [4, *other])
    assert texts.foretold(RequestId(0, 0), 20) == (20, 0)
    assert texts.foretold(RequestId(0, 0), 90) == (60, 0)
    assert texts.foretold(RequestId(5, 0), 20) == (0, 0)
    texts.open(RequestId(0, 1), prompt, [*prompt, *other[:5], *said[20:30]])
    assert texts.foretold(RequestId(0, 1), 8) == (8, 8)
    texts.close(RequestId(0, 0))
    assert texts.foretold(RequestId(0, 1), 8) == (8, 8), "what has ended is remembered"
    texts.open(RequestId(2, 0), (9,), [9, *(other[:6] * 3)])
    assert texts.foretold(RequestId(2, 0), 12) == (12, 10)
    texts.open(RequestId(3, 0), (1, 2), [1, 2])
    assert texts.foretold(RequestId(3, 0), 12) == (0, 0)
    requests = [RequestId(2, 0), RequestId(3, 0)]
    for _ in range(6 * HINT_EVERY):
        guessing.look(requests)
        guessing.end(1)
    assert guessing.is_awake
    guessing.look([])


def test_a_full_device_has_no_row_to_spare() -> None:
    """Every row costs as much as the first."""
    made, took, num_guessed = decode(promising(), 32, 4000, lambda rows: rows, good)
    assert made / took > 0.97 and num_guessed < 400
    assert not rows_for(256) and not rows_for(300)


def test_it_wakes_when_text_repeats_itself() -> None:
    guessing = promising()
    decode(guessing, 8, 700, flat, nothing)
    assert decode(guessing, 8, 3000, flat, good)[2] > 1500


def test_it_stops_when_text_is_new_again() -> None:
    guessing = promising()
    assert decode(guessing, 8, 2000, flat, good)[2] > 1500
    assert decode(guessing, 8, 4000, flat, nothing)[2] < 900


def test_a_smaller_batch_is_another_matter() -> None:
    """What a full device cannot spare, the tail has."""
    guessing = promising()

    def cost(rows: int) -> float:
        return 1.0 if rows <= 64 else rows / 32

    assert decode(guessing, 128, 1000, cost, good)[2] < 100
    assert decode(guessing, 4, 1000, cost, good)[2] > 800


def test_where_others_wait_bursts_are_short_and_must_gain_more() -> None:
    def little(_count: int, rows: int) -> float:
        return 1.08 * flat(rows) / flat(8)

    assert decode(promising(), 8, 2000, flat, little)[2] > 1000
    assert decode(promising(), 8, 2000, flat, little, queued=True)[2] < 300
    fixed = Guessing(Texts(1), fixed=4.0)
    assert fixed.way(1, 8).steps == STEPS > LOOK_STEPS
    assert fixed.way(1, 8, queued=True) == (32, QUEUED_STEPS)
    assert fixed.way(1, 600).rows == 0


def test_a_batch_that_changes_its_size_all_the_time_is_looked_at_too() -> None:
    guessing = promising()
    num_guessed = sum(decode(guessing, count, 8, flat, good)[2] for count in (30, 40) * 300)
    assert num_guessed > 4000


def test_a_capture_is_no_time_of_a_step() -> None:
    guessing = promising()
    for seconds in (50.0, 1.0, 1.0, 40.0):
        guessing.time(1, 8, 16, seconds)
    ((_, _, _, milliseconds, _),) = guessing.profile()
    assert milliseconds < 1300


def test_longer_pasts_have_more_guesses_and_what_fails_has_fewer() -> None:
    guessing = promising()
    before = guessing.lengths()
    assert len(before) == CHOICES and all(
        len(row) == PAST_MAX + 1 == len(CHANCES) for row in before
    )
    for row, following in itertools.pairwise(before):
        assert all(a <= b for a, b in zip(row, following, strict=True))
        assert row[0] == 0 and row == sorted(row)
    assert before[0][1] == 0 and before[-1][PAST_MAX] == GUESSES_MAX
    tried, right = [0.0] * 9, [0.0] * 9
    tried[3], tried[1], right[1] = 1000.0, 1000.0, 900.0
    guessing.learn(tried, right)
    after = guessing.lengths()
    assert after[-1][3] < before[-1][3] and after[-1][1] > before[-1][1]


def test_texts_of_a_prompt_are_listed_for_its_requests() -> None:
    texts = Texts(8)
    prompt, said = (1, 2, 3), [1, 2, 3]
    for sample in range(3):
        texts.open(RequestId(0, sample), prompt, [*said, sample])
    texts.open(RequestId(1, 0), (9,), [9])
    own = [texts.rows(RequestId(0, sample)) for sample in range(3)]
    assert [rows[0] for rows in own] == [0, 1, 2] and all(len(set(rows)) == 3 for rows in own)
    assert texts.rows(RequestId(1, 0)) == [3]
    assert texts.take_unlisted(RequestId(0, 0)) and not texts.take_unlisted(RequestId(0, 0))
    texts.close(RequestId(0, 1))
    assert texts.rows(RequestId(0, 0)) == [0, 2, 1] and texts.rows(RequestId(0, 1)) == []
    (ended,) = texts.take_unsent()
    assert ended.row == 1 and list(ended.tokens) == [1, 2, 3, 1] and not texts.take_unsent()


def test_rows_are_found_where_nobody_runs() -> None:
    texts = Texts(3)
    for group in range(3):
        texts.open(RequestId(group, 0), (group,), [group])
    texts.open(RequestId(3, 0), (3,), [3])
    assert texts.rows(RequestId(3, 0)) == [] and texts.text(RequestId(3, 0)) is None
    texts.close(RequestId(1, 0))
    texts.open(RequestId(4, 0), (4,), [4])
    assert texts.rows(RequestId(4, 0)) == [1]
    assert not [text for text in texts.take_unsent() if text.row == 1], "its row is another's"


def test_rows_of_any_history_belong_to_one_text(seed: int = 3) -> None:
    draw, texts = random.Random(seed), Texts(40)
    live: dict[RequestId, list[int]] = {}
    for number in range(3000):
        if live and draw.random() < 0.48:
            rid = draw.choice(list(live))
            del live[rid]
            texts.close(rid)
        else:
            rid = RequestId(draw.randrange(6), number)
            live[rid] = [rid.group, number]
            texts.open(rid, (rid.group,), live[rid])
        owned = [rows[0] for rid in live if (rows := texts.rows(rid))]
        assert len(set(owned)) == len(owned)
        for rid in live:
            rows = texts.rows(rid)
            assert len(rows) <= LISTED and len(set(rows)) == len(rows)
        if len(live) > 30:
            for rid in list(live)[:20]:
                del live[rid]
                texts.close(rid)
    texts.clear()
    assert not any(texts.rows(rid) for rid in live)
