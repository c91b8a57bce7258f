"""The coordinator: begins, adds up the norms, says how to step, collects the weights. A state machine like the node.

It moves no tensors while training: per iteration, one small message from every node and one to every node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from enum import Enum
from typing import Any, Protocol

from skippipe import __version__
from skippipe.learning import Learning
from skippipe.plan import Plan
from skippipe.runtime.control import (
    Averaged,
    Begin,
    Collect,
    Control,
    Failed,
    Hello,
    Proceed,
    Ready,
    Stepped,
    Stop,
    Want,
    Welcome,
)
from skippipe.transport.message import Message


class Surroundings(Protocol):
    """All that a coordinator can do to the world."""

    def now_ns(self) -> int: ...

    def meet(self, node: int, address: str) -> None:
        """From now on the node can be told things."""

    def tell(self, node: int, control: Control) -> None: ...

    def store(self, stage: int, piece: Any) -> None:
        """Keep a piece of a stage's weights; None after the last."""

    def save(self, stage: int, piece: Any) -> None:
        """Put a piece of a stage's state into the checkpoint that is being made; None after the last."""

    def saved(self, iterations: int) -> None:
        """The checkpoint after so many iterations is complete."""

    def give(self, node: int, piece: int) -> None:
        """Send a node a piece of the state that it goes on from."""


class Watcher(Protocol):
    """Whoever wants to know how it goes."""

    def iteration_done(self, report: IterationReport) -> None: ...


class Keeper(Protocol):
    """Whoever keeps checkpoints."""

    def save(self, stage: int, piece: Any) -> None:
        """A piece of a stage's state, in order; None after the last."""

    def saved(self, iterations: int) -> None:
        """All stages were given: so many iterations are done."""

    def piece(self, stage: int, number: int) -> tuple[Any, int]:
        """Of the state to go on from, None past the last; and the steps that the optimizer had taken."""


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
    JOINING = "to join"
    PREPARING = "to be ready"
    TRAINING = "to average gradients"
    STEPPING = "to take the last step"
    COLLECTING = "to send its weights"
    DONE = "for nothing"
    FAILED = "for nothing any more"


@dataclass(frozen=True)
class Deadlines:
    """How long the coordinator waits before it gives up and says for whom it waited."""

    join: timedelta = timedelta(minutes=10)
    """For the last node to join."""
    ready: timedelta = timedelta(minutes=5)
    """For nodes to build their stage."""
    iteration: timedelta = timedelta(minutes=10)
    """For an iteration, whatever the plan promises."""
    collect: timedelta = timedelta(minutes=10)
    """For the weights of a stage."""
    early: timedelta = timedelta(seconds=4)
    """The same, if somebody wants to stop at once."""


@dataclass
class Coordinator:
    plan: Plan
    learning: Learning
    surroundings: Surroundings
    watcher: Watcher
    iterations: int
    brief: dict[str, Any] = field(default_factory=dict)
    """What nodes must know to build their stage."""
    keys: Mapping[int, str | None] = field(default_factory=dict)
    """The nodes' public keys, by which they know each other."""
    first: int = 0
    recorded: frozenset[int] = frozenset()
    """The iterations of which every task is reported."""
    kept_every: int = 0
    """Iterations from one checkpoint to the next; 0: none are made."""
    resumed: bool = False
    """Nodes go on from a checkpoint."""
    deadlines: Deadlines = Deadlines()
    state: State = State.JOINING
    failure: str = ""
    iteration: int = field(init=False)
    _heard: dict[int, Any] = field(init=False, default_factory=dict)
    _since_ns: int = field(init=False)
    _collecting: int = field(init=False, default=-1)
    _early: bool = field(init=False, default=False)
    _saving: tuple[int, int] | None = field(init=False, default=None)
    """Of the checkpoint that is being made: after how many iterations, and the stage that is on its way."""

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
            case Hello() if self.state is State.JOINING:
                self._welcome(node, control)
            case Failed():
                self.fail(f"node '{self._name(node)}': {control.reason}")
            case Averaged() if self._early and self.state is State.COLLECTING:
                pass
            case _ if node in self._heard:
                self.fail(f"node '{self._name(node)}' said {type(control).__name__} when it had said all")
            case Want() if self.state is State.PREPARING and self.resumed:
                self._since_ns = self.surroundings.now_ns()
                self.surroundings.give(node, control.piece)
            case Ready() if self.state is State.PREPARING:
                self._heard[node] = control
                if self._all_heard():
                    self._training()
            case Averaged() if self.state is State.TRAINING and control.iteration == self.iteration:
                if flaw := self._flaw(node, control):
                    self.fail(f"node '{self._name(node)}' {flaw}")
                    return
                self._heard[node] = control
                if self._all_heard():
                    self._proceed()
            case Stepped() if self.state is State.STEPPING and control.iteration == self.iteration:
                self._heard[node] = control
                if self._all_heard():
                    self._collect(0)
            case _:
                self.fail(f"node '{self._name(node)}' said {type(control).__name__} while {self.state.name.lower()}")

    def receive(self, node: int, message: Message) -> None:
        """A piece of the weights, or of the copy that was kept for a checkpoint."""
        if self.over:
            return
        if message.step:
            self._save(node, message)
            return
        if self.state is not State.COLLECTING or node != self.plan.stages[self._collecting].ring[0]:
            self.fail(f"node '{self._name(node)}' sent weights that nobody asked for")
            return
        self.surroundings.store(self._collecting, message.body)
        if not self._early:
            self._since_ns = self.surroundings.now_ns()
        if message.body is None:
            self._collect(self._collecting + 1)
        else:
            self.surroundings.tell(node, Collect(message.microbatch + 1, kept=False))

    def finish_early(self) -> None:
        """Collect the weights as they are; what is in flight is given up. Before training there is nothing to keep."""
        if self._early or self.over:
            return
        self._early = True
        self.deadlines = replace(self.deadlines, collect=self.deadlines.early)
        if self.state is State.TRAINING:
            self._collect(0)
        elif self.state in (State.JOINING, State.PREPARING):
            self.state = State.DONE
            self._tell_all(Stop(""))

    def lost(self, node: int, how: str) -> None:
        self.fail(f"node '{self._name(node)}' is gone ({how}) while it was waited for {self.state.value}")

    def tick(self) -> None:
        """Give up if a deadline has passed."""
        if self.over or self.surroundings.now_ns() < self.deadline_ns():
            return
        missing = ", ".join(self._name(node) for node in self._missing())
        waited_s = (self.surroundings.now_ns() - self._since_ns) / 1e9
        self.fail(f"waited {waited_s:.0f} s for {missing} {self.state.value}")

    def deadline_ns(self) -> int:
        limit = {
            State.JOINING: self.deadlines.join,
            State.PREPARING: self.deadlines.ready,
            State.COLLECTING: self.deadlines.collect,
        }.get(self.state, self.deadlines.iteration)
        return self._since_ns + int(limit.total_seconds() * 1e9)

    def fail(self, reason: str) -> None:
        """Give up; the first reason counts."""
        if self.over:
            return
        self.failure = reason
        self.state = State.FAILED
        self._tell_all(Stop(reason))

    def _welcome(self, node: int, hello: Hello) -> None:
        if hello.version != __version__:
            self.fail(
                f"node '{self._name(node)}' runs skippipe {hello.version}, this is {__version__}; use one version"
            )
            return
        self._heard[node] = hello.address
        self.surroundings.meet(node, hello.address)
        if self._all_heard() and not self.over:
            peers = {self._name(each): [address, self.keys.get(each)] for each, address in self._heard.items()}
            self._enter(State.PREPARING)
            self._tell_all(Welcome(self.brief, peers, self.resumed))

    def _training(self) -> None:
        self._enter(State.TRAINING)
        self._tell_all(Begin(self.iteration, self.iteration in self.recorded))

    def _proceed(self) -> None:
        reports: dict[int, Averaged] = dict(self._heard)
        for index, stage in enumerate(self.plan.stages):
            norms = {node: reports[node].squared_norm for node in stage.nodes}
            if len(set(norms.values())) > 1 and not all(norm != norm for norm in norms.values()):
                said = ", ".join(f"{self._name(node)} {norm}" for node, norm in norms.items())
                self.fail(f"the nodes of stage {index} no longer agree on their gradient, its squared norm is: {said}")
                return
        norm, scale = self.learning.clipping(reports[stage.nodes[0]].squared_norm for stage in self.plan.stages)
        rate = self.learning.rate_at(self.iteration)
        losses = [loss for _, _, loss in sorted(tuple(row) for node in self._nodes for row in reports[node].losses)]
        last = self.iteration + 1 == self.first + self.iterations
        done = self.iteration + 1
        kept = self._saving is None and self.kept_every > 0 and (last or done % self.kept_every == 0)
        proceed = Proceed(self.iteration, rate, scale, last, kept, done in self.recorded)
        now_ns = self.surroundings.now_ns()
        report = IterationReport(
            iteration=self.iteration,
            loss=sum(losses) / len(losses),
            norm=norm,
            rate=rate,
            seconds=(now_ns - self._since_ns) / 1e9,
            sent_bytes={(node, to): count for node in self._nodes for to, count in reports[node].sent_bytes},
            tasks={node: reports[node].tasks for node in self._nodes if reports[node].tasks},
        )
        self._enter(State.STEPPING if last else State.TRAINING)
        if not last:
            self.iteration += 1
        self._tell_all(proceed)
        if kept:
            self._ask_for_state(done, 0)
        self.watcher.iteration_done(report)

    def _save(self, node: int, message: Message) -> None:
        if self._saving is None or node != self.plan.stages[self._saving[1]].ring[0]:
            self.fail(f"node '{self._name(node)}' sent weights that nobody asked for")
            return
        iterations, stage = self._saving
        if self.state is State.COLLECTING and not self._early:
            self._since_ns = self.surroundings.now_ns()
        self.surroundings.save(stage, message.body)
        if message.body is not None:
            self.surroundings.tell(node, Collect(message.microbatch + 1, kept=True))
        elif stage + 1 < len(self.plan.stages):
            self._ask_for_state(iterations, stage + 1)
        else:
            self._saving = None
            self.surroundings.saved(iterations)
            if self.state is State.COLLECTING and self._collecting == len(self.plan.stages):
                self._collect(self._collecting)

    def _ask_for_state(self, iterations: int, stage: int) -> None:
        self._saving = iterations, stage
        self.surroundings.tell(self.plan.stages[stage].ring[0], Collect(0, kept=True))

    def _collect(self, stage: int) -> None:
        if stage == len(self.plan.stages):
            self._collecting = stage
            if self._saving is None or self._early:
                self.state = State.DONE
                self._tell_all(Stop(""))
            return
        self._collecting = stage
        since_ns = self._since_ns
        self._enter(State.COLLECTING)
        if self._early and stage > 0:
            self._since_ns = since_ns
        self.surroundings.tell(self.plan.stages[stage].ring[0], Collect(0, kept=False))

    def _enter(self, state: State) -> None:
        self.state = state
        self._heard.clear()
        self._since_ns = self.surroundings.now_ns()

    def _flaw(self, node: int, said: Averaged) -> str:
        """What the plan does not foresee in a report; empty if all is well."""
        lanes = self.plan.lanes
        own = [
            [lane, number]
            for lane, each in enumerate(lanes)
            if each.path[0] == node
            for number in range(each.microbatches)
        ]
        if sorted(row[:2] for row in said.losses) != own or any(len(row) != 3 for row in said.losses):
            return f"reported the losses of {len(said.losses)} microbatches, not of the {len(own)} that start there"
        if not all(len(row) == 2 and row[0] in self.plan.stage_of for row in said.sent_bytes):
            return "reported bytes to a node that is not there"
        if not all(len(row) == 6 and row[0] < len(lanes) for row in said.tasks):
            return "reported tasks that are not in the plan"
        return ""

    def _all_heard(self) -> bool:
        return len(self._heard) == len(self._nodes)

    def _missing(self) -> list[int]:
        if self.state is State.COLLECTING:
            stage = self._collecting
            if self._saving is not None and stage == len(self.plan.stages):
                stage = self._saving[1]
            return [self.plan.stages[stage].ring[0]]
        return [node for node in self._nodes if node not in self._heard]

    def _tell_all(self, control: Control) -> None:
        for node in self._nodes:
            self.surroundings.tell(node, control)
            if self.state is State.FAILED and not isinstance(control, Stop):
                return  # this one could not be told, so everybody was told to stop

    def _name(self, node: int) -> str:
        return self.plan.cluster.nodes[node].name
