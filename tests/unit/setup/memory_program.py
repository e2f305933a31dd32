"""`benchmarks/memory.py` as a module: its tests, and the shapes of models that it plans for."""

from __future__ import annotations

import importlib.util
from typing import Any

from tests.kit.places import ROOT

PATH = ROOT / "benchmarks" / "memory.py"


def load() -> Any:
    spec = importlib.util.spec_from_file_location("memory_benchmark", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
