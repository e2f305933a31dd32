"""Scenarios borrow the hand-driven core and the small simulated runs of the unit tests."""

from __future__ import annotations

import sys
from pathlib import Path

UNIT = Path(__file__).parent.parent / "unit"
sys.path[:0] = [str(UNIT / "core"), str(UNIT / "observe")]
