"""The coordinator: begins, adds up the norms, says how to step, collects the weights. A state machine like the node.

It moves no tensors while training: per iteration, one small message from every node and one to every node.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.runtime.control import Averaged, Begin, Collect, Control, Failed, Proceed, Ready, Stepped, Stop
from skippipe.transport.message import Message


class Surroundings(Protocol):
    """All that a coordinator can do to the world."""

    def now_ns(self) -> int: ...

    def tell(self, node: int, control: Control) -> None: ...

    def store(self, stage: int, piece: Any) -> None:
        """Keep a piece of a stage's weights; None after the last."""


class Watcher(Protocol):
    """Whoever wants to know how it goes."""

    def iteration_done(self, report: IterationReport) -> None: ...


@dataclass(frozen=True)
class IterationReport:
    iteration: int
    loss: float
    """Mean over the microbatches."""
    norm: float
    """Of the whole model's gradient, before it is clipped."""
    rate: float
    seconds: float
    """Since the one before was done."""
    sent_bytes: dict[tuple[int, int], int]
    """Sender and receiver → tensors sent."""
    tasks: dict[int, list[list[int]]]
    """Node → its tasks, if they were recorded (see `Averaged`)."""


class State(Enum):
    GATHERING = "to be ready"
    TRAINING = "to average gradients"
    STEPPING = "to take the last step"
    COLLECTING = "to send its weights"
    DONE = "for nothing"
    FAILED = "for nothing any more"


@dataclass(frozen=True)
class Deadlines:
    """How long the coordinator waits before it gives up and says for whom it waited."""

    ready: timedelta = timedelta(minutes=5)
    """For nodes to join and to build their stage."""
    iteration: timedelta = timedelta(minutes=10)
    """For an iteration, whatever the plan promises."""
    collect: timedelta = timedelta(minutes=10)
    """For the weights of a stage."""


@dataclass
class Coordinator:
    plan: Plan
    learning: Learning
    surroundings: Surroundings
    watcher: Watcher
    iterations: int
    first: int = 0
    recorded: frozenset[int] = frozenset()
    """The iterations of which every task is reported."""
    deadlines: Deadlines = Deadlines()
    state: State = State.GATHERING
    failure: str = ""
    iteration: int = field(init=False)
    _heard: dict[int, Any] = field(init=False, default_factory=dict)
    _since_ns: int = field(init=False)
    _collecting: int = field(init=False, default=-1)

    def __post_init__(self) -> None:
        self.iteration = self.first
        self._nodes = sorted(self.plan.stage_of)
        self._since_ns = self.surroundings.now_ns()

    @property
    def over(self) -> bool:
        return self.state in (State.DONE, State.FAILED)

    def hear(self, node: int, control: Control) -> None:
        if self.over:
            return
        match control:
            case Ready() if self.state is State.GATHERING:
                self._note(node, True)
                if self._all_heard():
                    self._training()
            case Averaged() if self.state is State.TRAINING and control.iteration == self.iteration:
                self._note(node, control)
                if self._all_heard():
                    self._proceed()
            case Stepped() if self.state is State.STEPPING:
                self._note(node, True)
                if self._all_heard():
                    self._collect(0)
            case Failed():
                self.fail(f"node '{self._name(node)}': {control.reason}")
            case _:
                self.fail(f"node '{self._name(node)}' said {type(control).__name__} while {self.state.name.lower()}")

    def receive(self, node: int, message: Message) -> None:
        """A piece of the weights."""
        if self.state is not State.COLLECTING or node != self.plan.stages[self._collecting].ring[0]:
            return
        self.surroundings.store(self._collecting, message.body)
        self._since_ns = self.surroundings.now_ns()
        if message.body is None:
            self._collect(self._collecting + 1)

    def lost(self, node: int, how: str) -> None:
        if not self.over:
            self.fail(f"node '{self._name(node)}' is gone ({how}) while the others waited {self._waiting()}")

    def tick(self) -> None:
        """Give up if a deadline has passed."""
        if self.over or self.surroundings.now_ns() < self.deadline_ns():
            return
        missing = ", ".join(self._name(node) for node in self._missing())
        waited_s = (self.surroundings.now_ns() - self._since_ns) / 1e9
        self.fail(f"waited {waited_s:.0f} s for {missing} {self.state.value}")

    def deadline_ns(self) -> int:
        limit = {
            State.GATHERING: self.deadlines.ready,
            State.COLLECTING: self.deadlines.collect,
        }.get(self.state, self.deadlines.iteration)
        return self._since_ns + int(limit.total_seconds() * 1e9)

    def fail(self, reason: str) -> None:
        self.failure = reason
        self.state = State.FAILED
        self._tell_all(Stop(reason))

    def _training(self) -> None:
        self._enter(State.TRAINING)
        self._tell_all(Begin(self.iteration, self.iteration in self.recorded))

    def _proceed(self) -> None:
        reports: dict[int, Averaged] = dict(self._heard)
        for index, stage in enumerate(self.plan.stages):
            norms = {reports[node].squared_norm for node in stage.nodes}
            if len(norms) > 1 and not all(norm != norm for norm in norms):
                self.fail(f"the nodes of stage {index} no longer agree on their gradient: norms {sorted(norms)}")
                return
        norm, scale = self.learning.clipping(reports[stage.nodes[0]].squared_norm for stage in self.plan.stages)
        rate = self.learning.rate_at(self.iteration)
        losses = sorted(tuple(row) for node in self._nodes for row in reports[node].losses)
        if len(losses) != self.plan.microbatches:
            self.fail(f"{len(losses)} losses of {self.plan.microbatches} microbatches were reported")
            return
        last = self.iteration + 1 == self.first + self.iterations
        self._tell_all(Proceed(self.iteration, rate, scale, last, self.iteration + 1 in self.recorded))
        now_ns = self.surroundings.now_ns()
        report = IterationReport(
            iteration=self.iteration,
            loss=sum(loss for _, _, loss in losses) / len(losses),
            norm=norm,
            rate=rate,
            seconds=(now_ns - self._since_ns) / 1e9,
            sent_bytes={(node, to): count for node in self._nodes for to, count in reports[node].sent_bytes},
            tasks={node: reports[node].tasks for node in self._nodes if reports[node].tasks},
        )
        self._enter(State.STEPPING if last else State.TRAINING)
        if not last:
            self.iteration += 1
        self.watcher.iteration_done(report)

    def _collect(self, stage: int) -> None:
        if stage == len(self.plan.stages):
            self.state = State.DONE
            self._tell_all(Stop(""))
            return
        self._collecting = stage
        self._enter(State.COLLECTING)
        self.surroundings.tell(self.plan.stages[stage].ring[0], Collect())

    def _enter(self, state: State) -> None:
        self.state = state
        self._heard.clear()
        self._since_ns = self.surroundings.now_ns()

    def _note(self, node: int, what: Any) -> None:
        self._heard[node] = what

    def _all_heard(self) -> bool:
        return len(self._heard) == len(self._nodes)

    def _missing(self) -> list[int]:
        if self.state is State.COLLECTING:
            return [self.plan.stages[self._collecting].ring[0]]
        return [node for node in self._nodes if node not in self._heard]

    def _waiting(self) -> str:
        return self.state.value

    def _tell_all(self, control: Control) -> None:
        for node in self._nodes:
            self.surroundings.tell(node, control)

    def _name(self, node: int) -> str:
        return self.plan.cluster.nodes[node].name
