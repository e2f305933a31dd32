"""Inside: run one program to its end, then answer what is asked, then leave.

Runs in the program's own process, after all limits are in force. The program can change all of
this and say anything in its name; so nothing that decides is ever here: an answer is a value, and
what it is compared with stays outside. Only the standard library.
Invariant: never returns; the process ends with the status `python program.py` would have.
"""

from __future__ import annotations

import atexit
import builtins
import json
import linecache
import os
import sys
import traceback
import types
from typing import Any, NoReturn

from dora_rl.rewards.sandbox import values

NAME = "program.py"
# What is written on the pipe of answers: READY, one line for each answer, THE_END.
READY, THE_END = b"ready\n", b"end\n"


def run(code: str, asks: int, answers: int, asking: bool) -> NoReturn:
    """`asks` and `answers` are pipes. Nothing comes through the first before READY is sent."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__file__"] = NAME
    sys.modules["__main__"] = main
    sys.argv = [NAME]
    try:
        status = _execute(code, main.__dict__)
        if status is None and asking:
            _answer_all(asks, answers, main.__dict__)
        _leave(status or 0, answers)
    finally:
        # The program closed our pipes, or raises while its exception is shown.
        os._exit(1)


def _execute(code: str, scope: dict[str, Any]) -> int | None:
    """None if it ran through, otherwise the exit status."""
    linecache.cache[NAME] = (len(code), None, code.splitlines(True), NAME)
    try:
        exec(compile(code, NAME, "exec", dont_inherit=True), scope)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        # The first frame is this function's.
        trace = error.__traceback__.tb_next if error.__traceback__ else None
        traceback.print_exception(type(error), error, trace, file=sys.stderr)
        return 1
    return None


def _answer_all(asks: int, answers: int, scope: dict[str, Any]) -> None:
    os.write(answers, READY)
    with open(asks, "rb") as file:
        asked = json.loads(file.read())
    for index, (code, value) in enumerate(asked):
        line = json.dumps(_answer(code, value, f"test_{index}", scope)).encode() + b"\n"
        while line:
            line = line[os.write(answers, line) :]


def _answer(code: str, value: bool, name: str, scope: dict[str, Any]) -> list[Any]:
    try:
        if not value:
            exec(compile(code, name, "exec", dont_inherit=True), scope)
            return ["done"]
        found = eval(compile(code, name, "eval", dont_inherit=True), scope)
        try:
            return ["value", values.encode(found)]
        except values.NotPlain:
            return ["object", type(found).__name__, bool(found)]
    except BaseException as error:  # noqa: BLE001 - a program may raise anything
        return ["raised", type(error).__name__]


def _leave(status: int, answers: int) -> NoReturn:
    """The useful part of the interpreter's own end, without tearing everything down."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os.write(answers, THE_END)
    except BaseException:  # noqa: BLE001 - exit functions are the program's code
        status = status or 120
    os._exit(status)
