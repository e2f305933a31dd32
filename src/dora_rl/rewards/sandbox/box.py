"""`Sandbox`: run untrusted Python programs, many a second, and say how each ended.

Starts the zygote, hands it requests, watches the totals of each run from outside, restarts the
zygote if it is lost. Never runs anything in this process, and never parses what a program wrote.
Invariants: a sandbox that could not prove at the start that it isolates refuses to run, unless
`allow_unsandboxed` says otherwise; every wait for the zygote has a limit, and a zygote that misses
it is killed and counts as lost. Safe to use from several threads.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import dora_rl
from dora_rl.rewards.sandbox import cgroup, probe, watch
from dora_rl.rewards.sandbox.dialog import Dialog
from dora_rl.rewards.sandbox.limits import Ask, Limits, Run
from dora_rl.types import UserError

START_TIMEOUT_S = 30.0


class Sandbox:
    """`Sandbox().run("print(6 * 7)").stdout == "42\\n"`.

    `import_paths` are directories programs may import from (and see), `preload` modules that are
    imported once, before any program, so that importing them costs nothing later.
    """

    def __init__(
        self,
        *,
        allow_unsandboxed: bool = False,
        import_paths: Sequence[str] = (),
        preload: Sequence[str] = (),
    ) -> None:
        self._import_paths = [os.path.realpath(path) for path in import_paths]
        self._preload = list(preload)
        self._lock = threading.Lock()
        self._zygote: Zygote | None = None
        self._groups = cgroup.find()
        self.isolated = True
        problem = self._problem()
        if problem:
            self.close()
        if problem and not allow_unsandboxed:
            raise UserError(
                f"code sandbox: this machine cannot isolate programs ({problem}); enable user "
                f"namespaces, or set allow_unsandboxed = true to run them with limits only"
            )
        self.isolated = not problem

    def _problem(self) -> str:
        """Why programs would not be isolated; empty if a hostile one was seen to be harmless."""
        with tempfile.NamedTemporaryFile(prefix="dora-rl-probe-") as secret:
            os.chmod(secret.name, 0o644)
            try:
                run = self.run(probe.program(secret.name), limits=probe.LIMITS)
            except (SandboxLost, OSError) as error:
                return str(error)
        return probe.problem(run)

    def close(self) -> None:
        with self._lock:
            if self._zygote is not None:
                self._zygote.close()
            self._zygote = None
            if self._groups is not None:
                self._groups.close()
            self._groups = None

    def describe(self) -> str:
        """What holds programs here, for `dora-rl check`."""
        bounds = (
            "a control group" if self._groups else "a watcher, for want of a cgroup v2 to write"
        )
        where = "isolated" if self.isolated else "NOT isolated"
        return f"programs are {where}; memory, processes and time are bounded by {bounds}"

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        asks: Sequence[Ask] = (),
        limits: Limits | None = None,
    ) -> Run:
        """Run `code`; once it is through, ask it `asks`, one after the other.

        What the program does is in the result; `SandboxLost` and `OSError` say that it did not
        run, and that the machine is to blame.
        """
        limits = limits or Limits()
        asked = {
            "code": code,
            "stdin": stdin,
            "asking": bool(asks),
            "limits": asdict(limits),
        }
        try:
            return self._run_once(asked, asks, limits)
        except ZygoteLost:
            # With files of its own: the run may have begun, and written something.
            return self._run_once(asked, asks, limits)

    def _run_once(self, asked: dict[str, Any], asks: Sequence[Ask], limits: Limits) -> Run:
        with ExitStack() as stack:
            workdir = "/tmp"
            if not self.isolated:
                workdir = tempfile.mkdtemp(prefix="dora-rl-run-")
                stack.callback(shutil.rmtree, workdir, ignore_errors=True)
            request, stdout, stderr = (
                stack.enter_context(open(os.memfd_create(name), "w+b"))
                for name in ("request", "stdout", "stderr")
            )
            request.write(json.dumps(asked | {"workdir": workdir}).encode())
            request.flush()
            request.seek(0)
            dialog = stack.enter_context(closing(Dialog(asks, limits.answers_bytes_max)))
            read, write = os.pipe()
            stack.callback(os.close, read)
            held, go = os.pipe()
            with ExitStack() as theirs:
                for fd in (write, held, *dialog.theirs):
                    theirs.callback(os.close, fd)
                stack.callback(os.close, go)
                if self._groups is None:
                    # There is nothing to wait for.
                    os.write(go, b"g")
                files = [file.fileno() for file in (request, stdout, stderr)]
                pid, pidfd = self._send([*files, write, *dialog.theirs, held])
            stack.callback(os.close, pidfd)
            meter: watch.Meter = watch.Tree(pid)
            if self._groups is not None:
                meter = self._bounded(pid, limits, stack, self._groups)
                os.write(go, b"g")
            outputs = (stdout.fileno(), stderr.fileno())
            begin_s = time.monotonic()
            stopped = watch.until_ended(pidfd, outputs, limits, meter, dialog)
            # What a group counted last, it may have counted while the run was dying.
            stopped = stopped or meter.passed(limits)
            report = watch.read_status(read)
            texts = [watch.read_text(fd, limits.output_bytes_max) for fd in outputs]
            over = any(os.fstat(fd).st_size > limits.output_bytes_max for fd in outputs)
            if "broken" in report:
                raise SandboxLost(report["broken"])
            wall_s = report.get("wall_s", time.monotonic() - begin_s)
            return watch.verdict(report, stopped, over, texts, limits, wall_s, dialog)

    def _bounded(
        self, pid: int, limits: Limits, stack: ExitStack, groups: cgroup.Groups
    ) -> cgroup.Group:
        """Put the run under a control group, before its program starts."""
        group = groups.make(limits)
        stack.callback(groups.remove, group)
        with suppress(ProcessLookupError):
            group.take(pid)
        return group

    def _send(self, fds: list[int]) -> tuple[int, int]:
        with self._lock:
            if self._zygote is not None and self._zygote.pid_owner != os.getpid():
                # We are a fork: that zygote answers to our parent.
                self._zygote = None
            if self._zygote is None:
                self._zygote = Zygote(self.isolated, self._import_paths, self._preload)
            try:
                return self._zygote.start(fds)
            except (OSError, SandboxLost) as error:
                self._zygote.close()
                self._zygote = None
                raise ZygoteLost(str(error)) from error


class SandboxLost(Exception):
    """The zygote did not answer; the run did not happen."""


class ZygoteLost(SandboxLost):
    """It was asked for a run and is gone: how far the run came is not known."""


class Zygote:
    """The child process, and our end of its socket."""

    def __init__(self, isolated: bool, import_paths: list[str], preload: list[str]) -> None:
        self.pid_owner = os.getpid()
        base = tempfile.mkdtemp(prefix=f"dora-rl-view-{self.pid_owner}-")
        setup = {
            "isolated": isolated,
            "base": base,
            "readable": [*interpreter_paths(), *import_paths],
            "import_paths": import_paths,
            "preload": preload,
        }
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        source = str(Path(dora_rl.__file__).resolve().parent.parent)
        begin = (
            "import sys; door, source, setup = sys.argv[1:4]; sys.path.insert(0, source); "
            "from dora_rl.rewards.sandbox.zygote import main; sys.path.remove(source); "
            "main(int(door), setup)"
        )
        command = [interpreter(), "-S", "-s", "-P", "-B", "-c", begin]
        with theirs:
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno()), source, json.dumps(setup)],
                pass_fds=[theirs.fileno()],
                env={"PYTHONHASHSEED": "0", "LANG": "C.UTF-8", "PYTHONUTF8": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
            )
        try:
            self._socket.settimeout(START_TIMEOUT_S)
            answer = self._receive()[0]
        finally:
            with suppress(OSError):
                os.rmdir(base)
        if answer != "ready":
            self.close()
            raise SandboxLost(answer)

    def start(self, fds: list[int]) -> tuple[int, int]:
        """Pid of the run's init, and a descriptor that stays true when pids are reused."""
        socket.send_fds(self._socket, [b"r"], fds)
        answer, given = self._receive()
        word, _, pid = answer.partition(" ")
        if word != "run":
            raise SandboxLost(answer)
        return int(pid), given[0]

    def _receive(self) -> tuple[str, list[int]]:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, 4096, 1)
        except TimeoutError as error:
            raise SandboxLost("the zygote does not answer") from error
        if not data:
            # It is on its way out; what it said on stderr is why.
            self._process.wait()
            words = self._last_words()
            self.close()
            raise SandboxLost(f"the zygote ended: {words}")
        return data.decode(), fds

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        # Runs that are still dying hold the other end: do not wait for them.
        os.set_blocking(self._process.stderr.fileno(), False)
        lines = (self._process.stderr.read() or b"").decode(errors="replace").splitlines()
        return next((line for line in reversed(lines) if line.strip()), "no message")

    def close(self) -> None:
        """Closing the socket ends the zygote, and its end kills what it has started."""
        self._socket.close()
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stderr is not None:
            self._process.stderr.close()


def interpreter() -> str:
    """The real interpreter, not a virtual environment's link: the view has no such environment."""
    inside = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return str(inside) if inside.exists() else os.path.realpath(sys.executable)


def interpreter_paths() -> list[str]:
    """What the interpreter reads while it runs."""
    # Of the interpreter itself, not of the virtual environment that we may be in.
    base = {"base": sys.base_prefix, "platbase": sys.base_exec_prefix}
    paths = [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")]
    library = sysconfig.get_config_var("LIBDIR")
    found = [path for path in (*paths, library, os.path.dirname(interpreter())) if path]
    return [path for path in found if os.path.isdir(path)]
