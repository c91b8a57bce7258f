"""The gateway: puts streams on lanes, steps them, and moves them when nodes are lost.

A state machine: it is told what happens and says what to do, and knows neither sockets nor HTTP. Every lane has one
step on its way at a time: tokens of all its streams, whoever is new with the whole prompt, everybody else with the
last token. The nodes of the lane are told of the step by the gateway and pass tensors on to each other; the first one
embeds in the beginning and samples in the end.

A stream that loses its lane is put on another one and fed again from its first token. As chance depends on seed and
place alone, the answer goes on as it would have. Where nobody holds a stage any more, lanes do without it.


A request on its way to an answer.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from fractions import Fraction
from math import inf
from typing import Protocol

from skippipe.inference.request import SamplingParams
from skippipe.serving.routing import LinkCost, ServingRoute, UniformCost, fastest_route, links

DOUBT = 10  # times longer that a link seems, for every step that was lost on a way over it
MOST_SPOILED = 3  # steps with a stream that nodes may say cannot be done


@dataclass(frozen=True)
class StepRow:
    """A stream's part in a step."""

    slot: int
    start: int
    """Tokens that are in the caches already."""
    tokens: tuple[int, ...]
    """The next ones."""
    stream: SequenceState


@dataclass(frozen=True)
class ServingStep:
    number: int
    lane: ServingRoute
    rows: tuple[StepRow, ...]
    freed: tuple[int, ...]
    """Slots whose streams are over, since the lane's last step."""


class GatewayEnv(Protocol):
    """All that a gateway can do to the world."""

    def now_ns(self) -> int: ...

    def step(self, step: ServingStep) -> None:
        """Tell every node on the lane."""

    def close_lane(self, lane: ServingRoute) -> None:
        """Its caches are of no use any more."""

    def said(self, stream: SequenceState) -> None:
        """A stream has another token, or is over."""


@dataclass(frozen=True)
class ServingSettings:
    streams: int = 16
    """On a lane at once."""
    lanes: int = 2
    """For every node of stage 0."""
    waiting: int = 256
    """Requests that wait for a place at most."""
    prompt_tokens: int = 4096
    """New tokens that a step feeds at most."""
    lane_tokens: int = 2**16
    """That the caches of a lane have room for: as many slots as it has, each of its longest stream."""
    floor: Fraction = Fraction(0)
    """Share of the stages below which nothing is answered."""
    step: timedelta = timedelta(seconds=20)
    """After which a step counts as lost."""
    patience: timedelta = timedelta(seconds=30)
    """How long a request waits for a way to be there."""
    gathering: timedelta = timedelta(minutes=10)
    """How long all wait for the first node of every stage, before answers are given without some of them."""


class EngineFull(Exception):
    """Too many requests wait already."""


@dataclass
class Scheduler:
    stages: int
    env: GatewayEnv
    settings: ServingSettings = field(default_factory=ServingSettings)
    distance: LinkCost = field(default_factory=UniformCost)
    stage_of: dict[int, int] = field(default_factory=dict)
    """Of the nodes that are there."""
    streams: dict[int, SequenceState] = field(default_factory=dict)
    """That are not over."""
    _waiting: deque[SequenceState] = field(default_factory=deque)
    _lanes: dict[int, ServingRoute] = field(default_factory=dict)
    _steps: dict[int, ServingStep] = field(default_factory=dict)
    """On their way."""
    _freed: dict[int, list[int]] = field(default_factory=dict)
    _cut: set[frozenset[int]] = field(default_factory=set)
    """Pairs of nodes with no way between them."""
    _doubts: Counter[frozenset[int]] = field(default_factory=Counter)
    """How many steps in a row were lost on lanes over a link."""
    _numbers: Counter[str] = field(default_factory=Counter)
    _gathers_until_ns: int | None = field(init=False)
    """None: everybody was there once."""

    def __post_init__(self) -> None:
        self._gathers_until_ns = self.env.now_ns() + _ns(self.settings.gathering)

    # Requests

    def submit(self, request: SequenceRequest) -> SequenceState:
        """Full if too many wait already."""
        if len(self._waiting) >= self.settings.waiting:
            raise EngineFull(f"{len(self._waiting)} requests wait already")
        if request.longest > self.settings.lane_tokens:
            raise EngineFull(
                f"{request.longest} tokens are more than caches have room for, {self.settings.lane_tokens}"
            )
        stream = SequenceState(self._next("stream"), request, waits_since_ns=self.env.now_ns())
        self.streams[stream.number] = stream
        self._waiting.append(stream)
        self._go_on()
        return stream

    def cancel(self, number: int) -> None:
        stream = self.streams.get(number)
        if stream is not None:
            self._end(stream, FinishReason.CANCELLED)
            self._go_on()

    def close(self) -> None:
        """Nobody is answered any more."""
        for number in list(self.streams):
            self._end(self.streams[number], FinishReason.CANCELLED)

    # Nodes

    def joined(self, node: int, stage: int) -> None:
        """It has its weights and can take steps; if it was here before, it was started again."""
        if node in self.stage_of:
            self.lost(node)
        self.stage_of[node] = stage
        self._cut = {pair for pair in self._cut if node not in pair}
        if self.share == 1:
            self._gathers_until_ns = None
        self._go_on()

    def lost(self, node: int) -> None:
        self.stage_of.pop(node, None)
        for lane in [each for each in self._lanes.values() if node in each.path]:
            self._give_up(lane)
        self._go_on()

    def broken(self, a: int, b: int) -> None:
        """There is no way between two nodes that are both there."""
        self._cut.add(frozenset((a, b)))
        for lane in [each for each in self._lanes.values() if {a, b} in links(each.path)]:
            self._give_up(lane)
        self._go_on()

    def sampled(self, number: int, tokens: Sequence[int], node: int) -> None:
        """A step is back, with a token for every row; ValueError if the node that says so says what cannot be."""
        step = self._steps.get(number)
        if step is None:  # of a lane that was given up
            return
        if node != step.lane.path[0] or len(tokens) != len(step.rows):
            raise ValueError(
                f"says {len(tokens)} tokens to a step of {len(step.rows)} that node {step.lane.path[0]} ends"
            )
        del self._steps[number]
        step.lane.step = None
        for link in links(step.lane.path):
            self._doubts.pop(link, None)
        for row, token in zip(step.rows, tokens, strict=True):
            stream = row.stream
            if stream.lane != step.lane.number:  # it was cancelled meanwhile
                continue
            stream.fed = row.start + len(row.tokens)
            if stream.fed == len(stream.tokens):
                stream.add(token, len(step.lane.path))
                if stream.ending is None:
                    self.env.said(stream)
                else:
                    self._end(stream, stream.ending)
        self._go_on()

    def spoiled(self, number: int, node: int) -> tuple[int, ...]:
        """A node says that it cannot do a step; the step's path, if it is one that the node had to do."""
        step = self._steps.get(number)
        if step is None or node not in step.lane.path:
            return ()
        self._give_up(step.lane)
        for stream in [row.stream for row in step.rows if row.stream.ending is None]:
            stream.spoiled += 1
            if stream.spoiled >= MOST_SPOILED:
                self._end(stream, FinishReason.SPOILED)
        self._go_on()
        return step.lane.path

    def tick(self) -> None:
        """To be called often: deadlines pass."""
        now_ns = self.env.now_ns()
        if self._gathers_until_ns is not None and now_ns >= self._gathers_until_ns:
            self._gathers_until_ns = None
        late_ns = now_ns - _ns(self.settings.step)
        for lane in [each for each in self._lanes.values() if each.step is not None and each.stepped_ns < late_ns]:
            self._doubts.update(links(lane.path))
            self._give_up(lane)
        given_up_ns = now_ns - _ns(self.settings.patience)
        if not self._lanes:  # there is no way at all, it is not that all are taken
            for stream in [each for each in self._waiting if each.waits_since_ns < given_up_ns]:
                self._end(stream, FinishReason.NO_WAY)
        self._go_on()

    # Lanes

    @property
    def holders(self) -> list[list[int]]:
        """For every stage, the nodes that hold it."""
        return [sorted(node for node, held in self.stage_of.items() if held == stage) for stage in range(self.stages)]

    @property
    def share(self) -> Fraction:
        """Of the stages, that anybody holds; 0 without stage 0."""
        holders = self.holders
        return Fraction(sum(map(bool, holders)), self.stages) if holders[0] else Fraction(0)

    @property
    def is_open(self) -> bool:
        """Are there stages enough to answer with?"""
        return self._gathers_until_ns is None and self.share > 0 and self.share >= self.settings.floor

    def _go_on(self) -> None:
        """Everybody who can be is put on a lane, and every lane that can sets out."""
        while self._waiting and self.is_open:
            lane = self._roomiest(self._waiting[0])
            if lane is None:
                break
            stream = self._waiting.popleft()
            stream.lane, stream.slot, stream.fed = lane.number, lane.free_slot(), 0
            lane.slots[stream.slot] = stream.number
        for lane in list(self._lanes.values()):
            if lane.step is None:
                self._set_out(lane)

    def _roomiest(self, stream: SequenceState) -> ServingRoute | None:
        """With as few streams as any, a new one if there may be more; None: all are full."""
        whole = sum(map(bool, self.holders))
        usable = [lane for lane in self._lanes.values() if len(lane.path) == whole]
        roomy = [lane for lane in usable if self._has_room(lane, stream)]
        idle = min(roomy, key=lambda lane: len(lane.slots), default=None)
        if (idle is None or idle.slots) and len(usable) < self.settings.lanes * len(self.holders[0]):
            idle = self._opened() or idle
        return idle

    def _has_room(self, lane: ServingRoute, stream: SequenceState) -> bool:
        there = [self.streams[number].request.longest for number in lane.slots.values()]
        slots = max([lane.free_slot(), *lane.slots]) + 1
        longest = max([stream.request.longest, *there])
        return len(there) < self.settings.streams and slots * longest <= self.settings.lane_tokens

    def _opened(self) -> ServingRoute | None:
        busy = Counter(node for lane in self._lanes.values() for node in lane.path)
        holders, distance = self.holders, _Around(self.distance, self._cut, self._doubts)
        for start in sorted(holders[0], key=lambda node: (busy[node], node)):
            path = fastest_route(holders, distance, busy, start)
            if path is not None:
                lane = ServingRoute(self._next("lane"), path)
                self._lanes[lane.number] = lane
                return lane
        return None

    def _set_out(self, lane: ServingRoute) -> None:
        if not lane.slots:
            if self._lanes.pop(lane.number, None) is not None:
                self._freed.pop(lane.number, None)
                self.env.close_lane(lane)
            return
        room = self.settings.prompt_tokens
        rows: list[StepRow] = []
        for slot, number in sorted(lane.slots.items()):
            stream = self.streams[number]
            new = stream.tokens[stream.fed :]
            if len(new) > 1:  # a prompt, or what is left of one: as much of it as there is room for
                new = new[:room]
                room -= len(new)
            if new:
                rows.append(StepRow(slot, stream.fed, tuple(new), stream))
        step = ServingStep(self._next("step"), lane, tuple(rows), tuple(self._freed.pop(lane.number, ())))
        lane.step, lane.stepped_ns = step.number, self.env.now_ns()
        self._steps[step.number] = step
        self.env.step(step)

    def _give_up(self, lane: ServingRoute) -> None:
        """Its streams wait for another one, before all others."""
        del self._lanes[lane.number]
        if lane.step is not None:
            self._steps.pop(lane.step, None)
        self._freed.pop(lane.number, None)
        now_ns = self.env.now_ns()
        for _, number in sorted(lane.slots.items(), reverse=True):
            stream = self.streams[number]
            stream.lane, stream.slot, stream.fed, stream.waits_since_ns = None, -1, 0, now_ns
            self._waiting.appendleft(stream)
        self.env.close_lane(lane)

    def _end(self, stream: SequenceState, ending: FinishReason) -> None:
        stream.ending = ending
        del self.streams[stream.number]
        if stream.lane is None:
            self._waiting.remove(stream)
        else:
            lane = self._lanes[stream.lane]
            del lane.slots[stream.slot]
            self._freed.setdefault(lane.number, []).append(stream.slot)
            stream.lane = None
        self.env.said(stream)

    def _next(self, what: str) -> int:
        self._numbers[what] += 1
        return self._numbers[what]


def _ns(duration: timedelta) -> int:
    return int(duration.total_seconds() * 1e9)


@dataclass(frozen=True)
class _Around:
    """Not over links that are cut, and rather not over those where steps were lost."""

    distance: LinkCost
    cut: set[frozenset[int]]
    doubts: Counter[frozenset[int]]

    def task_s(self, stage: int, node: int) -> float:
        return self.distance.task_s(stage, node)

    def hop_s(self, sender: int, receiver: int) -> float:
        link = frozenset((sender, receiver))
        if link in self.cut:
            return inf
        return self.distance.hop_s(sender, receiver) * (1 + DOUBT * self.doubts[link])


@dataclass(frozen=True)
class SequenceRequest:
    prompt: tuple[int, ...]
    most: int
    """Tokens to answer with."""
    ends: frozenset[int] = frozenset()
    """Tokens that end the answer."""
    sampling: SamplingParams = SamplingParams()  # noqa: RUF009 (frozen)

    @property
    def longest(self) -> int:
        """Tokens in the end."""
        return len(self.prompt) + self.most


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    NO_WAY = "no way"
    """Too few stages were left for too long."""
    SPOILED = "spoiled"
    """No node could compute it."""


@dataclass
class SequenceState:
    number: int
    request: SequenceRequest
    tokens: list[int] = field(default_factory=list)
    """Prompt and answer so far."""
    fed: int = 0
    """Tokens that the stages of its lane have seen."""
    lane: int | None = None
    slot: int = -1
    """Its place in the caches of the lane's nodes."""
    visited: int = 0
    """Stages that the shortest lane had by which a token was made; 0: none yet."""
    waits_since_ns: int = 0
    spoiled: int = 0
    """Steps with it that could not be done."""
    ending: FinishReason | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt, *self.tokens]

    @property
    def answer(self) -> list[int]:
        return self.tokens[len(self.request.prompt) :]

    def add(self, token: int, visited: int) -> None:
        """A token was made by so many stages."""
        self.tokens.append(token)
        self.visited = min(self.visited, visited) if self.visited else visited
        if token in self.request.ends:
            self.ending = FinishReason.STOP
        elif len(self.answer) >= self.request.most:
            self.ending = FinishReason.LENGTH
