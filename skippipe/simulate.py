"""From a plan to its timeline: how long an iteration takes, and why.

The rules of time, which docs/formats.md states in full: a node runs one task at a time (`dispatch` says which), a hop
takes flight and transmit time, a lane's next microbatch sets out when the one before it is back. Under full timing,
each stage averages its gradients when the last of its nodes is done, while other stages still work; the optimizer
step follows when all are averaged, because clipping needs the norm of the whole model's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from skippipe.averaging import chunk_bytes, ring_ns
from skippipe.costs import NEVER_NS, Costs
from skippipe.dispatch import Dispatch, place, steps
from skippipe.errors import UserError
from skippipe.eventloop import run
from skippipe.plan import Plan
from skippipe.timeline import LinkUse, NodeUse, Task, Timeline, Timing

Ints = NDArray[np.int64]
LAST_NS = 2**62  # the end of time for whole numbers of 64 bits


class Deadlock(UserError):
    """Lanes hold memory slots that others of them wait for."""


@dataclass(frozen=True)
class Course:
    """Node times for a given placement, ready for the event loop: what stays the same while paths change."""

    forward_ns: Ints
    backward_ns: Ints
    head_ns: Ints
    slots: Ints
    flight_ns: Ints
    transmit_ns: Ints
    queued: bool
    forward_urgency: int

    @classmethod
    def of(cls, costs: Costs, stage_of: dict[int, int], dispatch: Dispatch, timing: Timing) -> Course:
        forward, backward, slots = (np.zeros(costs.nodes, np.int64) for _ in range(3))
        for node, stage in stage_of.items():
            forward[node] = costs.forward_ns[stage, node]
            backward[node] = costs.backward_ns[stage, node]
            slots[node] = costs.slots[stage, node]
        return cls(
            forward_ns=forward,
            backward_ns=backward,
            head_ns=costs.head_ns,
            slots=slots,
            flight_ns=costs.flight_ns,
            transmit_ns=costs.transmit_ns,
            queued=timing is Timing.FULL,
            forward_urgency=dispatch.forward_urgency,
        )

    def run(
        self, paths: Ints, lengths: Ints, microbatches: Ints, done_ns: Ints | None = None, record: Ints | None = None
    ) -> int:
        """The end of the last backward."""
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
            self.queued,
            self.forward_urgency,
            np.empty(len(self.forward_ns), np.int64) if done_ns is None else done_ns,
            np.empty((0, 3), np.int64) if record is None else record,
        )
        sent = int(microbatches.sum())
        if completed < sent:
            raise Deadlock(
                f"deadlock: only {completed} of {sent} microbatches come back, the others hold memory slots that they "
                "wait for; put fewer lanes through the full nodes ('skippipe check' names them)"
            )
        return int(last_ns)


def as_arrays(paths: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Paths as padded rows, and their lengths."""
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    rows = np.zeros((len(paths), int(lengths.max())), np.int64)
    for row, path in zip(rows, paths, strict=True):
        row[: len(path)] = path
    return rows, lengths


def _slowest_ns(course: Course) -> int:
    """Of any task or part of a hop."""
    parts = (course.forward_ns, course.backward_ns, course.head_ns, course.flight_ns, course.transmit_ns)
    return max(int(part.max()) for part in parts)


def simulate(plan: Plan, timing: Timing = Timing.FULL) -> Timeline:
    """Run one iteration of the plan under virtual time."""
    course = Course.of(plan.costs, plan.stage_of, plan.dispatch, timing)
    paths, lengths = as_arrays([lane.path for lane in plan.lanes])
    microbatches = np.array([lane.microbatches for lane in plan.lanes], dtype=np.int64)
    total = sum(lane.microbatches * steps(len(lane.path)) for lane in plan.lanes)
    if 3 * total * NEVER_NS > LAST_NS and 3 * total * _slowest_ns(course) > LAST_NS:
        raise UserError(
            "an iteration of this plan may take over a century: is a link missing or a speed far too small?"
        )
    record = np.empty((total, 3), np.int64)
    done_ns = np.zeros(len(plan.cluster), np.int64)
    last_ns = course.run(paths, lengths, microbatches, done_ns, record)

    tasks = _tasks(plan, record)
    averaging = _averaging(plan, done_ns) if timing is Timing.FULL else ()
    iteration_ns = last_ns
    if timing is Timing.FULL:
        step_ns = max(int(plan.costs.optimizer_ns[stage, node]) for node, stage in plan.stage_of.items())
        iteration_ns = max(end for _, end in averaging) + step_ns
    return Timeline(
        timing=timing,
        iteration_ns=iteration_ns,
        last_backward_ns=last_ns,
        averaging_ns=averaging,
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


def _averaging(plan: Plan, done_ns: Ints) -> tuple[tuple[int, int], ...]:
    spans = []
    for index, stage in enumerate(plan.stages):
        start = max(int(done_ns[node]) for node in stage.nodes)
        spans.append((start, start + ring_ns(plan.costs, index, stage.ring)))
    return tuple(spans)


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
        around = [*lane.path, lane.path[0]]
        for a, b in pairwise(around):
            for link in ((a, b), (b, a)):  # the activation, and on the way back its gradient
                sent[link] = sent.get(link, 0) + plan.costs.activation_bytes * lane.microbatches
    if timing is Timing.FULL:
        for index, stage in enumerate(plan.stages):
            if len(stage.ring) > 1:
                chunk = chunk_bytes(plan.costs.gradient_bytes[index], len(stage.ring))
                for link in zip(stage.ring, [*stage.ring[1:], stage.ring[0]], strict=True):
                    sent[link] = sent.get(link, 0) + 2 * (len(stage.ring) - 1) * chunk
    return tuple(LinkUse(a, b, count) for (a, b), count in sorted(sent.items()))
