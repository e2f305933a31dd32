"""What commands show while they work: live on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from dora_rl.core.waits import waits
from dora_rl.observe.eval_figures import Figures, failed_text, has_failed

if TYPE_CHECKING:
    from dora_rl.sim.compare import Job, See
    from dora_rl.sim.run import ModeResult

SHOWN = ("greedy", "sampled", "pass_at_k", "tail_greedy", "tail_sampled")
_WIDTH_MIN = 120


def console() -> Console:
    """Standard output. Tables keep their width in a file or a pipe."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH_MIN)


@contextmanager
def showing_runs(names: Sequence[str]) -> Iterator[See]:
    """Of simulations: one line per flow, the runs it has done and the last of them."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:

        def tell(name: str, job: Job, result: ModeResult) -> None:
            # In a thread of the pool, which must go on when nobody reads any more. The console
            # would end the thread there.
            with suppress(OSError):
                print(f"{name}: {describe(result)}", file=sys.stderr, flush=True)

        yield tell
        return
    columns = (SpinnerColumn(finished_text="·"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True) as progress:
        tasks = {name: progress.add_task(f"{name:14}", total=None) for name in names}
        num_runs = dict.fromkeys(names, 0)

        def see(name: str, job: Job, result: ModeResult) -> None:
            num_runs[name] += 1
            progress.update(
                tasks[name],
                description=f"{name:14} {num_runs[name]:3} runs, last {describe(result)}",
            )

        yield see


def describe(result: ModeResult) -> str:
    from dora_rl.sim.report import duration, split_text

    return f"{split_text(result)}: {duration(result.step_s)} a step"


def step_line(line: dict[str, Any]) -> str:
    rate = f"  lr {line['lr']:.3g}" if "lr" in line else ""
    return (
        f"step {line['step']:4.0f}  reward {line['reward/mean']:.3f}  "
        f"length {line['response_length/mean']:.0f}  staleness {line['staleness/mean']:.2f}"
        f"{rate}  {line['perf/tokens_per_s']:.0f} tokens/s"
    )


def evaluation_line(line: dict[str, Any]) -> str:
    """An evaluation in one line: its scores, and what failed."""
    found: Figures = {name.removeprefix("eval/"): value for name, value in line.items()}
    head, failed = f"evaluation of version {line['version']:.0f}", failed_text(found)
    if has_failed(found):
        return f"{head}  failed: {failed}"
    text = "  ".join(
        f"{name} {value:.3f}" for name in SHOWN if isinstance(value := found.get(name), float)
    )
    return f"{head}  {text}" + (f"  ({failed})" if failed else "")


class TrainProgress:
    """Of a training run: one table, redrawn in place. Reads its state and never changes it.
    `hear` gets each line that it is told, too."""

    def __init__(
        self, run: Any, *, show: bool, hear: Callable[[dict[str, Any]], None] | None = None
    ) -> None:
        self._run, self._show, self._hear = run, show, hear
        self._console, self._began = Console(), time.monotonic()
        self._live: Live | None = None
        self._lines: dict[str, Any] = {}
        run.notify.on_step, run.notify.on_lines = self._step, self._tell

    @contextmanager
    def showing(self) -> Iterator[None]:
        """A table on a terminal, redrawn twice a second; elsewhere `_step` writes lines."""
        if not self._show or not self._console.is_terminal:
            yield
            return
        try:
            with Live(
                get_renderable=self._table, console=self._console, refresh_per_second=2
            ) as self._live:
                yield
        finally:
            self._live = None

    def _step(self, line: dict[str, Any]) -> None:
        self._lines |= line
        if self._show and self._live is None:
            self._tell([step_line(line) if "step" in line else evaluation_line(line)])
        if self._hear is not None:
            self._hear(line)

    def _tell(self, lines: list[str]) -> None:
        """Something the user should know now: a watchdog's words, a repair."""
        if self._show:
            for line in lines:
                self._console.print(line, highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        state, lines = self._run.state, self._lines
        table = Table(box=None, show_header=False, pad_edge=False)
        table.add_row(
            "step",
            f"{state.committed}/{state.params.num_steps}  {time.monotonic() - self._began:.0f} s",
        )
        for label, key in (
            ("reward", "reward/mean"),
            ("staleness", "staleness/mean"),
            ("tokens/s", "perf/tokens_per_s"),
            ("length mean", "response_length/mean"),
            ("learning rate", "lr"),
            ("held-out", "eval/sampled"),
        ):
            if lines.get(key) is not None:
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
