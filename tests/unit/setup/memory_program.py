"""`benchmarks/memory.py` as a module: its tests, and the shapes of models that it plans for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

PATH = Path(__file__).parents[3] / "benchmarks" / "memory.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("memory_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
