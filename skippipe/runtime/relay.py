"""The process of a relay: it is a member like a node, and takes grants from whichever coordinator runs.

It keeps one port open, for streams (`transport.relay`); what the coordinator has to say comes over a stream that the
relay itself opens. While there is no coordinator, streams that are joined stay so, and the relay waits for the next
run: it ends when it is told to, when its key is refused or revoked, and not before.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import cycle
from math import inf

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.runtime.fencing import Incarnation, stamp_of
from skippipe.runtime.message_json import control_of, stamped
from skippipe.runtime.messages import Hello, RelayGrant, Stop
from skippipe.runtime.relay_pool import RELAY_HELLO_S
from skippipe.transport.enrolment import AdmissionClient, Call, Called, NoConversation
from skippipe.transport.keys import THE_COORDINATOR, KeyPair
from skippipe.transport.mailbox import OUT_ONLY, LossReason, Mailbox, NotConnected, QueueFull
from skippipe.transport.message import Received
from skippipe.transport.relay import Relay, RelayLoad
from skippipe.transport.token_gate import HEX_TOKEN, TOKEN_BYTES

REFUSED_S = 15.0  # for a coordinator that has just started to let this relay in
POLL_S = 0.2
CALL_BACK_S = 8.0  # for the coordinator to try to connect to this relay
LOAD_EVERY_S = 60.0  # from one line about the load to the next

log = logging.getLogger(__name__)


class RelayAgent:
    def __init__(
        self, name: str, keys: KeyPair, coordinator: str, coordinator_public: str, relay: Relay, address: str
    ) -> None:
        """`coordinator` and `address`, at which nodes dial the relay: host:port, several with commas between them."""
        self._relay = relay
        self._address = address
        self._keys = keys
        self._public = coordinator_public
        self._addresses = cycle(coordinator.split(","))
        self._mailbox = Mailbox(name, keys, listen=OUT_ONLY, trusted=THE_COORDINATOR)
        self._mailbox.allow(THE_COORDINATOR, coordinator_public)
        self._coordinator = ""
        self._incarnation = Incarnation(secrets.randbits(62) + 1)
        self._secret = b""
        """Secret of the streams to this coordinator, in this connection; empty: there is none."""
        self._dialled_at, self._hello_at = -inf, 0.0
        self._refused_since: float | None = None
        self._load_at = time.monotonic() + LOAD_EVERY_S
        self._told = relay.load

    def run(self, stopped: Callable[[], bool] = lambda: False, tell: Callable[[str], None] = log.info) -> None:
        """Relay until told to end; UserError if the coordinator refuses this relay. `tell` gets a line about the load
        now and then, and one if the coordinator cannot reach this relay; the latter from another thread."""
        try:
            while not stopped():
                for received in self._mailbox.receive(POLL_S):
                    self._take(received)
                self._check_connection(tell)
                self._say_hello()
                self._tell_load(tell)
        finally:
            self._mailbox.close(POLL_S)
            self._relay.close()

    def _check_connection(self, tell: Callable[[str], None]) -> None:
        now = time.monotonic()
        for lost in self._mailbox.lost():
            if lost.reason is LossReason.REFUSED:
                self._refused_since = self._refused_since or now
                if now > self._refused_since + REFUSED_S:
                    raise UserError(
                        f"the coordinator at {self._coordinator} refuses this relay: its key is not on the list of "
                        "members, or was revoked; have it invited with 'skippipe invite --relay'"
                    )
            elif lost.reason is LossReason.HANDSHAKE:
                log.warning(
                    "%s: the program there does not hold the coordinator's key, or has just ended", self._coordinator
                )
            elif lost.reason is LossReason.UNFINISHED:
                log.info("%s: connections come about, and nothing arrives; waiting for it", self._coordinator)
            else:
                log.info("the coordinator is gone; waiting for it, or for the next")
        if THE_COORDINATOR in self._mailbox.connected:
            self._refused_since = None
            if not self._secret:
                self._secret = secrets.token_bytes(TOKEN_BYTES)
                self._mailbox.be_callable(self._coordinator, self._secret)
                self._hello_at = now
                asking = partial(self._ask_to_be_called, self._coordinator, tell)
                threading.Thread(target=asking, name="is it reached", daemon=True).start()
        elif self._mailbox.attempt_is_over(THE_COORDINATOR, self._dialled_at):
            self._secret, self._dialled_at = b"", now
            self._coordinator = next(self._addresses)
            self._mailbox.connect(THE_COORDINATOR, self._coordinator, self._public)

    def _ask_to_be_called(self, coordinator: str, tell: Callable[[str], None]) -> None:
        """Tell if the coordinator, and so perhaps nobody, can connect to this relay."""
        with suppress(NoConversation, UserError), AdmissionClient(coordinator, self._keys, self._public) as client:
            for address in self._address.split(","):
                failure = client.ask(Call(address, secrets.token_hex(16)), Called, CALL_BACK_S).failure
                if failure:
                    tell(
                        f"warning: the coordinator cannot reach this relay at {address}: {failure}; open or forward "
                        "this TCP port, or say with --address where nodes reach it"
                    )

    def _say_hello(self) -> None:
        if self._secret and time.monotonic() >= self._hello_at:
            self._hello_at = time.monotonic() + RELAY_HELLO_S
            limits = self._relay.limits
            rates = [limits.bytes_per_s, limits.node_bytes_per_s, float(self._relay.load.streams)]
            hello = Hello(self._address, __version__, callback=self._secret.hex(), relay=rates)
            try:
                self._mailbox.send(THE_COORDINATOR, stamped(hello, self._incarnation.stamp()))
            except (NotConnected, QueueFull):
                log.debug("the coordinator does not take messages")

    def _take(self, received: Received) -> None:
        if not self._incarnation.accepts(stamp_of(received.message)):
            return
        try:
            control = control_of(received.message)
        except UserError as error:
            log.warning("a message of the coordinator cannot be read: %s", error)
            return
        if isinstance(control, RelayGrant) and HEX_TOKEN.fullmatch(control.secret):
            self._relay.grant(control.caller, control.callee, bytes.fromhex(control.secret))
        elif isinstance(control, Stop) and control.reason and not control.again:
            raise UserError(control.reason)

    def _tell_load(self, tell: Callable[[str], None]) -> None:
        now, load = time.monotonic(), self._relay.load
        if now >= self._load_at:
            if load != self._told:
                tell(load_line(load, self._told, LOAD_EVERY_S + now - self._load_at))
            self._load_at, self._told = now + LOAD_EVERY_S, load


def load_line(load: RelayLoad, before: RelayLoad, seconds: float) -> str:
    """What a relay does, in a line for people and for a log."""
    moved = load.forwarded_bytes - before.forwarded_bytes
    return (
        f"relay: {load.streams} streams of {load.nodes} nodes, {moved / 1e6 / seconds:.1f} MB/s, "
        f"{load.forwarded_bytes / 1e6:.1f} MB so far, {load.refused} refused"
    )
