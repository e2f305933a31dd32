"""What every section of the configuration is: checked once, then frozen.

The text below a key describes it: editors show it, and docs/config.md is made of it. A section made
by hand is held to the same rules as one from a file: what is wrong is one line that names the key,
the value and what it may be.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError

from dora_rl.types import UserError

_OUTSIDE = (
    "greater_than",
    "greater_than_equal",
    "less_than",
    "less_than_equal",
    "finite_number",
)
# Where pydantic speaks of Python and not of the file.
_PLAIN = {
    "extra_forbidden": "no such key here; see docs/config.md",
    "tuple_type": 'write a list: ["…"]',
    "missing": "this key is needed",
    "dict_type": "write a table: {name = value}",
}


@dataclass(frozen=True, slots=True)
class Range:
    """The finite numbers from `low` to `high`. With `or_zero` also 0, which switches it off."""

    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False
    high_open: bool = False
    or_zero: bool = False

    def holds(self, value: float) -> bool:
        over = value > self.low if self.low_open else value >= self.low
        under = value < self.high if self.high_open else value <= self.high
        return (self.or_zero and value == 0) or (math.isfinite(value) and over and under)

    def refuse(self, key: str, value: float) -> str:
        """The line for a value that is not in it."""
        words = str(self) if math.isfinite(float(value)) else f"finite, {self}"
        return f"{key} = {value}: must be {words}"

    def __str__(self) -> str:
        zero = "0 (off) or " if self.or_zero else ""
        low = f"above {self.low:g}" if self.low_open else f"at least {self.low:g}"
        high = f"below {self.high:g}" if self.high_open else f"at most {self.high:g}"
        ends = [low] * math.isfinite(self.low) + [high] * math.isfinite(self.high)
        return zero + (" and ".join(ends) or "a number")


def range_of(kind: type[BaseModel], place: Sequence[int | str]) -> Range:
    """The numbers that the key at `place` may have."""
    rules: Sequence[Any] = ()
    for part in place:
        if part not in kind.model_fields:
            continue  # a place in a list, a word of a free table
        field = kind.model_fields[part]
        inner = [field.annotation, *get_args(field.annotation)]
        kinds = [k for k in inner if isinstance(k, type) and issubclass(k, BaseModel)]
        kind = kinds[0] if kinds else kind
        # Those of an item of a list, `Annotated[int, Field(ge=0)]`, too.
        infos = (info for k in inner for info in getattr(k, "__metadata__", ()))
        rules = [*field.metadata, *(rule for i in infos for rule in getattr(i, "metadata", ()))]
    bounds = {
        name: float(getattr(rule, name))
        for rule in rules
        for name in ("ge", "gt", "le", "lt")
        if getattr(rule, name, None) is not None
    }
    return Range(
        low=bounds.get("ge", bounds.get("gt", -math.inf)),
        high=bounds.get("le", bounds.get("lt", math.inf)),
        low_open="gt" in bounds,
        high_open="lt" in bounds,
    )


def choose(what: str, name: str, known: Iterable[str]) -> str:
    """Return `name` if it is known, else raise with the nearest known name."""
    names = sorted(known)
    if name in names:
        return name
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.4)
    hint = f"did you mean '{near[0]}'?" if near else f"known: {', '.join(names)}"
    raise UserError(f"unknown {what} '{name}': {hint}")


def explain(kind: type[BaseModel], error: ValidationError, key: str = "") -> str:
    """The first thing that is wrong, as one line; `key` where it is not the place of the error."""
    first = error.errors()[0]
    key = key or ".".join(str(part) for part in first["loc"])
    if first["type"] in _OUTSIDE:
        return range_of(kind, first["loc"]).refuse(key, first["input"])
    return f"{key}: {_PLAIN.get(first['type'], first['msg'])}"


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise UserError(_by_hand(type(self), error)) from None

        # Sections inside of others are checked by these, which know the whole key.
        __init__.__pydantic_base_init__ = True


def _by_hand(kind: type[BaseModel], error: ValidationError) -> str:
    """As in a file, with the name of the section: `AlgorithmConfig` is [algorithm]."""
    owner = next(k.__name__ for k in kind.__mro__ if k.__name__.endswith("Config") or k is Section)
    field = error.errors()[0]["loc"][0]
    name = owner.removesuffix("Config").lower()
    key = str(field) if name in ("run", "section") else f"{name}.{field}"
    given = error.errors()[0]["input"]
    annotation = kind.model_fields[field].annotation if field in kind.model_fields else None
    if get_origin(annotation) is Literal and isinstance(given, str):
        choose(key, given, map(str, get_args(annotation)))
    return explain(kind, error, key)


def _as_tables(key: str, value: Any) -> Any:
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple({key: entry} if isinstance(entry, str) else entry for entry in entries)


# Of a list of tables: one entry needs no list, and a plain string stands for the entry's own key.
STRINGS_ARE_NAMES = BeforeValidator(partial(_as_tables, "name"))
STRINGS_ARE_PATHS = BeforeValidator(partial(_as_tables, "path"))
