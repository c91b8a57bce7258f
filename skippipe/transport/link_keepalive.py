"""Keepalive of a link: a connection of its own, on which ZeroMQ sends probes and the other side answers.

A link can be cut silently: packets are dropped, and neither side notices until TCP gives up on what it has sent, which
takes many seconds, or never where nothing is sent. ZeroMQ's heartbeat probes at an interval and gives up when no answer
comes. On the connection that carries messages it could not be used, because its answer would wait behind
tensors of many megabytes, and a healthy slow link would count as dead. Here nothing else is sent, so an answer only
waits for the network. Both ways are tested, for a probe and its answer have to pass. Both ends of it live in
ZeroMQ's own threads: a process that computes or imports answers like any other, one that is stopped does not.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import zmq

from skippipe.heartbeat import LINK_PROBES, PROBE_UNANSWERED
from skippipe.transport.addresses import (
    CONNECT_S,
    CONNECTION_EVENTS,
    Context,
    Socket,
    endpoint,
    monitor_events,
    push_socket,
)

RECONNECT_MOST_MS = 1000


class LinkHeartbeat:
    """The side that probes. The other one needs nothing but a mailbox."""

    def __init__(
        self, context: Context, secure: Callable[[Socket], None], host: str, port: int, heartbeat_s: float
    ) -> None:
        """`secure` gives a socket its keys; host and port are those that messages go to as well."""
        self._unanswered_s = PROBE_UNANSWERED * heartbeat_s
        self.answered = False
        """The other side has answered at least once."""
        self.silent_since: float | None = time.monotonic()
        """Since when there is no answer, by `time.monotonic`; none: there is."""
        push = self._push = push_socket(context, host, 1, RECONNECT_MOST_MS)
        push.setsockopt(zmq.HANDSHAKE_IVL, round(CONNECT_S * 1000))
        push.setsockopt(zmq.HEARTBEAT_IVL, max(1, round(heartbeat_s / LINK_PROBES * 1000)))
        push.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, round(self._unanswered_s * 1000)))
        secure(push)
        self.monitor = push.get_monitor_socket(CONNECTION_EVENTS)
        push.connect(endpoint(host, port))

    def changed(self) -> bool:
        """Read the monitor's events; whether the answers have stopped, or come again."""
        before = self.silent_since
        for event in monitor_events(self.monitor):
            if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.answered, self.silent_since = True, None
            elif event == zmq.EVENT_DISCONNECTED and self.answered and self.silent_since is None:
                self.silent_since = time.monotonic() - self._unanswered_s
        return before != self.silent_since

    def close(self) -> None:
        self._push.disable_monitor()
        self.monitor.close(linger=0)
        self._push.close(linger=0)
