"""The gateway as a thread: the scheduler over a mailbox that nodes join.

Requests come from other threads (an HTTP server's); a callback gets the tokens of each as they are sampled.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from math import isfinite
from queue import Empty, SimpleQueue

from skippipe.inference.request import TokenLogprobs
from skippipe.runtime.admission import Admission
from skippipe.runtime.messages import (
    ControlMessage,
    EndSequences,
    Failed,
    Heartbeat,
    LinkDown,
    Probe,
    Probed,
    Ready,
    Sampled,
    StepFailed,
)
from skippipe.runtime.rendezvous import CLOSE_LINGER_S, EndedNodes, Rendezvous
from skippipe.serving.node import ServingConfig
from skippipe.serving.routing import RouteCost, ServingRoute, UniformCost
from skippipe.serving.scheduler import EngineFull, Scheduler, ServingSettings, ServingStep
from skippipe.serving.sequence import SequenceRequest, SequenceState
from skippipe.serving.step_protocol import step_messages
from skippipe.transport.keys import THE_COORDINATOR, KeyPair
from skippipe.transport.mailbox import Mailbox

log = logging.getLogger(__name__)

SequenceCallback = Callable[[SequenceState], None]
"""Called on the gateway's thread with every token and at the end of a sequence; must not block."""


class GatewayCallback:
    """Called on the gateway's thread; must not block."""

    def node_ready(self, node: str, stage: int) -> None:
        """A node has the weights of its stage and takes steps from now on."""

    def node_lost(self, node: str, reason: str) -> None: ...

    def happened(self, what: str) -> None:
        """A node was admitted, refused or checked."""

    def failed(self, error: Exception) -> None:
        """The gateway has ended with an error."""


class GatewayThread:
    def __init__(
        self,
        node_config: ServingConfig,
        keys: KeyPair | None,
        publics: Mapping[str, str | None],
        *,
        settings: ServingSettings | None = None,
        cost: RouteCost | None = None,
        listen: str = "127.0.0.1:0",
        ended: EndedNodes = lambda: (),
        callback: GatewayCallback | None = None,
        admission: Admission | None = None,
    ) -> None:
        self._node_config = node_config
        self._ended = ended
        self._admission = admission
        self._callback = callback or GatewayCallback()
        self._names = {number: name for name, number in node_config.number.items()}
        self._mailbox = Mailbox(THE_COORDINATOR, keys, listen=listen, depth=1024)
        self._rendezvous = Rendezvous(
            self._mailbox,
            node_config.stage_of,
            publics,
            host=self,
            on_out_only=lambda name, *_: self._avoid_links(name),
            on_relay=lambda *_: self._relays_changed(),
            on_relay_only=self._relay_only_changed,
            node_config=node_config.to_json(),
            timeout_s=node_config.heartbeat_s,
        )
        if admission is not None:
            admission.follow(self._rendezvous)
        self.stages = len(node_config.layers)
        self._scheduler = Scheduler(self.stages, self, settings or ServingSettings(), cost or UniformCost())
        self._events = Counter({"lost_nodes": 0, "broken_links": 0, "spoiled_steps": 0})
        """Numbers of lost nodes, broken links and failed steps, for the metrics."""
        self.covered_stages = 0
        """Stages that are there for the next answer; 0 where none can be given. To be read by other threads."""
        self.missing: tuple[int, ...] = tuple(range(self.stages))
        """Stages that no node holds, or that no route can reach. To be read by other threads."""
        self.broken_hops: tuple[tuple[int, int], ...] = ()
        """Stages from one to the other of which nothing can be sent. To be read by other threads."""
        self.stage_nodes: tuple[int, ...] = (0,) * self.stages
        """Live nodes of every stage. To be read by other threads."""
        self.stats: dict[str, float] = {}
        """Values for Prometheus; to be read by other threads, and never changed."""
        self._callbacks: dict[int, SequenceCallback] = {}
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        """What other threads want to be done on this one."""
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway", daemon=True)

    @property
    def address(self) -> str:
        return self._mailbox.address

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Stops the nodes and the thread; returns when the nodes have been sent the message."""
        self._stopping.set()
        self._mailbox.wake()
        if self._thread.is_alive():
            self._thread.join(2 * CLOSE_LINGER_S)

    # From other threads

    def submit(self, request: SequenceRequest, updated: SequenceCallback, refused: Callable[[Exception], None]) -> None:
        """`updated` is called whenever the sequence changes, until it has finished; or `refused` gets the error."""

        def submit() -> None:
            try:
                sequence = self._scheduler.submit(request)
            except Exception as error:
                refused(error)
                return
            self._callbacks[sequence.number] = updated

        self._call(submit)
        if self._stopping.is_set():
            refused(EngineFull("the server is being stopped"))

    def cancel(self, updated: SequenceCallback) -> None:
        """Cancels the sequence that was submitted with this callback, if it has not finished."""

        def cancel() -> None:
            for number in [number for number, callback in self._callbacks.items() if callback is updated]:
                self._scheduler.cancel(number)

        self._call(cancel)

    def cancel_all(self) -> None:
        self._call(self._scheduler.close)

    def _call(self, function: Callable[[], None]) -> None:
        self._calls.put(function)
        self._mailbox.wake()

    # The loop

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._turn()
        except Exception as error:
            self._callback.failed(error)
        finally:
            self._stopping.set()
            self._run_calls()
            self._scheduler.close()
            self._rendezvous.close()

    def _turn(self) -> None:
        self._rendezvous.poll()
        self._run_calls()
        for name, reason in self._ended():
            self._rendezvous.declare_lost(name, reason)
        if self._admission is not None:
            for name, reason in self._admission.poll(self._rendezvous):
                self._rendezvous.declare_lost(name, reason)
            for event in self._admission.events():
                self._callback.happened(f"{event.kind}: '{event.name}' {event.text}")
        self._scheduler.tick()
        scheduler = self._scheduler
        self.covered_stages = len(scheduler.reach.stages) if scheduler.is_ready else 0
        self.missing = scheduler.missing
        self.broken_hops = scheduler.reach.broken_hops
        self.stage_nodes = tuple(map(len, scheduler.holders))
        self.stats = {
            "num_requests_running": float(scheduler.num_running),
            "num_requests_waiting": float(scheduler.num_waiting),
            "recomputed_tokens_total": float(scheduler.recomputed_tokens),
            "malformed_messages_total": float(self._rendezvous.malformed.total()),
            **{f"{event}_total": float(count) for event, count in self._events.items()},
        }

    def _run_calls(self) -> None:
        with contextlib.suppress(Empty):
            while True:
                self._calls.get_nowait()()

    # The rendezvous' host

    def joined(self, name: str) -> None:
        """Does nothing: a node takes no steps before it has its weights."""

    def _avoid_links(self, name: str) -> None:
        """A node cannot meet others without a relay that it cannot call, and that cannot call it."""
        for other in self._rendezvous.unreachable_from(name):
            self._scheduler.link_broken(self._node_config.number[name], self._node_config.number[other])

    def _relay_only_changed(self, a: str, b: str, relay_only: bool) -> None:
        """Two nodes cannot call each other, or are to try again."""
        without_relay = self._scheduler.link_broken if relay_only else self._scheduler.link_retried
        change = self._scheduler.link_mended if self._rendezvous.relays else without_relay
        change(self._node_config.number[a], self._node_config.number[b])

    def _relays_changed(self) -> None:
        change = self._scheduler.link_mended if self._rendezvous.relays else self._scheduler.link_broken
        for pair in self._rendezvous.pairs_without_link():
            change(*(self._node_config.number[name] for name in pair))

    def lost(self, name: str, how: str) -> None:
        self._events["lost_nodes"] += 1
        self._scheduler.node_lost(self._node_config.number[name])
        self._callback.node_lost(name, how)

    def refused(self, name: str, why: str) -> None:
        log.warning("'%s' cannot take part: %s", name, why)

    def received(self, name: str, control: ControlMessage) -> None:
        node = self._node_config.number[name]
        match control:
            case Ready():
                self._scheduler.node_joined(node, self._node_config.stage_of[name])
                self._avoid_links(name)
                self._callback.node_ready(name, self._node_config.stage_of[name])
            case Sampled():
                self._sampled(node, control)
            case StepFailed():
                self._step_failed(node, control)
            case LinkDown() if control.peer in self._names:
                self._events["broken_links"] += 1
                self._scheduler.link_reported(node, control.peer)
            case Probed() if control.samples:
                self._scheduler.link_probed(control.probe, node)
            case Failed():
                self._rendezvous.declare_lost(name, control.reason)
            case Heartbeat():
                pass
            case _:
                log.warning("'%s' sends %s, which is not for a gateway", name, type(control).__name__)

    def _sampled(self, node: int, control: Sampled) -> None:
        try:
            if not all(token < self._node_config.vocabulary for token in control.tokens):
                raise ValueError("reports tokens beyond the vocabulary")
            self._scheduler.sampled(control.step, control.tokens, node, self._logprobs(control))
        except ValueError as error:
            self._rendezvous.declare_lost(self._names[node], str(error))

    def _logprobs(self, control: Sampled) -> list[TokenLogprobs]:
        """ValueError if a pair is none of a token and a log-probability."""
        known = range(self._node_config.vocabulary)
        pairs = [pair for row in control.logprobs for pair in row]
        if not all(len(pair) == 2 and pair[0] in known and pair[1] <= 0 and isfinite(pair[1]) for pair in pairs):
            raise ValueError("reports log-probabilities that cannot be")
        return [tuple((int(token), value) for token, value in row) for row in control.logprobs]

    def _step_failed(self, node: int, control: StepFailed) -> None:
        """A node that sent bad input to the next one is declared lost; started again, it may come back."""
        self._events["spoiled_steps"] += 1
        path = self._scheduler.step_failed(control.step, node)
        if path and control.node == path[path.index(node) - 1]:
            self._rendezvous.declare_lost(
                self._names[control.node], f"'{self._names[node]}' got from it {control.reason}"
            )
        elif path:
            log.warning("'%s' cannot compute a step: %s", self._names[node], control.reason)

    # The scheduler's environment

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def start_step(self, step: ServingStep) -> None:
        for node, message in step_messages(step).items():
            self._rendezvous.send(self._names[node], message)

    def close_route(self, route: ServingRoute) -> None:
        for node in route.path:
            self._rendezvous.send(self._names[node], EndSequences(route.number))

    def probe_link(self, number: int, prober: int, peer: int) -> None:
        self._rendezvous.send(self._names[prober], Probe(number, peer))

    def updated(self, sequence: SequenceState) -> None:
        callback = self._callbacks.get(sequence.number)
        if sequence.finish_reason is not None:
            self._callbacks.pop(sequence.number, None)
        if callback is not None:
            callback(sequence)
