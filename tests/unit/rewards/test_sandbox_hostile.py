"""Each hostile program is harmless, is told apart properly, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from dora_rl.rewards.base import ScoreItem
from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.limits import Answer, Ask, End, Limits
from dora_rl.rewards.statements import question
from tests.unit.rewards import hostile_cheats, hostile_doors, hostile_kernel, hostile_programs
from tests.unit.rewards.as_user import OwnBox, UsersBox

Box = OwnBox | UsersBox

PROGRAMS = hostile_programs.PROGRAMS | hostile_kernel.PROGRAMS | hostile_doors.PROGRAMS
LIMITS = Limits(
    wall_s=30.0,
    cpu_s=20.0,
    memory_bytes_max=256 << 20,
    memory_total_bytes_max=300 << 20,
    processes_max=16,
    output_bytes_max=1 << 20,
    files_bytes_max=16 << 20,
)
# For programs that never end by themselves.
SHORT = replace(LIMITS, wall_s=0.6, cpu_s=0.5)


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a program must not reach."""

    secret: Path
    outside: Path
    listener: socket.socket

    def fill(self, code: str) -> str:
        port = self.listener.getsockname()[1]
        code = code.replace("@SECRET@", str(self.secret)).replace("@OUTSIDE@", str(self.outside))
        return code.replace("@PORT@", str(port)).replace("@PID@", str(os.getpid()))


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[Surroundings]:
    """Open to every user of the machine, so that only the sandbox keeps programs away."""
    monkeypatch.setenv("HOSTILE_SECRET", "1")
    with (
        tempfile.TemporaryDirectory(prefix="dora-rl-hostile-") as place,
        socket.create_server(("127.0.0.1", 0)) as listener,
    ):
        secret, outside = Path(place, "secret.txt"), Path(place, "outside")
        secret.write_text("the user's own")
        outside.mkdir()
        for path in (Path(place), outside):
            path.chmod(0o777)
        listener.setblocking(False)
        yield Surroundings(secret, outside, listener)


def processes_with(marker: str) -> list[str]:
    """Command lines and names on this machine that hold a marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                text = (entry / "comm").read_text() + (entry / "cmdline").read_text()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if marker in text:
                found.append(text)
    return found


@pytest.mark.parametrize("name", list(PROGRAMS))
def test_is_harmless_and_reported(name: str, box: Box, surroundings: Surroundings) -> None:
    hostile = PROGRAMS[name]
    limits = SHORT if "time" in hostile.ends else LIMITS
    run = box.run(surroundings.fill(hostile.code), limits=limits)
    assert "BREACH" not in run.stdout, run
    assert run.end in hostile.ends, run
    assert hostile.says in run.stdout + run.stderr, run
    assert len(run.stdout) <= LIMITS.output_bytes_max and len(run.stderr) <= LIMITS.output_bytes_max
    assert surroundings.secret.read_text() == "the user's own"
    assert list(surroundings.outside.iterdir()) == []
    with pytest.raises(BlockingIOError):
        surroundings.listener.accept()
    after = box.run("print('still here')", asks=[Ask("6 * 7")])
    assert (after.end, after.stdout) == (End.OK, "still here\n")
    assert after.answers == (Answer(True, 42),)


def test_daemon_dies_with_its_run(sandbox: Sandbox) -> None:
    code = f"""
import ctypes, os, time
for _ in range(2):
    if os.fork():
        break
    os.setsid()
else:
    ctypes.CDLL(None).prctl(15, b"daemon{os.getpid()}", 0, 0, 0)
    open("/tmp/up", "w").close()
    while True:
        time.sleep(0.01)
if os.getppid() == 1:
    while not os.path.exists("/tmp/up"):
        time.sleep(0.001)
    print("daemon is up")
"""
    run = sandbox.run(code, limits=LIMITS)
    assert (run.end, run.stdout) == (End.OK, "daemon is up\n")
    assert processes_with(f"daemon{os.getpid()}") == []


def test_fork_bomb_leaves_no_process(sandbox: Sandbox) -> None:
    code = f"""
import ctypes, os
ctypes.CDLL(None).prctl(15, b"bomb{os.getpid()}", 0, 0, 0)
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    assert sandbox.run(code, limits=SHORT).end in (End.TIME, End.CPU)
    assert processes_with(f"bomb{os.getpid()}") == []


def test_nothing_is_left_for_the_next_run(sandbox: Sandbox) -> None:
    leave = """
import os, random
open("/tmp/left", "w").write("x"); open("/dev/shm/left", "w").write("x")
os.environ["LEFT"] = "x"
random.left = "x"
print(random.random())
"""
    look = """
import os, random
print(os.listdir("/tmp"), os.listdir("/dev/shm"), "LEFT" in os.environ, hasattr(random, "left"))
"""
    first = sandbox.run(leave, limits=LIMITS).stdout
    assert sandbox.run(look, limits=LIMITS).stdout == "['.stdin'] [] False False\n"
    assert sandbox.run(leave, limits=LIMITS).stdout != first  # random numbers differ between runs


def test_time_of_children_that_nobody_buries_counts(sandbox: Sandbox) -> None:
    for name in ("burns_in_children_that_nobody_buries", "burns_in_a_chain_of_orphans"):
        run = sandbox.run(PROGRAMS[name].code, limits=replace(LIMITS, wall_s=60.0, cpu_s=0.4))
        assert run.end is End.CPU, run


def item(kind: str, code: str) -> ScoreItem:
    return ScoreItem("p", "p", f"```python\n{code}\n```", columns=hostile_cheats.KINDS[kind])


@pytest.mark.parametrize("name", list(hostile_cheats.CHEATS))
def test_earns_nothing(name: str, box: Box) -> None:
    """The score is 0, and not a failure, which would leave the sample out of its group."""
    code = hostile_cheats.program(name)
    few = isinstance(box, UsersBox) or name in hostile_cheats.SLOW
    kinds = ("printed", "asserted") if few else tuple(hostile_cheats.KINDS)
    assert {kind: box.score(item(kind, code)) for kind in kinds} == dict.fromkeys(kinds, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("name", list(hostile_cheats.CHEATS))
def test_earns_nothing_of_any_kind(name: str, box: Box) -> None:
    code, kinds = hostile_cheats.program(name), hostile_cheats.KINDS
    assert {kind: box.score(item(kind, code)) for kind in kinds} == dict.fromkeys(kinds, 0.0)


@pytest.mark.full
@pytest.mark.parametrize("name", list(PROGRAMS))
def test_attacks_earn_nothing(name: str, box: Box, surroundings: Surroundings) -> None:
    code, kinds = surroundings.fill(PROGRAMS[name].code), ("printed", "asserted")
    assert {kind: box.score(item(kind, code)) for kind in kinds} == dict.fromkeys(kinds, 0.0)


@pytest.mark.parametrize("kind", list(hostile_cheats.KINDS))
def test_whoever_knows_the_result_earns_the_reward(kind: str, box: Box) -> None:
    code = f"def solve(n):\n    return {hostile_cheats.SECRET_RESULT}\n"
    assert box.score(item(kind, f"{code}print(solve(0))")) == 1.0


# What the program can still say of itself, and the least that it costs: see docs/rewards.md.
OWN_WORD = {
    "a comparison of two values of the program": "assert solve(1) == other(1)",
    "a type of the program": "assert isinstance(solve(1), Klass)",
    "a function that the test imports": "import m\nassert m.close(solve(1), 5)",
    "all or any": "assert all(solve(x) == y for x, y in [(1, 2)])",
    "exceptions": "try:\n    solve(-1)\n    assert False\nexcept ValueError:\n    pass",
    "functions that return": "def near(a, b):\n    return a == b\nassert near(solve(1), 5)",
}
FORGES = """
import json, os
os.write(4, b"ready\\n")
text = b""
while more := os.read(3, 65536):
    text += more
for _, value in json.loads(text):
    os.write(4, b'["value", true]\\n' if value else b'["done"]\\n')
os.write(4, b"end\\n")
os._exit(0)
"""


@pytest.mark.parametrize("test", list(OWN_WORD.values()), ids=list(OWN_WORD))
def test_what_remains_possible(test: str, sandbox: Sandbox) -> None:
    """A program that speaks the protocol of the pipes passes these, but for its end: it must come
    to the interpreter's own end, or say that it did, as `FORGES` does before it leaves."""
    found = question(test)
    assert not found.outside
    run = sandbox.run(FORGES, asks=found.asks)
    assert found.holds(run.answers) and run.end is End.OK


def test_set_of_programs_is_large_enough() -> None:
    assert len(PROGRAMS) + len(hostile_cheats.CHEATS) >= 170
