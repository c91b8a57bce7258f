"""The receiving side of a mailbox: its socket, the admission of peers, and the fast paths that lead here."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import zmq

from skippipe.codecs import Buffer
from skippipe.errors import UserError
from skippipe.transport.addresses import Place, Socket, bind, join_address, pull_socket
from skippipe.transport.aead import Forged
from skippipe.transport.fast_path import VERB_MAGIC, FastPathMessage, FastPathReceiver, FastPathVerb
from skippipe.transport.keys import KeyPair
from skippipe.transport.message import Limits, Malformed, Received, from_frames
from skippipe.transport.sender import Sender, SocketSettings
from skippipe.transport.zap_auth import ZAP_DOMAIN, ZAP_ENDPOINT, ZapAuth

SLACK_BYTES = 1024  # a frame of CURVE is 33 bytes longer than what it carries; headers and names are short
LONGEST_NAME = 255
MOST_AT_ONCE = 64  # messages that one call of drain takes from the socket

log = logging.getLogger(__name__)


class Receiver:
    """A PULL socket, the answers to libzmq's requests for authentication, and at most one fast path for each peer."""

    def __init__(
        self,
        settings: SocketSettings,
        keys: KeyPair | None,
        places: Sequence[Place],
        limits: Limits,
        trusted: str | None = None,
    ) -> None:
        self.auth = ZapAuth()
        self.malformed: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self.host_of: dict[str, str] = {}
        """Peer → the address that its messages come from."""
        self.on_handshake: Callable[[], None] = lambda: None
        """Called before a connection is let in or refused."""
        self._settings = settings
        self._curve = keys is not None
        self._limits = limits
        self._trusted = trusted
        self._wide_limits = replace(limits, json_bytes=16 * limits.json_bytes)
        self._most_frames = 2 + -(-limits.payload_bytes // settings.piece_bytes)
        self._requests: dict[str, bytes] = {}
        self._paths: dict[str, FastPathReceiver] = {}
        self._zap: Socket | None = None
        if keys is not None:
            self._zap = settings.context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(ZAP_ENDPOINT)  # before a peer can connect
            settings.poller.register(self._zap, zmq.POLLIN)
        self._pull, self._places = self._bound(keys, places)
        settings.poller.register(self._pull, zmq.POLLIN)
        self.address = ",".join(join_address(*place) for place in self._places)

    def _bound(self, keys: KeyPair | None, places: Sequence[Place]) -> tuple[Socket, list[Place]]:
        """The socket, and where it listens."""
        settings, found = self._settings, list[Place]()
        largest_frame = min(self._limits.payload_bytes, settings.piece_bytes) + SLACK_BYTES
        pull = pull_socket(settings.context, largest_frame, settings.depth)
        if keys is not None:
            pull.setsockopt(zmq.CURVE_SERVER, 1)
            pull.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            pull.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        for host, port in places:
            try:
                found.append(bind(pull, host, port, found[0][1] if found else 0))
            except zmq.ZMQError as error:
                pull.close()
                settings.context.destroy(linger=0)
                where, why = join_address(host, port), zmq.strerror(error.errno or 0)
                hint = "choose another port, or 0 for any" if error.errno == zmq.EADDRINUSE else "check the address"
                raise UserError(f"{where}: cannot listen there: {why}; {hint}") from None
        return pull, found

    def place_of(self, port: int) -> Place | None:
        """Where this mailbox listens: for messages (port 0), or for a fast path. From any thread."""
        host, own_port = self._places[0]
        offered = any(path.port == port for path in list(self._paths.values()))
        return _here((host, port or own_port)) if offered or not port else None

    def allow(self, peer: str, public: str | None) -> None:
        if self.auth.key_of(peer) != public:
            self._close_path(peer)
        self.auth.allow(peer, public)

    def forbid(self, peer: str) -> None:
        self.auth.forbid(peer)
        self._close_path(peer)

    def answer_authentication(self) -> None:
        if self._zap is not None:
            with contextlib.suppress(zmq.Again):
                for _ in range(MOST_AT_ONCE):
                    request = self._zap.recv_multipart(zmq.NOBLOCK)
                    self.on_handshake()
                    self._zap.send_multipart(self.auth.answer(request))

    def drain(self, outgoing: Mapping[str, Sender]) -> list[Received]:
        """The messages that have arrived, each peer's in the order they were sent; `outgoing` is for fast paths."""
        found: list[Received] = []
        for peer in list(self._paths):
            self._read_path(peer, found)
        with contextlib.suppress(zmq.Again):
            for _ in range(MOST_AT_ONCE):
                self._take(found, outgoing)
        for peer in self._requests.keys() & outgoing.keys():
            self._offer(peer, outgoing[peer])
        return found

    def _take(self, found: list[Received], outgoing: Mapping[str, Sender]) -> None:
        """The next message, unless it is refused; zmq.Again when there is none."""
        first = frame = self._pull.recv(zmq.NOBLOCK, copy=False)
        frames: list[Buffer] = []
        beyond = 0
        while frame.more:  # a message is there whole or not at all, so the rest does not have to be waited for
            frame = self._pull.recv(zmq.NOBLOCK, copy=False)
            if len(frames) < self._most_frames:
                frames.append(frame.buffer)
            else:
                beyond += 1
        claimed = first.bytes[:LONGEST_NAME].decode(errors="replace")
        known = self.auth
        peer = known.by_key(str(first.get("User-Id"))) if self._curve else known.by_name(claimed)
        if peer is None:
            return
        self.host_of[peer] = str(first.get("Peer-Address"))
        try:
            if claimed != peer:
                raise Malformed(f"the sender says it is {claimed!a}, but its key is that of '{peer}'")
            if beyond:
                raise Malformed(f"{len(frames) + beyond} frames; at most {self._most_frames} are taken")
            if self._curve and len(frames) == 1 and frames[0][:4] == VERB_MAGIC:
                self._handle_verb(peer, FastPathMessage.from_bytes(frames[0]), found, outgoing.get(peer))
                return
        except Malformed as error:
            self.received_bytes[peer] += len(first) + sum(len(frame) for frame in frames)
            self._count_malformed(peer, error)
            return
        if self._open_path(peer):
            self._finish_path(peer, found)  # the sender has closed it
        self._accept(peer, frames, found)

    def _accept(self, peer: str, frames: list[Buffer], found: list[Received]) -> None:
        self.received_bytes[peer] += len(peer.encode()) + sum(len(frame) for frame in frames)
        try:
            message, due_ns = from_frames(frames, self._wide_limits if peer == self._trusted else self._limits)
        except Malformed as error:
            self._count_malformed(peer, error)
            return
        found.append(Received(peer, message, due_ns))

    def _count_malformed(self, peer: str, error: Malformed) -> None:
        self.malformed[peer] += 1
        if self.malformed[peer] == 1:
            log.warning("malformed message from '%s', dropped (later ones are only counted): %s", peer, error)

    def _handle_verb(self, peer: str, verb: FastPathMessage, found: list[Received], outgoing: Sender | None) -> None:
        if not self._settings.fast_path:
            return
        if verb.verb is FastPathVerb.REQUEST:
            self._finish_path(peer, found)
            self._requests[peer] = verb.path_id
        elif verb.verb is FastPathVerb.OFFER:
            if outgoing is not None:
                outgoing.open_fast_path(verb)
        elif (path := self._paths.get(peer)) is not None and path.path_id == verb.path_id and not path.is_open:
            path.open(verb.secret, peer, self._settings.name)
            self._settings.poller.register(path.pull, zmq.POLLIN)

    def _offer(self, peer: str, outgoing: Sender) -> None:
        """Answer a peer's request for a fast path, once there is a connection to it; later if its queue is full."""
        if not outgoing.has_room():
            return
        settings, name = self._settings, self._requests.pop(peer)
        try:
            hosts = [host for host, _ in self._places]
            path = FastPathReceiver(settings.context, hosts, name, self._limits.payload_bytes, settings.depth)
        except zmq.ZMQError as error:
            log.warning("no fast path for '%s': %s", peer, zmq.strerror(error.errno or 0))
            return
        self._paths[peer] = path
        self.auth.expect(path.path_id, path.token)
        outgoing.send_verb(path.offer())

    def _open_path(self, peer: str) -> FastPathReceiver | None:
        path = self._paths.get(peer)
        return path if path is not None and path.is_open else None

    def _read_path(self, peer: str, found: list[Received], *, all_there: bool = False) -> None:
        path = self._open_path(peer)
        try:
            for frames in path.messages(all_there=all_there) if path is not None else ():
                self._accept(peer, frames, found)
        except Forged as error:
            self.auth.refuse(f"fast path of '{peer}'", f"has {error}")
            self._close_path(peer)
        except Malformed as error:
            self._count_malformed(peer, error)
            self._close_path(peer)

    def _finish_path(self, peer: str, found: list[Received]) -> None:
        """Read all that has arrived in it, which was sent before what comes next under CURVE, and close it."""
        self._read_path(peer, found, all_there=True)
        self._close_path(peer)

    def _close_path(self, peer: str) -> None:
        self._requests.pop(peer, None)
        path = self._paths.pop(peer, None)
        if path is not None:
            self.auth.expect_no_more(path.path_id)
            if path.is_open:
                self._settings.poller.unregister(path.pull)
            path.close()

    def close(self) -> None:
        for peer in list(self._paths):
            self._close_path(peer)
        self._pull.close()
        if self._zap is not None:
            self._zap.close()


def _here(place: Place) -> Place:
    """From this machine, a listener at every address is reached over loopback."""
    return {"0.0.0.0": "127.0.0.1", "*": "127.0.0.1", "::": "::1"}.get(place[0], place[0]), place[1]
