"""A Hugging Face model directory, in and out: its config, the tensors of its safetensors files.

Never unpickles anything, and imports torch only to read or write a tensor, so that a directory is
checked before anything starts. Invariant: a directory written here is laid out as transformers and
vLLM expect (`model.safetensors`, or shards with `model.safetensors.index.json`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from safetensors import SafetensorError, safe_open

from dora_rl.model.families import spec_from_config
from dora_rl.model.names import by_layer, check_shape, targets_of
from dora_rl.model.spec import ModelSpec, eos_ids_of
from dora_rl.types import UserError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"


class TensorSource(Protocol):
    """Named tensors to load from; `ports.SealedWeights` is one."""

    def names(self) -> Sequence[str]: ...
    def tensor(self, name: str) -> Tensor: ...


@runtime_checkable
class FileSource(Protocol):
    """A source whose tensors lie in safetensors files that other processes may open."""

    @property
    def files(self) -> Sequence[Path]: ...


# -- config.json ----------------------------------------------------------------------------------


def read_config(path: Path) -> dict[str, Any]:
    """`config.json` of a model directory, with the end-of-sequence ids of its generation config."""
    if not (file := path / "config.json").is_file():
        raise UserError(f"{path}: no config.json; give a Hugging Face model directory")
    config, generation = _read_object(file), path / "generation_config.json"
    eos = _read_object(generation).get("eos_token_id") if generation.is_file() else None
    return config if eos is None else config | {"eos_token_id": eos}


def _read_object(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except ValueError as err:
        raise UserError(f"{file}: not valid JSON ({err})") from err
    if not isinstance(found, dict):
        raise UserError(f"{file}: not a JSON object; copy the file from the model again")
    return found


def read_spec(path: str | Path) -> ModelSpec:
    """The spec of a model directory."""
    return spec_from_config(read_config(Path(path)), str(Path(path) / "config.json"))


def read_eos_ids(path: str | Path) -> tuple[int, ...]:
    """The end-of-sequence ids of a model directory of any architecture."""
    return eos_ids_of(read_config(Path(path)))


# -- safetensors ----------------------------------------------------------------------------------


def tensor_files(directory: Path) -> dict[str, Path]:
    """Which file holds which tensor."""
    index, single = directory / INDEX, directory / SINGLE
    if index.is_file():
        try:
            listed = dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{index}: not an index of safetensors ({error})") from error
        return {name: directory / file for name, file in listed.items()}
    if single.is_file():
        return dict.fromkeys(_open(single, "np").keys(), single)
    raise UserError(f"{directory}: neither {SINGLE} nor {INDEX}; only safetensors are read")


def _open(file: Path, framework: str) -> safe_open:
    """A safetensors file, its head read and checked; `framework`: what its tensors shall be."""
    if not file.is_file():
        raise UserError(f"{file}: the file is missing")
    try:
        return safe_open(file, framework=framework)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file}: truncated or not safetensors ({error})") from error


class HfDirectory:
    """The tensors of a model directory by name, from one file or several shards."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.file_of = tensor_files(self.path)
        self._open: dict[Path, safe_open] = {}

    @property
    def files(self) -> Sequence[Path]:
        return sorted(set(self.file_of.values()))

    def names(self) -> Sequence[str]:
        return list(self.file_of)

    def tensor(self, name: str) -> Tensor:
        if (file := self.file_of.get(name)) is None:
            raise UserError(f"model '{self.path}': tensor '{name}' is missing")
        if file not in self._open:
            self._open[file] = _open(file, "pt")
        try:
            return self._open[file].get_tensor(name)
        except SafetensorError as err:
            raise UserError(f"{file}: cannot read {name} ({err})") from err


def check_files(directory: Path, spec: ModelSpec) -> None:
    """Every file of the weights is whole and has the tensors that config.json says; heads alone."""
    file_of, targets, where = tensor_files(directory), targets_of(spec), str(directory)
    opened = {file: _open(file, "np") for file in sorted(set(file_of.values()))}
    held = {file: set(tensors.keys()) for file, tensors in opened.items()}
    for name, file in file_of.items():
        if name not in held[file]:
            raise UserError(f"{file}: no tensor {name}, which {INDEX} lists")
    for members in by_layer(spec, targets, file_of, where).values():
        for name in members:
            shape = tuple(opened[file_of[name]].get_slice(name).get_shape())
            check_shape(targets[name], name, shape, where)


def write_model(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes_max: int
) -> list[Path]:
    """Write the weights, one file or several shards; returns the files."""
    from safetensors.torch import save_file

    shards: list[dict[str, Tensor]] = [{}]
    used = total = 0
    for name, tensor in tensors:
        if shards[-1] and used + tensor.nbytes > shard_bytes_max:
            shards.append({})
            used = 0
        shards[-1][name] = tensor.detach().to("cpu").contiguous()
        used, total = used + tensor.nbytes, total + tensor.nbytes
    count = len(shards)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = [directory / name for name in (names if count > 1 else [SINGLE])]
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, file, metadata={"format": "pt"})
    if count == 1:
        return files
    place = {name: file.name for file, shard in zip(files, shards, strict=True) for name in shard}
    index = {"metadata": {"total_size": total}, "weight_map": place}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return [*files, directory / INDEX]


def write_adapter(
    directory: Path,
    adapters: Mapping[str, Tensor],
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    base: str = "",
) -> None:
    """A PEFT directory: adapter_config.json and the whole adapters by peft's names."""
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    save_file({n: t.cpu().contiguous() for n, t in adapters.items()}, directory / ADAPTER)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": sorted({n.split(".lora_")[0].rsplit(".", 1)[-1] for n in adapters}),
        "bias": "none",
        "inference_mode": True,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
