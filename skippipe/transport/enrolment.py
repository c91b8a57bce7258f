"""What a node asks the coordinator's admission before it joins: to be admitted, and how it is seen from there.

Admission listens at the port below the coordinator's own. Connections are encrypted and both sides prove their keys, as
everywhere; the key is that of a member, or the one that follows from an invitation. A request is a JSON object, perhaps
with bytes after it, and gets one reply.
"""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Literal, TypeAlias, TypeVar

import msgspec
import zmq

from skippipe.errors import UserError
from skippipe.transport.addresses import (
    CONNECTION_EVENTS,
    UNFINISHED_HANDSHAKE,
    Place,
    endpoint,
    is_numeric,
    join_address,
    monitor_events,
    split_address,
    split_all,
)
from skippipe.transport.invitation import Invitation
from skippipe.transport.keys import KeyPair
from skippipe.transport.members import NotAdmitted
from skippipe.transport.streams import dial

PIECE_BYTES = 2**18  # of what is sent to measure bandwidth
MOST_BACK = 2**14
LONGEST_TEXT = 400
MOST_FINDINGS = 32
MOST_REQUEST_BYTES = 2**15
CONNECT_S = 5.0  # for a connection to come about
REACH_IN_BRIEF_S = 2.0
RETRY_S = 1.0  # from one attempt to reach the coordinator to the next
HANDSHAKE_BEGUN_S = 8.0  # for the side that connects: less than admission has, see `addresses`
SIGNATURE_BYTES, SIGNATURE_ENDS = 10, (0xFF, 0x7F)  # what ZeroMQ sends when a connection is there
REPLY_S = 10.0  # for an answer to a small request
CALLED_PREFIX = b"skippipe calls back "

Text = Annotated[str, msgspec.Meta(max_length=LONGEST_TEXT)]
Address = Annotated[str, msgspec.Meta(max_length=600)]
Level = Literal["ok", "warning", "wrong"]


class Finding(msgspec.Struct, frozen=True):
    """What a check has found, in one line; if something is wrong, with what to do about it."""

    check: Annotated[str, msgspec.Meta(max_length=20)]
    level: Level
    text: Text


class Request(msgspec.Struct, frozen=True, tag_field="ask", tag=str.lower, forbid_unknown_fields=True):
    """Base of all requests."""


class Enrol(Request, frozen=True):
    """Admit this public key under the name of the invitation that the connection was made with."""

    public: Annotated[str, msgspec.Meta(min_length=40, max_length=40)]
    version: Text


class Check(Request, frozen=True):
    """Say what is known of this node, and what it is to bring."""

    version: Text
    address: Address = ""
    """Where it will listen; empty: not known."""


class Call(Request, frozen=True):
    """Connect to this address, and send the number there."""

    address: Address
    number: Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]


class Piece(Request, frozen=True):
    """Take the bytes that follow, and send so many back."""

    back: Annotated[int, msgspec.Meta(ge=0, le=MOST_BACK)] = 0


class Report(Request, frozen=True):
    """What this node has found out about itself, for the event log."""

    findings: Annotated[list[Finding], msgspec.Meta(max_length=MOST_FINDINGS)]


class Reply(msgspec.Struct, frozen=True, tag_field="say", tag=str.lower, forbid_unknown_fields=True):
    """Base of all replies."""


class Refused(Reply, frozen=True):
    reason: str


class Admitted(Reply, frozen=True):
    name: str


class Checked(Reply, frozen=True):
    name: str
    version: str
    time_s: float
    """The coordinator's clock."""
    closed: str = ""
    """Why the invitation admits nobody any more; empty if it does, or if this is a member."""
    other: str = ""
    """Where another node is at work under this name; empty: there is none."""
    device: str = ""
    """What the job computes on; empty: not known."""
    memory_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    """What the plan needs on this node; 0: not known."""
    unplaced: str = ""
    """Why a member of this name cannot take part in the run that goes on; empty: it can."""


class Called(Reply, frozen=True):
    failure: str
    """Why the address could not be reached; empty: it could."""


class Taken(Reply, frozen=True):
    """Bytes or findings have arrived; perhaps bytes follow."""

    count: int
    back: int = 0


AnyRequest: TypeAlias = Enrol | Check | Call | Piece | Report
AnyReply: TypeAlias = Refused | Admitted | Checked | Called | Taken
_requests = msgspec.json.Decoder(AnyRequest)
_replies = msgspec.json.Decoder(AnyReply)
Expected = TypeVar("Expected", bound=Reply)


def read_request(frame: bytes) -> AnyRequest:
    """UserError, short and in one line, for anything else."""
    found: AnyRequest = _read(_requests, frame)
    return found


def read_reply(frame: bytes) -> AnyReply:
    found: AnyReply = _read(_replies, frame)
    return found


def _read(decoder: msgspec.json.Decoder[Expected], frame: bytes) -> Expected:
    if len(frame) > MOST_REQUEST_BYTES:
        raise UserError(f"{len(frame)} bytes, where {MOST_REQUEST_BYTES} are the most")
    try:
        return decoder.decode(frame)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise UserError(f"no request: {ascii(str(error))[:100]}") from None


def plain(text: str) -> str:
    """A text of another machine in one line that can be printed."""
    return "".join(each if each.isprintable() else " " for each in text)[:LONGEST_TEXT]


def admission_address(coordinator: str) -> str:
    """Where a coordinator admits, from where it listens: at the port below."""
    places = split_all(coordinator)
    if any(port < 2 for _, port in places):
        raise UserError(f"{coordinator}: the port of a coordinator is at least 2: admission is at the one below")
    return ",".join(join_address(host, port - 1) for host, port in places)


class Refusal(Enum):
    """Why there is no conversation with a coordinator."""

    NO_ANSWER = "does not answer"
    KEY_UNKNOWN = "does not know this key"
    OTHER_KEY = "is not the coordinator that this key or invitation is for"


class NoConversation(Exception):
    """A coordinator that does not talk to this node; the argument says why."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.value)
        self.refusal = refusal


class AdmissionClient:
    """A connection to a coordinator's admission. NoConversation if no machine has the name in its address."""

    def __init__(self, coordinator: str, keys: KeyPair, coordinator_public: str) -> None:
        host, port = split_address(admission_address(coordinator))
        if not is_numeric(host):
            host, port = _answering(join_address(host, port))
        self._context = zmq.Context(1)
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.setsockopt(zmq.IPV6, int(":" in host))
        self._dealer.setsockopt(zmq.SNDHWM, 64)
        self._dealer.setsockopt(zmq.MAXMSGSIZE, MOST_REQUEST_BYTES)
        self._dealer.setsockopt(zmq.RECONNECT_IVL, -1)
        self._dealer.setsockopt(zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_BEGUN_S))
        self._dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
        self._dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._dealer.setsockopt(zmq.CURVE_SERVERKEY, coordinator_public.encode())
        self._monitor = self._dealer.get_monitor_socket(CONNECTION_EVENTS)
        self._poller = zmq.Poller()
        self._poller.register(self._dealer, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._dealer.connect(endpoint(host, port))

    def __enter__(self) -> AdmissionClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._dealer.disable_monitor()
        self._monitor.close(linger=0)
        self._dealer.close(linger=0)
        self._context.term()

    def ask(self, request: AnyRequest, expected: type[Expected], within_s: float = REPLY_S) -> Expected:
        """The reply; UserError if the coordinator refuses, NoConversation if there is none."""
        deadline = time.monotonic() + within_s
        self._send([msgspec.json.encode(request)], deadline)
        return self._reply(expected, deadline)

    def send_pieces(self, count: int, back: int = 0, times: int = 1, within_s: float = REPLY_S) -> float:
        """Send so many bytes, several times at once, and wait until they are there and others are back; gives the
        seconds that this took."""
        began_s = time.monotonic()
        for _ in range(times):
            self._send([msgspec.json.encode(Piece(back)), bytes(count)], time.monotonic() + within_s)
        for _ in range(times):
            if self._reply(Taken, time.monotonic() + within_s).count != count:
                raise NoConversation(Refusal.NO_ANSWER)
        return time.monotonic() - began_s

    def _send(self, frames: list[bytes], deadline: float) -> None:
        while True:
            try:
                self._dealer.send_multipart(frames, zmq.NOBLOCK)
                return
            except zmq.Again:  # the queue is full; or the connection has failed, and there will be no room
                self._wait(zmq.POLLOUT, deadline)

    def _reply(self, expected: type[Expected], deadline: float) -> Expected:
        self._wait(zmq.POLLIN, deadline)
        try:
            reply = read_reply(self._dealer.recv_multipart()[0])
        except UserError:
            raise NoConversation(Refusal.OTHER_KEY) from None
        if isinstance(reply, Refused):
            raise UserError(plain(reply.reason))
        if not isinstance(reply, expected):
            raise NoConversation(Refusal.OTHER_KEY)
        return reply

    def _wait(self, what: int, deadline: float) -> None:
        """Wait until something can be sent or received; NoConversation if the connection fails before."""
        self._poller.modify(self._dealer, what)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(self._poller.poll(math.ceil(1000 * left_s)))
            if self._dealer in ready:
                return
            for event in monitor_events(self._monitor):
                if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    raise NoConversation(Refusal.KEY_UNKNOWN)
                if event in (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL):
                    raise NoConversation(Refusal.OTHER_KEY)
                if event in (UNFINISHED_HANDSHAKE, zmq.EVENT_DISCONNECTED):
                    raise NoConversation(Refusal.NO_ANSWER)
        raise NoConversation(Refusal.NO_ANSWER)


def _answering(address: str) -> Place:
    """Which of the addresses that a name stands for answers."""
    try:
        with dial([address]) as stream:
            host, port = stream.getpeername()[:2]
            return str(host), int(port)
    except OSError:
        raise NoConversation(Refusal.NO_ANSWER) from None


@dataclass(frozen=True)
class Reach:
    """Whether a TCP connection to an address comes about."""

    address: str
    failure: str = ""
    """Why not; empty: it does."""
    is_dropped: bool = False
    """Nothing came back at all: packets are dropped on the way."""
    is_other: bool = False
    """Another program than SkipPipe listens there."""


def reach(address: str, timeout_s: float = CONNECT_S, greeting: bytes = b"", *, heard: bool = False) -> Reach:
    """Connect, send the greeting if there is one, and close. Of several addresses, to the first that answers. If it has
    to be `heard`, what listens there must greet as ZeroMQ does, which a coordinator speaks."""
    try:
        with dial([join_address(*place) for place in split_all(address)], timeout_s) as connection:
            if greeting:
                connection.send(greeting)  # short: the first packet takes it
            if heard and not _greets(connection, timeout_s):
                return Reach(address, "what listens at this port is no SkipPipe coordinator", is_other=True)
        return Reach(address)
    except TimeoutError:
        return Reach(address, f"nothing came back in {timeout_s:g} s", is_dropped=True)
    except socket.gaierror:
        return Reach(address, "no machine of this name is known")
    except ConnectionRefusedError:
        return Reach(address, "nothing listens at this port")
    except OSError as error:
        return Reach(address, (error.strerror or str(error)).lower())


def _greets(connection: socket.socket, timeout_s: float) -> bool:
    """Whether the other side begins as ZeroMQ does, at once and without being asked (ZMTP 3: 10 bytes of signature)."""
    deadline, found = time.monotonic() + timeout_s, b""
    while len(found) < SIGNATURE_BYTES and (left_s := deadline - time.monotonic()) > 0:
        connection.settimeout(left_s)
        try:
            more = connection.recv(SIGNATURE_BYTES - len(found))
        except OSError:
            return False
        if not more:
            return False
        found += more
    return len(found) == SIGNATURE_BYTES and (found[0], found[-1]) == SIGNATURE_ENDS


def reach_all(addresses: list[str], timeout_s: float = CONNECT_S, *, heard: bool = False) -> list[Reach]:
    """All addresses side by side, so that one that is silent does not hold up the others; those that answer first."""
    with ThreadPoolExecutor(max(1, len(addresses))) as pool:
        tries = [pool.submit(reach, each, timeout_s, heard=heard) for each in addresses]
        done = [each.result() for each in as_completed(tries)]
    return sorted(done, key=lambda found: bool(found.failure))


def enrol(
    invitation: Invitation, public: str, version: str, patience_s: float, waiting: Callable[[str], None]
) -> tuple[str, ...]:
    """Have a new key admitted; gives the coordinator's addresses, the one that answers first. NotAdmitted if it is
    refused, UserError if the coordinator has not answered for so long; `waiting` is called with the first failure."""
    deadline = time.monotonic() + patience_s
    told, others = False, set[str]()
    while True:
        found = reach_all([admission_address(each) for each in invitation.addresses])
        for each in found:
            if each.failure:
                continue
            coordinator = next(some for some in invitation.addresses if admission_address(some) == each.address)
            try:
                with AdmissionClient(coordinator, invitation.keys, invitation.coordinator) as client:
                    client.ask(Enrol(public, version), Admitted)
                return (coordinator, *(some for some in invitation.addresses if some != coordinator))
            except UserError as error:
                raise NotAdmitted(str(error)) from None
            except NoConversation as error:
                if error.refusal is Refusal.KEY_UNKNOWN:
                    raise NotAdmitted(f"{coordinator}: this invitation is not known there; ask for a new one") from None
                once = coordinator not in others and time.monotonic() < deadline  # it may have ended at that moment
                if error.refusal is Refusal.OTHER_KEY and once:
                    others.add(coordinator)
                elif error.refusal is Refusal.OTHER_KEY:
                    raise NotAdmitted(f"{coordinator}: {error}; check who sent it, and ask for a new one") from None
        why = "; ".join(f"{each.address}: {each.failure or Refusal.NO_ANSWER.value}" for each in found)
        if time.monotonic() > deadline:
            raise UserError(
                f"waited {patience_s:g} s for the coordinator: {why}; is it started, and are its ports open?"
            )
        if not told:
            waiting(why)
        told = True
        time.sleep(min(RETRY_S, max(0.0, deadline - time.monotonic())))  # nobody is there who could wake us
