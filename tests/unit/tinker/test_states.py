"""The directory of the server: owners, names, time, and what a start sweeps away."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from dora_rl.tinker.states import Place, States, check_name, place_of
from dora_rl.types import UserError

MODEL = "3f2a:train:0"
ADAPTERS = {"a": torch.ones(2, 3)}
clock = [1000.0]


@pytest.fixture
def states(tmp_path: Path) -> Iterator[States]:
    clock[0] = 1000.0
    made = States(tmp_path / "dir", "base", lambda: clock[0])
    made.add_model(MODEL, {"owner": "me", "rank": 1})
    yield made
    made.close()


def save(states: States, name: str, overwrite: bool = False, **entry: Any) -> Place:
    place = Place(MODEL, "weights", name)
    states.save(place, entry, ADAPTERS, {"a:step": torch.tensor(3.0)}, overwrite)
    return place


def snapshot(states: States, name: str | None) -> int:
    version = states.new_version()
    states.store.publish(version, ADAPTERS.items(), None, "base")
    if name is not None:
        states.name_snapshot(Place(MODEL, "sampler_weights", name), version, {})
    return version


def test_what_was_saved_is_there_for_its_owner_alone(states: States) -> None:
    place = save(states, "one")
    found, entry = states.find(str(place), "me")
    assert found == place and entry["rank"] == 1 and entry["created"] == 1000.0
    adapters, moments = states.load(place)
    assert torch.equal(adapters["a"], ADAPTERS["a"]) and float(moments["a:step"]) == 3.0
    for path, owner in ((str(place), "you"), (f"{place}x", "me")):
        with pytest.raises(UserError, match="nothing of yours"):
            states.find(path, owner)
    with pytest.raises(UserError, match="no training run"):
        states.listed(MODEL, "you")
    assert states.models("me").keys() == {MODEL} and states.models("you") == {}


def test_a_name_is_taken_once_unless_it_is_meant(states: States) -> None:
    save(states, "one", note=1)
    with pytest.raises(UserError, match="is there already; pass overwrite=True"):
        save(states, "one")
    save(states, "one", overwrite=True, note=2)
    assert states.find(f"tinker://{MODEL}/weights/one", "me")[1]["note"] == 2


def test_a_snapshot_of_the_same_name_takes_the_place_of_the_other(states: States) -> None:
    first, second = snapshot(states, "s"), snapshot(states, "s")
    assert list(states.store.versions()) == [second] and first < second
    (one,) = states.listed(MODEL, "me")
    assert one[1]["version"] == second and states.num_bytes(one[0]) > 24


def test_what_is_for_a_limited_time_goes(states: States) -> None:
    kept, gone = save(states, "kept"), save(states, "gone", expires=2000.0)
    assert states.expire() == []
    clock[0] = 2000.5
    assert states.expire() == [gone]
    assert [place for place, _ in states.listed(MODEL, "me")] == [kept]


def test_a_start_sweeps_what_has_no_name(states: States) -> None:
    named, loose = snapshot(states, "s"), snapshot(states, None)
    states.close()
    again = States(states.root, "base")
    assert list(again.store.versions()) == [named]
    assert again.new_version() > named and loose not in again.store.versions()
    again.close()


def test_a_model_of_which_nothing_was_saved_leaves_nothing(states: States) -> None:
    states.add_model("3f2a:train:1", {"owner": "me"})
    save(states, "one")
    for model in (MODEL, "3f2a:train:1"):
        states.forget_model(model)
    assert states.models("me").keys() == {MODEL}


@pytest.mark.parametrize(
    "path",
    [
        "tinker://3f2a:train:0/weights/../../x",
        "tinker://../weights/one",
        "tinker://3f2a:train:0/weights/.hidden",
        "tinker://3f2a:train:0/other/one",
        "/etc/passwd",
        "tinker://3f2a:train:0/weights/a/b",
        "tinker://3f2a:train:0/weights/",
    ],
)
def test_paths_stay_in_the_directory(path: str) -> None:
    with pytest.raises(UserError, match="a path looks like"):
        place_of(path)


@pytest.mark.parametrize("name", ["", "..", "a/b", ".a", "a b", "x" * 129, "ü"])
def test_names_are_plain(name: str) -> None:
    with pytest.raises(UserError, match="a name has"):
        check_name(name)


def test_nobody_else_may_read_it(states: States) -> None:
    assert states.root.stat().st_mode & 0o077 == 0
