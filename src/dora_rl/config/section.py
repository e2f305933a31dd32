"""What every section of the configuration is: checked once, then frozen."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Base of every section: immutable, no unknown keys, no silent coercion of strings."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=False, validate_default=True)
