"""Long commands on a terminal: a progress bar, and Ctrl-C that asks them to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def interruptible(times: int = 1) -> Iterator[list[bool]]:
    """Ctrl-C, so many times, makes the list longer, which stops the work; once more ends the program."""
    stopped: list[bool] = []

    def stop(*_: object) -> None:
        if len(stopped) == times:
            raise KeyboardInterrupt
        stopped.append(True)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def plan_progress(strategy: str) -> Iterator[Callable[[str, float, float | None], None]]:
    """A progress bar on a terminal; elsewhere long work is silent."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, share, best_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.fields[strategy]:>9}"), TextColumn("{task.description:<32}"), BarColumn())
    figures = (TextColumn("{task.fields[best]}"), TimeElapsedColumn())
    with Progress(*columns, *figures, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=1.0, strategy=str(strategy), best="")

        def show(what: str, share: float, best_s: float | None) -> None:
            best = "" if best_s is None else f"best {best_s:.2f} s"
            bar.update(task, description=what, completed=share, best=best)

        yield show


@contextmanager
def count_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, updated with what is done, how much of it, and of how much; silent elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, of: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
