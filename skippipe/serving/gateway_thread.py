"""The gateway as a process's thread: its state machine over a real mailbox, and answers for those who wait.

Requests come from other threads (an HTTP server's); each is told of its tokens as they are made.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from skippipe.runtime.messages import (
    ControlMessage,
    EndSequences,
    Failed,
    Heartbeat,
    LinkDown,
    Ready,
    Sampled,
    StepFailed,
)
from skippipe.runtime.node.agent import THE_COORDINATOR
from skippipe.runtime.rendezvous import CLOSE_LINGER_S, EndedNodes, Rendezvous
from skippipe.serving.engine_client import StageCoverage
from skippipe.serving.node.role import ServingConfig
from skippipe.serving.routing import LinkCost, ServingRoute, UniformCost
from skippipe.serving.scheduler import (
    EngineFull,
    Scheduler,
    SequenceRequest,
    SequenceState,
    ServingSettings,
    ServingStep,
)
from skippipe.serving.step_protocol import step_messages
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, Security

log = logging.getLogger(__name__)

SequenceCallback = Callable[[SequenceState], None]
"""Called on the front's thread, with every token and with the ending; must not wait."""


class GatewayCallback:
    """Is told what happens, on the front's thread."""

    def holds(self, node: str, stage: int) -> None:
        """It has its weights and takes steps from now on."""

    def gone(self, node: str, how: str) -> None: ...

    def failed(self, error: Exception) -> None:
        """The front is no more."""


@dataclass(frozen=True)
class GatewayStatus:
    """How things stand, for other threads to look at."""

    share: StageCoverage
    figures: dict[str, float]


class GatewayThread:
    def __init__(
        self,
        node_config: ServingConfig,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        settings: ServingSettings | None = None,
        distance: LinkCost | None = None,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        gone: EndedNodes = lambda: (),
        watching: GatewayCallback | None = None,
    ) -> None:
        self._node_config = node_config
        self._gone = gone
        self._watching = watching or GatewayCallback()
        self._names = {number: name for name, number in node_config.number.items()}
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._attendance = Rendezvous(
            self._mailbox,
            node_config.stage_of,
            publics,
            host=self,
            node_config=node_config.to_json(),
            timeout_s=node_config.heartbeat_s,
        )
        self.gateway = Scheduler(
            len(node_config.layers), self, settings or ServingSettings(), distance or UniformCost()
        )
        self.counted: Counter[str] = Counter()
        """What has happened how often, for whoever watches."""
        self.seen = GatewayStatus(StageCoverage(0, len(node_config.layers)), {})
        self._told: dict[int, SequenceCallback] = {}
        self._asked: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def address(self) -> str:
        return self._mailbox.address

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Nodes are told to end; returns when that is said."""
        self._over.set()
        self._mailbox.wake()
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_LINGER_S)

    # From other threads

    def submit(
        self,
        request: SequenceRequest,
        told: SequenceCallback,
        refused: Callable[[Exception], None],
        begun: SequenceCallback,
    ) -> None:
        """`begun` gets the stream, by which it can be cancelled; or `refused` says why there is none."""

        def ask() -> None:
            try:
                stream = self.gateway.submit(request)
            except Exception as error:
                refused(error)
                return
            self._told[stream.number] = told
            begun(stream)

        self._ask(ask)
        if self._over.is_set():
            refused(EngineFull("the server is being stopped"))

    def cancel(self, number: int) -> None:
        self._ask(lambda: self.gateway.cancel(number))

    def hang_up(self) -> None:
        """Whoever is being answered is told that it is over."""
        self._ask(self.gateway.close)

    def _ask(self, what: Callable[[], None]) -> None:
        self._asked.put(what)
        self._mailbox.wake()

    # The loop

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self._turn()
        except Exception as error:
            self._watching.failed(error)
        finally:
            self._over.set()
            self._do_what_is_asked()
            self.gateway.close()
            self._attendance.close()

    def _turn(self) -> None:
        self._attendance.poll()
        self._do_what_is_asked()
        for name, how in self._gone():
            self._attendance.declare_lost(name, how)
        self.gateway.tick()
        self.seen = self._look()

    def _do_what_is_asked(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._asked.get_nowait()()

    def _look(self) -> GatewayStatus:
        gateway = self.gateway
        there = int(gateway.share * gateway.stages) if gateway.is_open else 0
        happened = {f"{what.replace(' ', '_')}_total": float(count) for what, count in self.counted.items()}
        happened["nonsense_total"] = float(self._attendance.malformed.total())
        figures = {"nodes": float(len(gateway.stage_of)), "streams": float(len(gateway.streams)), **happened}
        return GatewayStatus(StageCoverage(there, gateway.stages), figures)

    # Who is there

    def joined(self, name: str) -> None:
        """Nothing is asked of it before it has its weights."""

    def lost(self, name: str, how: str) -> None:
        self.counted["lost nodes"] += 1
        self.gateway.lost(self._node_config.number[name])
        self._watching.gone(name, how)

    def refused(self, name: str, why: str) -> None:
        log.warning("'%s' cannot take part: %s", name, why)

    def received(self, name: str, control: ControlMessage) -> None:
        node = self._node_config.number[name]
        match control:
            case Ready():
                self.gateway.joined(node, self._node_config.stage_of[name])
                self._watching.holds(name, self._node_config.stage_of[name])
            case Sampled():
                self._sampled(node, control)
            case StepFailed():
                self._spoiled(node, control)
            case LinkDown() if control.peer in self._names:
                self.counted["broken links"] += 1
                self.gateway.broken(node, control.peer)
            case Failed():
                self._attendance.declare_lost(name, control.reason)
            case Heartbeat():
                pass
            case _:
                log.warning("'%s' says %s, which is not for a gateway", name, type(control).__name__)

    def _sampled(self, node: int, control: Sampled) -> None:
        try:
            if not all(token < self._node_config.vocabulary for token in control.tokens):
                raise ValueError("says tokens that nobody knows")
            self.gateway.sampled(control.step, control.tokens, node)
        except ValueError as error:
            self._attendance.declare_lost(self._names[node], str(error))

    def _spoiled(self, node: int, control: StepFailed) -> None:
        """Whoever made what is of no use has to start over, and may come back."""
        self.counted["spoiled steps"] += 1
        path = self.gateway.spoiled(control.step, node)
        if path and control.node == path[path.index(node) - 1]:
            self._attendance.declare_lost(
                self._names[control.node], f"'{self._names[node]}' got from it {control.reason}"
            )
        elif path:
            log.warning("'%s' cannot do a step: %s", self._names[node], control.reason)

    # What the gateway sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def step(self, step: ServingStep) -> None:
        for node, feed in step_messages(step).items():
            self._attendance.send(self._names[node], feed)

    def close_lane(self, lane: ServingRoute) -> None:
        for node in lane.path:
            self._attendance.send(self._names[node], EndSequences(lane.number))

    def said(self, stream: SequenceState) -> None:
        told = self._told.get(stream.number)
        if stream.ending is not None:
            self._told.pop(stream.number, None)
        if told is not None:
            told(stream)
