"""One file per command of `dora-rl`: `SUMMARY`, `ARGUMENTS` and `run(args)`, the exit status.

A command reads its arguments, calls the library and prints. It imports what it needs inside `run`,
so that `dora-rl --help` stays fast.
"""

from __future__ import annotations

import argparse
from typing import Protocol

from dora_rl.commands import (
    audit,
    bench,
    check,
    dashboard,
    eval,
    export,
    plan,
    plot,
    replay,
    serve,
    sft,
    sim,
    trace,
    train,
)
from dora_rl.commands.arguments import Argument


class Command(Protocol):
    """What a module here has to offer."""

    @property
    def SUMMARY(self) -> str: ...
    @property
    def ARGUMENTS(self) -> tuple[Argument, ...]: ...
    def run(self, args: argparse.Namespace) -> int: ...


COMMANDS: dict[str, Command] = {
    "check": check,
    "sft": sft,
    "train": train,
    "bench": bench,
    "sim": sim,
    "plan": plan,
    "audit": audit,
    "replay": replay,
    "eval": eval,
    "export": export,
    "serve": serve,
    "dashboard": dashboard,
    "trace": trace,
    "plot": plot,
}
