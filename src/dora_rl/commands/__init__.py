"""The commands of `dora-rl`, each a function of its parsed arguments that gives the exit status.

A command reads its arguments, calls the library and prints. It imports what it needs inside, so
that `dora-rl --help` stays fast.
"""

from __future__ import annotations

from dora_rl.commands.arguments import Command
from dora_rl.commands.audit import audit, replay
from dora_rl.commands.check import check
from dora_rl.commands.compare import bench, plan, sim
from dora_rl.commands.init import init
from dora_rl.commands.models import evaluate, export, serve
from dora_rl.commands.train import sft, train
from dora_rl.commands.view import dashboard, plot, trace

COMMANDS: dict[str, Command] = {
    "init": init,
    "check": check,
    "sft": sft,
    "train": train,
    "bench": bench,
    "sim": sim,
    "plan": plan,
    "audit": audit,
    "replay": replay,
    "eval": evaluate,
    "export": export,
    "serve": serve,
    "dashboard": dashboard,
    "trace": trace,
    "plot": plot,
}
