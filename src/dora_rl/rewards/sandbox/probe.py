"""The check at the start: a program that tries to get out, and what it must not manage.

Everything is tried for real, in the sandbox as it will be used; nothing is concluded from version
numbers or settings. Invariant: an empty answer of `problem` means every attempt was seen to fail.
"""

from __future__ import annotations

import json

from dora_rl.rewards.sandbox.limits import End, Limits, Run

LIMITS = Limits(wall_s=20.0, cpu_s=20.0, processes_max=8)

ATTEMPTS = """
import ctypes, json, os, resource, signal, socket

libc = ctypes.CDLL(None, use_errno=True)

def network():
    socket.socket(socket.AF_INET, socket.SOCK_STREAM)

def read_file_of_user():
    open(SECRET).read()

def see_processes():
    os.listdir("/proc/1")

def write_outside():
    open("/usr/dora-rl-probe", "w").write("x")

def mount():
    if libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, b"") != 0:
        raise OSError("mount")

def new_namespace():
    if libc.unshare(0x10000000) != 0:
        raise OSError("unshare")

def trace():
    if libc.ptrace(0, 0, 0, 0) != 0:
        raise OSError("ptrace")

def signal_init():
    os.kill(1, signal.SIGKILL)

def limit_init():
    resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))

def share_memory_without_a_file():
    import mmap
    mmap.mmap(-1, 4096)

def fork_without_end():
    pids = []
    try:
        for _ in range(64):
            pid = os.fork()
            if pid == 0:
                signal.pause()
            pids.append(pid)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

done = {}
for attempt in (network, read_file_of_user, see_processes, write_outside, mount, new_namespace,
                trace, signal_init, limit_init, share_memory_without_a_file,
                fork_without_end):
    try:
        attempt()
        done[attempt.__name__] = True
    except OSError:
        done[attempt.__name__] = False
print(json.dumps({"pid": os.getpid(), "uid": os.getuid(), "done": done}))
"""


def program(secret: str) -> str:
    """`secret` is a file that the user can read and the program must not."""
    return f"SECRET = {secret!r}\n{ATTEMPTS}"


def problem(run: Run) -> str:
    if run.end is not End.OK:
        last = run.stderr.strip().rpartition("\n")[2]
        return f"the probe ended with {run.end} {last}".strip()
    found = json.loads(run.stdout)
    if found["pid"] > 64:
        return "programs see the process ids of the machine"
    managed = [name for name, done in found["done"].items() if done]
    return f"a program could {', '.join(managed).replace('_', ' ')}" if managed else ""
