"""The sandbox as its users see it: outputs, tests, limits, refusal, recovery."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from dora_rl.rewards.sandbox import calls, seccomp
from dora_rl.rewards.sandbox.box import Sandbox, SandboxLost
from dora_rl.rewards.sandbox.limits import Answer, Ask, End, Limits, Run
from dora_rl.rewards.sandbox.values import Opaque
from dora_rl.types import UserError


def test_input_output_and_status(sandbox: Sandbox) -> None:
    run = sandbox.run("import sys\nprint(input()[::-1])\nsys.exit(3)", stdin="häuser\n")
    assert (run.end, run.exit_status, run.stdout, run.stderr) == (End.FAILED, 3, "resuäh\n", "")
    assert 0 < run.wall_s < 60 and 0 < run.cpu_s < 10


@pytest.mark.parametrize(
    "read",
    [
        "import sys; print(sys.stdin.read())",
        "print(open(0).read())",
        "print(open('/dev/stdin').read())",
        "import os; print(os.read(0, 100).decode())",
        "import sys; print(sys.stdin.buffer.read().decode())",
        "import fileinput; print(''.join(fileinput.input()))",
    ],
)
def test_every_way_to_read_input(sandbox: Sandbox, read: str) -> None:
    run = sandbox.run(read, stdin="1 2\n3")
    assert (run.end, run.stdout) == (End.OK, "1 2\n3\n")


def test_traceback_shows_the_programs_own_lines(sandbox: Sandbox) -> None:
    run = sandbox.run("def f():\n    return 1 / 0\nf()")
    assert run.end is End.FAILED and run.exit_status == 1
    assert "return 1 / 0" in run.stderr and "zygote" not in run.stderr
    assert run.stderr.rstrip().endswith("ZeroDivisionError: division by zero")


def test_ordinary_programs_work(sandbox: Sandbox) -> None:
    code = """
import asyncio, concurrent.futures, multiprocessing, subprocess, sqlite3, tempfile, threading
from dataclasses import dataclass

@dataclass
class P:
    x: int

async def main():
    await asyncio.sleep(0)
    return P(1).x

def square(x):
    return x * x

if __name__ == "__main__":
    print(asyncio.run(main()))
    print(subprocess.run(["echo", "sub"], capture_output=True, text=True).stdout.strip())
    shell = "sleep 0.01 & wait; timeout 20 echo waited"
    print(subprocess.run(["sh", "-c", shell], capture_output=True, text=True).stdout.strip())
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        print(list(pool.map(square, range(3))))
    with tempfile.NamedTemporaryFile() as file:
        print(sqlite3.connect(file.name).execute("select 7").fetchone())
    import atexit
    atexit.register(print, "at exit")
    threading.Thread(target=lambda: print("thread")).start()
"""
    run = sandbox.run(code, limits=Limits(wall_s=30, cpu_s=30))
    assert run.end is End.OK, run.stderr
    assert run.stdout.splitlines() == [
        "1",
        "sub",
        "waited",
        "[0, 1, 4]",
        "(7,)",
        "thread",
        "at exit",
    ]


def done(run: Run) -> list[bool]:
    return [answer is not None and answer.done for answer in run.answers]


def test_asks_are_answered_one_by_one(sandbox: Sandbox) -> None:
    asks = [Ask("f(1)"), Ask("f('')"), Ask("raise SystemExit", value=False), Ask("(f(2), {3.5})")]
    run = sandbox.run("def f(x): return x + 1", asks=asks)
    assert run.end is End.OK
    assert run.answers == (Answer(True, 2), Answer(False), Answer(False), Answer(True, (3, {3.5})))


def test_statements_share_the_programs_scope(sandbox: Sandbox) -> None:
    asks = [Ask("x = [2, 1]", value=False), Ask("x.sort()", value=False), Ask("x + y")]
    assert sandbox.run("y = [3]", asks=asks).answers[-1] == Answer(True, [1, 2, 3])


def test_what_is_no_plain_data_is_true_or_false_and_equal_to_nothing(sandbox: Sandbox) -> None:
    code = """
class Equal:
    def __eq__(self, other): return True
    def __bool__(self): return False
"""
    (answer,) = sandbox.run(code, asks=[Ask("Equal()")]).answers
    assert answer is not None and isinstance(answer.value, Opaque)
    assert not answer.value and answer.value != 1 and answer.value.kind == "Equal"


@pytest.mark.parametrize(
    "leave",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "import atexit, os; atexit.register(os._exit, 0); raise SystemExit",
        "import os\nos.write(4, b'[\"value\", 1]\\n')\nos._exit(0)",
        "import os\nos.write(4, b'ready\\nready\\n')",
        "import os\nos.closerange(3, 9)",
    ],
)
def test_leaving_early_answers_nothing(sandbox: Sandbox, leave: str) -> None:
    run = sandbox.run(leave, asks=[Ask("1")])
    assert run.answers == (None,)


def test_nothing_is_asked_before_the_program_is_ready(sandbox: Sandbox) -> None:
    code = "import select\nprint(select.select([3], [], [], 0.2)[0])"
    run = sandbox.run(code, asks=[Ask("1")])
    assert (run.stdout, done(run)) == ("[]\n", [True])


def test_only_the_interpreters_own_end_is_a_good_one(sandbox: Sandbox) -> None:
    assert sandbox.run("import sys; sys.exit(0)").end is End.OK
    assert sandbox.run("print(1); import os; os._exit(0)").end is End.LEFT
    assert sandbox.run("import os; os.execv('/bin/true', ['true'])").end is End.LEFT


def test_many_large_asks_and_answers(sandbox: Sandbox) -> None:
    asks = [Ask(f"f({n}) + len({'x' * 5000!r}) * 'y'") for n in range(60)]
    run = sandbox.run("def f(n): return str(n)", asks=asks)
    assert [answer and answer.value for answer in run.answers] == [
        f"{n}{'y' * 5000}" for n in range(60)
    ]
    over = Limits(answers_bytes_max=100_000)
    assert sandbox.run("def f(n): return str(n)", asks=asks, limits=over).end is End.OUTPUT


def test_limits_from_both_sides(sandbox: Sandbox) -> None:
    memory = Limits(memory_bytes_max=200 << 20)
    assert sandbox.run("x = bytearray(100 << 20)", limits=memory).end is End.OK
    assert sandbox.run("x = bytearray(220 << 20)", limits=memory).end is End.MEMORY
    output = Limits(output_bytes_max=1000)
    assert sandbox.run("print('x' * 999)", limits=output).end is End.OK
    over = sandbox.run("print('x' * 1000)", limits=output)
    assert over.end is End.OUTPUT and over.stdout == "x" * 1000
    fork = (
        "import os\npids = [os.fork() for _ in range(1)]\nos._exit(0) if 0 in pids else os.wait()"
    )
    assert sandbox.run(fork, limits=Limits(processes_max=2)).end is End.OK
    assert sandbox.run(fork, limits=Limits(processes_max=1)).end is End.FAILED


def test_threads_run_side_by_side(sandbox: Sandbox) -> None:
    found: dict[int, str] = {}

    def one(n: int) -> None:
        found[n] = sandbox.run("print(int(input()) ** 2)", stdin=str(n)).stdout

    threads = [threading.Thread(target=one, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {n: f"{n * n}\n" for n in range(12)}


def test_a_killed_zygote_is_replaced(sandbox: Sandbox) -> None:
    sandbox.run("pass")
    assert sandbox._zygote is not None
    os.kill(sandbox._zygote._process.pid, signal.SIGKILL)
    assert sandbox.run("print(1)").stdout == "1\n"


def test_a_zygote_lost_after_a_run_had_begun(sandbox: Sandbox) -> None:
    """What that run wrote is not taken for the next one's."""

    class Dying:
        pid_owner = os.getpid()

        def start(self, fds: list[int]) -> tuple[int, int]:
            os.write(fds[1], b"of the first\n")
            os.write(fds[3], b'{"wall_s": 0.1, "exit": 1, "signal": 0}')
            raise SandboxLost("it died")

        def close(self) -> None:
            pass

    real, sandbox._zygote = sandbox._zygote, cast(Any, Dying())
    run = sandbox.run("print('of the second')")
    assert (run.end, run.stdout) == (End.OK, "of the second\n")
    if real is not None:
        real.close()


def test_a_child_that_has_ended_is_known_by_its_descriptor() -> None:
    """Nobody waits for it, so that its pid is free at once, as for the zygote's runs."""
    code = """
import os, select, signal, time
from dora_rl.rewards.sandbox import kernel
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
pid, pidfd = kernel.clone(0)
if pid == 0:
    os._exit(0)
while os.path.exists(f"/proc/{pid}"):
    time.sleep(0.01)
poll = select.poll()
poll.register(pidfd, select.POLLIN)
[(found, events)] = poll.poll(0)
assert found == pidfd and events & select.POLLIN
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


ORPHAN = f"orphan{os.getpid()}"  # of this test alone, whatever else runs on the machine
OWNER = f"""
from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.limits import Limits
code = '''
import ctypes, time
ctypes.CDLL(None).prctl(15, b"{ORPHAN}", 0, 0, 0)
time.sleep(600)
'''
Sandbox().run(code, limits=Limits(wall_s=600))
"""


def orphans() -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/comm"):
        with suppress(FileNotFoundError, ProcessLookupError):
            if entry.read_text().strip() == ORPHAN:
                found.append(entry.parent.name)
    return found


def test_a_killed_owner_takes_its_runs_along(sandbox: Sandbox) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER])
    deadline_s = time.monotonic() + 60
    while not orphans() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert orphans()
    owner.kill()
    owner.wait()
    while orphans() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not orphans()


def test_no_descriptor_and_no_directory_leaks(sandbox: Sandbox) -> None:
    sandbox.run("pass")
    gc.collect()  # what earlier tests left open
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        sandbox.run("print(1)")
    assert len(os.listdir("/proc/self/fd")) <= before
    assert not [
        name for name in os.listdir("/tmp") if name.startswith(f"dora-rl-view-{os.getpid()}-")
    ]


def test_packages_only_where_allowed(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "offered.py").write_text("value = 7")
    (tmp_path / "offered.py").chmod(0o666)
    tmp_path.chmod(0o755)
    assert sandbox.run("import offered").end is End.FAILED
    offering = Sandbox(import_paths=[str(tmp_path)])
    try:
        assert offering.run("import offered; print(offered.value)").stdout == "7\n"
        wrong = offering.run("import offered; open(offered.__file__, 'a')")
        assert wrong.end is End.FAILED and "Read-only" in wrong.stderr
    finally:
        offering.close()


def test_numpy_and_its_linear_algebra_run_under_the_list_of_calls() -> None:
    numpy = pytest.importorskip("numpy")
    code = """
import numpy as np
a = np.random.default_rng(0).standard_normal((200, 200))
assert np.allclose(a @ np.linalg.inv(a), np.eye(200))
assert np.linalg.svd(a)[1].shape == np.linalg.eigvalsh(a + a.T).shape == (200,)
def f(): return np.int64(3), np.float64(0.5), np.bool_(True)
"""
    limits = Limits(wall_s=60, cpu_s=30, memory_bytes_max=1 << 31, memory_total_bytes_max=1 << 31)
    box = Sandbox(import_paths=[str(Path(numpy.__file__).parent.parent)])
    try:
        run = box.run(code, asks=[Ask("f()")], limits=limits)
    finally:
        box.close()
    assert run.end is End.OK, run.stderr
    assert run.answers == (Answer(True, (3, 0.5, True)),)


def test_says_what_holds_programs(sandbox: Sandbox) -> None:
    bounds = "a control group" if sandbox._groups else "a watcher"
    assert sandbox.describe().startswith("programs are isolated; ")
    assert f"bounded by {bounds}" in sandbox.describe()


CANNOT_ISOLATE = """
import gc
import os
from dora_rl.rewards.sandbox.box import Sandbox
from dora_rl.rewards.sandbox.limits import Ask
from dora_rl.types import UserError
try:
    Sandbox()
except UserError as error:
    print(error)
box = Sandbox(allow_unsandboxed=True)
print(box.isolated)
print(box.run("print(input())", stdin="limits only", asks=[Ask("1")]))
print(box.run("import socket; socket.socket()").stderr)
print(box.run("import os, time\\nif os.fork() == 0:\\n    os.setsid(); time.sleep(60)").end)
box.close()
"""


def test_refuses_where_it_cannot_isolate() -> None:
    """In a user namespace that may make no others, as in many containers."""
    inside = 'echo 0 > /proc/sys/user/max_user_namespaces && exec "$0" -c "$1"'
    command = ["unshare", "--user", "--map-root-user", "sh", "-c", inside]
    if shutil.which("unshare") is None or subprocess.run([*command[:3], "true"]).returncode:
        pytest.skip("no unshare on this machine")
    done = subprocess.run(
        [*command, sys.executable, CANNOT_ISOLATE], capture_output=True, text=True, timeout=120
    )
    lines = done.stdout.splitlines()
    assert lines[0].startswith("code sandbox: this machine cannot isolate programs (")
    assert "allow_unsandboxed" in lines[0]
    assert lines[1] == "False"
    assert (
        "stdout='limits only\\n'" in lines[2]
        and "answers=(Answer(done=True, value=1),)" in lines[2]
    )
    assert "PermissionError" in done.stdout  # the filter holds without namespaces too
    assert lines[-1] == "ok", done.stderr


def test_the_hostile_set_can_fail(tmp_path: Path) -> None:
    """The same reads and writes succeed with limits only, so their failing elsewhere says much."""
    secret = tmp_path / "secret"
    secret.write_text("x")
    box = Sandbox(allow_unsandboxed=True)
    box.close()
    box.isolated = False
    try:
        assert box.run(f"print(open({str(secret)!r}).read())").stdout == "x\n"
        assert box.run("import os; print(os.path.exists('/proc/1'))").stdout == "True\n"
    finally:
        box.close()


def test_error_names_the_reason() -> None:
    with pytest.raises(UserError, match=r"cannot isolate programs \(.*no_such_module"):
        Sandbox(preload=["no_such_module"])


@pytest.mark.parametrize("machine", list(seccomp.AUDIT_ARCH))
def test_filter_is_well_formed(machine: str) -> None:
    """Every jump lands inside the program, and it ends in a return."""
    code = seccomp.program(machine)
    instructions = [code[place : place + 8] for place in range(0, len(code), 8)]
    for place, instruction in enumerate(instructions):
        kind = int.from_bytes(instruction[:2], sys.byteorder)
        if kind in seccomp.JUMPS:
            assert place + 1 + max(instruction[2], instruction[3]) < len(instructions)
    assert int.from_bytes(instructions[-1][:2], sys.byteorder) == seccomp.RETURN
    tables = [calls.numbers(table, machine) for table in (*calls.PLAIN, calls.CHECKED)]
    numbers = [number for table in tables for number in table.values()]
    assert len(numbers) == len(set(numbers))
    for name in ("socket", "ptrace", "mount", "memfd_create", "bpf", "shmget"):
        assert all(name not in table for table in tables)


def test_the_filter_searches_numbers_in_order() -> None:
    found = [first for first, _ in seccomp.segments("x86_64")]
    assert found[0] == 0 and found == sorted(set(found))
    actions = dict(seccomp.segments("x86_64"))
    assert actions[0] == [seccomp.ALLOW]  # read
    assert actions[41] == [seccomp.DENY]  # socket
