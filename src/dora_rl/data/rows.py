"""Rows of a data source, as plain dictionaries, by number: files, directories, hub ids, code.

Never tokenizes, shuffles or filters, and never keeps a text file's rows in memory. Invariant: row
i of an unchanged source is always the same, and `where(i)` says where the user finds it.
"""

from __future__ import annotations

import inspect
import json
import mmap
import re
from array import array
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from dora_rl.config import DataSource
from dora_rl.types import UserError
from dora_rl.user_code import load_object, one_line

Row = Mapping[str, object]

SPLIT_NAMES = {"train", "test", "validation", "valid", "val", "dev", "eval", "heldout"}
TEXT_SUFFIXES = (".jsonl", ".ndjson", ".json")
SUFFIXES = (*TEXT_SUFFIXES, ".parquet")


class Rows:
    """Rows by number, from `get`. `num_rows` is None where they are made and never end."""

    def __init__(self, name: str, num_rows: int | None, get: Callable[[int], object]) -> None:
        self.num_rows, self._name, self._get = num_rows, name, get

    def row(self, index: int) -> Row:
        row = self._get(index)
        if not isinstance(row, Mapping):
            raise UserError(
                f"{self.where(index)}: a row must be an object, not {type(row).__name__}"
            )
        return cast(Row, row)

    def where(self, index: int) -> str:
        return f"{self._name} row {index}"


class JsonlRows(Rows):
    """One JSON object a line. The file is mapped; only the places of its lines are kept."""

    def __init__(self, path: Path) -> None:
        self._begins, self._lines, place = array("q"), array("q"), 0
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    self._begins.append(place)
                    self._lines.append(number)
                place += len(line)
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if place else b""
        self._begins.append(place)
        super().__init__(str(path), len(self._lines), self._parse)

    def _parse(self, index: int) -> object:
        line = self._map[self._begins[index] : self._begins[index + 1]]
        try:
            return json.loads(line)
        except ValueError as error:
            raise UserError(
                f"{self.where(index)}: not JSON ({error}); write one JSON object on each line"
            ) from error

    def where(self, index: int) -> str:
        return f"{self._name} line {self._lines[index]}"


class JoinedRows(Rows):
    """Several files, one after the other."""

    def __init__(self, parts: Sequence[Rows]) -> None:
        self._parts = parts
        self._ends = list(accumulate(part.num_rows or 0 for part in parts))
        super().__init__("", self._ends[-1], lambda index: index)

    def row(self, index: int) -> Row:
        part, inside = self._find(index)
        return part.row(inside)

    def where(self, index: int) -> str:
        part, inside = self._find(index)
        return part.where(inside)

    def _find(self, index: int) -> tuple[Rows, int]:
        number = bisect_right(self._ends, index)
        return self._parts[number], index - (self._ends[number - 1] if number else 0)


class MadeRows(Rows):
    """Rows made by code: `maker.row(seed, index, split)` is a pure function of its arguments."""

    def __init__(self, name: str, maker: Any, seed: int, split: str) -> None:
        super().__init__(name, None, lambda index: maker.row(seed, index, split))

    def row(self, index: int) -> Row:
        try:
            return super().row(index)
        except UserError:
            raise
        except Exception as error:
            # The user's code may raise anything; to the run it is a row that cannot be made.
            raise UserError(f"{self.where(index)}: its code raised {one_line(error)}") from error


@dataclass(frozen=True, slots=True)
class OpenSource:
    """One source, opened and filtered. `kept` lists the rows within the length limit, or is None
    where all are."""

    config: DataSource
    split: str
    rows: Rows
    kept: Sequence[int] | None

    @property
    def num_kept(self) -> int | None:
        return self.rows.num_rows if self.kept is None else len(self.kept)

    @property
    def num_too_long(self) -> int:
        return (self.rows.num_rows or 0) - (self.num_kept or 0)

    def row_number(self, place: int) -> int:
        return place if self.kept is None else self.kept[place]


def _arrow_rows(name: str, table: Any) -> Rows:
    """A pyarrow table: parquet files, or the memory-mapped files of a saved dataset."""
    return Rows(name, table.num_rows, lambda index: table.slice(index, 1).to_pylist()[0])


def open_rows(
    source: DataSource, *, split: str, seed: int, base_dir: Path, key: str = "data"
) -> Rows:
    """Find out what `source.path` is and open it; every failure is one line for the user. `key` is
    where the user wrote it."""
    if re.fullmatch(r".+:[A-Za-z_]\w*", source.path):
        return MadeRows(source.path, load_maker(source, base_dir, key), seed, split)
    path = base_dir / Path(source.path).expanduser()
    if path.is_dir():
        rows = _directory_rows(path, split)
    elif path.is_file():
        rows = _file_rows(path)
    elif re.fullmatch(r"[\w.-]+(/[\w.-]+)?", source.path) and path.suffix not in SUFFIXES:
        rows = _hub_rows(source, split, path)
    else:
        raise UserError(f"{key}: {path} does not exist; check its path")
    if rows.num_rows == 0:
        raise UserError(f"data: {path} has no rows; give a file with at least one")
    return rows


def load_maker(source: DataSource, base_dir: Path, key: str) -> object:
    """What `package.module:name` or `file.py:name` names; a class is called with the options."""
    maker = load_object(source.path, base_dir, section="data", key=key)
    made = inspect.isclass(maker) or not hasattr(maker, "row")
    if source.options and not made:
        raise UserError(f"data: {source.path} is an object and takes no options")
    try:
        maker = maker(**source.options) if made and callable(maker) else maker
    except TypeError as error:
        raise UserError(
            f"data: {source.path} does not take the options {dict(source.options)} ({error})"
        ) from error
    if not callable(getattr(maker, "row", None)):
        raise UserError(f"data: {source.path} has no method row(seed, index, split) -> dict")
    return maker


def _file_rows(path: Path) -> Rows:
    if path.suffix == ".parquet":
        return _arrow_rows(str(path), _read_parquet(path))
    if path.suffix not in TEXT_SUFFIXES:
        raise UserError(f"data: {path} is not one of {', '.join(SUFFIXES)}")
    with path.open("rb") as file:
        is_array = path.suffix == ".json" and file.read(64).lstrip().startswith(b"[")
    if not is_array:
        return JsonlRows(path)
    try:
        rows = json.loads(path.read_bytes())
    except ValueError as error:
        raise UserError(f"data: {path} is not JSON ({error})") from error
    return Rows(str(path), len(rows), rows.__getitem__)


def _read_parquet(path: Path) -> Any:
    arrow = _pyarrow(path)
    try:
        return arrow.parquet.read_table(path, memory_map=True)
    except arrow.ArrowInvalid as error:
        raise UserError(f"data: {path} is not a parquet file ({one_line(error)})") from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(
            f"data: {path} needs pyarrow; pip install 'dora-rl[data]' or use jsonl"
        ) from error
    return pyarrow


def _directory_rows(path: Path, split: str) -> Rows:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(entry.name for entry in path.iterdir() if entry.is_dir())
        if split not in splits:
            raise UserError(f"data: {path} has no split {split!r}; set split to one of {splits}")
        path = path / split
    if (path / "state.json").is_file():
        return _saved_rows(path)
    shown = (f for f in path.rglob("*") if f.suffix in SUFFIXES and not f.name.startswith("."))
    files = sorted(f for f in shown if f.is_file() and f.name != "dataset_infos.json")
    if not files:
        raise UserError(f"data: {path} holds no {', '.join(SUFFIXES)} file")
    return JoinedRows([_file_rows(f) for f in _files_of_split(path, files, split)])


def _files_of_split(root: Path, files: Sequence[Path], split: str) -> Sequence[Path]:
    """Files named after the split (`data/train-00000-of-00002.parquet`), or all if none is."""

    def words(file: Path) -> set[str]:
        return set(re.split(r"[^a-z0-9]+", str(file.relative_to(root)).lower()))

    chosen = [file for file in files if split.lower() in words(file)]
    if not chosen and any(words(file) & SPLIT_NAMES for file in files):
        names = sorted(str(file.relative_to(root)) for file in files)
        raise UserError(f"data: {root} has no file of split {split!r} among {names[:8]}; set split")
    return chosen or files


def _saved_rows(path: Path) -> Rows:
    """What `Dataset.save_to_disk` wrote: arrow streams, listed in state.json."""
    arrow = _pyarrow(path)
    try:
        state = json.loads((path / "state.json").read_bytes())
        if state.get("_indices_files"):
            raise UserError(f"data: {path} has an index; save it after dataset.flatten_indices()")
        files = [arrow.memory_map(str(path / entry["filename"])) for entry in state["_data_files"]]
        table = arrow.concat_tables([arrow.ipc.open_stream(file).read_all() for file in files])
    except (ValueError, KeyError, OSError, arrow.ArrowInvalid) as error:
        raise UserError(f"data: {path} is not a saved dataset ({one_line(error)})") from error
    return _arrow_rows(str(path), table)


def _hub_rows(source: DataSource, split: str, path: Path) -> Rows:
    try:
        import datasets  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise UserError(
            f"data: {path} does not exist, and a Hugging Face id needs the datasets library; "
            f"pip install datasets, or download it and give the directory"
        ) from error
    try:
        loaded = datasets.load_dataset(source.path, source.subset or None, split=split)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"data: cannot load {source.path} split {split!r} ({one_line(error)})"
        ) from error
    return _arrow_rows(source.path, loaded.flatten_indices().data.table)
