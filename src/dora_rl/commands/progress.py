"""Progress of simulated runs on stderr: live lines on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dora_rl.sim.compare import Job, See
from dora_rl.sim.report import duration, split_text
from dora_rl.sim.run import ModeResult

_WIDTH_MIN = 120


def console() -> Console:
    """Standard output. Tables keep their width in a file or a pipe."""
    found = Console()
    return found if found.is_terminal else Console(width=_WIDTH_MIN)


@contextmanager
def showing(names: Sequence[str]) -> Iterator[See]:
    """Shows one line per flow, the runs it has done and the last of them."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield lambda name, job, result: stderr.print(
            f"{name}: {describe(result)}", highlight=False, soft_wrap=True
        )
        return
    columns = (SpinnerColumn(finished_text="·"), TextColumn("{task.description}"))
    with Progress(*columns, TimeElapsedColumn(), console=stderr, transient=True) as progress:
        tasks = {name: progress.add_task(f"{name:14}", total=None) for name in names}
        num_runs = dict.fromkeys(names, 0)

        def see(name: str, job: Job, result: ModeResult) -> None:
            num_runs[name] += 1
            text = f"{name:14} {num_runs[name]:3} runs, last {describe(result)}"
            progress.update(tasks[name], description=text)

        yield see


def describe(result: ModeResult) -> str:
    return f"{split_text(result)}: {duration(result.step_s)} a step"
