"""A node by itself: what tests tell it, and what it does to the world, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from skippipe.optim.config import OptimConfig
from skippipe.plan import Lane, Plan, Stage
from skippipe.runtime.coordinator.settings import RecoverySettings
from skippipe.runtime.messages import COORDINATOR, Begin, ControlMessage
from skippipe.runtime.node.interfaces import NodePhase
from skippipe.runtime.node.ops import AdoptPiece, ContributePiece, DropMicrobatch, GradNorm, Op, StageTask, op_name
from skippipe.runtime.node.state_machine import TrainingNode
from skippipe.runtime.simulation.symbolic_executor import Gradient, SymbolicExecutor, Trail
from skippipe.transport.message import GradientPiece, Hop, Message, MessageKind, StatePiece
from skippipe.workload import Workload
from tests.helpers.plans import TINY, uniform_cluster

LEARNING = OptimConfig(warmup=2, iterations=10)
AT_ONCE = RecoverySettings(planning=timedelta(0), backup_every=0)


def plan_of(nodes: int, stages: Sequence[tuple[int, ...]], lanes: Sequence[tuple[int, ...]], **others: Any) -> Plan:
    """Two microbatches on each lane."""
    workload = Workload(TINY, 16, 1, 2 * len(lanes))
    layers = workload.layer_split(len(stages))
    made = tuple(Stage(count, nodes, nodes) for count, nodes in zip(layers, stages, strict=True))
    return Plan(uniform_cluster(nodes), workload, made, tuple(Lane(path, 2) for path in lanes), **others)


def small_plan(**others: Any) -> Plan:
    """Stage 0 on nodes 0 and 1, stage 1 on 2, stage 2 on the ring 3, 4, 5; nobody needs node 6."""
    return plan_of(7, ((0, 1), (2,), (3, 4, 5)), ((0, 2, 3), (1, 2, 4)), **others)


def long_plan(**others: Any) -> Plan:
    """Stage 0 on nodes 0 and 1, stage 1 on 2, stage 2 on 3 and 4, stage 3 on 5 and 6.

    Forward in steps 0 to 3, the head is step 4, backward at places 3 to 0 in steps 5 to 8.
    """
    return plan_of(7, ((0, 1), (2,), (3, 4), (5, 6)), ((0, 2, 3, 5), (1, 2, 4, 6)), **others)


class Bench:
    """A node by itself, which computes with symbols; what it does to the world is noted, in words."""

    def __init__(self, number: int, plan: Plan | None = None) -> None:
        plan = plan or small_plan()
        self.now = 0
        self.sent_messages: list[tuple[int, Message]] = []
        self.said: list[ControlMessage] = []
        self.asked: list[tuple[int, ControlMessage]] = []
        self.shown: list[Any] = []
        self.misfits: set[MessageKind] = set()
        self.running: Op | None = None
        self.executor = SymbolicExecutor(number, plan)
        self.node = TrainingNode(number, plan, self)

    # what the node sees

    def now_ns(self) -> int:
        return self.now

    def send(self, receiver: int, message: Message) -> None:
        (self.shown if receiver == COORDINATOR else self.sent_messages).append((receiver, message))

    def send_control(self, control: ControlMessage, to: int = COORDINATOR) -> None:
        if to == COORDINATOR:
            self.said.append(control)
        else:
            self.asked.append((to, control))

    def start(self, work: Op) -> None:
        assert self.running is None, "one work at a time"
        self.running = work

    def fits(self, message: Message, expected: Any) -> bool:
        return message.kind not in self.misfits and self.executor.fits(message, expected)

    def prefetch(self, given: Any, device: int) -> Any:
        return self.executor.prefetch(given, device)

    # what a test does

    def begin(self, iteration: int = 0, epoch: int = 0) -> Bench:
        self.node.handle_control(Begin(iteration, epoch, False))
        return self

    def take(self, sender: int, *messages: Message) -> Bench:
        for message in messages:
            self.node.receive(sender, message)
        return self

    def hear(self, *controls: ControlMessage) -> Bench:
        for control in controls:
            self.node.handle_control(control)
        return self

    def decide(self) -> str:
        """What it begins with, or is still busy with."""
        self.node.decide()
        return words(self.running) if self.running is not None else ""

    def end(self) -> str:
        """Of what it is busy with."""
        work, self.running = self.running, None
        assert work is not None
        self.node.finished(work, self.executor.run(work))
        return words(work)

    def work(self) -> list[str]:
        """All that there is to do, until nothing is left."""
        done = []
        while self.decide():
            done.append(self.end())
        return done

    def sent(self) -> list[str]:
        """Since it was last asked."""
        posted, self.sent_messages = self.sent_messages, []
        return [f"{_name(message)} → {receiver}, epoch {message.header.epoch}" for receiver, message in posted]  # type: ignore[attr-defined]

    def heard(self) -> list[ControlMessage]:
        """What the coordinator was told since it was last asked."""
        said, self.said = self.said, []
        return said


def _name(message: Message) -> str:
    header = message.header
    if isinstance(header, GradientPiece):
        return f"transfer {header.transfer}"
    assert isinstance(header, Hop)
    return f"{header.lane}/{header.microbatch} step {header.step}"


def words(work: Op) -> str:
    match work:
        case StageTask():
            return f"{work.lane}/{work.microbatch} step {work.step}{'' if work.counts else ', counts not'}"
        case DropMicrobatch():
            return f"drop {work.lane}/{work.microbatch}"
        case ContributePiece():
            return f"contribute to piece {work.piece}, {len(work.given)} given{', total' * work.total}"
        case AdoptPiece():
            return f"adopt piece {work.piece}"
        case GradNorm():
            return f"measure {work.stage_microbatches}{' alone' if work.alone else ''}"
    return op_name(work)


def hop(lane: int, step: int, microbatch: int = 0, *, iteration: int = 0, epoch: int = 0) -> Message:
    trail: Any = Trail(lane, microbatch, step)
    return Message(Hop(iteration, lane, microbatch, step, epoch), trail)


def gradient_piece(transfer: int, *, stage: int = 2, iteration: int = 0, epoch: int = 0, piece: int = 0) -> Message:
    gradient: Any = Gradient(piece, Counter())
    return Message(GradientPiece(iteration, stage, transfer, epoch), gradient)


def state_piece(first: int = 0, *, iteration: int = 0, body: Any = ()) -> Message:
    return Message(StatePiece(iteration, first), body)


A_HOP, A_PIECE = "a hop that does not come here from there", "a gradient piece that does not come here from there"


def average_alone(bench: Bench) -> None:
    """Node 2 of `small_plan` has all its tasks behind it, and its mean gradient."""
    iteration = bench.node.iteration
    for lane in range(2):
        for microbatch in range(2):
            at = {"iteration": iteration, "epoch": bench.node.epoch}
            bench.take(lane, hop(lane, 1, microbatch, **at)).work()
            bench.take(3 + lane, hop(lane, 5, microbatch, **at)).work()
    assert bench.node.phase is NodePhase.AVERAGED
    bench.heard()
