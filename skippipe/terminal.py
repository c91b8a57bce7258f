"""Commands on a terminal: progress bars, tables, and Ctrl-C that asks long work to end, as SIGTERM does."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

LINE_EVERY_S = 5.0
STALLED_S = 5.0  # without a better plan: from then on a search is not called improving


@contextmanager
def interruptible(times: int = 1) -> Iterator[list[int]]:
    """Ctrl-C, so many times, makes the list of signals longer, which stops the work; once more ends the program."""
    stopped: list[int] = []

    def stop(number: int, _frame: object) -> None:
        if len(stopped) == times:
            raise KeyboardInterrupt
        stopped.append(number)

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def rich_progress(*columns: str | ProgressColumn, transient: bool = True) -> Progress:
    """Progress bars on stderr with these columns; transient ones disappear when they are closed."""
    from rich.console import Console
    from rich.progress import Progress

    return Progress(*columns, console=Console(stderr=True), transient=transient)


def print_table(
    headings: Sequence[str],
    rows: Iterable[Sequence[str]],
    left: Container[int] = (),
    unwrapped: int = 0,
    file_width: int | None = None,
    **look: Any,
) -> None:
    """Print a table on stdout, `file_width` wide where that is no terminal; columns in `left` are aligned left, and the
    first ones, so many, are not wrapped."""
    from rich.console import Console
    from rich.table import Table

    table = Table(**look)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index in left else "right", no_wrap=index < unwrapped)
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else file_width, markup=False).print(table)


class ProgressBar:
    """A bar that appears when there is progress to show, and lines above it."""

    def __init__(self, *, transient: bool = False) -> None:
        """A transient bar disappears when it is closed."""
        self._transient = transient
        self._progress: Any = None

    def show(self, done: int, total: int, text: str) -> None:
        if self._progress is None:  # rich starts a thread: not before there is something to show
            from rich.progress import BarColumn, MofNCompleteColumn

            columns = (MofNCompleteColumn(), BarColumn(), "{task.description}")
            self._progress = rich_progress(*columns, transient=self._transient)
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


class Trend:
    """The best plan so far, and since when it is the best."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._best_s: float | None = None
        self._since = clock()

    def describe(self, best_s: float | None) -> str:
        """The best plan and its trend in words; empty if there is no plan yet."""
        if best_s is None:
            return ""
        if best_s != self._best_s:  # lower; or the first of another plan
            self._best_s, self._since = best_s, self._clock()
        same_s = self._clock() - self._since
        return f"best {best_s:.2f} s, " + ("still improving" if same_s < STALLED_S else f"the same for {same_s:.0f} s")


class SearchLog:
    """Lines on stderr, for output that is not a terminal."""

    def __init__(self, strategy: str, trend: Trend, clock: Callable[[], float] = time.monotonic) -> None:
        self._strategy, self._trend, self._clock = strategy, trend, clock
        self._last = self._called = clock()
        self._doing = ""

    def __call__(self, what: str, share: float, best_s: float | None) -> None:
        best, now = self._trend.describe(best_s), self._clock()
        if self._doing not in ("", what) and now - self._called >= LINE_EVERY_S:  # such as compiling: there was no news
            print(f"{self._strategy}: {self._doing} took {now - self._called:.0f} s", file=sys.stderr, flush=True)
        self._doing, self._called = what, now
        if now - self._last >= LINE_EVERY_S:
            self._last = now
            line = f"{self._strategy}: {what}, {share:.0%}" + (f", {best}" if best else "")
            print(line, file=sys.stderr, flush=True)


@contextmanager
def plan_progress(strategy: str) -> Iterator[Callable[[str, float, float | None], None]]:
    """What a search does, its best plan so far and whether that still improves: a bar on a terminal, elsewhere a line
    every few seconds."""
    if sys.stderr is None:
        yield lambda what, share, best_s: None
        return
    trend = Trend()
    if not sys.stderr.isatty():
        yield SearchLog(strategy, trend)
        return
    from rich.progress import BarColumn, TimeElapsedColumn

    columns = (f"{strategy:>9}", "{task.description:<32}", BarColumn(), "{task.fields[best]}", TimeElapsedColumn())
    with rich_progress(*columns) as bar:
        task = bar.add_task("starting", total=1.0, best="")

        def show(what: str, share: float, best_s: float | None) -> None:
            bar.update(task, description=what, completed=share, best=trend.describe(best_s))

        yield show


@contextmanager
def count_progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on a terminal, updated with what is done, how much of it, and of how much; silent elsewhere."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda what, done, of: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, TimeRemainingColumn

    with rich_progress("{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()) as bar:
        task = bar.add_task("", total=None)
        yield lambda what, done, of: bar.update(task, description=what, completed=done, total=of)
