"""The conductor as a process: its state machine over a real mailbox."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from math import inf
from typing import Any

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.profiling.brief import ProfilingBrief
from skippipe.profiling.conductor import Conductor, Deadlines, Watching
from skippipe.profiling.survey import Survey
from skippipe.runtime.control import Control, Hello, Meet, Stop, Welcome, from_json, to_json
from skippipe.runtime.member import THE_COORDINATOR
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, NotConnected, QueueFull, Security
from skippipe.transport.message import Kind, Message, Received

log = logging.getLogger(__name__)
TURN_S = 0.2  # at most, from one look at the deadlines to the next
GOODBYE_S = 1.0
SILENT = 3  # times the heartbeat, after which a node counts as gone

Gone = Callable[[], Iterable[tuple[str, str]]]
"""Nodes that are known to have ended since it was last asked, and how."""


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
        self.nonsense: Counter[str] = Counter()
        """Peer → control messages that were none."""
        self._brief = brief
        self._publics = publics
        self._watching = watching or Watching()
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        for name in brief.names:
            self._mailbox.allow(name, publics[name])
        self._addresses: dict[str, str] = {}
        self._parted: dict[str, tuple[str, float]] = {}
        """Where those who are gone were last, and from when on they may be told that they count as gone."""
        self._heard: dict[str, float] = {}
        """Node → when it last gave a sign of life."""
        self._turned = time.monotonic()
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
            for name in list(self._addresses):
                self._tell(name, Stop(""))
            self._mailbox.close(GOODBYE_S)
        return self.conductor.survey(datetime.now(UTC).isoformat(timespec="seconds"))

    def close(self) -> None:
        self._mailbox.close()

    # What the conductor sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def tell(self, node: int, control: Control) -> None:
        self._tell(self._brief.names[node], control)

    # The loop

    def _turn(self, gone: Gone) -> None:
        for received in self._mailbox.receive(TURN_S):
            self._deliver(received)
        for name, how in gone():
            self._part(name)
            self.conductor.lost(self._brief.number[name], how)  # it may have ended before it ever said hello
        for lost in self._mailbox.lost():
            self._lost(lost.peer, f"its connection: {lost.reason}")
        now, before = time.monotonic(), self._turned
        self._turned = now
        patience_s = SILENT * self._brief.heartbeat_s
        if now - before > patience_s / 2:  # we were held up, and they may have spoken
            self._heard = dict.fromkeys(self._heard, now)
        for name in [name for name, heard in self._heard.items() if now - heard > patience_s]:
            self._lost(name, f"no sign of life for {patience_s:g} s")
        self.conductor.tick()

    def _deliver(self, received: Received) -> None:
        name, message = received.peer, received.message
        try:
            if message.kind is not Kind.CONTROL:
                raise UserError("a tensor where there should be none")
            control = from_json(message.body)
        except UserError as error:
            self.nonsense[name] += 1
            if self.nonsense[name] == 1:
                log.warning("nonsense from '%s' (later ones are only counted): %s", name, error)
            return
        if isinstance(control, Hello):
            self._greet(name, control)
        elif name in self._addresses:
            self._heard[name] = time.monotonic()
            self.conductor.hear(self._brief.number[name], control)
        else:
            self._answer_a_ghost(name)

    def _greet(self, name: str, hello: Hello) -> None:
        self._lost(name, "it was started again")
        try:
            self._mailbox.connect(name, hello.address, self._publics[name])
        except UserError as error:
            self._watching.happened(f"'{name}' is left out: {error}")
            return
        if hello.version != __version__:
            self._watching.happened(f"'{name}' is left out: it runs skippipe {hello.version}, this is {__version__}")
            self._tell(name, Stop(f"skippipe {hello.version} here, {__version__} where the others are: use one"))
            self._mailbox.disconnect(name, GOODBYE_S)
            return
        self._addresses[name] = hello.address
        self._parted.pop(name, None)
        self._heard[name] = time.monotonic()
        self._tell(name, Welcome(self._brief.to_json(), self._introduced(self._brief.names), {}))
        for other in self._addresses:
            if other != name:
                self._tell(other, Meet(self._introduced([name])))
        self.conductor.joined(self._brief.number[name])

    def _lost(self, name: str, how: str) -> None:
        if self._part(name):
            self.conductor.lost(self._brief.number[name], how)

    def _part(self, name: str) -> bool:
        """Whether it was there. It stays out, unless it says hello again."""
        address = self._addresses.pop(name, None)
        if address is None:
            return False
        self._parted[name] = address, time.monotonic()
        del self._heard[name]
        self._mailbox.disconnect(name)
        return True

    def _answer_a_ghost(self, name: str) -> None:
        """It was taken for dead and is not: it may say hello again."""
        address, told_from = self._parted.get(name, ("", inf))
        now = time.monotonic()
        if now >= told_from:
            self._parted[name] = address, now + self._brief.heartbeat_s
            self._mailbox.connect(name, address, self._publics[name])
            self._tell(name, Stop("you were taken for dead", again=True))

    def _introduced(self, names: Iterable[str]) -> dict[str, Any]:
        return {name: [self._addresses.get(name, ""), self._publics[name]] for name in names}

    def _tell(self, name: str, control: Control) -> None:
        try:
            self._mailbox.send(name, Message(Kind.CONTROL, 0, 0, 0, 0, to_json(control)))
        except (NotConnected, QueueFull) as error:
            log.warning("'%s' does not take messages: %s", name, type(error).__name__)
