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

from skippipe.runtime.control import Alive, Broken, Close, Control, Failed, Ready, Sampled, Spoiled
from skippipe.runtime.member import THE_COORDINATOR
from skippipe.runtime.reception import GOODBYE_S, Attendance, Gone
from skippipe.serving.answering import Share
from skippipe.serving.brief import ServingBrief
from skippipe.serving.feeding import feeds
from skippipe.serving.gateway import Full, Gateway, ServingSettings, Step
from skippipe.serving.lanes import Distance, Even, Lane
from skippipe.serving.streams import Request, Stream
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox, Security

log = logging.getLogger(__name__)

Told = Callable[[Stream], None]
"""Called on the front's thread, with every token and with the ending; must not wait."""


class Watching:
    """Is told what happens, on the front's thread."""

    def holds(self, node: str, stage: int) -> None:
        """It has its weights and takes steps from now on."""

    def gone(self, node: str, how: str) -> None: ...

    def failed(self, error: Exception) -> None:
        """The front is no more."""


@dataclass(frozen=True)
class Seen:
    """How things stand, for other threads to look at."""

    share: Share
    figures: dict[str, float]


class Front:
    def __init__(
        self,
        brief: ServingBrief,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        settings: ServingSettings | None = None,
        distance: Distance | None = None,
        listen: str = "127.0.0.1:0",
        security: Security = "curve",
        gone: Gone = lambda: (),
        watching: Watching | None = None,
    ) -> None:
        self._brief = brief
        self._gone = gone
        self._watching = watching or Watching()
        self._names = {number: name for name, number in brief.number.items()}
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, security=security, depth=1024)
        self._attendance = Attendance(
            self._mailbox, brief.stage_of, publics, host=self, brief=brief.to_json(), silent_s=brief.heartbeat_s
        )
        self.gateway = Gateway(len(brief.layers), self, settings or ServingSettings(), distance or Even())
        self.counted: Counter[str] = Counter()
        """What has happened how often, for whoever watches."""
        self.seen = Seen(Share(0, len(brief.layers)), {})
        self._told: dict[int, Told] = {}
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
            self._thread.join(2 * GOODBYE_S)

    # From other threads

    def submit(self, request: Request, told: Told, refused: Callable[[Exception], None], begun: Told) -> None:
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
            refused(Full("the server is being stopped"))

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
        self._attendance.turn()
        self._do_what_is_asked()
        for name, how in self._gone():
            self._attendance.lose(name, how)
        self.gateway.tick()
        self.seen = self._look()

    def _do_what_is_asked(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._asked.get_nowait()()

    def _look(self) -> Seen:
        gateway = self.gateway
        there = int(gateway.share * gateway.stages) if gateway.is_open else 0
        happened = {f"{what.replace(' ', '_')}_total": float(count) for what, count in self.counted.items()}
        happened["nonsense_total"] = float(self._attendance.nonsense.total())
        figures = {"nodes": float(len(gateway.stage_of)), "streams": float(len(gateway.streams)), **happened}
        return Seen(Share(there, gateway.stages), figures)

    # Who is there

    def joined(self, name: str) -> None:
        """Nothing is asked of it before it has its weights."""

    def lost(self, name: str, how: str) -> None:
        self.counted["lost nodes"] += 1
        self.gateway.lost(self._brief.number[name])
        self._watching.gone(name, how)

    def refused(self, name: str, why: str) -> None:
        log.warning("'%s' cannot take part: %s", name, why)

    def heard(self, name: str, control: Control) -> None:
        node = self._brief.number[name]
        match control:
            case Ready():
                self.gateway.joined(node, self._brief.stage_of[name])
                self._watching.holds(name, self._brief.stage_of[name])
            case Sampled():
                self._sampled(node, control)
            case Spoiled():
                self._spoiled(node, control)
            case Broken() if control.peer in self._names:
                self.counted["broken links"] += 1
                self.gateway.broken(node, control.peer)
            case Failed():
                self._attendance.lose(name, control.reason)
            case Alive():
                pass
            case _:
                log.warning("'%s' says %s, which is not for a gateway", name, type(control).__name__)

    def _sampled(self, node: int, control: Sampled) -> None:
        try:
            if not all(token < self._brief.vocabulary for token in control.tokens):
                raise ValueError("says tokens that nobody knows")
            self.gateway.sampled(control.step, control.tokens, node)
        except ValueError as error:
            self._attendance.lose(self._names[node], str(error))

    def _spoiled(self, node: int, control: Spoiled) -> None:
        """Whoever made what is of no use has to start over, and may come back."""
        self.counted["spoiled steps"] += 1
        path = self.gateway.spoiled(control.step, node)
        if path and control.node == path[path.index(node) - 1]:
            self._attendance.lose(self._names[control.node], f"'{self._names[node]}' got from it {control.reason}")
        elif path:
            log.warning("'%s' cannot do a step: %s", self._names[node], control.reason)

    # What the gateway sees

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def step(self, step: Step) -> None:
        for node, feed in feeds(step).items():
            self._attendance.tell(self._names[node], feed)

    def close_lane(self, lane: Lane) -> None:
        for node in lane.path:
            self._attendance.tell(self._names[node], Close(lane.number))

    def said(self, stream: Stream) -> None:
        told = self._told.get(stream.number)
        if stream.ending is not None:
            self._told.pop(stream.number, None)
        if told is not None:
            told(stream)
