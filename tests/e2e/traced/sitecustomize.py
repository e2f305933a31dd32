"""Found by every Python process of a traced run: notes which of our functions were handed what.

The product knows nothing of it: a test puts this folder on PYTHONPATH and names, in the
environment, a folder to write to and the package to watch. Each process (forked ones too) writes a
file of its own, with a line for each function and type of argument or result, at most ten a second:

    seconds (monotonic)  file in the package  function  type of an argument or of the result

What runs while a module is imported does not count. Of lists, tuples and dictionaries the first
entry counts, two levels down. The type is empty for a call as such.
"""

from __future__ import annotations

import builtins
import os
import sys
import threading
import time
from types import CodeType, FrameType
from typing import Any, TextIO

FOLDER = os.environ.get("DORA_RL_TRACE_TO", "")
PACKAGE = os.environ.get("DORA_RL_TRACED", "") + os.sep
AGAIN_S = 0.1
WATCHED = ("dora_rl", "numpy", "torch")

files: dict[CodeType, str] = {}  # "": not ours
told: dict[tuple[CodeType, str], float] = {}
outs: dict[int, TextIO] = {}
importing = threading.local()


def kind_of(value: Any) -> str:
    """The type of what is handed over, or nothing where it is neither ours nor an array."""
    for _ in range(2):
        if type(value) not in (list, tuple, set, dict) or not value:
            break
        value = next(iter(value.values() if type(value) is dict else value))
    module = type(value).__module__
    return f"{module}.{type(value).__qualname__}" if module.split(".")[0] in WATCHED else ""


def tell(code: CodeType, kind: str) -> None:
    now = time.monotonic()
    if now - told.get((code, kind), 0.0) < AGAIN_S:
        return
    told[code, kind] = now
    process = os.getpid()
    if process not in outs:  # a forked process has the file of its parent
        outs[process] = open(f"{FOLDER}/{process}", "a", buffering=1)  # noqa: SIM115
    outs[process].write(f"{now}\t{files[code]}\t{code.co_qualname}\t{kind}\n")


def look(frame: FrameType, event: str, result: Any) -> None:
    code = frame.f_code
    name = files.get(code)
    if name is None:
        ours = code.co_filename.startswith(PACKAGE) and code.co_name != "<module>"
        name = files[code] = code.co_filename.removeprefix(PACKAGE) if ours else ""
    if not name:
        return
    if event == "return" and (kind := kind_of(result)):
        tell(code, kind)
    elif event == "call":
        tell(code, "")
        values = frame.f_locals
        for argument in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
            if kind := kind_of(values.get(argument)):
                tell(code, kind)


def quiet_import(*arguments: Any, **options: Any) -> Any:
    if getattr(importing, "now", False):
        return plain_import(*arguments, **options)
    importing.now, before = True, sys.getprofile()
    sys.setprofile(None)
    try:
        return plain_import(*arguments, **options)
    finally:
        importing.now = False
        sys.setprofile(before)


plain_import = builtins.__import__
if FOLDER:
    builtins.__import__ = quiet_import
    threading.setprofile(look)
    sys.setprofile(look)
