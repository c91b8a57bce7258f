"""What a node's computer does: one thing at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from skippipe.runtime.work import Work


class Agenda:
    """Chores wait in a row. Nothing that runs can be called back: if it is given up, its result is of no use."""

    def __init__(self, start: Callable[[Work], None]) -> None:
        self.doing: Work | None = None
        self.void = False
        """What runs was given up."""
        self._start = start
        self._chores: deque[Work] = deque()

    def add(self, chore: Work) -> None:
        self._chores.append(chore)

    def start(self, work: Work) -> None:
        self.doing = work
        self._start(work)

    def start_chore(self) -> bool:
        """The next one, if there is one; whether there is."""
        if not self._chores:
            return False
        self.start(self._chores.popleft())
        return True

    def give_up(self, *kinds: type[Work]) -> None:
        """Work of some kinds, whether it waits or runs."""
        self._chores = deque(each for each in self._chores if not isinstance(each, kinds))
        self.void = self.void or isinstance(self.doing, kinds)

    def finished(self) -> bool:
        """Nothing runs any more; whether what ran is of use."""
        void, self.void, self.doing = self.void, False, None
        return not void
