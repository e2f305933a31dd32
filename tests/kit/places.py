"""Where the repository is, and the tiny model that is in it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "recipes" / "models" / "tiny"
