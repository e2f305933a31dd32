"""dora-rl: reinforcement-learning post-training with multi-version streaming rollout.

    import dora_rl

    run = dora_rl.train("model", data=rows, reward=function, orchestration__num_steps=20)

Importing the package is light: torch, ray, vllm and the like are imported where they are used, and
so is `dora_rl.api`, in which the names below are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora_rl.api.engine import Engine, Generation
    from dora_rl.api.run import Run, RunStopped, train
    from dora_rl.types import UserError

__version__ = "0.1.0"
__all__ = ["Engine", "Generation", "Run", "RunStopped", "UserError", "train"]
_HOMES = {
    "Engine": "dora_rl.api.engine",
    "Generation": "dora_rl.api.engine",
    "Run": "dora_rl.api.run",
    "RunStopped": "dora_rl.api.run",
    "UserError": "dora_rl.types",
    "train": "dora_rl.api.run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
