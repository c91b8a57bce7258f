"""Long commands on a terminal: a progress bar, and Ctrl-C that asks them to end."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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


class ProgressBar:
    """A bar that appears when there is progress to show, and lines above it."""

    def __init__(self, *, transient: bool = False) -> None:
        """Transient: it disappears when it is closed."""
        self._transient = transient
        self._progress: Any = None

    def show(self, done: int, total: int, text: str) -> None:
        if self._progress is None:  # rich starts a thread: not before there is something to show
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=Console(stderr=True), transient=self._transient)
            self._progress.start()
            self._task = self._progress.add_task("", total=total)
        self._progress.update(self._task, completed=done, total=total, description=text)

    def print(self, line: str) -> None:
        if self._progress is not None:
            self._progress.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()


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
