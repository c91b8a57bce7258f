"""A node that is measured: first it computes, then it probes links to others and answers their probes.

A state machine like the one that trains, over the same sockets: what it sends are tensors along a path, as far as the
transport can tell. Every one is answered at once by a small one; both carry the number of the probe and of the
message, so that a late answer is not taken for another one.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any

from skippipe.codecs import EncodedTensor
from skippipe.profiling.link_probe import SMALL_BYTES, LinkProbe, ProbeSettings
from skippipe.runtime.messages import COORDINATOR, Computed, ControlMessage, Hello, Probe, Probed, Stop
from skippipe.runtime.node.interfaces import NodeEnv
from skippipe.runtime.state_source import StateSource
from skippipe.transport.message import Message, ProbePiece

log = logging.getLogger(__name__)
PING, PONG = 0, 1  # the direction of a message that measures a link


@dataclass(frozen=True)
class RunPasses:
    """What its executor is asked to do, once (see `compute_bench`)."""


class ProfilingNode:
    epoch = 0

    def __init__(self, number: int, nodes: int, effort: ProbeSettings, env: NodeEnv) -> None:
        self.stopped: Stop | None = None
        self.dropped: Counter[tuple[int, str]] = Counter()
        """Sender and what was wrong → how many such messages were dropped."""
        self._number = number
        self._nodes = nodes
        self._effort = effort
        self._env = env
        self._probe: Probe | None = None
        self._probing = LinkProbe(effort)
        self._step = 0
        self._sent_ns = 0
        self._prober: int | None = None
        """The node that probes the link to this one, or was the last to do so."""
        self._computes = False

    @property
    def doing(self) -> str:
        if self._probe is not None:
            return f"measuring the link to node {self._probe.peer}"
        return "computing" if self._computes else "waiting to be measured"

    def hello(self, address: str, version: str) -> Hello:
        """Greet a new coordinator, which does not wait for the result of an earlier probe."""
        self._probe = None
        return Hello(address, version)

    def executor_ready(self, _origin: StateSource | None, _assignment: int) -> None:
        self._computes = True
        self._env.start(RunPasses())

    def finished(self, _work: Any, result: Computed) -> None:
        self._computes = False
        self._env.send_control(result)

    # Input

    def handle_control(self, control: ControlMessage) -> None:
        match control:
            case Probe() if 0 <= control.peer < self._nodes and control.peer != self._number:
                self._probe, self._probing, self._step = control, LinkProbe(self._effort), 0
                self._send_next()
            case Stop():
                self.stopped = control
            case _:
                self._drop(COORDINATOR, type(control).__name__)

    def receive(self, sender: int, message: Message) -> None:
        header = message.header
        if not isinstance(header, ProbePiece) or message.body is None:
            self._drop(sender, message.kind.label)
        elif header.direction == PING:
            self._prober = sender
            self._env.send(sender, _message(header.probe, PONG, header.step, SMALL_BYTES))
        elif self._probe and (sender, header.probe, header.step) == (self._probe.peer, self._probe.probe, self._step):
            self._probing.took((self._env.now_ns() - self._sent_ns) / 1e9)
            self._step += 1
            self._send_next()
        else:
            self._drop(sender, "a late answer")

    def handle_peer_control(self, sender: int, control: ControlMessage) -> None:
        self._drop(sender, type(control).__name__)

    # Actions

    def decide(self) -> None:
        """Report what there is when an answer has not come in time."""
        if self._probe and self._env.now_ns() - self._sent_ns > 1e9 * self._effort.patience_s:
            self._report(self._probe)

    def active_peers(self) -> set[int]:
        """The node whose link it probes, and the one that it answers."""
        measured = self._probe.peer if self._probe else None
        return {each for each in (measured, self._prober) if each is not None}

    def reconnected(self, _peer: int) -> None:
        """A connection broke and came back: a message that was on its way may be lost, and its answer is then late."""

    def retry_requests(self, _timeout_ns: int) -> None:
        """Nothing is repeated."""

    def _send_next(self) -> None:
        assert self._probe is not None
        size = self._probing.next_bytes()
        if size is None:
            self._report(self._probe)
            return
        message = _message(self._probe.probe, PING, self._step, size)
        self._sent_ns = self._env.now_ns()
        self._env.send(self._probe.peer, message)

    def _report(self, probe: Probe) -> None:
        self._probe = None
        self._env.send_control(Probed(probe.probe, [[float(size), took_s] for size, took_s in self._probing.samples]))

    def _drop(self, sender: int, what: str) -> None:
        self.dropped[sender, what] += 1
        if self.dropped[sender, what] == 1:
            log.warning("dropped from %s: %s (later ones are only counted)", sender, what)


def _message(probe: int, direction: int, step: int, size: int) -> Message:
    return Message(ProbePiece(probe, direction, step), EncodedTensor("fp32", (size // 4,), bytes(size)))
