"""The gateway over real sockets, with peers that send anything: it goes on, and declares the right node lost."""

from __future__ import annotations

import asyncio
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from skippipe import __version__
from skippipe.inference.request import FinishReason, SamplingParams
from skippipe.runtime.admission import Admission
from skippipe.runtime.fencing import Incarnation
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import (
    ControlMessage,
    EndSequences,
    Heartbeat,
    Hello,
    LinkDown,
    Probe,
    Probed,
    Ready,
    RunStep,
    Sampled,
    StepFailed,
    Stop,
    Welcome,
)
from skippipe.serving.async_engine import AsyncEngine, EngineRequest, RequestOutput
from skippipe.serving.gateway_thread import GatewayCallback, GatewayThread
from skippipe.serving.node import ServingConfig
from skippipe.serving.scheduler import EngineFull
from skippipe.serving.sequence import SequenceRequest
from skippipe.transport.keys import KeyPair, PeerList
from skippipe.transport.mailbox import Mailbox
from skippipe.transport.members import MemberStore
from skippipe.transport.message import Message
from tests.helpers.staged_models import TEXT

PATIENCE_S = 60.0
NODES = {"ann": 0, "bob": 1, "cem": 0}
Said = TypeVar("Said", bound=ControlMessage)


class Peer:
    """A node whose messages the test writes."""

    def __init__(self, name: str, pair: KeyPair, gateway: GatewayThread, public: str) -> None:
        self.heard: list[ControlMessage] = []
        self._incarnation = Incarnation(1)
        self._mailbox = Mailbox(name, pair)
        self._mailbox.allow("coordinator", public)
        self._mailbox.connect("coordinator", gateway.address, public)

    def say(self, said: ControlMessage | dict[str, Any]) -> None:
        body = said if isinstance(said, dict) else to_json(said)
        self._mailbox.send("coordinator", Message(self._incarnation.stamp(), body))

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


class Cluster(GatewayCallback):
    def __init__(self, folder: Path) -> None:
        self.node_config = ServingConfig("nowhere", (1, 1), NODES, vocabulary=50, fingerprint="", heartbeat_s=60.0)
        own, pairs = KeyPair.new(), {name: KeyPair.new() for name in NODES}
        self.members = MemberStore.of_folder(folder)
        PeerList({name: pair.public for name, pair in pairs.items()}).save(self.members.path)
        admission = Admission(MemberStore.of_folder(folder), own)
        self.gateway = GatewayThread(self.node_config, own, admission.publics, callback=self, admission=admission)
        self.events: list[tuple[str, str]] = []
        self.failure: Exception | None = None
        self.peers = {name: Peer(name, pair, self.gateway, own.public) for name, pair in pairs.items()}
        self.reasons: list[FinishReason | None] = []
        self.refused: list[Exception] = []
        self.gateway.start()

    def node_ready(self, node: str, stage: int) -> None:
        self.events.append((node, f"holds {stage}"))

    def node_lost(self, node: str, reason: str) -> None:
        self.events.append((node, reason))

    def failed(self, error: Exception) -> None:
        self.failure = error

    def join(self, *names: str) -> None:
        for name in names:
            self.peers[name].hello()
            assert self.peers[name].hears(Welcome).node_config == self.node_config.to_json()
            self.peers[name].say(Ready())
            self.until(lambda name=name: (name, f"holds {NODES[name]}") in self.events)  # type: ignore[misc]

    def ask(self) -> None:
        self.gateway.submit(
            SequenceRequest((1, 2), 5),
            lambda sequence: self.reasons.append(sequence.finish_reason),
            self.refused.append,
        )

    def until(self, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.failure is None, self.failure
            assert time.monotonic() < deadline, self.events
            time.sleep(0.01)

    def declared_lost(self, name: str) -> str:
        self.until(lambda: self.events[-1][0] == name and not self.events[-1][1].startswith("holds"))
        return self.events[-1][1]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    try:
        yield made
    finally:
        made.gateway.close()
        for peer in made.peers.values():
            peer.close()


@pytest.mark.parametrize(
    ("said", "logprobs", "why"),
    [
        ([50], [], "tokens beyond the vocabulary"),
        ([3, 4], [], "2 tokens for a step of 1"),
        ([3], [[[3, 0.5]]], "log-probabilities that cannot be"),
        ([3], [[[3, float("-inf")]]], "log-probabilities that cannot be"),
        ([3], [[[50, -0.5]]], "log-probabilities that cannot be"),
        ([3], [[[3, -0.5]]], "log-probabilities of other tokens than were asked for"),
    ],
)
def test_a_node_that_reports_impossible_tokens_is_declared_lost_and_may_come_back(
    cluster: Cluster, said: list[int], logprobs: list[list[list[float]]], why: str
) -> None:
    cluster.join("ann", "bob")
    ann = cluster.peers["ann"]
    cluster.ask()
    ann.say(Sampled(ann.hears(RunStep).step, said, logprobs))
    assert why in cluster.declared_lost("ann")
    assert ann.hears(Stop, again=Heartbeat("still here")).again
    cluster.join("ann", "cem")
    step = ann.hears(RunStep)
    ann.say(Sampled(step.step, [7]))
    cluster.until(lambda: cluster.reasons == [None])


def test_a_node_that_is_revoked_is_lost_while_answers_go_on(cluster: Cluster) -> None:
    cluster.join("ann", "bob", "cem")
    cluster.members.revoke("ann")
    assert "was revoked" in cluster.declared_lost("ann")
    assert not cluster.peers["ann"].hears(Stop).again
    cluster.until(lambda: cluster.gateway.stage_nodes == (1, 1))
    cluster.ask()
    cluster.peers["cem"].say(Sampled(cluster.peers["cem"].hears(RunStep).step, [7]))
    cluster.until(lambda: cluster.reasons == [None])


def test_a_stage_that_is_held_but_not_reached_is_left_out(cluster: Cluster) -> None:
    """All stages are held, and nothing can be sent from one to the other."""
    cluster.join("ann", "bob")
    gateway, ann = cluster.gateway, cluster.peers["ann"]
    cluster.until(lambda: gateway.covered_stages == 2 and not (gateway.broken_hops or gateway.missing))
    cluster.peers["bob"].say(LinkDown(0, 0))
    cluster.until(lambda: gateway.covered_stages == 1 and gateway.broken_hops == ((0, 1), (1, 0)))
    assert gateway.missing == (1,)
    cluster.ask()
    step = ann.hears(RunStep)
    assert step.path == [0]
    cluster.join("cem")
    cluster.until(lambda: gateway.covered_stages == 2 and not (gateway.broken_hops or gateway.missing))
    cluster.ask()
    assert cluster.peers["cem"].hears(RunStep).path == [2, 1]


def test_nodes_that_are_to_try_again_do_so_with_a_probe_before_any_request_does(cluster: Cluster) -> None:
    cluster.join("ann", "bob")
    gateway, ann, bob = cluster.gateway, cluster.peers["ann"], cluster.peers["bob"]
    for apart in (True, False):
        gateway._call(lambda apart=apart: gateway._relay_only_changed("bob", "ann", apart))  # type: ignore[misc]
    probe = ann.hears(Probe)
    assert probe.peer == 1
    bob.say(Probed(probe.probe, [[4.0, 0.1]]))  # it was not asked
    ann.say(Probed(probe.probe, []))
    cluster.ask()
    assert ann.hears(RunStep).path == [0], "nothing has come through"
    ann.say(Probed(probe.probe, [[4.0, 0.1]]))
    cluster.until(lambda: gateway.covered_stages == 2 and not gateway.broken_hops)
    cluster.ask()
    while ann.hears(RunStep).path == [0]:  # a step of the first request
        pass


def test_a_step_of_another_is_not_for_everybody_to_answer(cluster: Cluster) -> None:
    cluster.join("ann", "bob")
    cluster.ask()
    step = cluster.peers["ann"].hears(RunStep).step
    cluster.peers["bob"].say(Sampled(step, [7]))
    assert "that node 0 ends" in cluster.declared_lost("bob")
    assert cluster.reasons == []


def test_a_node_that_sends_bad_input_is_declared_lost(cluster: Cluster) -> None:
    cluster.join("ann", "bob", "cem")
    cluster.ask()
    step = cluster.peers["ann"].hears(RunStep)
    cluster.peers["bob"].hears(RunStep)
    cluster.peers["bob"].say(StepFailed(step.step, 2, "not finite"))  # cem is not on this route
    cluster.peers["ann"].hears(EndSequences)
    again = cluster.peers["ann"].hears(RunStep)
    assert again.path == [0, 1]
    cluster.peers["bob"].say(StepFailed(again.step, 0, "not finite"))
    assert "'bob' got from it not finite" in cluster.declared_lost("ann")
    assert cluster.peers["cem"].hears(RunStep).path == [2, 1]


def test_nonsense_is_counted_and_nothing_else(cluster: Cluster) -> None:
    cluster.join("ann", "bob")
    for said in ({"say": "sampled"}, {"say": "run_step", "step": 1}, {}):
        cluster.peers["bob"].say(said)
    for control in (RunStep(1, 1, [0], [], [], [], [], []), Stop("now"), StepFailed(99, 0, ""), Sampled(99, [1])):
        cluster.peers["bob"].say(control)
    cluster.until(lambda: cluster.gateway.stats.get("malformed_messages_total") == 3)
    cluster.ask()
    ann = cluster.peers["ann"]
    for token in range(5):
        ann.say(Sampled(ann.hears(RunStep).step, [token]))
    cluster.until(lambda: cluster.reasons == [None] * 4 + [FinishReason.LENGTH])
    assert [what for _, what in cluster.events] == ["holds 0", "holds 1"]


def test_another_version_is_told(cluster: Cluster) -> None:
    ann = cluster.peers["ann"]
    ann.hello("0.0.1")
    stop = ann.hears(Stop)
    assert not stop.again
    assert "use one version" in stop.reason
    assert not cluster.events


def test_all_are_told_when_it_is_over(cluster: Cluster) -> None:
    cluster.join("ann", "bob")
    cluster.ask()
    cluster.peers["ann"].hears(RunStep)
    cluster.gateway.close()
    assert cluster.reasons == [FinishReason.CANCELLED]
    assert cluster.peers["ann"].hears(Stop) == cluster.peers["bob"].hears(Stop) == Stop("")
    cluster.ask()
    assert isinstance(cluster.refused[0], EngineFull)


def test_what_waits_for_a_client_that_does_not_read_grows_with_the_answer_and_no_more(cluster: Cluster) -> None:
    cluster.join("ann", "bob")
    ann, count = cluster.peers["ann"], 500

    def answer(tokens: int) -> None:
        for _ in range(tokens):
            ann.say(Sampled(ann.hears(RunStep).step, [7]))

    async def ask() -> tuple[int, list[RequestOutput]]:
        engine = AsyncEngine(cluster.gateway, TEXT, "model", 2000, 50, frozenset())
        outputs = engine.generate(EngineRequest((1, 2), count, SamplingParams()))
        read = asyncio.create_task(anext(outputs))
        await asyncio.to_thread(answer, 1)
        heard = [await read]
        tracemalloc.start()
        await asyncio.to_thread(answer, count - 1)
        waiting_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return waiting_bytes, heard + [output async for output in outputs]

    waiting_bytes, heard = asyncio.run(asyncio.wait_for(ask(), PATIENCE_S))
    assert [output.num_tokens for output in heard] == list(range(1, count + 1))
    assert "".join(output.text for output in heard) == TEXT.decode([7] * count)
    assert waiting_bytes < 2000 * count, "2 KB a token, if each came with all those before it"
