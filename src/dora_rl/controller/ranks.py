"""The ranks of the learner: started together, told the same in the same order."""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from dora_rl.setup.layout import Layout
from dora_rl.workers.messages import Message
from dora_rl.workers.pool import Workers


class Ranks:
    """One worker each, named as the layout says."""

    def __init__(self, workers: Workers, layout: Layout, run_dir: Path) -> None:
        self._workers, self._layout, self._run_dir = workers, layout, run_dir

    def start(self) -> None:
        """All ranks begin together; one that is still there ends first."""
        rendezvous = prepare_rendezvous(self._run_dir)
        names = self._layout.learners
        for name in names:
            if name in self._workers.workers:
                self._workers.kill(name)
        for name in names:
            self._workers.start("learner", name, self._layout.learner_extra(name, rendezvous))

    def send(self, message: Message) -> None:
        for name in self._layout.learners:
            self._workers.send(name, message)


def prepare_rendezvous(run_dir: Path) -> Path:
    """A file that no group of ranks has used, where the next one finds itself together."""
    folder = run_dir / "meeting"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    return folder / secrets.token_hex(8)
