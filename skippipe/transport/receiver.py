"""What comes in: the socket that everybody sends to, who is let in there, and the fast lanes that lead here."""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import zmq

from skippipe.codecs import Buffer
from skippipe.errors import UserError
from skippipe.transport.addresses import Socket, endpoint, pull_socket
from skippipe.transport.aead import Forged
from skippipe.transport.fast_path import WORD_MAGIC, FastPathMessage, FastPathReceiver, FastPathVerb
from skippipe.transport.keys import KeyPair
from skippipe.transport.message import Limits, Malformed, Received, from_frames
from skippipe.transport.sender import Sender, SocketSettings
from skippipe.transport.zap_auth import ZAP_DOMAIN, ZAP_ENDPOINT, ZapAuth

SLACK_BYTES = 1024  # a frame of CURVE is 33 bytes longer than what it carries; headers and names are short
LONGEST_NAME = 255
DRAINED = 64  # messages that one call of drain takes from the socket at most

log = logging.getLogger(__name__)


class Receiver:
    """A PULL socket, the answers to libzmq's questions about keys, and at most one lane for each peer."""

    def __init__(
        self,
        wiring: SocketSettings,
        keys: KeyPair | None,
        host: str,
        port: int,
        limits: Limits,
        trusted: str | None = None,
    ) -> None:
        self.admission = ZapAuth()
        self.malformed: Counter[str] = Counter()
        self.received_bytes: Counter[str] = Counter()
        self._wiring = wiring
        self._curve = keys is not None
        self._host = host
        self._limits = limits
        self._trusted = trusted
        self._wide_limits = replace(limits, json_bytes=16 * limits.json_bytes)
        self._most_frames = 2 + -(-limits.payload_bytes // wiring.piece_bytes)
        self._asks: dict[str, bytes] = {}
        self._lanes: dict[str, FastPathReceiver] = {}
        self._zap: Socket | None = None
        if keys is not None:
            self._zap = wiring.context.socket(zmq.REP)
            self._zap.setsockopt(zmq.LINGER, 0)
            self._zap.bind(ZAP_ENDPOINT)  # before anybody can connect
            wiring.poller.register(self._zap, zmq.POLLIN)
        self._pull = self._bound(keys, port)
        wiring.poller.register(self._pull, zmq.POLLIN)
        self.address = self._pull.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://")

    def _bound(self, keys: KeyPair | None, port: int) -> Socket:
        wiring, host = self._wiring, self._host
        largest_frame = min(self._limits.payload_bytes, wiring.piece_bytes) + SLACK_BYTES
        pull = pull_socket(wiring.context, host, largest_frame, wiring.depth)
        if keys is not None:
            pull.setsockopt(zmq.CURVE_SERVER, 1)
            pull.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
            pull.setsockopt(zmq.ZAP_DOMAIN, ZAP_DOMAIN)
        try:
            pull.bind(endpoint(host, port or "*"))
        except zmq.ZMQError as error:
            pull.close()
            wiring.context.destroy(linger=0)
            hint = "choose another port, or 0 for any" if error.errno == zmq.EADDRINUSE else "check the address"
            raise UserError(f"{host}:{port}: cannot listen there: {zmq.strerror(error.errno or 0)}; {hint}") from None
        return pull

    def allow(self, peer: str, public: str | None) -> None:
        if self.admission.key_of(peer) != public:
            self._close_lane(peer)
        self.admission.allow(peer, public)

    def forbid(self, peer: str) -> None:
        self.admission.forbid(peer)
        self._close_lane(peer)

    def answer_strangers(self) -> None:
        if self._zap is not None:
            with contextlib.suppress(zmq.Again):
                for _ in range(DRAINED):
                    self._zap.send_multipart(self.admission.answer(self._zap.recv_multipart(zmq.NOBLOCK)))

    def drain(self, outgoing: Mapping[str, Sender]) -> list[Received]:
        """What is there, each peer's messages in the order they were sent; `outgoing` is for words about lanes."""
        found: list[Received] = []
        for peer in list(self._lanes):
            self._take_from_lane(peer, found)
        with contextlib.suppress(zmq.Again):
            for _ in range(DRAINED):
                self._take(found, outgoing)
        for peer in self._asks.keys() & outgoing.keys():
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
        known = self.admission
        peer = known.by_key(str(first.get("User-Id"))) if self._curve else known.by_name(claimed)
        if peer is None:
            return
        try:
            if claimed != peer:
                raise Malformed(f"the sender says it is {claimed!a}, but its key is that of '{peer}'")
            if beyond:
                raise Malformed(f"{len(frames) + beyond} frames; at most {self._most_frames} are taken")
            if self._curve and len(frames) == 1 and frames[0][:4] == WORD_MAGIC:
                self._hear(peer, FastPathMessage.from_bytes(frames[0]), found, outgoing.get(peer))
                return
        except Malformed as error:
            self.received_bytes[peer] += len(first) + sum(len(frame) for frame in frames)
            self._complain(peer, error)
            return
        if self._opened(peer):
            self._finish_lane(peer, found)  # the sender has left it
        self._accept(peer, frames, found)

    def _accept(self, peer: str, frames: list[Buffer], found: list[Received]) -> None:
        self.received_bytes[peer] += len(peer.encode()) + sum(len(frame) for frame in frames)
        try:
            message, due_ns = from_frames(frames, self._wide_limits if peer == self._trusted else self._limits)
        except Malformed as error:
            self._complain(peer, error)
            return
        found.append(Received(peer, message, due_ns))

    def _complain(self, peer: str, error: Malformed) -> None:
        self.malformed[peer] += 1
        if self.malformed[peer] == 1:
            log.warning("malformed message from '%s', dropped (later ones are only counted): %s", peer, error)

    def _hear(self, peer: str, word: FastPathMessage, found: list[Received], outgoing: Sender | None) -> None:
        if not self._wiring.fast_lane:
            return
        if word.verb is FastPathVerb.ASK:
            self._finish_lane(peer, found)
            self._asks[peer] = word.lane
        elif word.verb is FastPathVerb.OFFER:
            if outgoing is not None:
                outgoing.take_lane(word)
        elif (lane := self._lanes.get(peer)) is not None and lane.name == word.lane and not lane.is_open:
            lane.open(word.secret, peer, self._wiring.name)
            self._wiring.poller.register(lane.pull, zmq.POLLIN)

    def _offer(self, peer: str, outgoing: Sender) -> None:
        """Answer a peer that asked for a lane, now that there is a connection to it; later if its queue is full."""
        if not outgoing.has_room():
            return
        wiring, name = self._wiring, self._asks.pop(peer)
        try:
            lane = FastPathReceiver(wiring.context, self._host, name, self._limits.payload_bytes, wiring.depth)
        except zmq.ZMQError as error:
            log.warning("no fast lane for '%s': %s", peer, zmq.strerror(error.errno or 0))
            return
        self._lanes[peer] = lane
        self.admission.expect(lane.name, lane.token)
        outgoing.say(lane.offer())

    def _opened(self, peer: str) -> FastPathReceiver | None:
        lane = self._lanes.get(peer)
        return lane if lane is not None and lane.is_open else None

    def _take_from_lane(self, peer: str, found: list[Received], *, all_there: bool = False) -> None:
        lane = self._opened(peer)
        try:
            for frames in lane.messages(all_there=all_there) if lane is not None else ():
                self._accept(peer, frames, found)
        except Forged as error:
            self.admission.refuse(f"lane of '{peer}'", f"has {error}")
            self._close_lane(peer)
        except Malformed as error:
            self._complain(peer, error)
            self._close_lane(peer)

    def _finish_lane(self, peer: str, found: list[Received]) -> None:
        """With all that has arrived in it: that was sent before whatever comes next under CURVE."""
        self._take_from_lane(peer, found, all_there=True)
        self._close_lane(peer)

    def _close_lane(self, peer: str) -> None:
        self._asks.pop(peer, None)
        lane = self._lanes.pop(peer, None)
        if lane is not None:
            self.admission.expect_no_more(lane.name)
            if lane.is_open:
                self._wiring.poller.unregister(lane.pull)
            lane.close()

    def close(self) -> None:
        for peer in list(self._lanes):
            self._close_lane(peer)
        self._pull.close()
        if self._zap is not None:
            self._zap.close()
