"""A trajectory as columns of a row, as a message and as a digest: the one place for each.

Never decides anything. Invariant: what comes back equals what was given, except its prompt, which
is not carried: whoever reads knows the prompt of the group. What has its default is left out, so
that rows and messages of an older release read as well.

The digest is what the log remembers of a sample's tokens and log-probs: taken by the instance where
the sample is made, logged with `SampleFinished`, and compared by `audit --files` with every file
that holds the sample later. Log-probs count to four decimals, as rollouts.jsonl has them, so that
each of those files gives the same digest.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, fields
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dora_rl.types import ARRAYS, Branch, Finish, RequestId, Segment, Trajectory, Version

_BESIDE = ("request", "version", "prompt_ids")
_DEFAULTS = {
    field.name: field.default_factory() if field.default_factory is not MISSING else field.default
    for field in fields(Trajectory)
    if field.name not in _BESIDE
}


def columns_of(trajectory: Trajectory) -> dict[str, Any]:
    """Arrays and values that JSON carries, by the names of the fields."""
    values = {name: getattr(trajectory, name) for name in _DEFAULTS}
    found = {
        name: value
        for name, value in values.items()
        if (value is not None if name in ARRAYS else value != _DEFAULTS[name])
    }
    found["finish"] = trajectory.finish.value
    found["segments"] = [list(segment) for segment in trajectory.segments]
    for name in ("branches", "turn_rewards"):
        if name in found:
            found[name] = [list(one) if isinstance(one, tuple) else one for one in found[name]]
    return found


def trajectory_of(request: RequestId, version: Version, columns: Mapping[str, Any]) -> Trajectory:
    """From its columns; those that are not a trajectory's are left out."""
    known = {name: value for name, value in columns.items() if name in _DEFAULTS}
    payload: dict[str, Any] = {"token_ids": (), "logprobs": (), "loss_mask": ()}
    known["finish"] = Finish(known["finish"])
    known["segments"] = tuple(Segment(*pair) for pair in known["segments"])
    if isinstance(known.get("parts"), str):  # as releases before had it
        known["parts"] = json.loads(known["parts"])
    known["branches"] = branches_of(known.get("branches", ()))
    known["turn_rewards"] = tuple(known.get("turn_rewards", ()))
    return Trajectory(request, version, **payload | known)


def branches_of(plain: Iterable[Sequence[int]]) -> tuple[Branch, ...]:
    """From their lists, as JSON has them."""
    return tuple(Branch(*map(int, one)) for one in plain)


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


# -- the digest of a sample ------------------------------------------------------------------------


DECIMALS = 4
ROUTING_KINDS = ("|u1", "<i2")


def sample_digest(
    request: RequestId,
    segments: Sequence[Segment],
    token_ids: ArrayLike,
    logprobs: ArrayLike,
    loss_mask: ArrayLike,
    branches: Sequence[Branch] = (),
    turn_rewards: Sequence[float] = (),
    routing: str = "",
) -> str:
    """16 hexadecimal digits over all of it; `routing` is the digest of its experts."""
    head: list[Any] = [list(request), [list(segment) for segment in segments]]
    if branches:  # without them, rewards of turns and routing, it is that of older releases
        head.append([list(map(int, branch)) for branch in branches])
    if turn_rewards:
        head.append(list(map(float, turn_rewards)))
    if routing:
        head.append(routing)
    found = blake2b(repr(head).encode(), digest_size=8)
    found.update(np.asarray(token_ids, dtype="<i4").tobytes())
    # Not every float can be scaled and be a whole number: those are infinite, and never trained.
    scaled = np.rint(np.asarray(logprobs, dtype=np.float64) * 10**DECIMALS)
    found.update(np.nan_to_num(scaled, posinf=2**62, neginf=-(2**62)).astype("<i8").tobytes())
    found.update(np.asarray(loss_mask, dtype=np.uint8).tobytes())
    return found.hexdigest()


def digest_of(sample: Trajectory) -> str:
    """Of a sample as it is."""
    payload = (sample.token_ids, sample.logprobs, sample.loss_mask)
    more = (sample.branches, sample.turn_rewards, routing_digest(sample.expert_ids))
    return sample_digest(sample.request, sample.segments, *payload, *more)


def routing_digest(expert_ids: NDArray[Any] | None) -> str:
    """Of the experts of a sample; empty: none were recorded."""
    if expert_ids is None:
        return ""
    found = blake2b(repr((expert_ids.dtype.str, expert_ids.shape)).encode(), digest_size=8)
    found.update(np.ascontiguousarray(expert_ids).tobytes())
    return found.hexdigest()


def routing_to_json(sample: Trajectory) -> list[Any]:
    """As rollouts.jsonl has it: the digest, and of the first sample of a group the experts
    themselves, which need many times the room of the tokens. Empty: none were recorded."""
    found = sample.expert_ids
    if found is None:
        return []
    kept = b64encode(found.tobytes()).decode() if not sample.request.sample else ""
    return [routing_digest(found), found.dtype.str, list(found.shape), kept]


def routing_from_json(plain: Sequence[Any]) -> tuple[str, NDArray[Any] | None]:
    """The digest, and the experts if they are there, which must have it."""
    if not plain:
        return "", None
    digest, kind, shape, kept = plain
    if not kept:
        return str(digest), None
    if kind not in ROUTING_KINDS:
        raise ValueError(f"experts are not recorded as {kind!r}")
    found = np.frombuffer(b64decode(kept, validate=True), kind).reshape(shape)
    if routing_digest(found) != digest:
        raise ValueError("its experts are not those of their digest")
    return digest, found


def text_digest(text: str) -> str:
    """Of a file or a line that the log vouches for."""
    return blake2b(text.encode(), digest_size=8).hexdigest()


def rounded(logprobs: ArrayLike) -> list[float]:
    """As rollouts.jsonl has them."""
    return np.asarray(logprobs, dtype=np.float64).round(DECIMALS).tolist()
