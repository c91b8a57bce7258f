"""The coordinator of profiling as a process: its state machine over a mailbox, with the nodes of a launcher."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

from skippipe.heartbeat import PROFILING_TIMEOUT
from skippipe.launch.launcher import Launcher
from skippipe.profiling.config import ProfilingConfig
from skippipe.profiling.coordinator import ProfilingCallback, ProfilingCoordinator, ProfilingDeadlines
from skippipe.profiling.results import ProfileResult
from skippipe.runtime.messages import ControlMessage
from skippipe.runtime.node.agent import THE_COORDINATOR
from skippipe.runtime.rendezvous import EndedNodes, Rendezvous
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, Security


def profile_nodes(
    node_config: ProfilingConfig,
    launcher: Launcher,
    callback: ProfilingCallback,
    *,
    listen: str = "127.0.0.1:0",
    deadlines: ProfilingDeadlines | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> ProfileResult:
    """Measure the nodes of a launcher, which is closed in the end."""
    try:
        keys = launcher.prepare().public_keys
        server = ProfilingServer(
            node_config, launcher.keys, keys, listen=listen, deadlines=deadlines, callback=callback
        )
        launcher.start(server.address)
        return server.run(launcher.ended, stopped)
    finally:
        launcher.close()


class ProfilingServer:
    """What the coordinator sees of the world, and the loop around it."""

    def __init__(
        self,
        node_config: ProfilingConfig,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        deadlines: ProfilingDeadlines | None = None,
        callback: ProfilingCallback | None = None,
    ) -> None:
        self._node_config = node_config
        self._callback = callback or ProfilingCallback()
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._rendezvous = Rendezvous(
            self._mailbox,
            node_config.names,
            publics,
            host=self,
            node_config=node_config.to_json(),
            timeout_s=PROFILING_TIMEOUT * node_config.heartbeat_s,
        )
        self.coordinator = ProfilingCoordinator(
            node_config.names,
            node_config.work,
            node_config.workload,
            self,
            self._callback,
            node_config.effort,
            deadlines or ProfilingDeadlines(),
        )

    @property
    def address(self) -> str:
        return self._mailbox.address

    def run(self, gone: EndedNodes = lambda: (), stopped: Callable[[], bool] = lambda: False) -> ProfileResult:
        """Measure until all is done, or until `stopped`: then the result has what was measured so far."""
        try:
            while not self.coordinator.over and not stopped():
                self._turn(gone)
        finally:
            self._rendezvous.close()
        return self.coordinator.result(datetime.now(UTC).isoformat(timespec="seconds"))

    # ProfilingEnv

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def tell(self, node: int, control: ControlMessage) -> None:
        self._rendezvous.send(self._node_config.names[node], control)

    # MembershipCallback

    def joined(self, name: str) -> None:
        self.coordinator.joined(self._node_config.number[name])

    def received(self, name: str, control: ControlMessage) -> None:
        self.coordinator.hear(self._node_config.number[name], control)

    def lost(self, name: str, how: str) -> None:
        self.coordinator.lost(self._node_config.number[name], how)

    def refused(self, name: str, why: str) -> None:
        self._callback.happened(f"'{name}' is left out: {why}")

    def _turn(self, gone: EndedNodes) -> None:
        self._rendezvous.poll()
        for name, how in gone():
            if not self._rendezvous.declare_lost(name, how):
                self.lost(name, how)  # it has ended before it joined
        self.coordinator.tick()
