"""The gateway over real sockets, with peers that say what they like: it goes on, and knows whom to throw out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from skippipe import __version__
from skippipe.runtime.fencing import Incarnation, stamped
from skippipe.runtime.messages import (
    ControlMessage,
    EndSequences,
    Heartbeat,
    Hello,
    Ready,
    RunStep,
    Sampled,
    StepFailed,
    Stop,
    Welcome,
    from_json,
    to_json,
)
from skippipe.serving.gateway_thread import GatewayCallback, GatewayThread
from skippipe.serving.node.role import ServingConfig
from skippipe.serving.scheduler import EngineFull, FinishReason, SequenceRequest, SequenceState
from skippipe.transport.keys import KeyPair
from skippipe.transport.mailbox import Mailbox

PATIENCE_S = 20.0
NODES = {"ann": 0, "bob": 1, "cem": 0}
Said = TypeVar("Said", bound=ControlMessage)


class Peer:
    """Has a node's key, and somebody at the keyboard."""

    def __init__(self, name: str, pair: KeyPair, front: GatewayThread, public: str) -> None:
        self.heard: list[ControlMessage] = []
        self._incarnation = Incarnation(1)
        self._mailbox = Mailbox(name, pair)
        self._mailbox.allow("coordinator", public)
        self._mailbox.connect("coordinator", front.address, public)

    def say(self, said: ControlMessage | dict[str, Any]) -> None:
        body = said if isinstance(said, dict) else to_json(said)
        self._mailbox.send("coordinator", stamped(body, self._incarnation.stamp()))

    def hello(self, version: str = __version__) -> None:
        self.say(Hello(self._mailbox.address, version))

    def hears(self, kind: type[Said], again: ControlMessage | None = None) -> Said:
        """The next of this kind; `again` is said until it comes."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            found = next((each for each in self.heard if isinstance(each, kind)), None)
            if found is not None:
                self.heard.remove(found)
                return found
            if again is not None:
                self.say(again)
            self.heard += [from_json(received.message.body) for received in self._mailbox.receive(0.1)]
        pytest.fail(f"no {kind.__name__} in {self.heard}")

    def close(self) -> None:
        self._mailbox.close()


class Room(GatewayCallback):
    def __init__(self) -> None:
        self.node_config = ServingConfig("nowhere", (1, 1), NODES, vocabulary=50, fingerprint="", heartbeat_s=60.0)
        own, pairs = KeyPair.new(), {name: KeyPair.new() for name in NODES}
        self.front = GatewayThread(
            self.node_config, own, {name: pair.public for name, pair in pairs.items()}, watching=self
        )
        self.events: list[tuple[str, str]] = []
        self.failure: Exception | None = None
        self.peers = {name: Peer(name, pair, self.front, own.public) for name, pair in pairs.items()}
        self.told: list[FinishReason | None] = []
        self.refused: list[Exception] = []
        self.front.start()

    def holds(self, node: str, stage: int) -> None:
        self.events.append((node, f"holds {stage}"))

    def gone(self, node: str, how: str) -> None:
        self.events.append((node, how))

    def failed(self, error: Exception) -> None:
        self.failure = error

    def join(self, *names: str) -> None:
        for name in names:
            self.peers[name].hello()
            assert self.peers[name].hears(Welcome).node_config == self.node_config.to_json()
            self.peers[name].say(Ready())
            self.until(lambda name=name: (name, f"holds {NODES[name]}") in self.events)  # type: ignore[misc]

    def ask(self) -> None:
        def nothing(_stream: SequenceState) -> None: ...

        self.front.submit(
            SequenceRequest((1, 2), 5), lambda stream: self.told.append(stream.ending), self.refused.append, nothing
        )

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)

    def thrown_out(self, name: str) -> str:
        self.until(lambda: self.events[-1][0] == name and not self.events[-1][1].startswith("holds"))
        return self.events[-1][1]


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room()
    try:
        yield made
    finally:
        made.front.close()
        for peer in made.peers.values():
            peer.close()


@pytest.mark.parametrize(
    ("said", "why"),
    [([50], "tokens that nobody knows"), ([3, 4], "2 tokens to a step of 1")],
)
def test_whoever_says_tokens_that_cannot_be_is_thrown_out_and_may_come_back(
    room: Room, said: list[int], why: str
) -> None:
    room.join("ann", "bob")
    ann = room.peers["ann"]
    room.ask()
    ann.say(Sampled(ann.hears(RunStep).step, said))
    assert why in room.thrown_out("ann")
    assert ann.hears(Stop, again=Heartbeat("still here")).again
    room.join("ann", "cem")
    feed = ann.hears(RunStep)
    ann.say(Sampled(feed.step, [7]))
    room.until(lambda: room.told == [None])


def test_a_step_of_another_is_not_for_everybody_to_answer(room: Room) -> None:
    room.join("ann", "bob")
    room.ask()
    step = room.peers["ann"].hears(RunStep).step
    room.peers["bob"].say(Sampled(step, [7]))
    assert "that node 0 ends" in room.thrown_out("bob")
    assert room.told == []


def test_whoever_makes_what_is_of_no_use_is_thrown_out(room: Room) -> None:
    room.join("ann", "bob", "cem")
    room.ask()
    feed = room.peers["ann"].hears(RunStep)
    room.peers["bob"].hears(RunStep)
    room.peers["bob"].say(StepFailed(feed.step, 2, "not finite"))  # cem is not on this lane
    room.peers["ann"].hears(EndSequences)
    again = room.peers["ann"].hears(RunStep)
    assert again.path == [0, 1]
    room.peers["bob"].say(StepFailed(again.step, 0, "not finite"))
    assert "'bob' got from it not finite" in room.thrown_out("ann")
    assert room.peers["cem"].hears(RunStep).path == [2, 1]


def test_nonsense_is_counted_and_nothing_else(room: Room) -> None:
    room.join("ann", "bob")
    for said in ({"say": "sampled"}, {"say": "run_step", "step": 1}, {}):
        room.peers["bob"].say(said)
    for control in (RunStep(1, 1, [0], [], [], [], [], []), Stop("now"), StepFailed(99, 0, ""), Sampled(99, [1])):
        room.peers["bob"].say(control)
    room.until(lambda: room.front.seen.figures.get("nonsense_total") == 3)
    room.ask()
    ann = room.peers["ann"]
    for token in range(5):
        ann.say(Sampled(ann.hears(RunStep).step, [token]))
    room.until(lambda: room.told == [None] * 4 + [FinishReason.LENGTH])
    assert [what for _, what in room.events] == ["holds 0", "holds 1"]


def test_another_version_is_told(room: Room) -> None:
    ann = room.peers["ann"]
    ann.hello("0.0.1")
    stop = ann.hears(Stop)
    assert not stop.again
    assert "use one version" in stop.reason
    assert not room.events


def test_all_are_told_when_it_is_over(room: Room) -> None:
    room.join("ann", "bob")
    room.ask()
    room.peers["ann"].hears(RunStep)
    room.front.close()
    assert room.told == [FinishReason.CANCELLED]
    assert room.peers["ann"].hears(Stop) == room.peers["bob"].hears(Stop) == Stop("")
    room.ask()
    assert isinstance(room.refused[0], EngineFull)
