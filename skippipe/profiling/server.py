"""The conductor as a process: its state machine over a real mailbox."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from skippipe.heartbeat import PROFILING_TIMEOUT
from skippipe.profiling.config import ProfilingConfig
from skippipe.profiling.coordinator import ProfilingCallback, ProfilingCoordinator, ProfilingDeadlines
from skippipe.profiling.results import ProfileResult
from skippipe.runtime.messages import ControlMessage
from skippipe.runtime.node.agent import THE_COORDINATOR
from skippipe.runtime.rendezvous import EndedNodes, Rendezvous
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, Security


class ProfilingServer:
    """What the conductor sees of the world, and the loop around it."""

    def __init__(
        self,
        node_config: ProfilingConfig,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        deadlines: ProfilingDeadlines | None = None,
        watching: ProfilingCallback | None = None,
    ) -> None:
        self._node_config = node_config
        self._watching = watching or ProfilingCallback()
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._attendance = Rendezvous(
            self._mailbox,
            node_config.names,
            publics,
            host=self,
            node_config=node_config.to_json(),
            timeout_s=PROFILING_TIMEOUT * node_config.heartbeat_s,
        )
        self.conductor = ProfilingCoordinator(
            node_config.names,
            node_config.work,
            node_config.workload,
            self,
            self._watching,
            node_config.effort,
            deadlines or ProfilingDeadlines(),
        )

    @property
    def address(self) -> str:
        return self._mailbox.address

    def run(self, gone: EndedNodes = lambda: (), stopped: Callable[[], bool] = lambda: False) -> ProfileResult:
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

    def tell(self, node: int, control: ControlMessage) -> None:
        self._attendance.send(self._node_config.names[node], control)

    # Who is there

    def joined(self, name: str) -> None:
        self.conductor.joined(self._node_config.number[name])

    def received(self, name: str, control: ControlMessage) -> None:
        self.conductor.hear(self._node_config.number[name], control)

    def lost(self, name: str, how: str) -> None:
        self.conductor.lost(self._node_config.number[name], how)

    def refused(self, name: str, why: str) -> None:
        self._watching.happened(f"'{name}' is left out: {why}")

    def _turn(self, gone: EndedNodes) -> None:
        self._attendance.poll()
        for name, how in gone():
            if not self._attendance.declare_lost(name, how):
                self.lost(name, how)  # it has ended before it ever said hello
        self.conductor.tick()
