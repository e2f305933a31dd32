"""What `dora_rl.train` is given, as a configuration: keywords, rows and functions.

Keywords are sections (`trainer={"lr": 1e-5}`) or single keys (`trainer__lr=1e-5`, and dotted ones
in a dictionary: `**{"trainer.lr": 1e-5}`); a key says more than its section, and both more than the
file. They are checked as the file is, with the same words. A function that stands where a name may
stand is written into `given/` of the run directory, as rows are, and the configuration names it
there. So the run directory alone is enough to resume.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from typing import Any

from dora_rl.api.carry import Carry, label_of
from dora_rl.api.words import known_as, sections_with
from dora_rl.config import DataConfig, DataSource, RunConfig
from dora_rl.controller.run_dir import GIVEN, make_run_dir
from dora_rl.data.columns import columns_of
from dora_rl.data.prompts import plain
from dora_rl.setup.settings import read_config, resolve, todays_name
from dora_rl.types import UserError
from dora_rl.user_code import hint, require

WHERE = "dora_rl.train"
# The key that an argument stands for.
ARGUMENTS = {
    "model": ("model", "path"),
    "data": ("data", "train"),
    "eval_data": ("data", "eval"),
    "reward": ("reward", "functions"),
    "run_dir": ("runtime", "run_dir"),
}
_ENTRIES = ("reward.functions", "env.environments")  # lists of tables that have a label


class Given:
    """What goes into `given/` of a run directory. Writes nothing before `put_down`."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / GIVEN
        self._carry, self._rows = Carry(), dict[str, Any]()

    def filled(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """The tables as a file has them: names stand for what was given."""
        data = dict(tables.get("data", {}))
        sources = {p: self._sources(data[p], p) for p in ("train", "eval") if p in data}
        named = self._named({**tables, "data": data | sources})
        return _with_module(named, str(self._module()))

    def _named(self, value: Any, key: str = "") -> Any:
        if isinstance(value, Mapping):
            if key in _ENTRIES and callable(value.get("name")):
                entry, rest = self._entry(value["name"], key), {**value}
                options = {**entry.get("options", {}), **rest.pop("options", {})}
                return entry | {k: v for k, v in rest.items() if k != "name"} | {"options": options}
            return {n: self._named(one, f"{key}.{n}" if key else n) for n, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._named(one, key) for one in value]
        if isinstance(value, Path):
            return str(value)
        if not callable(value):
            return value
        return self._entry(value, key) if key in _ENTRIES else _Late(self._add(value, key))

    def _add(self, function: Any, key: str) -> str:
        try:
            return self._carry.add(function)
        except UserError as error:
            raise UserError(f"{WHERE}: {key}: {error}") from error

    def _entry(self, function: Any, key: str) -> dict[str, Any]:
        """A table: it has a label, and may bring arguments."""
        options: dict[str, Any] = {}
        while isinstance(function, partial):
            by_name = not function.args
            require((by_name, f"{WHERE}: {key}: give arguments to functools.partial by name"))
            options, function = {**function.keywords, **options}, function.func
        name = self._add(function, key)
        return {"name": _Late(name), "label": label_of(name)} | (
            {"options": options} if options else {}
        )

    def _sources(self, data: Any, part: str) -> list[Any]:
        """`data.train` or `data.eval`: names and tables as they are, or the rows themselves, which
        may stand in place of the path of a table."""
        listed = data if isinstance(data, (list, tuple)) else [data]
        if not listed or not all(map(_is_source, listed)):
            return [self._source_of(data, part, {})]
        return [
            self._source_of(one["path"], part, one)
            if isinstance(one, Mapping) and not isinstance(one["path"], (str, Path))
            else one
            for one in listed
        ]

    def _source_of(self, rows: Any, part: str, table: Mapping[str, Any]) -> dict[str, Any]:
        """Rows as a source; what its table says of the columns goes before what they look like."""
        rows = _as_rows(rows, part)
        has_rows = hasattr(rows, "__iter__") and hasattr(rows, "__len__") and len(rows)
        require(
            (
                has_rows and not isinstance(rows, Mapping),
                f"{WHERE}: data.{part}: give rows (a list of dictionaries, a Dataset), a path or "
                f"a list of paths, not {_what(rows)}",
            )
        )
        others = sum(name.startswith(part) for name in self._rows)
        name = f"{part}_{others + 1}" if others else part
        self._rows[name] = rows
        first = next(iter(rows))
        if isinstance(first, Mapping) and (answer := table.get("answer_column")):
            first = {**first, "answer": first.get(answer, "")}  # only this one may have a mark
        found = columns_of(first) if isinstance(first, Mapping) else {}
        return {"name": name, **found, **table, "path": str(self._place(name))}

    def in_words(self, text: str) -> str:
        """A refusal that speaks of files which are taken back: of the arguments instead."""
        for name in self._rows:
            place = re.escape(str(self._place(name)))
            said = name.replace("train", "data").replace("eval", "eval_data")
            if not re.search(place, text):
                continue
            for pattern, words in (
                (rf"^{place} line (\d+): no (?=')", "{said}: row {row} has no "),
                (rf"^{place} line (\d+)", "{said}: row {row}"),
                (rf"{place} line (\d+)", "row {row} of {said}"),
            ):
                text = re.sub(
                    pattern,
                    lambda m, words=words, said=said: words.format(said=said, row=int(m[1]) - 1),
                    text,
                )
            key = r"set (prompt_column|answer_column)"
            text = re.sub(key, rf'set \1 ({said}={{"path": rows, "\1": ...}})', text)
        module = re.escape(str(self._module()))
        return re.sub(rf"{module}:(\w+)", lambda m: _with_article(label_of(m[1])), text)

    def _place(self, name: str) -> Path:
        return self._folder / f"{name}.jsonl"

    def _module(self) -> Path:
        """A name of its own for each text: a process imports a module once."""
        digest = blake2b(self._carry.text().encode(), digest_size=4).hexdigest()
        return self._folder / f"functions_{digest}.py"

    def put_down(self) -> None:
        text = self._carry.text()
        if not text and not self._rows:
            return
        make_run_dir(self._folder.parent)
        self._folder.mkdir(exist_ok=True)
        if text:
            self._module().write_text(text)
        for name, rows in self._rows.items():
            with self._place(name).open("w", encoding="utf-8") as file:
                file.writelines(_lines(rows, name))

    def take_back(self) -> None:
        """The run has not begun."""
        shutil.rmtree(self._folder, ignore_errors=True)
        run_dir = self._folder.parent
        if run_dir.is_dir() and not any(run_dir.iterdir()):
            run_dir.rmdir()


class _Late(str):
    """A name in the module of functions, whose place is known when all are in it."""


def _with_module(value: Any, module: str) -> Any:
    if isinstance(value, _Late):
        return f"{module}:{value}"
    if isinstance(value, dict):
        return {name: _with_module(one, module) for name, one in value.items()}
    if isinstance(value, list):
        return [_with_module(one, module) for one in value]
    return value


def _is_source(entry: Any) -> bool:
    """A path, or a table of one; a row of data may have a column `path` too, and has others."""
    if isinstance(entry, Mapping):
        return "path" in entry and {*entry} <= {*DataSource.model_fields}
    return isinstance(entry, (str, Path))


def _with_article(label: str) -> str:
    return f"a {label}" if label == "lambda" else label


def _check_table(value: Any, name: str) -> None:
    """A table of one source has the keys of one, whatever its `path` is."""
    if isinstance(value, Mapping) and "path" in value:
        known = [*DataSource.model_fields]
        unknown = next((key for key in value if key not in known), None)
        wrong = f"{WHERE}: {name}: unknown key {unknown!r}"
        require((unknown is None, f"{wrong}{hint(str(unknown), known)}"))


def _is_columns(data: Any) -> bool:
    """A table of columns, `{"prompt": [...], "answer": [...]}`, and not a section."""
    return (
        isinstance(data, Mapping)
        and bool(data)
        and not {*data} & {"path", *DataConfig.model_fields}
        and all(isinstance(column, (list, tuple)) for column in data.values())
    )


def _as_rows(data: Any, part: str) -> Any:
    if not _is_columns(data):
        return data
    lengths = ", ".join(f"{name} {len(column)}" for name, column in data.items())
    same = len({len(column) for column in data.values()}) == 1
    require((same, f"{WHERE}: data.{part}: the columns differ in length ({lengths})"))
    return [dict(zip(data, row, strict=True)) for row in zip(*data.values(), strict=True)]


def _check_model(model: Any) -> None:
    """A directory or an id; what is in memory is written first."""
    first = "run.export(DIRECTORY)" if hasattr(model, "directory") else "save_pretrained(DIRECTORY)"
    require(
        (
            model is None or isinstance(model, (str, Path, Mapping)),
            f"{WHERE}: model: give a directory or an id, not a {type(model).__name__}; "
            f"write it with {first} first",
        )
    )


def _what(data: Any) -> str:
    empty = data is None or (hasattr(data, "__len__") and not len(data))
    return "nothing" if empty else f"a {type(data).__name__}"


def _lines(rows: Any, part: str) -> Iterator[str]:
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise UserError(
                f"{WHERE}: data.{part} row {number}: a row must be a dictionary, not "
                f"{type(row).__name__}"
            )
        yield json.dumps(plain(row), ensure_ascii=False) + "\n"


def merged(
    base: Mapping[str, Any], keywords: Mapping[str, Any], where: str = WHERE
) -> dict[str, Any]:
    """The tables of a file with the keywords on top: sections first, then single keys."""
    tables = {name: {**one} if isinstance(one, Mapping) else one for name, one in base.items()}
    for name, value in sorted(keywords.items(), key=lambda item: "." in dotted(item[0])):
        key = dotted(name)
        if "." not in key and (known_as(key) or not isinstance(value, Mapping)):
            raise UserError(_no_section(key, where))
        for one, setting in {key: value}.items() if "." in key else value.items():
            _put(tables, one if "." in key else f"{key}.{one}", setting, where)
    return tables


def dotted(name: str) -> str:
    """`trainer__lr` is `trainer.lr`."""
    return name.replace("__", ".")


def _put(tables: dict[str, Any], key: str, value: Any, where: str) -> None:
    if meant := known_as(key):
        raise UserError(f"{where}: unknown key {key}; did you mean {meant}?")
    *sections, last = todays_name(key, where).split(".")
    if sections == ["data"] and last in {*DataSource.model_fields} - {*DataConfig.model_fields}:
        raise UserError(
            f"{where}: unknown key {key}; it says how one source is read: "
            f'data={{"path": rows or a path, "{last}": ...}}'
        )
    for section in sections:
        tables = tables.setdefault(section, {})
        require((isinstance(tables, dict), f"{where}: {key}: {section} is not a section"))
    tables[last] = value


def _no_section(name: str, where: str) -> str:
    """The line for a keyword that is neither a section nor a key of one."""
    if name in RunConfig.model_fields:
        return f"{where}: {name} is a section, not a value"
    having = sections_with(name) or [meant for meant in (known_as(name),) if meant]
    meant = f"did you mean {' or '.join(having)}?" if having else "write section__key=value"
    return f"{where}: unknown keyword {name}; {meant}"


def new_run_dir(now: datetime | None = None) -> Path:
    """`runs/20261119-154502`, or the first of its kind that is free; made, so that of two runs that
    begin in the same second each has its own."""
    name = f"{now or datetime.now():%Y%m%d-%H%M%S}"
    for one in chain([name], (f"{name}-{number}" for number in count(2))):
        path = Path("runs") / one
        if path.exists():
            continue
        make_run_dir(path.parent)
        with suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise AssertionError


def settle(
    arguments: Mapping[str, Any],
    config: str | Path | Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> tuple[RunConfig, Given]:
    """The configuration of a new run, and what must be put down before it begins. `arguments`:
    model, data, eval_data, reward and run_dir, where they are given; they may be sections too."""
    base = read_config(Path(config)) if isinstance(config, (str, Path)) else config or {}
    _check_model(arguments.get("model"))
    sections: dict[str, Any] = {}
    for name, value in arguments.items():
        section, key = ARGUMENTS[name]
        if value is None:
            continue
        if section == "data":
            _check_table(value, name)
        whole = name == section and isinstance(value, Mapping)
        whole = whole and not _is_source(value) and not (section == "data" and _is_columns(value))
        sections.setdefault(section, {}).update(value if whole else {key: value})
    tables = merged(merged(base, sections), keywords)
    runtime = tables.setdefault("runtime", {})
    require((isinstance(runtime, dict), f"{WHERE}: runtime is a section, not a value"))
    # Absolute: a program may change its directory while the run goes on.
    asked = runtime.get("run_dir")
    run_dir = Path(asked or new_run_dir()).absolute()
    runtime["run_dir"] = str(run_dir)
    given = Given(run_dir)
    try:
        return resolve(given.filled(tables), WHERE), given
    except BaseException:
        if not asked:
            given.take_back()
        raise
