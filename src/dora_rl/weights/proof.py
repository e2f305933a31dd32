"""Whether the weights in a run directory are those that its log speaks of.

Reads only. Sealed versions are compared by the checksum that the log committed; a checkpoint by
the digests it wrote of itself, its step, and, where it holds what was sealed bit for bit, by that
checksum too. `export`, `eval` and `serve` refuse what does not match; `audit --files` reports it.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora_rl.core.events import Rewound, StepCommitted
from dora_rl.model.checksum import checksum_of
from dora_rl.observe.eventlog import Entry, parse_line
from dora_rl.observe.segments import segments
from dora_rl.types import UserError, Version
from dora_rl.weights.format import TensorEntry, digest_of

if TYPE_CHECKING:
    from dora_rl.config import RunConfig

_COMMITTED, _REWOUND = b'"is":"StepCommitted"', b'"is":"Rewound"'


def committed_weights(run: Path) -> dict[Version, str]:
    """The checksum of every version that the log of a run commits. Other lines are passed over."""
    found: dict[Version, str] = {}
    for path in segments(run / "events"):
        with path.open("rb") as file:
            for line in file:
                told = _COMMITTED in line or _REWOUND in line
                record = parse_line(line) if told else None
                event: Any = record.event if isinstance(record, Entry) else None
                if isinstance(event, Rewound):
                    found = {
                        version: found[version] for version in found if version <= event.version
                    }
                elif isinstance(event, StepCommitted):
                    found.setdefault(event.step + 1, event.checksum)
    return found


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
    from dora_rl.trainer.checkpoints.state import FORMAT, read_state, tensor_digests

    state = read_state(directory)
    version, form, noted = state["next_step"], state.get("format"), state.get("files")
    if version != step + 1:
        return f"its trainer state is that of version {version}, not {step + 1}"
    if not isinstance(form, int):
        return "its trainer/state.json has no format"
    if not isinstance(noted, dict) and (noted is not None or form >= FORMAT):
        return "its trainer/state.json has no digests of its files"
    if noted is not None:
        every = trainer and form >= FORMAT
        if not every:
            noted = {name: digest for name, digest in noted.items() if "/" not in name}
        found = tensor_digests(directory, trainer=every)
        names = sorted(name for name in {*noted, *found} if noted.get(name) != found.get(name))
        if names:
            return f"{names[0]} is not the file that was saved"
    if sealed and model_checksum(directory) != sealed:
        return f"its weights are not those that the log committed as version {step + 1}"
    return ""
