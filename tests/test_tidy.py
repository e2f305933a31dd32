"""House rules as a test: import direction, purity of the core, sizes, names, orphans.

Sizes are a ratchet: what is too large today is listed with its size, and the list may only shrink.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src" / "dora_rl"
FILES = sorted(SRC.rglob("*.py"))
TREES = ("src", "tests", "benchmarks", "recipes")
ALL_FILES = sorted(path for tree in TREES for path in (ROOT / tree).rglob("*.py"))

# Imports only point to an earlier line. The parts of one line are siblings and do not import each
# other, except that `observe` reads through `ports`, `config` uses `types`, and the command line
# may start the dashboard.
RUN = (
    "store",
    "weights",
    "setup",
    "workers",
    "controller",
    "worlds",
    "audit",
    "bench",
)
LAYERS = (
    ("types",),
    ("user_code", "out_of_memory", "histories"),
    ("config",),
    ("core",),
    ("ports",),
    ("io",),
    ("observe",),
    ("model",),
    ("chat",),
    ("engine", "trainer", "data", "rewards", "envs"),
    ("runtime", *RUN),
    ("sim",),
    ("dashboard", "serve"),
    ("tinker",),
    ("cli", "commands"),
    ("api",),
)
# The command line is one part in several folders, and so is what runs a run.
ONE_PART = {"commands": "cli"} | dict.fromkeys(RUN, "runtime")
RANK = {part: rank for rank, parts in enumerate(LAYERS) for part in parts}

CORE_MAY_IMPORT = {
    "__future__",
    "collections",
    "dataclasses",
    "enum",
    "heapq",
    "math",
    "types",
    "typing",
}
CORE_MAY_NOT_CALL = {
    "print",
    "open",
    "input",
    "eval",
    "exec",
    "hash",
    "id",
    "globals",
    "breakpoint",
}
BANNED_NAMES = {"utils", "util", "misc", "manager", "helper", "helpers", "common"}
HEAVY = ("torch", "transformers", "ray", "vllm", "pydantic", "numpy", "matplotlib", "rich")

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70
# path -> lines it has today. Make it smaller and take it out; never add.
LARGE_FILES: dict[str, int] = {}
# path::function -> lines it has today.
LARGE_FUNCTIONS: dict[str, int] = {
    "src/dora_rl/engine/cuda/kernels/fused.py::fused_kernel": 111,  # cannot be split
}

FOLDER_FILES_MAX = 20
IMPORTS_MAX = 15  # of our own modules
# The same for what a reader has to hold in mind: what offends today. Mend it and take it out.
# folder -> .py files
LARGE_FOLDERS: dict[str, int] = {}
# module -> modules of ours that it imports
MANY_IMPORTS: dict[str, int] = {}
# module -> times that it uses a private name of another module of ours
PRIVATE_USES: dict[str, int] = {}
# Of named tuples and of ctypes: public in spite of their names.
NO_SECRETS = {"_", "_replace", "_asdict", "_fields", "_make", "_fields_"}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_of(path: Path) -> str:
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(path: Path) -> Iterator[str]:
    """Dotted names a file imports, wherever in it. `from a import b` gives a.b and a."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative imports hide the direction"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def part_of(module: str) -> str | None:
    """The part of the package a module belongs to; None outside and for the package itself."""
    names = module.split(".")
    if names[0] != "dora_rl" or len(names) < 2 or names[1].startswith("_"):
        return None
    return names[1]


def shown(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def test_there_is_something_to_check() -> None:
    assert len(FILES) > 20 and {part_of(module_of(path)) for path in FILES} - {None} <= set(RANK)


def test_imports_only_point_left() -> None:
    wrong: list[str] = []
    for path in FILES:
        own = part_of(module_of(path))
        for name in imports_of(path):
            other = part_of(name)
            if own is None or other is None or other not in RANK:
                continue
            same = ONE_PART.get(own, own) == ONE_PART.get(other, other)
            if not same and RANK[other] >= RANK[own]:
                wrong.append(f"{shown(path)} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_the_core_decides_only() -> None:
    """No I/O, clock, randomness, asyncio, torch or logging: only these modules, not these calls."""
    wrong: list[str] = []
    for path in sorted((SRC / "core").glob("*.py")):
        for name in imports_of(path):
            if name.split(".")[0] not in CORE_MAY_IMPORT and part_of(name) not in ("core", "types"):
                wrong.append(f"{shown(path)} imports {name}")
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id in CORE_MAY_NOT_CALL:
                    wrong.append(f"{shown(path)}:{node.lineno} calls {node.func.id}()")
            elif isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.Global)):
                wrong.append(f"{shown(path)}:{node.lineno} is asynchronous or global")
    assert not wrong, "\n".join(wrong)


def test_the_audit_shares_only_the_words_of_the_core() -> None:
    for path in sorted((SRC / "observe").glob("audit*.py")):
        of_core = {n for n in imports_of(path) if part_of(n) == "core" and n.count(".") >= 2}
        modules = {name.split(".")[2] for name in of_core}
        assert modules <= {"events", "actions", "params"}, f"{shown(path)} imports {modules}"


def test_no_pickle_anywhere_and_ray_in_one_place() -> None:
    with_ray: list[str] = []
    for path in FILES:
        names = {name.split(".")[0] for name in imports_of(path)}
        assert not names & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}, shown(path)
        if "ray" in names:
            with_ray.append(shown(path))
    assert len(with_ray) <= 1, with_ray


@pytest.mark.parametrize("module", ["dora_rl", "dora_rl.core.step", "dora_rl.observe.audit"])
def test_importing_is_light(module: str) -> None:
    code = f"import sys, {module}; print(*[m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def functions_of(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


def ratchet(sizes: dict[str, int], limit: int, listed: dict[str, int]) -> list[str]:
    """What breaks the limit or the list."""
    wrong: list[str] = []
    for name, size in sizes.items():
        allowed = listed.get(name, limit)
        if size > allowed:
            wrong.append(f"{name} has {size} lines, {allowed} are allowed: split it")
    for name in listed:
        if sizes.get(name, 0) <= limit:
            wrong.append(f"{name} is small enough now: take it out of the list")
    return wrong


def test_files_and_functions_stay_small() -> None:
    files = {shown(path): path.read_text().count("\n") for path in ALL_FILES}
    functions = {
        f"{shown(path)}::{name}": size for path in ALL_FILES for name, size in functions_of(path)
    }
    wrong = ratchet(files, FILE_LINES_MAX, LARGE_FILES)
    wrong += ratchet(functions, FUNCTION_LINES_MAX, LARGE_FUNCTIONS)
    assert not wrong, "\n".join(wrong)


def still_listed(found: dict[str, int], limit: int, listed: dict[str, int], what: str) -> list[str]:
    """As `ratchet`, for counts of something else than lines."""
    wrong = [
        f"{name}: {count} {what}, {listed.get(name, limit)} are allowed"
        for name, count in found.items()
        if count > listed.get(name, limit)
    ]
    mended = [name for name in listed if found.get(name, 0) <= limit]
    return wrong + [
        f"{name} no longer offends ({what}): take it out of its list" for name in mended
    ]


def test_folders_stay_small() -> None:
    folders = Counter(shown(path.parent) for path in FILES)
    wrong = still_listed(folders, FOLDER_FILES_MAX, LARGE_FOLDERS, "files")
    assert not wrong, "\n".join(wrong)


def modules_used(path: Path, modules: dict[str, Path]) -> set[str]:
    """Our modules that a file imports. Where a package passes a name on, the module that has it
    counts; the configuration is one module, whatever section is asked for."""
    used: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            used |= {alias.name for alias in node.names if alias.name in modules}
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            used |= {home_of(node.module, alias.name, modules) for alias in node.names}
    used = {"dora_rl.config" if name.startswith("dora_rl.config.") else name for name in used}
    return used - {module_of(path)}


def home_of(module: str, name: str, modules: dict[str, Path]) -> str:
    """The module that `from module import name` reads."""
    if f"{module}.{name}" in modules:
        return f"{module}.{name}"
    if modules[module].name == "__init__.py":
        for node in tree_of(modules[module]).body:
            names = node.names if isinstance(node, ast.ImportFrom) else []
            for alias in names:
                if (alias.asname or alias.name) == name and node.module in modules:
                    return home_of(node.module, alias.name, modules)
    return module


def test_no_module_needs_many_others() -> None:
    modules = {module_of(path): path for path in FILES}
    counts = {name: len(modules_used(path, modules)) for name, path in modules.items()}
    counts = {name: n for name, n in counts.items() if modules[name].name != "__init__.py"}
    wrong = still_listed(counts, IMPORTS_MAX, MANY_IMPORTS, "of our modules imported")
    assert not wrong, "\n".join(wrong)


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__") and name not in NO_SECRETS


@cache
def own_names(path: Path) -> frozenset[str]:
    """What a file gives a meaning to: its functions, classes, variables and attributes."""
    own: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and in_self(node):
            own.add(node.attr)
    return frozenset(own)


def private_uses(path: Path, others: set[str]) -> Iterator[str]:
    """Private names of `others` that a file uses and has no meaning for itself: imported ones,
    attributes of others, and those of a base class that is elsewhere in the package."""
    tree, own = tree_of(path), own_names(path)
    imported: dict[str, str] = {}  # name -> where it is from
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        elif isinstance(node, ast.Import):
            imported |= {a.asname or a.name.split(".")[0]: a.name for a in node.names}
    for name in imported.values():
        if name.startswith("dora_rl.") and is_private(name.rpartition(".")[2]):
            yield name
    heirs = {
        node
        for kind in ast.walk(tree)
        if isinstance(kind, ast.ClassDef)
        and any(imported.get(ast.unparse(b), "").startswith("dora_rl.") for b in kind.bases)
        for node in ast.walk(kind)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_private(node.attr):
            continue
        if node.attr in others and node.attr not in own and (node in heirs or not in_self(node)):
            yield ast.unparse(node)


def in_self(node: ast.Attribute) -> bool:
    return isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_private_names_stay_in_their_module() -> None:
    ours = {name for path in FILES for name in own_names(path)}
    used = {module_of(path): sorted(private_uses(path, ours)) for path in FILES}
    counts = {name: len(uses) for name, uses in used.items()}
    wrong = still_listed(counts, 0, PRIVATE_USES, "private names of others")
    assert not wrong, "\n".join([*wrong, *(f"{n}: {u}" for n, u in used.items() if u)])


def test_nothing_is_left_out_of_the_coverage() -> None:
    mark = "pragma: no " + "cover"
    assert not [shown(path) for path in ALL_FILES if mark in path.read_text()]


def words_of(name: str) -> set[str]:
    """`TokenManager` and `token_manager` are both token and manager."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+", name)}


def test_no_name_says_nothing() -> None:
    wrong = [shown(path) for path in ALL_FILES if words_of(shown(path)) & BANNED_NAMES]
    for path in FILES:
        for node in ast.walk(tree_of(path)):
            named = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
            if named and words_of(node.name) & BANNED_NAMES:
                wrong.append(f"{shown(path)}:{node.lineno} {node.name}")
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_is() -> None:
    silent = [shown(p) for p in FILES if tree_of(p).body and not ast.get_docstring(tree_of(p))]
    assert not silent, "no docstring: " + ", ".join(silent)


def test_no_module_is_an_orphan() -> None:
    """Imported somewhere, started by name somewhere, or an entry point of its own."""
    imported = {name for path in ALL_FILES for name in imports_of(path)}
    started = "\n".join(
        node.value
        for path in ALL_FILES
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and "dora_rl." in node.value
    )
    started += (ROOT / "pyproject.toml").read_text()
    orphans: list[str] = []
    for path in FILES:
        module = module_of(path)
        starts_itself = "__main__" in path.read_text() or path.name == "__main__.py"
        known = module in imported or module in started or starts_itself
        if not known and path.name != "__init__.py":
            orphans.append(shown(path))
    assert not orphans, "nobody imports " + ", ".join(orphans)


def test_no_work_is_left_over_in_comments() -> None:
    mark = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b(?!.*issue \d+)")
    texts = [*ALL_FILES, *(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")]
    wrong = [
        f"{shown(path)}:{number}"
        for path in texts
        for number, line in enumerate(path.read_text().splitlines(), start=1)
        if mark.search(line)
    ]
    assert not wrong, "without an issue: " + ", ".join(wrong)


def test_the_checks_can_fail(tmp_path: Path) -> None:
    """Each rule, shown something that breaks it."""
    assert ratchet({"a.py": 401}, 400, {}) and ratchet({"a.py": 399}, 400, {"a.py": 450})
    assert ratchet({"a.py": 451}, 400, {"a.py": 450}) and not ratchet({"a": 450}, 400, {"a": 450})
    assert still_listed({"a": 3}, 2, {}, "files") and not still_listed(
        {"a": 3}, 2, {"a": 3}, "files"
    )
    assert still_listed({"a": 4}, 2, {"a": 3}, "files") and still_listed({}, 2, {"a": 3}, "files")
    assert words_of("TokenManager") & BANNED_NAMES and words_of("my_utils") & BANNED_NAMES
    assert not words_of("commoner") & BANNED_NAMES
    assert part_of("dora_rl.core.step") == "core" and part_of("numpy.random") is None
    path = tmp_path / "module.py"
    path.write_text("def f():\n    import time\n    from os import path\n")
    assert set(imports_of(path)) == {"time", "os", "os.path"}
    assert dict(functions_of(path)) == {"f": 3}
    path = tmp_path / "other.py"
    path.write_text(
        "from dora_rl.core.window import _bound\nfrom dora_rl.types import Group\n"
        "class A(Group):\n    def f(self, other):\n        self._mine = other._theirs\n"
        "        return self._base, self._mine, other._mine, other._nobodys\n"
    )
    uses = private_uses(path, {"_theirs", "_base", "_mine"})
    assert set(uses) == {"dora_rl.core.window._bound", "other._theirs", "self._base"}
