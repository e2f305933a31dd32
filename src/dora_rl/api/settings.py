"""What `dora_rl.train` is given, as a configuration: keywords, rows and functions.

Keywords are sections (`trainer={"lr": 1e-5}`) or single keys (`trainer__lr=1e-5`, and dotted ones
in a dictionary: `**{"trainer.lr": 1e-5}`); a key says more than its section, and both more than the
file. They are checked as the file is, with the same words. A function that stands where a name may
stand is written into `given/` of the run directory, as rows are, and the configuration names it
there. So the run directory alone is enough to resume.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from datetime import datetime
from functools import partial
from hashlib import blake2b
from itertools import chain, count
from pathlib import Path
from typing import Any

from dora_rl.api.carry import Carry
from dora_rl.config import DataSource, RunConfig
from dora_rl.controller.run_dir import GIVEN, make_run_dir
from dora_rl.data.columns import columns_of
from dora_rl.data.prompts import plain
from dora_rl.setup.settings import read_config, resolve, todays_name
from dora_rl.types import UserError
from dora_rl.user_code import require

WHERE = "dora_rl.train"
# The key that an argument stands for.
_ARGUMENTS = {
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
        return {"name": _Late(name), "label": name} | ({"options": options} if options else {})

    def _sources(self, data: Any, part: str) -> Any:
        """`data.train` or `data.eval`: names and tables as they are, or the rows themselves."""
        listed = data if isinstance(data, (list, tuple)) else [data]
        if listed and all(map(_is_source, listed)):
            return data
        has_rows = hasattr(data, "__iter__") and hasattr(data, "__len__") and len(data)
        require(
            (
                has_rows and not isinstance(data, Mapping),
                f"{WHERE}: data.{part}: give rows (a list of dictionaries, a Dataset), a path or "
                f"a list of paths, not {_what(data)}",
            )
        )
        self._rows[part] = data
        first = next(iter(data))
        found = columns_of(first) if isinstance(first, Mapping) else {}
        return [{"path": str(self._place(part)), "name": part, **found}]

    def _place(self, part: str) -> Path:
        return self._folder / f"{part}.jsonl"

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
        for part, rows in self._rows.items():
            with self._place(part).open("w", encoding="utf-8") as file:
                file.writelines(_lines(rows, part))

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


def merged(base: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """The tables of a file with the keywords on top: sections first, then single keys."""
    tables = {name: {**one} if isinstance(one, Mapping) else one for name, one in base.items()}
    for name, value in sorted(keywords.items(), key=lambda item: "." in dotted(item[0])):
        key = dotted(name)
        if "." not in key and not isinstance(value, Mapping):
            raise UserError(_no_section(key))
        for one, setting in {key: value}.items() if "." in key else value.items():
            _put(tables, one if "." in key else f"{key}.{one}", setting)
    return tables


def dotted(name: str) -> str:
    """`trainer__lr` is `trainer.lr`."""
    return name.replace("__", ".")


def _put(tables: dict[str, Any], key: str, value: Any) -> None:
    *sections, last = todays_name(key, WHERE).split(".")
    for section in sections:
        tables = tables.setdefault(section, {})
        require((isinstance(tables, dict), f"{WHERE}: {key}: {section} is not a section"))
    tables[last] = value


def _no_section(name: str) -> str:
    """The line for a keyword that is neither a section nor a key of one."""
    if name in RunConfig.model_fields:
        return f"{WHERE}: {name} is a section, not a value"
    having = [
        f"{section}__{name}"
        for section, field in RunConfig.model_fields.items()
        if name in getattr(field.annotation, "model_fields", {})
    ]
    meant = f"did you mean {' or '.join(having)}?" if having else "write section__key=value"
    return f"{WHERE}: unknown keyword {name}; {meant}"


def new_run_dir(now: datetime | None = None) -> Path:
    """`runs/20261119-154502`, or the first of its kind that is free."""
    name = f"{now or datetime.now():%Y%m%d-%H%M%S}"
    there = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for one in there if not (path := Path("runs") / one).exists())


def settle(
    arguments: Mapping[str, Any],
    config: str | Path | Mapping[str, Any] | None,
    keywords: Mapping[str, Any],
) -> tuple[RunConfig, Given]:
    """The configuration of a new run, and what must be put down before it begins. `arguments`:
    model, data, eval_data, reward and run_dir, where they are given; they may be sections too."""
    base = read_config(Path(config)) if isinstance(config, (str, Path)) else config or {}
    sections: dict[str, Any] = {}
    for name, value in arguments.items():
        section, key = _ARGUMENTS[name]
        if value is None:
            continue
        whole = name == section and isinstance(value, Mapping) and not _is_source(value)
        sections.setdefault(section, {}).update(value if whole else {key: value})
    tables = merged(merged(base, sections), keywords)
    runtime = tables.setdefault("runtime", {})
    require((isinstance(runtime, dict), f"{WHERE}: runtime is a section, not a value"))
    # Absolute: a program may change its directory while the run goes on.
    run_dir = Path(runtime.get("run_dir") or new_run_dir()).absolute()
    runtime["run_dir"] = str(run_dir)
    given = Given(run_dir)
    return resolve(given.filled(tables), WHERE), given
