"""Messages that come late, or come again, as from the buffer of a connection that has been replaced since."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random

from skippipe.costs import ns
from skippipe.runtime.faults import Fault

LATER_S = (0.0005, 0.02, 0.5, 4.0, 15.0)  # roughly: within an iteration, or many lives later


class Echoes:
    """What comes again, and when, follows from the fault alone."""

    def __init__(self) -> None:
        self._faults: list[tuple[Fault, Random]] = []
        self._last_ns: dict[tuple[int, int], int] = {}
        """Sender and receiver → when the last word arrives; those that follow do not overtake it."""

    def begin(self, fault: Fault) -> None:
        self._faults.append((fault, Random(str(fault))))

    def end(self, fault: Fault) -> None:
        self._faults = [each for each in self._faults if each[0] is not fault]

    def of(self, sender: int, receiver: int) -> Iterator[int]:
        """A message is sent: after how many nanoseconds it comes once more."""
        for fault, random in self._faults:
            if (sender in fault.nodes or receiver in fault.nodes) and random.random() < fault.share:
                yield ns(random.choice(LATER_S) * random.uniform(0.5, 1.5))

    def arrival_ns(self, sender: int, receiver: int, now_ns: int) -> int:
        """When a word between a node and the coordinator arrives, so that words of both sides cross on their way."""
        at_ns = max(now_ns, self._last_ns.get((sender, receiver), 0))
        for fault, random in self._faults:
            if fault.late_s and (sender in fault.nodes or receiver in fault.nodes):
                at_ns = max(at_ns, now_ns + ns(fault.late_s * random.random()))
        self._last_ns[sender, receiver] = at_ns
        return at_ns
