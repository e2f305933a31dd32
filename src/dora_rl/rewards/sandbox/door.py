"""The zygote as seen from outside: starting it, asking it for a run, ending it.

Never parses what a program wrote. Invariant: every wait for the zygote has a limit, and a zygote
that misses it is killed and counts as lost.
"""

from __future__ import annotations

import json
import os
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from pathlib import Path

import dora_rl

START_TIMEOUT_S = 30.0


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


def package_paths() -> list[str]:
    """Where this environment's packages lie, for programs that may import them."""
    return [path for path in site.getsitepackages() if os.path.isdir(path)]
