"""The coordinator's admission: a thread that answers those who want to join, at the port below the coordinator's own.

libzmq asks once per connection whether a key is let in: those of members are, and those that follow from invitations,
also if they are over, so that a second use gets an answer, and is logged with the time and the address. All others get
no further than the handshake. With the key of an invitation one can be admitted, once, and be told how one is seen from
here; nothing of the run. Requests are small, and so many a minute of one key.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal

import msgspec
import zmq
from zmq.utils import z85

from skippipe import __version__
from skippipe.errors import UserError
from skippipe.transport.addresses import bind, keep_alive, split_all
from skippipe.transport.enrolment import (
    CALLED_PREFIX,
    PIECE_BYTES,
    Admitted,
    AnyReply,
    Call,
    Called,
    Check,
    Checked,
    Enrol,
    Finding,
    Piece,
    Reach,
    Refused,
    Report,
    Taken,
    admission_address,
    plain,
    reach,
    read_request,
)
from skippipe.transport.keys import Z85_KEY, KeyPair, PeerList, RevokedKey
from skippipe.transport.members import MemberStore, NotAdmitted, fingerprint, why_closed
from skippipe.transport.zap_auth import KEY_BYTES, ZAP_DOMAIN, ZAP_ENDPOINT, ZAP_FRAMES

log = logging.getLogger(__name__)
HANDSHAKE_S = 10.0
POLL_S = 0.05  # from one look at calls under way, and at the wish to stop, to the next
CLOSE_S = 10.0
CALL_S = 3.0  # for a connection back to a node
MOST_CALLS = 4  # at once
MOST_QUEUED = 64
MINUTE_S = 60.0
MOST_A_MINUTE: dict[type, int] = {Enrol: 20, Check: 60, Call: 12, Piece: 512, Report: 12, RevokedKey: 3}
"""Requests of one key, and connections with one that was revoked."""


@dataclass(frozen=True)
class AdmissionEvent:
    """Something for the event log."""

    kind: Literal["admitted", "refused", "checked"]
    text: str
    name: str = ""


@dataclass(frozen=True)
class NodeNeeds:
    """What a node is to bring, as far as it is known."""

    device: str = ""
    memory_bytes: int = 0
    unplaced: str = ""
    """Why no node of this name can take part; empty: one can."""


class AdmissionServer:
    def __init__(
        self,
        store: MemberStore,
        keys: KeyPair,
        coordinator: str,
        *,
        clock: Callable[[], float] = time.time,
        needs: Callable[[str], NodeNeeds] = lambda name: NodeNeeds(),
        at_work: Callable[[], Mapping[str, str]] = dict,
    ) -> None:
        """`coordinator` is where the coordinator listens. `at_work` gives the addresses of the nodes that are
        connected, and `needs` what a node is to bring; both are called from another thread."""
        self._store = store
        self._clock = clock
        self._needs = needs
        self._at_work = at_work
        self._events: SimpleQueue[AdmissionEvent] = SimpleQueue()
        self._known = PeerList({})
        self._requests: Counter[tuple[str, type]] = Counter()
        self._minute = 0
        self._refused = 0
        self._stopping = threading.Event()
        self._slow: list[tuple[Future[AnyReply], bytes]] = []
        """Replies for which another machine is called first, and whom they are for."""
        self._pool = ThreadPoolExecutor(MOST_CALLS, "admission")
        self.address = admission_address(coordinator)
        self._context = zmq.Context(1)
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(ZAP_ENDPOINT)  # before anybody can connect
        self._router = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, MOST_QUEUED),
            (zmq.SNDHWM, MOST_QUEUED),
            (zmq.MAXMSGSIZE, PIECE_BYTES + 1024),
            (zmq.HANDSHAKE_IVL, round(1000 * HANDSHAKE_S)),
            (zmq.CURVE_SERVER, 1),
        ):
            self._router.setsockopt(option, value)
        self._router.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
        self._router.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        keep_alive(self._router)
        try:
            for host, port in split_all(self.address):
                bind(self._router, host, port)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise UserError(
                f"{self.address}: nobody can be admitted there: {zmq.strerror(error.errno or 0)}; choose another port "
                "for the coordinator: admission is at the one below it"
            ) from None
        self._thread = threading.Thread(target=self._run, name="admission", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def events(self) -> list[AdmissionEvent]:
        """What has happened since the last call; from any thread."""
        found = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._events.get_nowait())
        return found

    # The thread

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._zap, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        try:
            while not self._stopping.is_set():
                poller.poll(round(1000 * POLL_S))
                self._reload()
                with contextlib.suppress(zmq.Again):
                    for _ in range(MOST_QUEUED):
                        self._zap.send_multipart(self._authenticate(self._zap.recv_multipart(zmq.NOBLOCK)))
                with contextlib.suppress(zmq.Again):
                    for _ in range(MOST_QUEUED):
                        self._take()
                self._send_slow()
        except Exception:
            log.exception("admission has ended: nobody can be admitted until the coordinator is started again")
        finally:
            self._router.close()
            self._zap.close()
            self._context.term()

    def _reload(self) -> None:
        try:
            self._known = self._store.current()
        except (UserError, OSError) as error:  # it may be right again later; meanwhile what was known holds
            log.debug("%s", error)
        minute = int(time.monotonic() / MINUTE_S)
        if minute != self._minute:
            self._minute = minute
            self._requests.clear()

    def _authenticate(self, request: list[bytes]) -> list[bytes]:
        """The reply to a ZAP request (see `zap_auth`): is this the key of a member or of an invitation?"""
        whole = [*request, *[b""] * (ZAP_FRAMES - len(request))]
        version, request_id, domain, address, _, mechanism, *credentials = whole
        if version == b"1.0" and domain == ZAP_DOMAIN and mechanism == b"CURVE" and len(credentials) == 1:
            public = z85.encode(credentials[0]).decode() if len(credentials[0]) == KEY_BYTES else ""
            known = self._known
            if public in known.peers.values() or any(each.public == public for each in known.invitations):
                return [b"1.0", request_id, b"200", b"OK", public.encode(), b""]
            revoked = next((each for each in known.revoked if each.public == public), None)
            if revoked is not None and self._is_allowed(public, RevokedKey):
                self._log("refused", f"came with a key that was revoked, from {_shown(address)}", revoked.name)
        self._refused += 1
        if self._refused & (self._refused - 1) == 0:  # the 1st, 2nd, 4th, …: a flood does not fill the log
            log.warning("admission: refused an unknown key from %s (%d so far)", _shown(address), self._refused)
        return [b"1.0", request_id, b"400", b"not on the list", b"", b""]

    def _take(self) -> None:
        """The next request; zmq.Again when there is none."""
        frames = self._router.recv_multipart(zmq.NOBLOCK, copy=False)
        sender, content = frames[0].bytes, [bytes(frame.buffer) for frame in frames[1:3]]
        public, address = str(frames[-1].get("User-Id")), str(frames[-1].get("Peer-Address"))
        reply = self.answer(public, plain(address), content)
        if not callable(reply):
            self._send(sender, reply)
        elif len(self._slow) >= MOST_CALLS:
            self._send(sender, Refused("too many ask to be called back; try again in a minute"))
        else:
            self._slow.append((self._pool.submit(reply), sender))

    def _send_slow(self) -> None:
        waiting = []
        for future, sender in self._slow:
            if not future.done():  # looked at once: it may be done a moment later, and is then for the next turn
                waiting.append((future, sender))
                continue
            failure = future.exception()
            self._send(sender, Refused(f"the coordinator has failed: {failure}") if failure else future.result())
        self._slow = waiting

    def _send(self, to: bytes, reply: AnyReply) -> None:
        with contextlib.suppress(zmq.ZMQError):  # it is gone, or takes nothing
            back = [bytes(reply.back)] if isinstance(reply, Taken) and reply.back else []
            self._router.send_multipart([to, msgspec.json.encode(reply), *back], zmq.NOBLOCK)

    # Requests

    def answer(self, public: str, address: str, frames: list[bytes]) -> AnyReply | Callable[[], AnyReply]:
        """The reply to a request that came with this key from this address; a function where that takes a while."""
        known = self._known
        invitation = next((each for each in known.invitations if each.public == public), None)
        member = next((name for name, each in known.peers.items() if each == public), "")
        name = invitation.name if invitation else member
        if not name:
            return Refused("this key is not known here any more")
        try:
            request = read_request(frames[0] if frames else b"")
        except UserError as error:
            return Refused(str(error))
        if not self._is_allowed(public, type(request)):
            return Refused("too many requests; try again in a minute")
        closed = why_closed(invitation, self._clock()) if invitation else ""
        match request:
            case Enrol() if invitation is None:
                return Refused(f"'{name}' is a member already; start it without the invitation")
            case Enrol():
                return self._enrol(name, public, address, request)
            case Check():
                return partial(self._checked, name, request, closed)
            case _ if closed:
                return Refused(closed)
            case Call():
                return partial(_call, request)
            case Piece():
                return Taken(len(frames[1]) if len(frames) > 1 else 0, request.back)
            case Report():
                self._log("checked", _summary(request.findings), name)
                return Taken(len(request.findings))

    def _is_allowed(self, public: str, kind: type) -> bool:
        self._requests[public, kind] += 1
        return self._requests[public, kind] <= MOST_A_MINUTE[kind]

    def _enrol(self, name: str, invitation: str, address: str, request: Enrol) -> AnyReply:
        why = ""
        if request.version != __version__:
            why = f"skippipe {plain(request.version)[:20]} here, {__version__} at the coordinator: use one version"
        elif not Z85_KEY.fullmatch(request.public):
            why = "the new key is none"
        else:
            try:
                before = self._known.peers.get(name)
                self._store.admit(invitation, request.public)
                self._reload()
                if before != request.public:
                    self._log("admitted", f"with the key {fingerprint(request.public)}…, from {address}", name)
                return Admitted(name)
            except NotAdmitted as error:
                why = str(error)
            except (UserError, OSError) as error:  # a folder that cannot be written
                why = f"the coordinator cannot write down who is admitted: {error}"
        self._log("refused", f"{why} (asked from {address})", name)
        return Refused(why)

    def _checked(self, name: str, request: Check, closed: str) -> Checked:
        needs = self._needs(name)
        other = self._at_work().get(name, "")
        if ":" not in other or other == request.address or reach(other, CALL_S).failure:
            other = ""  # none, one that cannot be called, the same node, or one that is gone and will be missed
        found = needs.device, needs.memory_bytes, needs.unplaced
        return Checked(name, __version__, self._clock(), closed, other, *found)

    def _log(self, kind: Literal["admitted", "refused", "checked"], text: str, name: str) -> None:
        self._events.put(AdmissionEvent(kind, text, name))


def _call(request: Call) -> AnyReply:
    try:
        found: Reach = reach(request.address, CALL_S, CALLED_PREFIX + request.number.encode())
    except UserError as error:
        return Called(str(error))
    return Called(found.failure)


def _summary(findings: list[Finding]) -> str:
    """One line: what is wrong, or that all is well."""
    wrong = [f"{plain(each.check)}: {plain(each.text)}" for each in findings if each.level != "ok"]
    well = ", ".join(plain(each.text) for each in findings if each.level == "ok")
    return plain("; ".join(wrong) if wrong else f"all is well: {well}")


def _shown(address: bytes) -> str:
    return plain(address[:64].decode(errors="replace"))
