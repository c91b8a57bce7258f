"""The simulator: from a plan to its timeline, how long an iteration takes and why.

The rules of time, which docs/formats.md states in full: each worker of a node runs one task at a time (`dispatch` says
which), a hop takes flight and transmit time, a lane's next microbatch sets out when the one before it is back. Under
full timing, every node averages gradients within its stage (`collectives`) as soon as it is done, while others still
work; the optimizer step follows when all stages are averaged, because clipping needs the norm of the whole model's
gradient.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np

from skippipe.collectives.rings import ring_edges
from skippipe.collectives.schedule import Averaging
from skippipe.collectives.transfers import FreeLinks, MergedSchedule, TransferTimes, free_links, merged, transfer_times
from skippipe.constraints import NodePath, circle
from skippipe.cost_model import CostModel
from skippipe.dispatch import Dispatch, all_steps, is_weights, place
from skippipe.errors import UserError
from skippipe.event_loop import run_iteration
from skippipe.jit import Ints
from skippipe.plan import Plan
from skippipe.timeline import LinkUse, NodeUse, Task, Timeline, Timing
from skippipe.whole_paths import hop_messages, planned_teacher_paths

LAST_NS = 2**62  # the end of time for whole numbers of 64 bits
MOST_TASKS = 20_000_000
NO_RECORD = np.empty((0, 4), np.int64)
NO_SLACK = np.empty(0, np.int64)
Spans: TypeAlias = tuple[tuple[int, int], ...]


class Deadlock(UserError):
    """A deadlock: lanes hold memory slots that others of them wait for."""


@dataclass(frozen=True)
class IterationTimes:
    """The main figures of a simulated iteration."""

    iteration_ns: int
    last_backward_ns: int
    averaging_ns: tuple[tuple[int, int], ...]
    """Start and end of each stage's averaging; empty if not counted."""
    done_ns: Ints
    """[node]: end of its last task; 0 if it has none."""


@dataclass(frozen=True)
class PlacementCosts:
    """Costs of one placement, ready for the event loop: what stays the same while paths change."""

    forward_ns: Ints
    backward_ns: Ints
    """[node]: backward pass; only the input gradient, if the backward is split."""
    weight_ns: Ints
    """[node]: weight gradients; 0 if the backward is not split."""
    head_ns: Ints
    slots: Ints
    workers: Ints | None
    """[node]: tasks that it runs side by side; 1 if it holds no stage. None: one each."""
    worker_slots: Ints
    """[node]: slots of each of its workers."""
    flight_ns: Ints
    transmit_ns: Ints
    upload_ns: Ints
    download_ns: Ints
    order: int
    split_backward: bool
    timing: Timing
    averaging_spans: Callable[[Ints, FreeLinks], Spans]
    """From when each node is done, and each link free, to when each stage averages."""
    averaging_ns: tuple[int, ...]
    """How long each stage averages if its nodes are done at the same time; 0 if not counted."""
    step_ns: int
    """The slowest node's optimizer step; 0 if not counted."""

    @classmethod
    def of(
        cls,
        costs: CostModel,
        averagings: Sequence[Averaging],
        dispatch: Dispatch,
        timing: Timing,
        split_backward: bool = False,
    ) -> PlacementCosts:
        """Costs of a placement; `averagings` say which nodes each stage has, and how they average."""
        forward, backward, weight, slots = (np.zeros(costs.nodes, np.int64) for _ in range(4))
        workers = np.ones(costs.nodes, np.int64)
        for stage, averaging in enumerate(averagings):
            nodes = list(averaging.order)
            forward[nodes] = costs.forward_ns[stage, nodes]
            backward[nodes] = (costs.input_ns if split_backward else costs.backward_ns)[stage, nodes]
            weight[nodes] = costs.weight_ns[stage, nodes] if split_backward else 0
            slots[nodes] = costs.slots[stage, nodes]
            workers[nodes] = costs.workers[stage, nodes]
        full = timing is Timing.FULL
        return cls(
            forward_ns=forward,
            backward_ns=backward,
            weight_ns=weight,
            head_ns=costs.head_ns,
            slots=slots,
            workers=workers if (workers > 1).any() else None,
            worker_slots=slots // workers,
            flight_ns=costs.flight_ns,
            transmit_ns=costs.transmit_ns,
            upload_ns=costs.upload_ns,
            download_ns=costs.download_ns,
            order=dispatch.order,
            split_backward=split_backward,
            timing=timing,
            averaging_spans=_averaging_spans(costs, averagings),
            averaging_ns=tuple(costs.averaging_ns(*each) if full else 0 for each in enumerate(averagings)),
            step_ns=max(int(costs.optimizer_ns[s, n]) for s, each in enumerate(averagings) for n in each.order)
            if full
            else 0,
        )

    @classmethod
    def of_plan(cls, plan: Plan, timing: Timing, costs: CostModel | None = None) -> PlacementCosts:
        """Costs of a plan's placement: by its own cost model, or by another one."""
        averagings = [stage.averaging for stage in plan.stages]
        return cls.of(costs or plan.costs, averagings, plan.dispatch, timing, plan.split_backward)

    def alone_ns(self, path: Sequence[int]) -> int:
        """Nanoseconds of a round trip without other traffic: every task of the path once, every hop there and back."""
        flight_ns, (forward_ns, backward_ns) = self.flight_ns, self.transmit_ns
        hops = sum(
            int(flight_ns[a, b] + flight_ns[b, a] + forward_ns[a, b] + backward_ns[b, a]) for a, b in circle(path)
        )
        tasks = sum(int(self.forward_ns[node] + self.backward_ns[node]) for node in path)
        return hops + tasks + int(self.head_ns[path[0]])

    def run_iteration(
        self,
        paths: Ints,
        lengths: Ints,
        microbatches: Ints,
        record: Ints | None = None,
        teacher: Mapping[int, Sequence[int]] | None = None,
    ) -> IterationTimes:
        """Simulate one iteration; `record` takes the (ready, start, end, worker) of every task, lane by lane.
        `teacher`: lane → the teacher's path, if any has one."""
        lanes, teaches = len(lengths), None
        if teacher:
            teaches = np.array([-1] * lanes + list(teacher), dtype=np.int64)
            every = [*(row[:length] for row, length in zip(paths, lengths, strict=True)), *teacher.values()]
            paths, lengths = path_arrays(every)
            microbatches = np.concatenate([microbatches, microbatches[list(teacher)]])
        done_ns = np.zeros(len(self.forward_ns), np.int64)
        free_ns = free_links(len(self.forward_ns))
        last_ns, left = run_iteration(
            paths,
            lengths,
            microbatches,
            self.forward_ns,
            self.backward_ns,
            self.weight_ns,
            self.head_ns,
            self.worker_slots,
            self.workers,
            self.flight_ns,
            self.transmit_ns,
            self.upload_ns,
            self.download_ns,
            self.timing is Timing.FULL,
            self.order,
            self.split_backward,
            NO_SLACK,
            done_ns,
            *free_ns,
            NO_RECORD if record is None else record,
            teaches,
        )
        if left:
            sent = int(microbatches[:lanes].sum())
            raise Deadlock(
                f"deadlock: only {sent - left} of {sent} microbatches come back, the others hold memory slots that "
                "they wait for; put fewer lanes through the full nodes ('skippipe check' names them)"
            )
        if self.timing is Timing.CONTENTION_ONLY:
            return IterationTimes(int(last_ns), int(last_ns), (), done_ns)
        averaging = self.averaging_spans(done_ns, free_ns)
        iteration_ns = max(end for _, end in averaging) + self.step_ns
        return IterationTimes(iteration_ns, int(last_ns), averaging, done_ns)


def _averaging_spans(costs: CostModel, averagings: Sequence[Averaging]) -> Callable[[Ints, FreeLinks], Spans]:
    """A function from when each node is done, and each link free, to when each stage averages: from its last node to
    its sum."""
    edges = ring_edges(costs, averagings)

    @cache
    def transfers() -> tuple[MergedSchedule, TransferTimes]:
        return merged(costs, averagings), transfer_times(costs, averagings, range(len(averagings)))

    def spans(done_ns: Ints, free_ns: FreeLinks) -> Spans:
        last_ns = [max((int(done_ns[node]) for node in each.order), default=0) for each in averagings]
        if edges is not None and not any(free_ns.link_ns[ring.links].any() for ring in edges):
            ends_ns = [ring.averaged_ns(done_ns) for ring in edges]
        else:
            schedule, times = transfers()
            ends_ns = schedule.run(done_ns, times, free_ns).tolist()
        return tuple((last, max(last, end)) for last, end in zip(last_ns, ends_ns, strict=True))

    return spans


def path_arrays(paths: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    """Paths as padded rows, and their lengths."""
    lengths = np.array([len(path) for path in paths], dtype=np.int64)
    rows = np.zeros((len(paths), int(lengths.max())), np.int64)
    for row, path in zip(rows, paths, strict=True):
        row[: len(path)] = path
    return rows, lengths


def lane_arrays(plan: Plan) -> tuple[Ints, Ints, Ints]:
    """The paths of a plan's lanes as padded rows, their lengths, and the microbatches of each lane."""
    microbatches = np.array([lane.microbatches for lane in plan.lanes], dtype=np.int64)
    return *path_arrays([lane.path for lane in plan.lanes]), microbatches


def simulate(plan: Plan, timing: Timing = Timing.FULL) -> Timeline:
    """Run one iteration of the plan under virtual time."""
    teacher = planned_teacher_paths(plan)
    outcome, record = _run(plan, timing, teacher)
    tasks = _tasks(plan, record)
    return Timeline(
        timing=timing,
        iteration_ns=outcome.iteration_ns,
        last_backward_ns=outcome.last_backward_ns,
        averaging_ns=outcome.averaging_ns,
        nodes=node_use(plan, tasks, teacher),
        links=_link_use(plan, timing, teacher),
        tasks=tasks,
    )


def simulated_times(plan: Plan, timing: Timing = Timing.FULL) -> IterationTimes:
    """The main figures of the same iteration: of many nodes, the whole timeline takes longer to write down than to
    simulate."""
    return _run(plan, timing, planned_teacher_paths(plan))[0]


def _run(plan: Plan, timing: Timing, teacher: Mapping[int, NodePath]) -> tuple[IterationTimes, Ints]:
    """The iteration, and the (ready, start, end) of every task, lane by lane."""
    placement_costs = PlacementCosts.of_plan(plan, timing)
    total = sum(lane.microbatches * all_steps(len(lane.path), plan.split_backward) for lane in plan.lanes)
    if total > MOST_TASKS:
        raise UserError(f"{total} tasks in an iteration are more than the {MOST_TASKS} that can be simulated")
    one_after_another_ns = sum(
        lane.microbatches
        * (placement_costs.alone_ns(lane.path) + int(placement_costs.weight_ns[list(lane.path)].sum()))
        for lane in plan.lanes
    )
    for number, path in teacher.items():
        hops = sum(int(plan.costs.flight_ns[hop] + plan.costs.transmit_ns[0][hop]) for hop in circle(path))
        steps = sum(int(placement_costs.forward_ns[node]) for node in path)
        one_after_another_ns += plan.lanes[number].microbatches * (hops + steps)
    if one_after_another_ns + sum(placement_costs.averaging_ns) > LAST_NS:
        raise UserError("an iteration of this plan may take over a century: does it use a link that is not there?")
    record = np.empty((total, 4), np.int64)
    return placement_costs.run_iteration(*lane_arrays(plan), record, teacher), record


def _tasks(plan: Plan, record: Ints) -> tuple[Task, ...]:
    times = iter(record.tolist())
    tasks = [
        Task(number, microbatch, step, lane.path[place(step, len(lane.path))], *next(times))
        for number, lane in enumerate(plan.lanes)
        for microbatch in range(lane.microbatches)
        for step in range(all_steps(len(lane.path), plan.split_backward))
    ]
    return tuple(sorted(tasks, key=lambda task: task.start_ns))  # those that start together stay in order


def node_use(plan: Plan, tasks: Sequence[Task], teacher: Mapping[int, NodePath]) -> tuple[NodeUse, ...]:
    busy_ns = dict.fromkeys(plan.stage_of, 0)
    collision_ns = dict.fromkeys(plan.stage_of, 0)
    for task in tasks:
        busy_ns[task.node] += task.end_ns - task.start_ns
        if not is_weights(task.step, len(plan.lanes[task.lane].path)):
            collision_ns[task.node] += task.start_ns - task.ready_ns
    for lane, path in teacher.items():
        for node in path:
            busy_ns[node] += int(plan.costs.forward_ns[plan.stage_of[node], node]) * plan.lanes[lane].microbatches
    costs, split = plan.costs, plan.split_backward
    backward_ns = costs.input_ns if split else costs.backward_ns
    return tuple(
        NodeUse(
            node=node,
            stage=stage,
            slots=plan.slots[node],
            workers=plan.workers[node],
            forward_ns=int(costs.forward_ns[stage, node]),
            backward_ns=int(backward_ns[stage, node]),
            weight_ns=int(costs.weight_ns[stage, node]) if split else 0,
            head_ns=int(costs.head_ns[node]) if stage == 0 else 0,
            optimizer_ns=int(costs.optimizer_ns[stage, node]),
            busy_ns=busy_ns[node],
            collision_ns=collision_ns[node],
        )
        for node, stage in sorted(plan.stage_of.items())
    )


def _link_use(plan: Plan, timing: Timing, teacher: Mapping[int, NodePath]) -> tuple[LinkUse, ...]:
    sent: Counter[tuple[int, int]] = Counter()
    for message, count in hop_messages(plan, teacher).items():
        sent[message[1:]] += int(plan.costs.hop_bytes[message]) * count
    if timing is Timing.FULL:
        for index, stage in enumerate(plan.stages):
            sent.update(stage.averaging.link_bytes(*plan.costs.gradient_rounds[index]))
    return tuple(LinkUse(*link, sent[link]) for link in sorted(sent))
