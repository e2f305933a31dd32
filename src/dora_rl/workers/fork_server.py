"""One warm process that worker processes are forked from: what all of them import, once.

The controller starts it (`ForkServer`) and asks for workers over a socket; the server (`main`)
imports, forks and tells how its children end. It never starts a thread, never touches a device and
never runs user code, which is what makes forking safe; if a library broke that rule it says so and
the controller starts fresh interpreters instead.

    controller                        fork server                       worker
      start(log, stdin, …)  ─request─▶  fork ───────────────────────────▶ worker.main()
                            ◀─pid, pidfd─                                   │
                            ◀─ended pid, code──────── SIGCHLD ◀─────────────┘ ends

Invariant: a worker dies with the server and the server dies with the controller (Linux's parent
death signal), so nobody writes into a run beside the controller that resumes it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any, NoReturn

PR_SET_PDEATHSIG = 1  # <sys/prctl.h>
MESSAGE_BYTES_MAX = 1 << 20
FDS_MAX = 16
# What nearly every worker needs. None of them starts threads or looks for a device.
WARM = (
    "torch",
    "safetensors.torch",
    "dora_rl.workers.rollout",
    "dora_rl.workers.learner",
    "dora_rl.workers.evaluator",
    "dora_rl.workers.reward",
    "dora_rl.workers.environment",
)


# What a learner on a GPU needs besides: its layers are compiled.
WARM_GPU = ("torch._dynamo", "torch._inductor.compile_fx")


class ForkedProcess:
    """A worker, as the controller sees it (see `workers.pool.Process`)."""

    def __init__(self, pid: int, pidfd: int, stdin: IO[bytes]) -> None:
        self.pid, self.stdin = pid, stdin
        self._pidfd = pidfd
        self._ended = threading.Event()
        self._code = 0
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        return self._code if self._ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
        return self._code

    def kill(self) -> None:
        """By its descriptor: a number may belong to somebody else by now."""
        with self._lock:
            if not self._ended.is_set():
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def end(self, code: int) -> None:
        """Called once, when the server has buried it."""
        with self._lock:
            if self._ended.is_set():
                return
            self._code = code
            os.close(self._pidfd)
            self._ended.set()
        with contextlib.suppress(OSError):
            self.stdin.close()


class ForkServer:
    """The controller's end. `start` is called by one thread at a time."""

    def __init__(
        self, environment: Mapping[str, str], log: IO[bytes], *, gpu: bool = False
    ) -> None:
        self._environment = dict(environment)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # OpenBLAS starts its threads when it is imported, which a process that forks must not have.
        env = {**environment, "OPENBLAS_NUM_THREADS": "1"}
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "dora_rl.workers.fork_server", str(theirs.fileno())]
                + ["gpu"] * gpu,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=env,
                start_new_session=True,
                pass_fds=[theirs.fileno()],
            )
        self._socket = ours
        self._answered = threading.Condition()
        self._answer: tuple[int, int] | None = None  # pid and pidfd, or (-1, -1): refused
        self.is_alive = True
        self._children: dict[int, ForkedProcess] = {}
        self._ended_early: dict[int, int] = {}  # pid to code: told before its start was
        threading.Thread(target=self._listen, daemon=True).start()

    def start(
        self,
        name: str,
        log: IO[bytes],
        keep_fds: Sequence[int] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ForkedProcess | None:
        """A worker that reads its setup from the pipe behind `stdin`; None: not from here.
        `environment` is its own, where that is no longer the one the server was started with."""
        read, write = os.pipe()
        try:
            with self._answered:
                self._answer = None
                asked = {"name": name, "keep": list(keep_fds)}
                asked["environment"] = self._changed(environment)
                body = json.dumps(asked).encode()
                try:
                    socket.send_fds(self._socket, [body], [read, log.fileno(), *keep_fds])
                except OSError:
                    self.is_alive = False
                while self.is_alive and self._answer is None:
                    self._answered.wait()
                pid, pidfd = self._answer or (-1, -1)
                if pid > 0:
                    child = ForkedProcess(pid, pidfd, os.fdopen(write, "wb", buffering=0))
                    self._children[pid] = child
                    if pid in self._ended_early:
                        child.end(self._ended_early.pop(pid))
                    write = -1
                    return child
                return None
        finally:
            os.close(read)
            if write >= 0:
                os.close(write)

    def _changed(self, environment: Mapping[str, str] | None) -> dict[str, str | None]:
        """What is different now; None: no longer there."""
        if environment is None:
            return {}
        before, now = self._environment, environment
        names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
        return {name: now.get(name) for name in names}

    def _listen(self) -> None:
        """What the server says, until it is gone; its children are gone with it."""
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self._socket, MESSAGE_BYTES_MAX, 1)
            except OSError:
                data, fds = b"", []
            with self._answered:
                if not data:
                    self.is_alive = False
                    for child in self._children.values():
                        child.end(-signal.SIGKILL)
                    self._answered.notify_all()
                    return
                said = json.loads(data)
                if "ended" in said:
                    child = self._children.pop(said["ended"], None)
                    if child is not None:
                        child.end(said["code"])
                    else:
                        self._ended_early[said["ended"]] = said["code"]
                else:
                    self._answer = (said["pid"], fds[0] if fds else -1)
                    self._answered.notify_all()

    def close(self) -> None:
        """The end of the server, and of whoever is still there."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()


# -- inside the server ----------------------------------------------------------------------------


def main(number: int, *more: str) -> None:
    """Import, then fork on request until the controller is gone."""
    die_with_parent()
    for ignored in (signal.SIGINT, signal.SIGTERM):
        signal.signal(ignored, signal.SIG_IGN)
    peer = socket.socket(fileno=number)
    for name in (*WARM, *WARM_GPU) if "gpu" in more else WARM:
        importlib.import_module(name)
    os.environ.pop("OPENBLAS_NUM_THREADS", None)
    gc.collect()
    gc.freeze()
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    os.set_blocking(wake_read, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    inner = [peer.fileno(), wake_read, wake_write]
    while True:
        ready, _, _ = select.select([peer, wake_read], [], [])
        if wake_read in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(wake_read, 4096)
            _bury(peer)
        if peer in ready:
            data, fds, _, _ = socket.recv_fds(peer, MESSAGE_BYTES_MAX, FDS_MAX)
            if not data:
                return
            _fork(peer, json.loads(data), fds, inner)


def _fork(peer: socket.socket, asked: dict[str, Any], fds: list[int], inner: list[int]) -> None:
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would copy locks that nobody opens again
        peer.send(json.dumps({"pid": -1}).encode())
    else:
        pid = os.fork()
        if pid == 0:
            _become_worker(asked, fds, inner)
        pidfd = os.pidfd_open(pid)
        socket.send_fds(peer, [json.dumps({"pid": pid}).encode()], [pidfd])
        os.close(pidfd)
    for fd in fds:
        os.close(fd)


def _become_worker(asked: dict[str, Any], fds: list[int], inner: list[int]) -> NoReturn:
    """In the child: its own session and descriptors, then what a fresh worker does."""
    code = 1
    try:
        os.setsid()
        die_with_parent()
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)
        for name, value in asked["environment"].items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        stdin, log, *kept = fds
        _take_descriptors(stdin, log, kept, asked["keep"], inner)
        sys.stdin = open(0)  # noqa: SIM115 - the process's own, until its end
        import numpy as np

        from dora_rl.workers.worker import main as work

        np.random.seed()  # user code may draw from it; not the same numbers in all workers
        code = work()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:  # noqa: BLE001 - as the interpreter would: printed, and the end
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _take_descriptors(
    stdin: int, log: int, kept: list[int], keep: list[int], inner: list[int]
) -> None:
    """Standard streams, and the descriptors to keep, under the numbers the controller knows."""
    for fd in inner:
        os.close(fd)
    above = max([*keep, *kept, stdin, log, 2]) + 1
    moved = [_move_up(fd, above) for fd in (stdin, log, *kept)]
    for fd, target in zip(moved, (0, 1, *keep), strict=True):
        os.dup2(fd, target, inheritable=target <= 2)
        os.close(fd)
    os.dup2(1, 2)


def _move_up(fd: int, above: int) -> int:
    import fcntl

    new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(fd)
    return new


def _bury(peer: socket.socket) -> None:
    """Tell of every child that has ended."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError):
            peer.send(json.dumps({"ended": pid, "code": code}).encode())


def die_with_parent() -> None:
    """On Linux: killed by the system when the parent ends."""
    parent = os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died in between
        os._exit(1)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
