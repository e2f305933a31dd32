"""Examples may take as long as a busy machine makes them: no test here is about time."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
