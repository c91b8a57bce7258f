"""Scheduler and nodes together under virtual time, over messages as they are on the wire."""

from __future__ import annotations

import base64
import heapq
from collections.abc import Callable, Sequence
from datetime import timedelta
from itertools import count
from random import Random
from typing import Any

import pytest
from msgspec import structs

from skippipe.inference.request import FinishReason, SamplingParams
from skippipe.runtime.message_json import from_json, to_json
from skippipe.runtime.messages import (
    COORDINATOR,
    ControlMessage,
    EndSequences,
    Probe,
    Probed,
    Ready,
    RunStep,
    Sampled,
    StepFailed,
)
from skippipe.serving.node import MAX_EARLY, PROBE_BODY, EarlyTensors, ServingNode
from skippipe.serving.routing import ServingRoute
from skippipe.serving.scheduler import Scheduler, ServingSettings, ServingStep
from skippipe.serving.sequence import SequenceRequest, SequenceState
from skippipe.serving.step_protocol import (
    ForwardStep,
    FreeSlots,
    InputRow,
    NodeInfo,
    SampleTokens,
    ServingWork,
    StepOutput,
    StepRefused,
    step_messages,
)
from skippipe.transport.message import PONG, GradientPiece, Message, ProbePiece, StepHop
from tests.helpers.echo_engine import PLACES, VOCABULARY, expected_tokens, next_token

STAGE_OF = {node: stage for stage, nodes in PLACES.items() for node in nodes}
STAGES = tuple(STAGE_OF[node] for node in sorted(STAGE_OF))
Prefixes = list[tuple[int, ...]]
"""What stands for a hidden state: all tokens up to and with this one."""


class SymbolicExecutor:
    """An executor that checks that every stage sees every token once and in order."""

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self.caches: dict[tuple[int, int], list[int]] = {}

    def run(self, work: ServingWork) -> Any:
        match work:
            case ForwardStep():
                return self._pass(work)
            case SampleTokens():
                end_tokens = [sum(row.count for row in work.step.rows[: at + 1]) for at in range(len(work.step.rows))]
                tokens = [
                    next_token(list(work.inputs[end - 1]), sampling.params.seed)
                    for end, sampling in zip(end_tokens, work.step.sampling, strict=True)
                ]
                return StepOutput(tokens, [()] * len(tokens))
            case FreeSlots():
                self.caches = {key: each for key, each in self.caches.items() if key[0] != work.route}
                return None

    def _pass(self, work: ForwardStep) -> Prefixes:
        for slot in work.step.freed:
            self.caches.pop((work.step.route, slot), None)
        made: Prefixes = []
        at = 0
        for number, row in enumerate(work.step.rows):
            cache = self.caches.setdefault((work.step.route, row.slot), [])
            assert len(cache) == row.start
            new = self._new(work.inputs, number, row, at)
            at += row.count
            for token in new:
                cache.append(token)
                made.append(tuple(cache))
        if self.stage > 0:
            assert made == work.inputs
        return made

    def _new(self, given: Any, number: int, row: InputRow, at: int) -> Sequence[int]:
        if self.stage == 0:
            tokens: Sequence[int] = given[number]
            assert len(tokens) == row.count
            return tokens
        return [prefix[-1] for prefix in given[at : at + row.count]]


class Place:
    """What a node sees of the world."""

    def __init__(self, world: World, number: int) -> None:
        self.world = world
        self.number = number
        self.executor = SymbolicExecutor(STAGE_OF[number])
        self.node = ServingNode(NodeInfo(number, len(PLACES), STAGES, VOCABULARY, 2**16), self)
        self.alive = True

    def now_ns(self) -> int:
        return self.world.clock_ns

    def send(self, receiver: int, message: Message) -> None:
        self.world.between(self.number, receiver, lambda place: place.node.receive(self.number, message))

    def send_control(self, control: ControlMessage, to: int = COORDINATOR) -> None:
        assert to == COORDINATOR
        self.world.to_gateway(self, from_json(to_json(control)))

    def start(self, work: ServingWork) -> None:
        self.world.at(self.world.random.uniform(0.001, 0.01), lambda: self._done(work))

    def fits(self, message: Message, expected: int) -> bool:
        return isinstance(message.body, list) and len(message.body) == expected

    def prefetch(self, given: Any, _device: int) -> Any:
        return given

    def _done(self, work: ServingWork) -> None:
        if self.alive:
            self.node.finished(work, self.executor.run(work))
            self.node.decide()


class World:
    def __init__(self, seed: int, settings: ServingSettings) -> None:
        self.random = Random(seed)
        self.clock_ns = 0
        self._events: list[tuple[int, int, Callable[[], None]]] = []
        self._order = count()
        self.scheduler = Scheduler(len(PLACES), self, settings)
        self.places: dict[int, Place] = {}
        self.over: list[SequenceState] = []
        self.step_failed: list[StepFailed] = []
        for node in STAGE_OF:
            self.begin(node)

    def begin(self, node: int) -> None:
        self.places[node] = Place(self, node)
        self.places[node].node.executor_ready(None, 0)

    def kill(self, node: int, back_after_s: float) -> None:
        self.places[node].alive = False
        self.at(0.05, lambda: self.scheduler.node_lost(node))
        self.at(0.05 + back_after_s, lambda: self.begin(node))

    def at(self, delay_s: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.clock_ns + int(delay_s * 1e9), next(self._order), what))

    def between(self, sender: int, receiver: int, what: Callable[[Place], None]) -> None:
        """A message is lost if its receiver has ended, or was started again, before it arrives."""
        there = self.places[receiver]

        def arrive() -> None:
            if there.alive and self.places[receiver] is there:
                what(there)
                there.node.decide()

        assert sender in self.places
        self.at(self.random.uniform(0.001, 0.02), arrive)

    def to_gateway(self, place: Place, control: ControlMessage) -> None:
        def arrive() -> None:
            if not place.alive:
                return
            match control:
                case Ready():
                    self.scheduler.node_joined(place.number, STAGE_OF[place.number])
                case Sampled():
                    self.scheduler.sampled(control.step, control.tokens, place.number)
                case StepFailed():
                    self.step_failed.append(control)
                    self.scheduler.step_failed(control.step, place.number)
                case Probed():
                    self.scheduler.link_probed(control.probe, place.number)
                case _:
                    raise AssertionError(control)

        self.at(self.random.uniform(0.001, 0.02), arrive)

    # What the gateway sees

    def now_ns(self) -> int:
        return self.clock_ns

    def start_step(self, step: ServingStep) -> None:
        for node, feed in step_messages(step).items():
            self._tell(node, feed)

    def close_route(self, route: ServingRoute) -> None:
        for node in route.path:
            self._tell(node, EndSequences(route.number))

    def probe_link(self, number: int, prober: int, peer: int) -> None:
        self._tell(prober, Probe(number, peer))

    def updated(self, sequence: SequenceState) -> None:
        if sequence.finish_reason is not None:
            self.over.append(sequence)

    def _tell(self, node: int, control: RunStep | EndSequences | Probe) -> None:
        heard = from_json(to_json(control))
        there = self.places[node]

        def arrive() -> None:
            if there.alive and self.places[node] is there:
                there.node.handle_control(heard)
                there.node.decide()

        self.at(0.005, arrive)  # in the order in which it was said

    def run(self, until: Callable[[], bool]) -> None:
        while not until():
            assert self.clock_ns < 600e9, "it hangs"
            if not self._events:
                self.at(0.5, lambda: None)
            self.clock_ns, _, what = heapq.heappop(self._events)
            what()
            self.scheduler.tick()


@pytest.mark.parametrize("seed", range(25))
def test_sequences_go_on_whichever_nodes_are_lost(seed: int) -> None:
    world = World(
        seed,
        ServingSettings(max_sequences=3, routes_per_head=2, max_prompt_tokens=12, step_timeout=timedelta(seconds=1)),
    )
    random = world.random
    world.at(1, lambda: None)
    world.run(lambda: len(world.scheduler.stage_of) == len(STAGE_OF))
    sequences: list[SequenceState] = []
    for _ in range(12):
        prompt = tuple(random.randrange(50) for _ in range(random.randint(1, 30)))
        request = SequenceRequest(prompt, random.randint(1, 12), sampling=SamplingParams(seed=random.randrange(2**40)))
        world.at(random.uniform(0, 2), lambda request=request: sequences.append(world.scheduler.submit(request)))  # type: ignore[misc]
    for _ in range(4):
        node = random.randrange(1, 7)
        world.at(random.uniform(0, 2), lambda node=node: world.kill(node, random.uniform(0.1, 1)))  # type: ignore[misc]
    world.run(lambda: len(sequences) == 12 and not world.scheduler.sequences)
    for sequence in sequences:
        assert sequence.finish_reason is FinishReason.LENGTH
        assert sequence.output_tokens == expected_tokens(sequence.request)
    assert len(world.over) == 12
    world.at(1, lambda: None)
    done_ns = world.clock_ns + int(1e9)
    world.run(lambda: world.clock_ns >= done_ns)
    assert not any(place.executor.caches for place in world.places.values() if place.alive), "routes are closed"


def test_what_no_step_foresees_is_dropped() -> None:
    world = World(0, ServingSettings())
    place = world.places[2]
    feed = RunStep(1, 1, [0, 2], [[0, 0, 1]], [], [], [], [])
    place.node.handle_control(feed)
    hop = Message(StepHop(1, 1, 1))
    for sender, body in ((4, [(1,)]), (0, [(1,), (2,)]), (0, "nonsense")):
        place.node.receive(sender, Message(StepHop(1, 1, 1), body))  # type: ignore[arg-type]
    place.node.receive(0, hop)
    place.node.receive(0, Message(GradientPiece(1, 1, 1)))
    assert sum(place.node.dropped.values()) == 5
    place.node.handle_control(RunStep(2, 1, [0, 4], [[0, 0, 1]], [], [], [], []))
    assert sum(place.node.dropped.values()) == 6
    place.node.receive(0, Message(StepHop(1, 1, 1), [(1,)]))  # type: ignore[arg-type]
    assert sum(place.node.dropped.values()) == 6


CHANCES, GREEDY = [0.5, 3.0, 0.9, 0.1, 1.2, 0.5, -0.5], [0.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0]
ALLOWED = base64.b64encode(b"\1" * 7).decode()  # of 50 tokens
GOOD = RunStep(
    step=1,
    lane=1,
    path=[0, 2],
    rows=[[0, 0, 2], [1, 4, 1]],
    freed=[3],
    tokens=[[5, 6], [7]],
    chances=[CHANCES, GREEDY],
    seeds=[1, 2],
    prompts=[2, 3],
    biases=[[[49.0, -100.0]], []],
    logprobs=[0, 21],
    allowed=["", ALLOWED],
)


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"lane": 2**32}, "too large"),
        ({"path": [0, 2, 2]}, "twice"),
        ({"path": [0, 70]}, "unknown nodes"),
        ({"path": [1, 2]}, "does not come here"),
        ({"path": [2, 0]}, "stage 0"),
        ({"path": []}, "does not come here"),
        ({"rows": []}, "without slot"),
        ({"rows": [[0, 0], [1, 4, 1]]}, "without slot"),
        ({"rows": [[0, 0, 2], [0, 4, 1]]}, "twice"),
        ({"rows": [[0, 0, 2], [1, 4, 0]]}, "a row without tokens"),
        ({"rows": [[0, 0, 2], [2**40, 4, 1]]}, "room"),
        ({"tokens": [[5, 6]]}, "other tokens"),
        ({"tokens": [[5, 6], [7, 8]]}, "other tokens"),
        ({"tokens": [[5, 6], [VOCABULARY]]}, "beyond the vocabulary"),
        ({"chances": [CHANCES]}, "sampling parameters"),
        ({"chances": [CHANCES[:6], GREEDY]}, "sampling parameters"),
        ({"chances": [[0.5, float("inf"), *CHANCES[2:]], GREEDY]}, "sampling parameters"),
        ({"chances": [[float("nan"), *CHANCES[1:]], GREEDY]}, "temperature"),
        ({"chances": [[0.5, 3.0, 0.0, *CHANCES[3:]], GREEDY]}, "top-p"),
        ({"chances": [[0.5, 3.0, 0.9, 1.1, *CHANCES[4:]], GREEDY]}, "min-p"),
        ({"chances": [[0.5, 3.0, 0.9, 0.1, 0.0, *CHANCES[5:]], GREEDY]}, "repetition penalty"),
        ({"chances": [CHANCES, [*GREEDY[:6], float("inf")]]}, "not finite"),
        ({"seeds": [1]}, "sampling parameters"),
        ({"prompts": [1]}, "sampling parameters"),
        ({"biases": [[[float(VOCABULARY), 1.0]], []]}, "a bias of no token"),
        ({"biases": [[[0.5, 1.0]], []]}, "a bias of no token"),
        ({"biases": [[[5.0]], []]}, "a bias of no token"),
        ({"biases": [[[5.0, float("nan")]], []]}, "not finite"),
        ({"logprobs": [0, 22]}, "log-probabilities"),
        ({"allowed": ["", "?"]}, "base64"),
        ({"allowed": ["", base64.b64encode(bytes(7)).decode()]}, "no token that is allowed"),
        ({"allowed": ["", base64.b64encode(b"\1" * 6).decode()]}, "too few bits"),
    ],
)
def test_steps_that_cannot_be_are_dropped(changed: dict[str, Any], why: str) -> None:
    node = World(0, ServingSettings()).places[0].node
    node.handle_control(structs.replace(GOOD, **changed))
    ((sender, what),) = node.dropped
    assert sender == COORDINATOR
    assert why in what
    node.decide()
    assert node.doing == "serving", "nothing is done about it"
    node.handle_control(GOOD)
    node.decide()
    assert node.doing == "serving, forward step"


def test_tensors_that_nobody_told_of_make_room_for_others() -> None:
    early = EarlyTensors()
    for step in range(3 * MAX_EARLY):
        early.put(4, (step, 1), step)
    early.put(5, (0, 1), "another's")
    assert early.take(4, (0, 1)) is None
    assert early.take(4, (3 * MAX_EARLY - 1, 1)) == 3 * MAX_EARLY - 1
    assert early.take(5, (0, 1)) == "another's"
    assert early.take(5, (0, 1)) is None


def test_a_tensor_from_elsewhere_does_not_take_the_place_of_the_one_that_is_waited_for() -> None:
    place = World(0, ServingSettings()).places[2]
    place.node.receive(0, Message(StepHop(1, 1, 1), [(1,)]))  # type: ignore[arg-type]
    place.node.receive(4, Message(StepHop(1, 1, 1), [(9,)]))  # type: ignore[arg-type]
    place.node.handle_control(RunStep(1, 1, [0, 2], [[0, 0, 1]], [], [], [], []))
    place.node.decide()
    assert place.node.doing == "serving, forward step"


class Sick(SymbolicExecutor):
    """Gets nothing that it can use."""

    def run(self, work: ServingWork) -> Any:
        return super().run(work) if isinstance(work, FreeSlots) else StepRefused("not finite", bad_input=True)


def test_whoever_sends_what_is_of_no_use_is_named() -> None:
    world = World(0, ServingSettings(routes_per_head=1))
    for node in PLACES[2]:
        world.places[node].executor = Sick(2)
    world.at(1, lambda: None)
    world.run(lambda: len(world.scheduler.stage_of) == len(STAGE_OF))
    sequence = world.scheduler.submit(SequenceRequest((1, 2), 3))
    world.run(lambda: not world.scheduler.sequences)
    assert sequence.finish_reason is FinishReason.FAILED
    assert len(world.step_failed) == 3
    assert {STAGE_OF[control.node] for control in world.step_failed} == {1}


def test_a_probe_and_its_answer_show_that_a_link_works() -> None:
    world = World(0, ServingSettings())
    world.run(lambda: len(world.scheduler.stage_of) == len(STAGE_OF))
    asked, sent = world.places[2].node, world.between
    world.between = lambda *_message: None  # type: ignore[method-assign]
    world.scheduler.link_broken(4, 2, world.clock_ns)
    world.run(lambda: 4 in asked._probes)
    world.at(5, lambda: None)
    world.run(lambda: world.clock_ns > 5e9)
    assert world.scheduler._links.hop_s(2, 4) == float("inf"), "nothing has come through"
    world.between = sent  # type: ignore[method-assign]
    asked.reconnected(4)
    world.run(lambda: world.scheduler._links.hop_s(2, 4) == 1)
    assert not asked._probes
    asked.reconnected(4)  # with no probe on its way
    for peer in (2, 99):
        asked.handle_control(Probe(7, peer))
    asked.receive(4, Message(ProbePiece(1, PONG, 0), PROBE_BODY))
    assert {what for _, what in asked.dropped} == {"Probe", "an answer to no probe"}
