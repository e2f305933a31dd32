"""The zygote: a warm interpreter inside the view that makes one process tree for each request.

Runs without any package and without the user's environment. It parses nothing: a request is
file descriptors that go straight to the new init. One thread only, because `clone` is not for
more. Invariant: nothing of one run (processes, files, memory) is there in the next.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import time
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

from dora_rl.rewards.sandbox import kernel, program, seccomp, view

NUM_FDS = 7  # request, stdout, stderr, status, asks, answers, go
# Not threading, nor what imports it: its hook after a fork costs every run a millisecond.
WARM = (
    "bisect cmath collections.abc copy ctypes dataclasses datetime decimal enum fractions "
    "functools heapq itertools json math operator random re signal statistics string struct typing"
)
# Not the network's: the kernel buries those of the whole machine one after the other, and new runs
# wait for it. All runs are in the zygote's, which is empty, and none can make or name a socket.
NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWCGROUP
)
STACK_BYTES = 64 << 20


class Home(NamedTuple):
    """What every run is made from. `proc` is a descriptor of the machine's own /proc, through which
    a run writes its id maps; it is closed before a program starts."""

    proc: int
    uid: int
    gid: int
    isolated: bool
    filter: seccomp.Filter


def main(door: int, setup: str) -> None:
    """Serve requests from the socket `door` until its other end closes."""
    options: dict[str, Any] = json.loads(setup)
    peer = socket.socket(fileno=door)
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    sys.path[:] = [*sys.path, *options["import_paths"]]
    for name in (*WARM.split(), *options["preload"]):
        importlib.import_module(name)
    _forget_ourselves()
    try:
        if options["isolated"]:
            view.enter(options["base"], options["readable"], proc)
            sys.path[:] = map(view.placed, sys.path)
    except OSError as error:
        peer.send(f"cannot isolate: {error.strerror}".encode())
        return
    # Ended runs need no burial, and `pidfd` tells the other side of their end.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.freeze()
    home = Home(proc, os.geteuid(), os.getegid(), options["isolated"], seccomp.Filter())
    peer.send(b"ready")
    while True:
        _, fds, _, _ = socket.recv_fds(peer, 1, NUM_FDS)
        if len(fds) != NUM_FDS:
            return
        _start(peer, fds, home)


def _forget_ourselves() -> None:
    """What programs find: no module of ours, no environment but this. The standard streams stay:
    each run puts its own files behind their descriptors."""
    for name in [name for name in sys.modules if name.split(".")[0] == "dora_rl"]:
        del sys.modules[name]
    os.environ.clear()
    os.environ.update(PATH="/usr/bin:/bin", HOME="/tmp", LANG="C.UTF-8")


def _start(peer: socket.socket, fds: list[int], home: Home) -> None:
    try:
        pid, pidfd = kernel.clone(NAMESPACES if home.isolated else 0)
    except OSError as error:
        peer.send(f"cannot start: {error.strerror}".encode())
        pid, pidfd = -1, -1
    if pid == 0:
        peer.close()
        _init(fds, home)
    if pid > 0:
        socket.send_fds(peer, [b"run %d" % pid], [pidfd])
        os.close(pidfd)
    for fd in fds:
        os.close(fd)


def _init(fds: list[int], home: Home) -> NoReturn:
    """Process 1 of the run. Whatever goes wrong here must not return into the zygote's loop."""
    request, _, _, status, _, _, go = fds
    try:
        kernel.prctl(kernel.PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with open(request, "rb") as file:
            asked = json.loads(file.read())
        if home.isolated:
            _make_private(home, asked["limits"]["files_bytes_max"])
        else:
            kernel.prctl(kernel.PR_SET_CHILD_SUBREAPER, 1)
            os.environ["HOME"] = asked["workdir"]
        os.close(home.proc)
        kernel.drop_capabilities()
        # Until we are in the run's control group, or whoever wanted the run has given it up.
        if not os.read(go, 1):
            os._exit(0)
        pid = _start_program(asked, fds, home)
    except BaseException as error:  # noqa: BLE001 - told to the parent, then the run is over
        os.write(status, json.dumps({"broken": f"{type(error).__name__}: {error}"}).encode())
        os._exit(0)
    # From here on a fault is the program's doing: without a report the run counts as lost.
    try:
        report = _supervise(pid, asked["limits"]["wall_s"])
        if not home.isolated:
            _kill_children()
        os.write(status, json.dumps(report).encode())
    finally:
        os._exit(0)


def _make_private(home: Home, bytes_max: int) -> None:
    view.map_ids(home.proc, home.uid, home.gid)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    for place in ("/tmp", "/dev/shm"):
        kernel.mount("tmpfs", place, "tmpfs", flags, f"size={bytes_max},nr_inodes=4096,mode=755")


def _start_program(asked: dict[str, Any], fds: list[int], home: Home) -> int:
    os.chdir(asked["workdir"])
    with open(".stdin", "w", encoding="utf-8", errors="replace") as file:
        file.write(asked["stdin"])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    # Memory of ours is not for the program to read, whatever the filter lets through.
    kernel.prctl(kernel.PR_SET_DUMPABLE, 0)
    pid = os.fork()
    if pid == 0:
        _become_program(asked, fds, home)
    return pid


def _supervise(pid: int, wall_s: float) -> dict[str, Any]:
    """Wait until the program ends or its time is over, say what happened."""
    begin_s = time.monotonic()
    ended = _wait(pid, begin_s + wall_s)
    report = {"wall_s": time.monotonic() - begin_s, "exit": None, "signal": 0}
    if ended is not None:
        status, usage = ended
        report["cpu_s"] = usage.ru_utime + usage.ru_stime
        if os.WIFSIGNALED(status):
            report["signal"] = os.WTERMSIG(status)
        else:
            report["exit"] = os.WEXITSTATUS(status)
    return report


def _wait(pid: int, end_s: float) -> tuple[int, Any] | None:
    """The program's status and usage; None when its time is over. Also buries orphans."""
    while True:
        try:
            found, status, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if found == pid:
            return status, usage
        if found:
            continue
        left_s = end_s - time.monotonic()
        if left_s <= 0:
            return None
        signal.sigtimedwait({signal.SIGCHLD}, left_s)


def _become_program(asked: dict[str, Any], fds: list[int], home: Home) -> NoReturn:
    try:
        _, stdout, stderr, _, asks, answers, _ = fds
        os.setsid()
        stdin = os.open(".stdin", os.O_RDONLY)
        # First up and out of the way, then down to their places.
        high = [os.dup2(fd, 100 + n) for n, fd in enumerate((stdin, stdout, stderr, asks, answers))]
        for place, fd in enumerate(high):
            os.dup2(fd, place)
        kernel.close_from(len(high))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _limit(asked["limits"])
        home.filter.install()
    except BaseException as error:  # noqa: BLE001 - must not return into init's code
        os.write(2, f"sandbox: {type(error).__name__}: {error}".encode())
        os._exit(125)
    program.run(asked["code"], 3, 4, asked["asking"])


def _limit(limits: dict[str, Any]) -> None:
    cpu_s = max(1, int(limits["cpu_s"] + 0.999))
    size = max(limits["files_bytes_max"], limits["output_bytes_max"])
    bounds = {
        resource.RLIMIT_AS: limits["memory_bytes_max"],
        resource.RLIMIT_NPROC: limits["processes_max"] + 1,  # init counts too
        resource.RLIMIT_FSIZE: size,
        resource.RLIMIT_NOFILE: limits["open_files_max"],
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_RTPRIO: 0,
        resource.RLIMIT_SIGPENDING: 256,
        resource.RLIMIT_STACK: STACK_BYTES,
    }
    for kind, value in bounds.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))


def _kill_children() -> None:
    """Without a pid namespace: everything that was started comes back to us, and dies."""
    for _ in range(1000):
        path = f"/proc/self/task/{os.getpid()}/children"
        with open(path) as file:
            pids = [int(word) for word in file.read().split()]
        if not pids:
            return
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)
