"""`Sandbox`: run untrusted Python programs, many a second, and say how each ended.

Starts the zygote, hands it requests, watches the totals of each run from outside, restarts the
zygote if it is lost. Never runs anything in this process. Invariant: a sandbox that could not
prove at the start that it isolates refuses to run, unless `allow_unsandboxed` says otherwise.
Safe to use from several threads.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from dora_rl.rewards.sandbox import probe, watch
from dora_rl.rewards.sandbox.door import SandboxLost, Zygote, ZygoteLost
from dora_rl.rewards.sandbox.limits import Limits, Run
from dora_rl.types import UserError


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
        self.isolated = True
        problem = self._problem()
        if problem and not allow_unsandboxed:
            self.close()
            raise UserError(
                f"code sandbox: this machine cannot isolate programs ({problem}); enable user "
                f"namespaces, or set allow_unsandboxed = true to run them with limits only"
            )
        if problem:
            self.close()
            self.isolated = False

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

    def run(
        self,
        code: str,
        *,
        stdin: str = "",
        tests: Sequence[str] = (),
        limits: Limits | None = None,
    ) -> Run:
        """Run `code`, then each of `tests` in its scope.

        What the program does is in the result; `SandboxLost` and `OSError` say that it did not
        run, and that the machine is to blame.
        """
        limits = limits or Limits()
        asked = {
            "code": code,
            "stdin": stdin,
            "tests": list(tests),
            "token": secrets.token_hex(16),
            "limits": asdict(limits),
        }
        try:
            return self._run_once(asked, limits)
        except ZygoteLost:
            # With files of its own: the run may have begun, and written something.
            return self._run_once(asked, limits)

    def _run_once(self, asked: dict[str, Any], limits: Limits) -> Run:
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
            read, write = os.pipe()
            stack.callback(os.close, read)
            with open(write, "wb") as status:
                fds = [file.fileno() for file in (request, stdout, stderr, status)]
                pid, pidfd = self._send(fds)
            stack.callback(os.close, pidfd)
            outputs = (stdout.fileno(), stderr.fileno())
            begin_s = time.monotonic()
            stopped = watch.until_ended(pid, pidfd, outputs, limits)
            report = watch.read_status(read)
            texts = [watch.read_text(fd, limits.output_bytes_max) for fd in outputs]
            over = any(os.fstat(fd).st_size > limits.output_bytes_max for fd in outputs)
        if "broken" in report:
            raise SandboxLost(report["broken"])
        wall_s = report.get("wall_s", time.monotonic() - begin_s)
        return watch.verdict(report, stopped, over, texts, limits, wall_s)

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
