"""Inside: run one program to its end, then its tests, then leave. The last trusted code.

Runs in the program's own process, after all limits are in force. What it says can be forged by
the program; only the process tree around it is trusted. Only the standard library.
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

NAME = "program.py"


def run(code: str, tests: int, report: int) -> NoReturn:
    """`tests` and `report` are pipes: what to run afterwards, and which of them passed."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    main.__dict__["__file__"] = NAME
    sys.modules["__main__"] = main
    sys.argv = [NAME]
    status = _execute(code, NAME, main.__dict__)
    if status is None:
        status = _run_tests(tests, report, main.__dict__)
    _leave(status)


def _execute(code: str, name: str, scope: dict[str, Any]) -> int | None:
    """None if it ran through, otherwise the exit status."""
    linecache.cache[name] = (len(code), None, code.splitlines(True), name)
    try:
        exec(compile(code, name, "exec", dont_inherit=True), scope)
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


def _run_tests(tests: int, report: int, scope: dict[str, Any]) -> int:
    with open(tests, "rb") as file:
        asked = json.loads(file.read() or b"{}")
    status = 0
    for index, test in enumerate(asked.get("tests", ())):
        if _execute(test, f"test_{index}", scope) is None:
            os.write(report, f"{asked['token']} {index}\n".encode())
        else:
            status = 1
    return status


def _leave(status: int) -> NoReturn:
    """The useful part of the interpreter's own end, without tearing everything down."""
    try:
        if "threading" in sys.modules:
            sys.modules["threading"]._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:  # noqa: BLE001 - exit functions are the program's code
        status = status or 120
    os._exit(status)
