"""How long a search may go on: a number of steps, which makes it repeatable, and seconds, which makes it end."""

from __future__ import annotations

from collections.abc import Callable

LOOK_EVERY = 4  # steps between two looks at the clock


class Effort:
    """Counts steps against its limits; the clock and the wish to stop are passed in."""

    def __init__(
        self,
        steps: int,
        seconds: float,
        clock: Callable[[], float],
        stopped: Callable[[], bool] = lambda: False,
        on_step: Callable[[int, int], None] = lambda spent, steps: None,
    ) -> None:
        self.steps = steps
        self.spent = 0
        self._over = False
        self._deadline = clock() + seconds
        self._clock = clock
        self._stopped = stopped
        self._on_step = on_step

    def spend(self) -> bool:
        """Take one step, if there is one left."""
        if self._over or self.spent >= self.steps:
            return False
        if self.spent % LOOK_EVERY == 0:
            self._on_step(self.spent, self.steps)
            self._over = self._stopped() or self._clock() >= self._deadline
            if self._over:
                return False
        self.spent += 1
        return True
