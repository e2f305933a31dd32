"""Whether the weights in a run directory are those that its log speaks of.

Reads only. Sealed versions are compared by the checksum that the log committed; a checkpoint by
the digests it wrote of itself, its step, and, where it holds what was sealed bit for bit, by that
checksum too. `export`, `eval` and `serve` refuse what does not match; `audit --files` reports it.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Collection, Iterator
from pathlib import Path

from dora_rl.config import RunConfig
from dora_rl.core.events import Rewound, StepCommitted
from dora_rl.io.append_log import whole_lines
from dora_rl.model.checksum import checksum_of
from dora_rl.observe.eventlog import Entry, parse_line
from dora_rl.observe.segments import segments
from dora_rl.types import UserError, Version
from dora_rl.weights.format import TensorEntry, digest_of

_COMMITTED, _REWOUND = b'"is":"StepCommitted"', b'"is":"Rewound"'


def committed_checksums(run: Path, wanted: Collection[Version]) -> dict[Version, str]:
    """The checksums that the log of a run commits of these versions. Read from the end: the cost
    does not grow with the run. Lines that cannot be read are passed over."""
    open_, found = {version for version in wanted if version > 0}, dict[Version, str]()
    if not open_:
        return found
    until: Version | None = None  # what is older than a rewind speaks of versions up to its own
    for event in _from_the_end(run):
        if isinstance(event, Rewound):
            until = event.version if until is None else min(until, event.version)
            continue
        version = event.step + 1
        if version in open_ and (until is None or version <= until):
            found[version] = event.checksum
            open_.discard(version)
        if not open_ or version < min(open_):
            break
    return found


def _from_the_end(run: Path) -> Iterator[Rewound | StepCommitted]:
    """What the log says of versions, the newest first."""
    for path in reversed(segments(run / "events")):
        for line in reversed(whole_lines(path.read_bytes())):
            record = parse_line(line) if _COMMITTED in line or _REWOUND in line else None
            if isinstance(record, Entry) and isinstance(record.event, (Rewound, StepCommitted)):
                yield record.event


def newest_committed(run: Path) -> Version | None:
    """The newest version that the log of a run speaks of as its own; None: it has no log. What was
    sealed after it is for a resume alone, which may make it again. Read from the end."""
    for event in _from_the_end(run):
        return event.version if isinstance(event, Rewound) else event.step + 1
    return 0 if segments(run / "events") else None


def seals_whole_models(config: RunConfig) -> bool:
    """Whether a checkpoint's model is, bit for bit, the version that was sealed with it."""
    adapters = config.trainer.lora_rank and config.trainer.lora_publish == "adapters"
    return not adapters and config.checkpoint.dtype == config.trainer.publish_dtype


def model_checksum(directory: Path) -> str:
    """The checksum that the weights of a model directory would be sealed with."""
    from dora_rl.model.directory import tensor_files

    files = sorted({*tensor_files(directory).values()})
    return checksum_of(entry for file in files for entry in _tensors(file))


def _tensors(path: Path) -> Iterator[TensorEntry]:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            (length,) = struct.unpack("<Q", data[:8])
            header = json.loads(data[8 : 8 + length])
        except (struct.error, ValueError) as error:
            raise UserError(f"{path}: truncated or not safetensors ({error})") from None
        header.pop("__metadata__", None)
        with memoryview(data) as view:
            for name, place in header.items():
                begin, end = place["data_offsets"]
                with view[8 + length + begin : 8 + length + end] as part:
                    digest = digest_of(part)
                yield TensorEntry(name, place["dtype"], tuple(place["shape"]), begin, end, digest)


def checkpoint_problem(directory: Path, step: int, sealed: str, *, trainer: bool = False) -> str:
    """What speaks against a checkpoint being that of the end of `step`; "" if nothing does.

    `sealed` is the checksum of the version, "" where that says nothing about the checkpoint. With
    `trainer` the learner's own files are read too.
    """
    from dora_rl.trainer.checkpoints.digests import files_problem, read_state

    state = read_state(directory)
    if (version := state["next_step"]) != step + 1:
        return f"its trainer state is that of version {version}, not {step + 1}"
    if problem := files_problem(directory, state, trainer=trainer):
        return problem
    if sealed and model_checksum(directory) != sealed:
        return f"its weights are not those that the log committed as version {step + 1}"
    return ""
