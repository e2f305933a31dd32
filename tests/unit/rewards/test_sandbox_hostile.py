"""Each hostile program is harmless, is told apart properly, and leaves nothing behind."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import hostile_kernel
import hostile_programs
import pytest

from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.limits import End, Limits

PROGRAMS = hostile_programs.PROGRAMS | hostile_kernel.PROGRAMS
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
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Surroundings]:
    monkeypatch.setenv("HOSTILE_SECRET", "1")
    secret = tmp_path / "secret.txt"
    secret.write_text("the user's own")
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    for place in (tmp_path, outside):
        place.chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as listener:
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
def test_is_harmless_and_reported(name: str, sandbox: Sandbox, surroundings: Surroundings) -> None:
    hostile = PROGRAMS[name]
    limits = SHORT if "time" in hostile.ends else LIMITS
    run = sandbox.run(surroundings.fill(hostile.code), limits=limits)
    assert "BREACH" not in run.stdout, run
    assert run.end in hostile.ends, run
    assert hostile.says in run.stdout + run.stderr, run
    assert len(run.stdout) <= LIMITS.output_bytes_max and len(run.stderr) <= LIMITS.output_bytes_max
    assert surroundings.secret.read_text() == "the user's own"
    assert list(surroundings.outside.iterdir()) == []
    with pytest.raises(BlockingIOError):
        surroundings.listener.accept()
    after = sandbox.run("print(input())", stdin="still here")
    assert (after.end, after.stdout) == (End.OK, "still here\n")


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


def test_set_of_programs_is_large_enough() -> None:
    assert len(PROGRAMS) >= 20
