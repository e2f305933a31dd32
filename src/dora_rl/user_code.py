"""Objects that the user names: `package.module:name` or `path/to/file.py:name`; what they raise.

Also `require` and `hint`, for checks of what a user gives. Knows nothing of what the objects are
for. Invariant: whatever is wrong with the name or the code behind it is one `UserError` line that
names the section and the key; what the code raises later is told to whoever listens in this
process, with its traceback.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from hashlib import blake2b
from pathlib import Path
from types import ModuleType
from typing import Any

from dora_rl.types import UserError


def require(*checks: tuple[object, str]) -> None:
    """Refuse what the user gave with the line of the first check that does not hold."""
    for holds, line in checks:
        if not holds:
            raise UserError(line)


def hint(word: str, names: Iterable[str]) -> str:
    """The end of an error line about an unknown name.

    >>> hint("snyc", ["sync", "partial"])
    "; did you mean 'sync'?"
    """
    known = [str(name) for name in names]
    near = difflib.get_close_matches(word, known, n=1)
    return f"; did you mean {near[0]!r}?" if near else f"; there are {', '.join(known)}"


class UserCodeError(UserError):
    """Code that the user named failed while the run was under way, and would fail again."""


def load_object(spec: str, base_dir: Path, *, section: str, key: str) -> Any:
    """What `spec` names; `key` is where the user wrote it, `section` begins the error."""
    place, _, name = spec.rpartition(":")
    try:
        found: Any = _load_module(place, base_dir, section, key)
        for part in name.split("."):
            if not hasattr(found, part):
                raise UserError(f"{section}: {spec}: there is no {part!r} in it; check {key}")
            found = getattr(found, part)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        # Importing runs the user's code, which may raise anything, or call sys.exit.
        raise UserError(
            f"{section}: cannot load {spec} ({one_line(error)}); "
            f"give path/to/file.py:name or package.module:name"
        ) from error
    return found


def _load_module(place: str, base_dir: Path, section: str, key: str) -> ModuleType:
    if not place.endswith(".py"):
        # Only for a module that is nowhere else: this is where the run was started.
        if importlib.util.find_spec(place.partition(".")[0]) is None:
            _search_in(base_dir)
        return importlib.import_module(place)
    path = base_dir / Path(place).expanduser()
    if not path.is_file():
        raise UserError(f"{section}: {path} does not exist; check {key}")
    return load_file(path.resolve(), section)


def load_file(path: Path, section: str) -> ModuleType:
    """The module in a file, which may import its neighbours; executed once as it is now."""
    # The name is unique to the file, so that two files of one name do not meet, and to its text:
    # a file that was mended since is another module.
    digest = blake2b(str(path).encode() + b"\0" + path.read_bytes(), digest_size=6).hexdigest()
    name = f"dora_rl_{section}_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    _search_in(path.parent)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and typing look a class's module up by name while it is being executed.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _search_in(directory: Path) -> None:
    """The user's files import their neighbours; last on the path, they shadow nothing."""
    place = str(directory.resolve())
    if place not in sys.path:
        sys.path.append(place)


def leave_out(directory: str) -> None:
    """Do not import from here, unless PYTHONPATH asks for it."""
    asked = os.environ.get("PYTHONPATH")
    if not asked or directory not in map(os.path.abspath, asked.split(os.pathsep)):
        sys.path[:] = [place for place in sys.path if os.path.abspath(place) != directory]


def place_in(function: Any, error: BaseException) -> str:
    """` (file.py, line 7)`: the innermost line of the function's own file that the error went
    through, or where the function begins if it never was in it."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if code is None:
        return ""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f" ({code.co_filename}, line {lines[-1]})" if lines else place_of(function)


def place_of(function: Any) -> str:
    """` (file.py, line 7)`: where a function begins; nothing where that cannot be known."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return "" if code is None else f" ({code.co_filename}, line {code.co_firstlineno})"


def one_line(error: BaseException) -> str:
    """Kind and first line of an error that others raised."""
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}" if first else type(error).__name__


Listener = Callable[[str, BaseException], None]
_listeners: list[Listener] = []


def listen(listener: Listener | None) -> None:
    """Tell this process's listener (or, from now on, nobody) of all that the user's code raises."""
    _listeners[:] = [listener] if listener is not None else []


def raised(what: str, error: BaseException) -> str:
    """The user's code raised and the work goes on: its traceback is told. Returns one line.

    `what` names the code: "reward mine.py:score".
    """
    for listener in _listeners:
        listener(what, error)
    return one_line(error)


def origin_of(error: BaseException) -> str:
    """The same for two errors of one kind from one place, whatever their texts say."""
    frames = traceback.extract_tb(error.__traceback__)
    cause = origin_of(error.__cause__) if error.__cause__ is not None else ""
    place = [type(error).__qualname__, *(f"{f.filename}:{f.lineno}" for f in frames), cause]
    return blake2b("|".join(place).encode(), digest_size=8).hexdigest()


def trace_of(error: BaseException, chars_max: int = 8000) -> str:
    """The traceback, its middle left out where it is longer."""
    text = "".join(traceback.format_exception(error)).rstrip()
    half = chars_max // 2
    return text if len(text) <= chars_max else f"{text[:half]}\n  ...\n{text[-half:]}"
