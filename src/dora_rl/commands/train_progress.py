"""What a training run shows while it runs: one table, redrawn in place; plain lines elsewhere."""

from __future__ import annotations

import threading
import time
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table

from dora_rl.core.waits import waits
from dora_rl.runtime.evaluation import FIGURES


class Progress:
    """Reads a run's state now and then; never changes it."""

    def __init__(self, run: Any, *, show: bool) -> None:
        self._run = run
        self._console = Console()
        self._live: Live | None = None
        self._lines: dict[str, float] = {}
        self._show = show
        self._began = time.monotonic()
        run.on_step = self._step
        run.on_wait = self._tell

    def __enter__(self) -> Progress:
        if self._show and self._console.is_terminal:
            self._live = Live(self._table(), console=self._console, refresh_per_second=2)
            self._live.__enter__()
            threading.Thread(target=self._refresh, args=(self._live,), daemon=True).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        live, self._live = self._live, None
        if live is not None:
            live.__exit__(kind, error, trace)

    def _refresh(self, live: Live) -> None:
        while self._live is live:
            time.sleep(0.5)
            live.update(self._table())

    def _step(self, line: dict[str, float]) -> None:
        self._lines |= line
        if self._show and self._live is None:
            if "step" in line:
                self._console.print(
                    f"step {line['step']:4.0f}  reward {line['reward/mean']:.3f}  "
                    f"length {line['response_length/mean']:.0f}  "
                    f"staleness {line['staleness/mean']:.2f}  "
                    f"{line['perf/tokens_per_s']:.0f} tokens/s",
                    highlight=False,
                    soft_wrap=True,
                )
            else:
                text = "  ".join(f"{name} {line[f'eval/{name}']:.3f}" for name in FIGURES)
                head = f"evaluation of version {line['version']:.0f}"
                self._console.print(f"{head}  {text}", highlight=False, soft_wrap=True)

    def _tell(self, lines: list[str]) -> None:
        """Something the user should know now: a watchdog's words, a repair."""
        if self._show:
            for line in lines:
                self._console.print(line, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        state, lines = self._run.state, self._lines
        table = Table(box=None, show_header=False, pad_edge=False)
        steps = f"{state.committed}/{state.params.num_steps}"
        table.add_row("step", f"{steps}  {time.monotonic() - self._began:.0f} s")
        for label, key in (
            ("reward", "reward/mean"),
            ("staleness", "staleness/mean"),
            ("tokens/s", "perf/tokens_per_s"),
            ("length mean", "response_length/mean"),
            ("held-out", "eval/sampled"),
        ):
            if key in lines:
                table.add_row(label, f"{lines[key]:.3g}")
        alive = ", ".join(f"{v.version} ({v.num_active})" for v in list(state.versions.values()))
        table.add_row("versions alive", f"{alive}  (requests running)")
        try:
            found = waits(state)
        except RuntimeError:  # the run changed the state while it was read
            found = []
        for wait in found[:3]:
            table.add_row("waits", f"{wait.who} for {wait.what}")
        return table
