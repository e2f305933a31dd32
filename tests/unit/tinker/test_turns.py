"""Whose request is next: one of each client in turn, in order, and never half a batch."""

from __future__ import annotations

import random
from collections import Counter

from dora_rl.tinker.turns import Turns


def turns_of(**requests: int) -> Turns[str]:
    """Clients with so many requests each, numbered from 1."""
    turns: Turns[str] = Turns()
    for client, count in requests.items():
        turns.open(client)
        for seq in range(1, count + 1):
            turns.add(client, seq, f"{client}{seq}", 0.0)
    return turns


def taken(turns: Turns[str]) -> list[str]:
    found = []
    while (item := turns.take()) is not None:
        found.append(item)
    return found


def test_one_request_of_each_client_in_turn() -> None:
    assert taken(turns_of(a=4, b=2)) == ["a1", "b1", "a2", "b2", "a3", "a4"]


def test_a_long_queue_does_not_starve_who_comes_later() -> None:
    turns = turns_of(a=1000)
    assert turns.take() == "a1"
    turns.open("b")
    turns.add("b", 1, "b1", 0.0)
    assert turns.take() == "b1" or turns.take() == "b1"


def test_requests_of_a_client_run_in_their_order_however_they_come() -> None:
    turns: Turns[str] = Turns()
    turns.open("a")
    for seq in (3, 2):
        turns.add("a", seq, f"a{seq}", 0.0)
        assert turns.take() is None
    turns.add("a", 1, "a1", 0.0)
    assert taken(turns) == ["a1", "a2", "a3"] and turns.num_waiting == 0


def test_a_client_whose_next_may_not_run_lets_others_go() -> None:
    turns = turns_of(a=2, b=2)
    assert turns.take(lambda client, item: client == "b") == "b1"
    assert taken(turns) == ["a1", "b2", "a2"]


def test_what_waits_for_a_number_that_never_comes_is_given_up_as_a_whole() -> None:
    turns: Turns[str] = Turns()
    turns.open("a")
    turns.add("a", 1, "a1", 0.0)
    assert turns.take() == "a1"
    turns.add("a", 3, "a3", 5.0)
    turns.add("a", 5, "a5", 7.0)
    assert turns.overdue(14.9, 10.0) == []
    (missing,) = turns.overdue(15.1, 10.0)
    assert missing == ("a", 2, ["a3", "a5"])
    assert turns.is_past("a", 2) and turns.num_waiting == 0
    turns.add("a", 6, "a6", 16.0)
    assert taken(turns) == ["a6"]


def test_who_is_gone_has_nothing_waiting() -> None:
    turns = turns_of(a=3, b=1)
    assert turns.close("a") == ["a1", "a2", "a3"]
    assert turns.num_waiting == 1 and taken(turns) == ["b1"]


def test_any_order_of_arrival_serves_all_once_and_fairly() -> None:
    """Between two requests of a client, whoever else has one ready gets one."""
    for seed in range(50):
        draw = random.Random(seed)
        counts = {client: draw.randrange(1, 9) for client in "abcd"}
        arrivals = [(client, seq) for client, n in counts.items() for seq in range(1, n + 1)]
        draw.shuffle(arrivals)
        turns: Turns[tuple[str, int]] = Turns()
        for client in counts:
            turns.open(client)
        done: list[tuple[str, int]] = []
        since = Counter[str]()  # turns of others that a client with a ready request has seen pass
        for one in [*arrivals, *([None] * len(arrivals))]:
            if one is not None:
                turns.add(*one, one, 0.0)
            ready = {c for c in counts if turns.num_of(c) and (c, next_of(done, c)) in seen(turns)}
            item = turns.take()
            assert (item is None) == (not ready)
            if item is None:
                continue
            done.append(item)
            for client in ready - {item[0]}:
                since[client] += 1
                assert since[client] < len(counts), f"{client} was passed over"
            since[item[0]] = 0
        assert sorted(done) == sorted(arrivals)
        for client, n in counts.items():
            assert [seq for who, seq in done if who == client] == list(range(1, n + 1))


def next_of(done: list[tuple[str, int]], client: str) -> int:
    return 1 + sum(who == client for who, _ in done)


def seen(turns: Turns[tuple[str, int]]) -> set[tuple[str, int]]:
    """What waits, by looking at every client's next one."""
    found: set[tuple[str, int]] = set()

    def look(client: str, item: tuple[str, int]) -> bool:
        found.add(item)
        return False

    turns.take(look)
    return found


def test_only_a_number_that_others_wait_for_is_awaited() -> None:
    turns: Turns[str] = Turns()
    turns.open("a")
    assert not turns.is_awaited("a", 1)
    turns.add("a", 2, "a2", 0.0)
    assert turns.is_awaited("a", 1) and not turns.is_awaited("a", 3)
    turns.add("a", 1, "a1", 0.0)
    assert not turns.is_awaited("a", 1)
