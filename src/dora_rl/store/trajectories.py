"""A trajectory as columns of a row and as a message, and back: the one pair of functions for each.

Never decides anything. Invariant: what comes back equals what was given, except its prompt, which
is not carried: whoever reads knows the prompt of the group. What has its default is left out, so
that rows and messages of an older release read as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any

from numpy.typing import NDArray

from dora_rl.types import ARRAYS, Finish, RequestId, Segment, Trajectory, Version

_BESIDE = ("request", "version", "prompt_ids")
_DEFAULTS = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Trajectory)
    if field.name not in _BESIDE
}


def columns_of(trajectory: Trajectory) -> dict[str, Any]:
    """Arrays and values that JSON carries, by the names of the fields."""
    found: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        value = getattr(trajectory, name)
        if name in ARRAYS:
            if value is not None:
                found[name] = value
        elif value != default:
            found[name] = value
    found["finish"] = trajectory.finish.value
    found["segments"] = [list(segment) for segment in trajectory.segments]
    return found


def trajectory_of(request: RequestId, version: Version, columns: Mapping[str, Any]) -> Trajectory:
    """From its columns; those that are not a trajectory's are left out."""
    known = {name: value for name, value in columns.items() if name in _DEFAULTS}
    payload: dict[str, Any] = {"token_ids": (), "logprobs": (), "loss_mask": ()}
    known["finish"] = Finish(known["finish"])
    known["segments"] = tuple(Segment(*pair) for pair in known["segments"])
    if isinstance(known.get("parts"), str):  # as releases before had it
        known["parts"] = json.loads(known["parts"])
    if known.get("parent") is not None:
        known["parent"] = RequestId(*map(int, known["parent"]))
    return Trajectory(request, version, **payload | known)


def to_message(
    trajectories: Sequence[Trajectory],
) -> tuple[list[dict[str, Any]], dict[str, NDArray[Any]]]:
    """Entries of a message's body, and its arrays."""
    entries: list[dict[str, Any]] = []
    arrays: dict[str, NDArray[Any]] = {}
    for place, trajectory in enumerate(trajectories):
        entry: dict[str, Any] = {"request": trajectory.request, "version": trajectory.version}
        for name, value in columns_of(trajectory).items():
            if name not in ARRAYS:
                entry[name] = value
                continue
            arrays[f"{place}.{name}"] = value.reshape(-1)
            if value.ndim > 1:  # arrays travel flat
                entry.setdefault("shapes", {})[name] = value.shape
        entries.append(entry)
    return entries, arrays


def from_message(
    entries: Sequence[Mapping[str, Any]], arrays: Mapping[str, NDArray[Any]]
) -> list[Trajectory]:
    """The trajectories of a message."""
    found: list[Trajectory] = []
    for place, entry in enumerate(entries):
        columns = dict(entry)
        shapes = columns.get("shapes", {})
        for name in ARRAYS:
            array = arrays.get(f"{place}.{name}")
            if array is not None:
                columns[name] = array.reshape(shapes.get(name, -1))
        found.append(trajectory_of(RequestId(*entry["request"]), entry["version"], columns))
    return found
