"""From a plan to its timeline: how long an iteration takes, and why.

The rules of time, which docs/formats.md states in full: a node runs one task at a time (`dispatch` says which), a hop
takes flight and transmit time, a lane's next microbatch sets out when the one before it is back. Under full timing,
each stage averages its gradients when the last of its nodes is done, while other stages still work; the optimizer
step follows when all are averaged, because clipping needs the norm of the whole model's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skippipe.averaging import chunk_bytes, ring_ns
from skippipe.costs import Costs
from skippipe.dispatch import Dispatch, place, steps
from skippipe.errors import UserError
from skippipe.eventloop import run
from skippipe.plan import Plan
from skippipe.rules import circle
from skippipe.timeline import LinkUse, NodeUse, Task, Timeline, Timing

Ints = NDArray[np.int64]
LAST_NS = 2**62  # the end of time for whole numbers of 64 bits
MOST_TASKS = 20_000_000


class Deadlock(UserError):
    """Lanes hold memory slots that others of them wait for."""


@dataclass(frozen=True)
class Run:
    """An iteration in three figures."""

    iteration_ns: int
    last_backward_ns: int
    averaging_ns: tuple[tuple[int, int], ...]
    """Of each stage, from when to when; empty if not counted."""


@dataclass(frozen=True)
class Course:
    """A placement ready for the event loop: what stays the same while paths change."""

    forward_ns: Ints
    backward_ns: Ints
    head_ns: Ints
    slots: Ints
    flight_ns: Ints
    transmit_ns: Ints
    forward_urgency: int
    timing: Timing
    members: tuple[tuple[int, ...], ...]
    """The nodes of each stage."""
    ring_ns: tuple[int, ...]
    """How long each stage averages; 0 if not counted, like the next."""
    step_ns: int
    """The slowest node's optimizer step."""

    @classmethod
    def of(cls, costs: Costs, rings: Sequence[Sequence[int]], dispatch: Dispatch, timing: Timing) -> Course:
        """`rings` are the nodes of every stage in the order in which they average."""
        forward, backward, slots = (np.zeros(costs.nodes, np.int64) for _ in range(3))
        for stage, ring in enumerate(rings):
            nodes = list(ring)
            forward[nodes] = costs.forward_ns[stage, nodes]
            backward[nodes] = costs.backward_ns[stage, nodes]
            slots[nodes] = costs.slots[stage, nodes]
        full = timing is Timing.FULL
        return cls(
            forward_ns=forward,
            backward_ns=backward,
            head_ns=costs.head_ns,
            slots=slots,
            flight_ns=costs.flight_ns,
            transmit_ns=costs.transmit_ns,
            forward_urgency=dispatch.forward_urgency,
            timing=timing,
            members=tuple(tuple(ring) for ring in rings),
            ring_ns=tuple(ring_ns(costs, stage, ring) if full else 0 for stage, ring in enumerate(rings)),
            step_ns=max(int(costs.optimizer_ns[s, n]) for s, ring in enumerate(rings) for n in ring) if full else 0,
        )

    def alone_ns(self, path: Sequence[int]) -> int:
        """A round trip with nobody else there: every task once, every hop there and back."""
        hop_ns = self.flight_ns, self.transmit_ns
        hops = sum(int(part[a, b] + part[b, a]) for a, b in circle(path) for part in hop_ns)
        tasks = sum(int(self.forward_ns[node] + self.backward_ns[node]) for node in path)
        return hops + tasks + int(self.head_ns[path[0]])

    def run(self, paths: Ints, lengths: Ints, microbatches: Ints, record: Ints | None = None) -> Run:
        """One iteration; `record` takes the (ready, start, end) of every task, lane by lane."""
        done_ns = np.zeros(len(self.forward_ns), np.int64)
        last_ns, completed = run(
            paths,
            lengths,
            microbatches,
            self.forward_ns,
            self.backward_ns,
            self.head_ns,
            self.slots,
            self.flight_ns,
            self.transmit_ns,
            self.timing is Timing.FULL,
            self.forward_urgency,
            done_ns,
            np.empty((0, 3), np.int64) if record is None else record,
        )
        sent = int(microbatches.sum())
        if completed < sent:
            raise Deadlock(
                f"deadlock: only {completed} of {sent} microbatches come back, the others hold memory slots that they "
                "wait for; put fewer lanes through the full nodes ('skippipe check' names them)"
            )
        if self.timing is Timing.CONTENTION_ONLY:
            return Run(int(last_ns), int(last_ns), ())
        done = done_ns.tolist()
        starts = [max(done[node] for node in nodes) for nodes in self.members]
        spans = tuple((start, start + ring) for start, ring in zip(starts, self.ring_ns, strict=True))
        return Run(max(end for _, end in spans) + self.step_ns, int(last_ns), spans)


def as_arrays(paths: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Paths as padded rows, and their lengths."""
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    rows = np.zeros((len(paths), int(lengths.max())), np.int64)
    for row, path in zip(rows, paths, strict=True):
        row[: len(path)] = path
    return rows, lengths


def simulate(plan: Plan, timing: Timing = Timing.FULL) -> Timeline:
    """Run one iteration of the plan under virtual time."""
    course = Course.of(plan.costs, [stage.ring for stage in plan.stages], plan.dispatch, timing)
    paths, lengths = as_arrays([lane.path for lane in plan.lanes])
    microbatches = np.array([lane.microbatches for lane in plan.lanes], dtype=np.int64)
    total = sum(lane.microbatches * steps(len(lane.path)) for lane in plan.lanes)
    if total > MOST_TASKS:
        raise UserError(f"{total} tasks in an iteration are more than the {MOST_TASKS} that can be simulated")
    if sum(lane.microbatches * course.alone_ns(lane.path) for lane in plan.lanes) > LAST_NS:  # one after another
        raise UserError("an iteration of this plan may take over a century: does it use a link that is not there?")
    record = np.empty((total, 3), np.int64)
    outcome = course.run(paths, lengths, microbatches, record)
    tasks = _tasks(plan, record)
    return Timeline(
        timing=timing,
        iteration_ns=outcome.iteration_ns,
        last_backward_ns=outcome.last_backward_ns,
        averaging_ns=outcome.averaging_ns,
        nodes=_node_use(plan, tasks),
        links=_link_use(plan, timing),
        tasks=tasks,
    )


def _tasks(plan: Plan, record: Ints) -> tuple[Task, ...]:
    times = iter(record.tolist())
    tasks = [
        Task(number, microbatch, step, lane.path[place(step, len(lane.path))], *next(times))
        for number, lane in enumerate(plan.lanes)
        for microbatch in range(lane.microbatches)
        for step in range(steps(len(lane.path)))
    ]
    return tuple(sorted(tasks, key=lambda task: (task.start_ns, task.lane)))


def _node_use(plan: Plan, tasks: Sequence[Task]) -> tuple[NodeUse, ...]:
    busy_ns = dict.fromkeys(plan.stage_of, 0)
    collision_ns = dict.fromkeys(plan.stage_of, 0)
    for task in tasks:
        busy_ns[task.node] += task.end_ns - task.start_ns
        collision_ns[task.node] += task.start_ns - task.ready_ns
    costs = plan.costs
    return tuple(
        NodeUse(
            node=node,
            stage=stage,
            slots=plan.slots[node],
            forward_ns=int(costs.forward_ns[stage, node]),
            backward_ns=int(costs.backward_ns[stage, node]),
            head_ns=int(costs.head_ns[node]) if stage == 0 else 0,
            optimizer_ns=int(costs.optimizer_ns[stage, node]),
            busy_ns=busy_ns[node],
            collision_ns=collision_ns[node],
        )
        for node, stage in sorted(plan.stage_of.items())
    )


def _link_use(plan: Plan, timing: Timing) -> tuple[LinkUse, ...]:
    sent: dict[tuple[int, int], int] = {}
    for lane in plan.lanes:
        for a, b in circle(lane.path):
            for link in ((a, b), (b, a)):  # the activation, and on the way back its gradient
                sent[link] = sent.get(link, 0) + plan.costs.activation_bytes * lane.microbatches
    if timing is Timing.FULL:
        for index, stage in enumerate(plan.stages):
            if len(stage.ring) > 1:
                chunk = chunk_bytes(plan.costs.gradient_bytes[index], len(stage.ring))
                for link in circle(stage.ring):
                    sent[link] = sent.get(link, 0) + 2 * (len(stage.ring) - 1) * chunk
    return tuple(LinkUse(a, b, count) for (a, b), count in sorted(sent.items()))
