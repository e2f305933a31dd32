"""Reading and writing the safetensors files of a Hugging Face model directory.

Never unpickles anything. Invariant: a directory written here is laid out as transformers and vLLM
expect (`model.safetensors`, or shards with `model.safetensors.index.json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dora_rl.types import UserError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    if (directory / INDEX).is_file():
        index = json.loads((directory / INDEX).read_text())
        return {name: directory / file for name, file in index["weight_map"].items()}
    path = directory / SINGLE
    if not path.is_file():
        raise UserError(f"model '{directory}': no {SINGLE}; only safetensors weights are read")
    with _open(path) as file:
        return dict.fromkeys(file.keys(), path)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: truncated or not safetensors ({error})") from error


class TensorReader:
    """Reads tensors of a model directory by name; use as a context."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.files = tensor_files(directory)
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str) -> Tensor:
        path = self.files.get(name)
        if path is None:
            raise UserError(f"model '{self.directory}': tensor '{name}' is missing")
        if path not in self._open:
            self._open[path] = self._stack.enter_context(_open(path))
        return self._open[path].get_tensor(name)


def write_model(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes_max: int
) -> list[Path]:
    """Write the weights, one file or several shards; returns the files."""
    shards: list[dict[str, Tensor]] = [{}]
    used = 0
    for name, tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if shards[-1] and used + size > shard_bytes_max:
            shards.append({})
            used = 0
        shards[-1][name] = tensor.detach().to("cpu").contiguous()
        used += size
    if len(shards) == 1:
        save_file(shards[0], directory / SINGLE, metadata={"format": "pt"})
        return [directory / SINGLE]
    return _write_shards(directory, shards)


def _write_shards(directory: Path, shards: list[dict[str, Tensor]]) -> list[Path]:
    files, place, total = [], {}, 0
    for i, shard in enumerate(shards):
        path = directory / f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        files.append(path)
        place.update(dict.fromkeys(shard, path.name))
        total += sum(t.numel() * t.element_size() for t in shard.values())
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*files, directory / INDEX]
