"""The SDK's messages that are protocol buffers: a training pass in, its outputs and samples out.

Numbers of fields and types are those of the SDK's `tinker_public.proto`. Looks at shapes and never
at a model. Invariant: what `read_training_pass` returns has whole tensors whose sizes agree with
their shapes; whatever else comes in is a `UserError` of one line.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dora_rl.tinker import wire
from dora_rl.types import SamplingParams, UserError

FLOAT32, INT64 = 1, 2
NUMPY: dict[int, Any] = {FLOAT32: np.float32, INT64: np.int64}
DATA_MAX = 4096  # data of one request
ELEMENTS_MAX = 1 << 24  # of one tensor, and of all sparse ones of a request, written out
TENSORS_MAX = 16  # of one datum
MASK_LOGPROB = -99999.0  # of a place that has no k-th best token
STOP, LENGTH = 0, 1

Array: TypeAlias = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Datum:
    """One sequence, and the tensors of the loss by name."""

    token_ids: Array
    inputs: dict[str, Array]


@dataclass(frozen=True, slots=True)
class TrainingPass:
    """`forward_backward`, or with `forward_only` `forward`."""

    model_id: str = ""
    seq: int = 0
    loss: str = ""
    config: dict[str, float | str] = field(default_factory=dict)
    forward_only: bool = False
    data: tuple[Datum, ...] = ()


def read_training_pass(body: bytes) -> TrainingPass:
    try:
        return _training_pass(body)
    except wire.Malformed as error:
        raise UserError(f"the body is not a forward_backward request: {error}") from None


def pass_names(body: bytes) -> tuple[str, int]:
    """The model and the number of a request, without reading its data."""
    model_id, seq = "", 0
    try:
        for one in wire.fields(body):
            if one.number == 1:
                model_id = one.text()
            elif one.number == 2:
                seq = one.whole()
    except wire.Malformed as error:
        raise UserError(f"the body is not a forward_backward request: {error}") from None
    return model_id, seq


def _training_pass(body: bytes) -> TrainingPass:
    model_id, seq, loss, forward_only = "", 0, "", False
    old: dict[str, float | str] = {}
    new: dict[str, float | str] = {}
    data: list[Datum] = []
    room = ELEMENTS_MAX + len(body)  # dense ones are never more than their bytes
    for one in wire.fields(body):
        if one.number == 1:
            model_id = one.text()
        elif one.number == 2:
            seq = one.whole()
        elif one.number == 3:
            if len(data) >= DATA_MAX:
                raise wire.Malformed(f"more than {DATA_MAX} data")
            data.append(_datum(one.bytes()))
            room -= sum(tensor.size for tensor in data[-1].inputs.values())
            if room < 0:
                raise wire.Malformed(f"sparse tensors of more than {ELEMENTS_MAX} elements")
        elif one.number == 4:
            loss = one.text()
        elif one.number == 5:
            key, value = wire.entry(one.bytes())
            old[key] = 0.0 if value is None else value.double()
        elif one.number == 6:
            forward_only = bool(one.whole())
        elif one.number == 7:
            key, value = wire.entry(one.bytes())
            new[key] = 0.0 if value is None else _config_value(value.bytes())
    return TrainingPass(model_id, seq, loss, new or old, forward_only, tuple(data))


def _config_value(data: bytes) -> float | str:
    for one in wire.fields(data):
        return one.double() if one.number == 1 else one.text()
    return 0.0


def _datum(data: bytes) -> Datum:
    chunks: list[Array] = []
    inputs: dict[str, Array] = {}
    for one in wire.fields(data):
        if one.number == 1:
            chunks.append(_chunk(one.bytes()))
        elif one.number == 2:
            key, value = wire.entry(one.bytes())
            if len(inputs) >= TENSORS_MAX:
                raise wire.Malformed(f"a datum with more than {TENSORS_MAX} loss_fn_inputs")
            if value is not None:
                inputs[key] = _tensor(key, value.bytes())
    return Datum(np.concatenate(chunks) if chunks else np.empty(0, np.int32), inputs)


def _chunk(data: bytes) -> Array:
    for one in wire.fields(data):
        if one.number != 1:
            raise wire.Malformed("only chunks of text are taken: this model reads no images")
        for inner in wire.fields(one.bytes()):
            if inner.number == 1:
                return _array(inner.bytes(), np.int32, "a chunk")
    return np.empty(0, np.int32)


def _tensor(name: str, data: bytes) -> Array:
    dense, sparse, kind = None, None, 0
    shape: list[int] = []
    for one in wire.fields(data):
        if one.number == 1:
            dense = one.bytes()
        elif one.number == 2:
            sparse = one.bytes()
        elif one.number == 3:
            kind = one.whole()
        elif one.number == 4:
            shape += one.wholes()
    if kind not in NUMPY:
        raise wire.Malformed(f"tensor '{name}' has type {kind}; float32 or int64 was expected")
    size = _size(name, shape)
    if sparse is not None:
        return _written_out(name, sparse, shape, NUMPY[kind])
    values = _array(dense or b"", NUMPY[kind], f"tensor '{name}'")
    if not shape:
        return values
    if values.size != size:
        raise wire.Malformed(f"tensor '{name}' has {values.size} values, its shape says {size}")
    return values.reshape(shape)


def _size(name: str, shape: Sequence[int]) -> int:
    size = 1
    for length in shape:
        size *= length
        if not 0 <= length <= ELEMENTS_MAX or size > ELEMENTS_MAX:
            raise wire.Malformed(f"tensor '{name}' is too large")
    if len(shape) > 2:
        raise wire.Malformed(f"tensor '{name}' has {len(shape)} dimensions; 1 or 2 were expected")
    return size


def _array(data: bytes, dtype: Any, what: str) -> Array:
    if len(data) % np.dtype(dtype).itemsize:
        raise wire.Malformed(f"{what} is cut off")
    return np.frombuffer(data, dtype)


def _written_out(name: str, data: bytes, shape: Sequence[int], dtype: Any) -> Array:
    """A sparse matrix (compressed rows) with its zeros."""
    parts = {one.number: one.bytes() for one in wire.fields(data)}
    values = _array(parts.get(1, b""), dtype, f"tensor '{name}'")
    rows, columns = (
        _array(parts.get(number, b""), np.int64, f"tensor '{name}'") for number in (2, 3)
    )
    wrong = (
        len(shape) != 2
        or len(rows) != shape[0] + 1
        or len(columns) != len(values)
        or rows[0] != 0
        or rows[-1] != len(values)
        or bool((np.diff(rows) < 0).any())
        or bool(((columns < 0) | (columns >= shape[1])).any())
    )
    if wrong:
        raise wire.Malformed(f"tensor '{name}': its rows and columns do not agree with its shape")
    out = np.zeros(shape, dtype)
    out[np.repeat(np.arange(shape[0]), np.diff(rows)), columns] = values
    return out


# -- out ------------------------------------------------------------------------------------------


def write_outputs(logprobs: Sequence[Array], metrics: dict[str, float]) -> bytes:
    """`ForwardBackwardOutput`: the log-probs of each datum's targets, in their shape."""
    out = [wire.put_text(1, "ArrayRecord")]
    for width, part in groupby(logprobs, lambda one: one.shape[1:]):
        out.append(wire.put_bytes(2, _record("logprobs", list(part), width)))
    for name, value in metrics.items():
        out.append(wire.put_entry(3, name, wire.put_double(2, value)))
    return b"".join(out)


def _record(name: str, arrays: Sequence[Array], width: tuple[int, ...]) -> bytes:
    ends = np.cumsum([0, *(one.size for one in arrays)], dtype=np.int64) * 4
    flat = b"".join(np.ascontiguousarray(one, np.float32).tobytes() for one in arrays)
    batched = wire.put_bytes(1, flat) + wire.put_bytes(2, ends.tobytes())
    batched += wire.put_whole(3, FLOAT32)
    if width:
        batched += wire.put_wholes(4, width)
    return (
        wire.put_text(1, "ArrayRecord")
        + wire.put_entry(2, name, wire.put_bytes(2, batched))
        + wire.put_whole(3, len(arrays))
    )


Best: TypeAlias = Sequence[Sequence[tuple[int, float]]]


@dataclass(frozen=True, slots=True)
class Asked:
    """A request for samples. Of the prompt the log-probs of the `last` tokens are wanted, and
    `top_prompt` best tokens of each place; `seed` None: another one each time."""

    prompt: tuple[int, ...]
    params: SamplingParams
    num_samples: int
    seed: int | None
    scores_prompt: bool
    top_prompt: int
    last: int


@dataclass(slots=True)
class Sample:
    """One response. `top`: the best tokens of each place, where they were asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    top: list[tuple[tuple[int, float], ...]] = field(default_factory=list)


def write_samples(
    samples: Iterable[Sample], top_k: int, prompt: Sequence[float] | None, prompt_top: Best | None
) -> bytes:
    """`SampleResponse`. `prompt`: the log-probs of its tokens, NaN where there is none."""
    out: list[bytes] = []
    for one in samples:
        sequence = wire.put_whole(1, STOP if one.stopped else LENGTH)
        sequence += wire.put_bytes(2, np.asarray(one.token_ids, np.int32).tobytes())
        sequence += wire.put_bytes(3, np.asarray(one.logprobs, np.float32).tobytes())
        if top_k:
            sequence += wire.put_bytes(4, _best(one.top, top_k))
        out.append(wire.put_bytes(1, sequence))
    if prompt is not None:
        out.append(wire.put_bytes(2, np.asarray(prompt, np.float32).tobytes()))
    if prompt_top is not None:
        width = max(map(len, prompt_top), default=0)
        out.append(wire.put_bytes(3, _best(prompt_top, width)))
    return b"".join(out)


def _best(rows: Best, width: int) -> bytes:
    ids = np.zeros((len(rows), width), np.int32)
    logprobs = np.full((len(rows), width), MASK_LOGPROB, np.float32)
    for index, row in enumerate(rows):
        for place, (token, logprob) in enumerate(row[:width]):
            ids[index, place], logprobs[index, place] = token, logprob
    return (
        wire.put_bytes(1, ids.tobytes())
        + wire.put_bytes(2, logprobs.tobytes())
        + wire.put_whole(3, width)
        + wire.put_whole(4, len(rows))
    )
