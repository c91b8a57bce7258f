"""The conductor as a process: its state machine over a real mailbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from skippipe.profiling.brief import ProfilingBrief
from skippipe.profiling.conductor import Conductor, Deadlines, Watching
from skippipe.profiling.survey import Survey
from skippipe.runtime.control import Control
from skippipe.runtime.member import THE_COORDINATOR
from skippipe.runtime.reception import Attendance, Gone
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, Security

SILENT = 3  # times the heartbeat, after which a node counts as gone


class ProfilingDesk:
    """What the conductor sees of the world, and the loop around it."""

    def __init__(
        self,
        brief: ProfilingBrief,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        deadlines: Deadlines | None = None,
        watching: Watching | None = None,
    ) -> None:
        self._brief = brief
        self._watching = watching or Watching()
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._attendance = Attendance(
            self._mailbox, brief.names, publics, host=self, brief=brief.to_json(), silent_s=SILENT * brief.heartbeat_s
        )
        self.conductor = Conductor(
            brief.names, brief.work, brief.workload, self, self._watching, brief.effort, deadlines or Deadlines()
        )

    @property
    def address(self) -> str:
        return self._mailbox.address

    def run(self, gone: Gone = lambda: (), stopped: Callable[[], bool] = lambda: False) -> Survey:
        """Until all is measured, or somebody wants it to end: then, what was measured so far."""
        try:
            while not self.conductor.over and not stopped():
                self._turn(gone)
        finally:
            self._attendance.close()
        return self.conductor.survey(datetime.now(UTC).isoformat(timespec="seconds"))

    # What the conductor sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def tell(self, node: int, control: Control) -> None:
        self._attendance.tell(self._brief.names[node], control)

    # Who is there

    def joined(self, name: str) -> None:
        self.conductor.joined(self._brief.number[name])

    def heard(self, name: str, control: Control) -> None:
        self.conductor.hear(self._brief.number[name], control)

    def lost(self, name: str, how: str) -> None:
        self.conductor.lost(self._brief.number[name], how)

    def refused(self, name: str, why: str) -> None:
        self._watching.happened(f"'{name}' is left out: {why}")

    def _turn(self, gone: Gone) -> None:
        self._attendance.turn()
        for name, how in gone():
            if not self._attendance.lose(name, how):
                self.lost(name, how)  # it has ended before it ever said hello
        self.conductor.tick()
