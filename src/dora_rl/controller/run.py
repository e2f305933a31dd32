"""A run from its start to its end: one thread that hears workers, tells the core, keeps time.

    workers --Envelope--> Inbox --(by role)--> handlers --event--> Control --> Loop --> core.step
                                                                                 |
    workers <--Message-- ports (fleet, learner, rewards, keeper) <--actions-------+--> log

The run owns none of the decisions and none of the hands: `build` has given each part what it uses.
Workers are processes, not threads: on a CPU each decodes or trains with its own interpreter, and a
crash of one never takes the run with it. (In the inline world they are objects of this process.)
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

from dora_rl.config import RunConfig
from dora_rl.controller.evaluation import KeptVersions
from dora_rl.controller.inbox import Inbox
from dora_rl.controller.loop import Control
from dora_rl.controller.recovery import GpuUse, Staff
from dora_rl.controller.run_dir import RunFiles, config_digest, write_config
from dora_rl.controller.watchdog import Garbage, Watchdog
from dora_rl.controller.world import Notify, World
from dora_rl.core import actions as act
from dora_rl.core import events as ev
from dora_rl.setup.layout import Layout
from dora_rl.workers.last_words import DISK_ERRORS
from dora_rl.workers.pool import Workers

TICK_S = 0.5


class Run:
    """One `dora-rl train`. `state` and `notify` are for whoever watches it."""

    def __init__(
        self,
        config: RunConfig,
        layout: Layout,
        control: Control,
        files: RunFiles,
        world: World,
        inbox: Inbox,
        workers: Workers,
        staff: Staff,
        kept: KeptVersions,
        notify: Notify,
    ) -> None:
        self._config, self._layout, self._control, self._files = config, layout, control, files
        self._world, self._inbox, self._workers, self._staff = world, inbox, workers, staff
        self._kept, self.notify, self.state = kept, notify, control.state
        self._watchdog = Watchdog(files.run_dir / "watchdog.jsonl", config.runtime.watchdog_s)
        self._garbage = Garbage()
        self._gpu: GpuUse | None = None

    def run(self, interrupted: Callable[[], bool | str]) -> act.Stop:
        """Until the core says stop and the last evaluation is in, or until it is interrupted (a
        text says why). A full disk, no memory and a run directory that is gone stop it too."""
        try:
            self._start()
            return self._loop(interrupted)
        except (*DISK_ERRORS, MemoryError) as error:
            line = self._files.refused(error)
            if line is None:
                raise  # a mistake of ours
            self._control.stop = act.Stop(line, done=False)
            return self._control.stop

    def _start(self) -> None:
        self._world.begin(lambda: self._inbox.read_next(TICK_S))
        config, files, control = self._config, self._files, self._control
        self._gpu = GpuUse(self._layout.device, mps=config.runtime.mps)
        if freed := files.versions.hold() >> 20:
            self.notify(f"{freed} MiB of shared memory given back that killed runs had left")
        shutil.rmtree(self._layout.transfer_root, ignore_errors=True)
        self._layout.transfer_root.mkdir(parents=True)
        missing = self._kept.missing(self.state.committed) if files.is_resumed else []
        self.notify(*files.clear({*missing, *self._kept.best()}))
        begun = ev.Resumed if files.is_resumed else ev.Started
        control.handle(begun(files.params, config=config_digest(config)))
        self._go_back()
        for version in self._kept.missing(self.state.committed) if files.is_resumed else ():
            self._kept.ask(version)
        write_config(config, files.run_dir)  # the core has not refused it
        if control.stop is None:
            self._staff.start_training()
        if not self._is_settled() or control.stop is None:
            self._staff.start_scoring()

    def _go_back(self) -> None:
        """To the last durable version, where the newest was lost with its host."""
        version, lost = self._files.goes_back_to, self.state.committed
        if version is None or self._control.stop is not None:
            return
        self._files.versions.rewind(version)
        self._control.handle(ev.Rewound(version))
        self.notify(
            f"version {lost} was lost with the host's shared memory before it was on disk: the "
            f"run goes back to version {version} and trains step {version} again"
        )

    def _loop(self, interrupted: Callable[[], bool | str]) -> act.Stop:
        ticked = 0.0
        while self._control.stop is None or not self._is_settled():
            if why := interrupted():
                self._interrupt(why if isinstance(why, str) else "interrupted")
                break
            self._inbox.read_next(TICK_S)
            now = time.monotonic()
            if now - ticked >= TICK_S:
                ticked = now
                self._tick()
        assert self._control.stop is not None
        return self._control.stop

    def _interrupt(self, why: str) -> None:
        if self._control.stop is None:
            self._control.handle(ev.StopRequested(why))
        else:
            self._control.stop = act.Stop(f"{why} before the last evaluation", done=False)

    def _tick(self) -> None:
        if not self._files.lock.is_there():
            self._control.stop = act.Stop(self._files.gone_line(), done=False)
            return
        self._control.handle(ev.Tick())
        self._files.records.tick(is_training=self._control.stop is None)
        self._garbage.tick()
        self._world.tick()
        self._staff.check_time()
        if self._control.stop is None:
            lines = self._watchdog.look(self.state, self._staff.num_answered)
            self.notify(*lines, *(self._staff.waits() if lines else ()))

    def _is_settled(self) -> bool:
        stop = self._control.stop
        return stop is None or not stop.done or not self._staff.evaluates

    def kill_all(self) -> None:
        """The second signal: nobody is asked."""
        self._workers.kill_all()

    def close(self) -> dict[str, Any]:
        """End the workers and write the summary. What the disk has no room for is left out."""
        files, stop = self._files, self._control.stop
        summary: dict[str, Any] = {}
        try:
            if stop is None or not stop.done:
                files.records.cut_short()
            self._workers.end(self._config.runtime.grace_s)
            try:
                summary = self._summary(stop.reason if stop is not None else "cut off")
                files.close()
            except DISK_ERRORS as error:
                if not files.may_be_unwritten(error):
                    raise
            shutil.rmtree(self._layout.transfer_root, ignore_errors=True)
            files.versions.release()
            files.lock.release()
            self._garbage.end()
        finally:
            self._world.close()
        return summary

    def _summary(self, reason: str) -> dict[str, Any]:
        records, config = self._files.records, self._config
        cores = self._layout.num_cores if config.runtime.world != "ray" else 0
        since, until = records.training_began, records.step_began
        idle = self._gpu.end(since, until) if self._gpu is not None else None
        mode, steps = self._files.params.mode.value, self.state.committed
        best, aside = config.checkpoint, self.state.set_aside
        return records.summary(mode, steps, reason, cores, idle, best, aside)
