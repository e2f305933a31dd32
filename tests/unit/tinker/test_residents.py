"""Which snapshots are in the engine: none goes under its users, and nobody waits for ever."""

from __future__ import annotations

import random
from collections import Counter

from dora_rl.tinker.residents import Load, Residents


def load(residents: Residents, version: int, evict: int | None = None) -> None:
    assert residents.want(version) == Load(version, evict)
    assert residents.want(version) is False  # not twice
    residents.loaded(version)


def test_a_snapshot_is_loaded_once_and_used_by_many() -> None:
    residents = Residents(2)
    load(residents, 7)
    assert residents.want(7) is True and residents.want(7) is True
    assert residents.versions() == (7,)


def test_the_one_that_was_used_least_recently_makes_way() -> None:
    residents = Residents(2)
    for version in (1, 2):
        load(residents, version)
    for version in (2, 1):
        assert residents.want(version) is True
        residents.leave(version)
    load(residents, 3, evict=2)
    assert set(residents.versions()) == {1, 3}


def test_none_is_taken_away_under_its_users() -> None:
    residents = Residents(1)
    load(residents, 1)
    assert residents.want(1) is True
    assert residents.want(2) is False
    residents.leave(1)
    assert residents.want(2) == Load(2, 1)


def test_who_waits_for_a_slot_gets_one_although_others_keep_coming() -> None:
    residents = Residents(1)
    load(residents, 1)
    assert residents.want(1) is True
    assert residents.want(2) is False
    assert residents.want(1) is False, "its slot is promised: no new requests on it"
    residents.leave(1)
    assert residents.want(2) == Load(2, 1)


def test_a_load_that_failed_leaves_its_slot_free() -> None:
    residents = Residents(1)
    assert residents.want(1) == Load(1, None)
    residents.failed(1)
    assert residents.want(2) == Load(2, None)


def test_what_nobody_wants_any_more_goes_where_it_is_unused() -> None:
    residents = Residents(2)
    load(residents, 1)
    assert residents.want(1) is True and not residents.forget(1)
    residents.leave(1)
    assert residents.forget(1) and residents.versions() == () and not residents.forget(1)


def test_any_mix_of_clients_is_served() -> None:
    for seed in range(30):
        draw = random.Random(seed)
        slots, versions = draw.randrange(1, 4), range(6)
        residents = Residents(slots)
        waiting = Counter(dict.fromkeys(versions, 40))
        running: list[int] = []
        for _ in range(20_000):
            if not waiting and not running:
                break
            for version in sorted(waiting, key=lambda v: draw.random()):
                wanted = residents.want(version)
                if isinstance(wanted, Load):
                    assert wanted.evict not in running
                    residents.loaded(version)
                elif wanted:
                    running.append(version)
                    waiting -= Counter([version])
                assert len(residents.versions()) <= slots
            while running and draw.random() < 0.5:
                residents.leave(running.pop(draw.randrange(len(running))))
        assert not waiting and not running, "somebody waits for ever"
