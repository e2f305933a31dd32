"""What every section of the configuration is: checked once, then frozen.

The text below a key describes it: editors show it, and docs/config.md is made of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pydantic import BaseModel, BeforeValidator, ConfigDict


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)


def _as_tables(key: str, value: Any) -> Any:
    entries = value if isinstance(value, (list, tuple)) else (value,)
    return tuple({key: entry} if isinstance(entry, str) else entry for entry in entries)


# Of a list of tables: one entry needs no list, and a plain string stands for the entry's own key.
STRINGS_ARE_NAMES = BeforeValidator(partial(_as_tables, "name"))
STRINGS_ARE_PATHS = BeforeValidator(partial(_as_tables, "path"))
