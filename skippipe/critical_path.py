"""The critical path of an iteration: going back from its end, what determined each moment; and the bottlenecks it
shows.

A task starts when it is ready or when its node comes free; it is ready when its message has arrived; a message is sent
when its task has ended, or when the link has sent the one before. Of two things that something waits for, the later one
is on the path. So every nanosecond of the iteration has one cause, and the causes add up to the whole.

While a task that is on the path was ready and waited, that wait is the cause, whatever it waited for was doing: a busy
node, a memory slot, a link that still sent for others. The path itself goes on with that, because the task would have
started no sooner had it been ready sooner.

Bottlenecks are the path added up by node, link and stage. Links are named as narrowly as the path allows: one
direction, if the other has little to do with it; both directions between two nodes; or all links of a node, if each of
them costs clearly more than every other on the path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from skippipe.collectives.topology import merged, transfer_times
from skippipe.constraints import circle
from skippipe.dispatch import frees_slot, is_weights, place, steps
from skippipe.plan import Plan
from skippipe.simulator import simulate
from skippipe.timeline import Task, Timeline, Timing

Link = tuple[int, int]


class CauseKind(StrEnum):
    COMPUTING = "computing"
    BUSY = "busy"
    """A task was ready, and its node was at work on others: a collision."""
    SLOT = "slot"
    """A forward was ready, and its node had no memory slot left."""
    LATENCY = "latency"
    """Latency of a hop, with the overhead of the message."""
    BANDWIDTH = "bandwidth"
    """The link transmitted a hop's message."""
    QUEUE = "queue"
    """A message waited until the link had sent others."""
    AVERAGING_LATENCY = "averaging-latency"
    AVERAGING_BANDWIDTH = "averaging-bandwidth"
    OPTIMIZER = "optimizer"


class Cause(NamedTuple):
    kind: CauseKind
    node: int
    """The node; of a link, the sender."""
    to: int | None = None
    """The receiver of a link; None: the cause is a node."""
    stage: int | None = None
    """The stage that averages gradients; None: it is not about averaging."""


@dataclass(frozen=True)
class PathSegment:
    """An interval of the critical path with one cause."""

    cause: Cause
    start_ns: int
    end_ns: int

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(plan: Plan, timeline: Timeline) -> list[PathSegment]:
    """The path from 0 to the end of the iteration without a gap; `timeline` is what `simulate` gives for the plan."""
    return _Walk(plan, timeline).segments()


class _LinkMessage(NamedTuple):
    """A message on a link where messages queue."""

    task: Task
    """The task whose result it carries."""
    sent_from_ns: int
    """Start of its transmission."""
    before: _LinkMessage | None
    """The message before it on the same directed link."""


class _Walk:
    """The walk back in time; `now_ns` is where it has got to."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.now_ns = timeline.iteration_ns
        self.found: list[PathSegment] = []
        self.waits: list[tuple[Cause, int]] = []  # until when, going back, a wait is the cause; the latest first
        self.task = {(task.lane, task.microbatch, task.step): task for task in timeline.tasks}
        self.on_node: dict[int, list[Task]] = {node: [] for node in plan.stage_of}
        for task in timeline.tasks:  # in the order of their start
            self.on_node[task.node].append(task)
        self.position = {task: at for mine in self.on_node.values() for at, task in enumerate(mine)}
        self.held = {task: held for mine in self.on_node.values() for task, held in self._held(mine)}
        self.messages = self._messages() if timeline.timing is Timing.FULL else {}

    def segments(self) -> list[PathSegment]:
        task = self._last_task()
        while task is not None:
            task = self._before(task)
        assert self.now_ns == 0, "the path begins where the iteration does"
        return self.found[::-1]

    # what is known of the iteration

    def _length(self, task: Task) -> int:
        return len(self.plan.lanes[task.lane].path)

    def _held(self, tasks: list[Task]) -> Iterator[tuple[Task, int]]:
        """For each task, how many microbatches the node holds when it starts."""
        held = 0
        for task in tasks:
            yield task, held
            length = self._length(task)
            held += (task.step < length) - frees_slot(task.step, length, self.plan.split_backward)

    def _messages(self) -> dict[Task, _LinkMessage]:
        """Messages by the task that sends them."""
        found: dict[Task, _LinkMessage] = {}
        last: dict[tuple[int, int], _LinkMessage] = {}
        for tasks in self.on_node.values():
            for task in tasks:
                following = self.task.get((task.lane, task.microbatch, task.step + 1))
                if following is None or task.step + 1 >= steps(self._length(task)) or following.node == task.node:
                    continue
                link = (task.node, following.node)
                before = last.get(link)
                free_ns = before.sent_from_ns + int(self.plan.costs.transmit_ns[link]) if before else 0
                found[task] = last[link] = _LinkMessage(task, max(task.end_ns, free_ns), before)
        return found

    # one step back

    def _spend(self, start_ns: int, cause: Cause) -> None:
        """Attribute all that lies between `start_ns` and now to the cause, but for waits."""
        while self.now_ns > start_ns:
            while self.waits and self.waits[0][1] >= self.now_ns:
                self.waits.pop(0)
            blamed, since_ns = self.waits[0] if self.waits else (cause, start_ns)
            since_ns = max(since_ns, start_ns)
            self.found.append(PathSegment(blamed, since_ns, self.now_ns))
            self.now_ns = since_ns

    def _wait(self, cause: Cause, since_ns: int) -> None:
        """Note a wait of a task on the path from `since_ns` until now; earlier waits go first."""
        if not self.waits or since_ns < self.waits[-1][1]:
            self.waits.append((cause, since_ns))

    def _before(self, task: Task) -> Task | None:
        """Go through a task to the one that it started after."""
        self._spend(task.start_ns, Cause(CauseKind.COMPUTING, task.node))
        if task.ready_ns == task.start_ns:
            return self._sender(task)
        if not is_weights(task.step, self._length(task)):  # no task waits for those, nor do they collide
            for cause, since_ns in self._waited(task):
                self._wait(cause, since_ns)
        return self.on_node[task.node][self.position[task] - 1]

    def _waited(self, task: Task) -> Iterator[tuple[Cause, int]]:
        """What a ready task waited for, and since when, going back."""
        mine = self.on_node[task.node]
        at, until_ns = self.position[task] - 1, task.start_ns
        while until_ns > task.ready_ns:
            running = mine[at] if at >= 0 else None
            if running is None or running.end_ns < until_ns:  # idle all the same
                full, since_ns = True, running.end_ns if running else 0
            else:
                full = task.step < self._length(task) and self.held[running] >= self.plan.slots[task.node]
                full = full and running.start_ns >= task.ready_ns
                since_ns, at = running.start_ns, at - 1
            until_ns = max(since_ns, task.ready_ns)
            yield Cause(CauseKind.SLOT if full else CauseKind.BUSY, task.node), until_ns

    def _sender(self, task: Task) -> Task | None:
        """Go back over what made the task ready; None: the iteration begins with it."""
        length = self._length(task)
        if is_weights(task.step, length):
            return self.task[task.lane, task.microbatch, 2 * length - place(task.step, length)]
        if task.step == 0:
            return self.task[task.lane, task.microbatch - 1, steps(length) - 1] if task.microbatch else None
        sender = self.task[task.lane, task.microbatch, task.step - 1]
        if sender.node == task.node:
            return sender
        link = (sender.node, task.node)
        self._spend(self.now_ns - int(self.plan.costs.flight_ns[link]), Cause(CauseKind.LATENCY, *link))
        sending = Cause(CauseKind.BANDWIDTH, *link)
        if self.timeline.timing is Timing.CONTENTION_ONLY:
            self._spend(sender.end_ns, sending)
            return sender
        return self._back_over_queue(self.messages[sender], link)

    def _back_over_queue(self, message: _LinkMessage, link: Link) -> Task:
        """Go back over the transmission of a message and those that it waited for, to the task that sent the first."""
        sending = Cause(CauseKind.BANDWIDTH, *link)
        self._spend(message.sent_from_ns, sending)
        while message.sent_from_ns > message.task.end_ns:
            self._wait(Cause(CauseKind.QUEUE, *link), message.task.end_ns)
            assert message.before is not None
            message = message.before
            self._spend(message.sent_from_ns, sending)
        return message.task

    # the end of the iteration

    def _last_task(self) -> Task | None:
        """Go back over optimizer step and averaging to the last task."""
        if self.timeline.timing is Timing.CONTENTION_ONLY:
            return max(self.timeline.tasks, key=lambda task: task.end_ns)
        slowest = max(self.timeline.nodes, key=lambda use: use.optimizer_ns)
        ends = [end for _, end in self.timeline.averaging_ns]
        self._spend(max(ends), Cause(CauseKind.OPTIMIZER, slowest.node))
        return self._back_over_averaging(ends.index(max(ends)))

    def _back_over_averaging(self, stage: int) -> Task | None:
        """Go back to the task that the averaging of this stage waited for; docs/formats.md has the rule. None: a node
        without tasks."""
        averagings = [each.averaging for each in self.plan.stages]
        schedule = merged(tuple(averagings))
        done = self.timeline.done_ns(len(self.plan.cluster))
        free_ns = np.zeros(self.plan.costs.flight_ns.shape, np.int64)
        last_hop: dict[Link, _LinkMessage] = {}
        for task, message in self.messages.items():  # on each node in the order of their start
            link = task.node, self.task[task.lane, task.microbatch, task.step + 1].node
            last_hop[link] = message
            free_ns[link] = message.sent_from_ns + self.plan.costs.transmit_ns[link]
        record = np.zeros((len(schedule.stages), 4), np.int64)
        times = transfer_times(self.plan.costs, averagings, range(len(averagings)))
        schedule.run(np.array(done, np.int64), *times, free_ns, record)
        ready, start, sent, arrived = (column.tolist() for column in record.T)
        links = list(zip(schedule.senders.tolist(), schedule.receivers.tolist(), strict=True))
        needs: list[list[int]] = [[] for _ in links]
        for number in range(len(links)):
            for following in schedule.after[schedule.first_after[number] : schedule.first_after[number + 1]].tolist():
                needs[following].append(number)

        def last_of(moment_ns: int, numbers: Iterable[int]) -> int | None:
            """The transfer that arrived at this moment; None: a node was done then."""
            return next((number for number in numbers if arrived[number] == moment_ns), None)

        found = last_of(self.now_ns, np.flatnonzero(schedule.stages == stage).tolist())
        if found is None:
            return self._last_on(next(node for node in averagings[stage].order if done[node] == self.now_ns))
        while True:
            link = links[found]
            of_stage = int(schedule.stages[found])
            self._spend(sent[found], Cause(CauseKind.AVERAGING_LATENCY, *link, of_stage))
            self._spend(start[found], Cause(CauseKind.AVERAGING_BANDWIDTH, *link, of_stage))
            while start[found] > ready[found]:
                before = [other for other, each in enumerate(links) if each == link and sent[other] == start[found]]
                if not before:  # it waited for messages of hops
                    return self._back_over_queue(last_hop[link], link)
                found = before[0]
                self._spend(start[found], Cause(CauseKind.AVERAGING_BANDWIDTH, *link, int(schedule.stages[found])))
            following = last_of(ready[found], needs[found])
            if following is None:
                return self._last_on(link[0])
            found = following

    def _last_on(self, node: int) -> Task | None:
        return self.on_node[node][-1] if self.on_node[node] else None


ONE_WAY = 0.7  # of what both directions cost: then it is this direction
CLEARLY = 1.5  # times as much


class CauseGroup(StrEnum):
    """Groups of causes, as they are shown."""

    COMPUTING = "computing"
    COLLISIONS = "collisions"
    MEMORY = "memory"
    TRANSFERS = "transfers"
    AVERAGING = "averaging"
    OPTIMIZER = "optimizer"


GROUP_OF_KIND = {
    CauseKind.COMPUTING: CauseGroup.COMPUTING,
    CauseKind.BUSY: CauseGroup.COLLISIONS,
    CauseKind.SLOT: CauseGroup.MEMORY,
    CauseKind.LATENCY: CauseGroup.TRANSFERS,
    CauseKind.BANDWIDTH: CauseGroup.TRANSFERS,
    CauseKind.QUEUE: CauseGroup.TRANSFERS,
    CauseKind.AVERAGING_LATENCY: CauseGroup.AVERAGING,
    CauseKind.AVERAGING_BANDWIDTH: CauseGroup.AVERAGING,
    CauseKind.OPTIMIZER: CauseGroup.OPTIMIZER,
}


@dataclass(frozen=True)
class Bottleneck:
    """A part of the critical path that one node, link or stage accounts for."""

    group: CauseGroup
    causes: dict[Cause, int]
    """Nanoseconds of every cause, the largest first."""
    node: int | None = None
    """The node; of transfers, the one that has all the links."""
    stage: int | None = None
    """The stage that averages."""

    @property
    def ns(self) -> int:
        return sum(self.causes.values())

    @property
    def links(self) -> list[Link]:
        """The links involved, the costliest first."""
        return [*dict.fromkeys((cause.node, cause.to) for cause in self.causes if cause.to is not None)]

    def of(self, *kinds: CauseKind) -> int:
        """Nanoseconds of causes of these kinds."""
        return sum(ns for cause, ns in self.causes.items() if cause.kind in kinds)


def time_by_cause(path: Iterable[PathSegment]) -> dict[Cause, int]:
    """Nanoseconds of every cause; they add up to the iteration."""
    causes: Counter[Cause] = Counter()
    for piece in path:
        causes[piece.cause] += piece.took_ns
    return dict(causes.most_common())


def time_by_group(causes: dict[Cause, int]) -> dict[CauseGroup, int]:
    """Nanoseconds of every group of causes."""
    found: Counter[CauseGroup] = Counter()
    for cause, ns in causes.items():
        found[GROUP_OF_KIND[cause.kind]] += ns
    return dict(found.most_common())


def bottlenecks(causes: dict[Cause, int]) -> list[Bottleneck]:
    """The bottlenecks, the largest first; every cause is in one of them."""
    at_nodes: dict[tuple[CauseGroup, int], dict[Cause, int]] = {}
    averaged: dict[int, dict[Cause, int]] = {}
    over_links: dict[Link, dict[Cause, int]] = {}
    for cause, ns in causes.items():
        if cause.stage is not None:
            averaged.setdefault(cause.stage, {})[cause] = ns
        elif cause.to is not None:
            over_links.setdefault((cause.node, cause.to), {})[cause] = ns
        else:
            at_nodes.setdefault((GROUP_OF_KIND[cause.kind], cause.node), {})[cause] = ns
    found = [Bottleneck(what, each, node=node) for (what, node), each in at_nodes.items()]
    found += [Bottleneck(CauseGroup.AVERAGING, each, stage=stage) for stage, each in averaged.items()]
    found += _transfers(over_links)
    return sorted(found, key=lambda limit: -limit.ns)


def _transfers(over_links: dict[Link, dict[Cause, int]]) -> list[Bottleneck]:
    """Bottlenecks of links, merged where that says more."""
    cost = {link: sum(causes.values()) for link, causes in over_links.items()}
    found = []
    far = _distant_node(cost)
    if far is not None:
        its = [link for link in over_links if far in link]
        found.append(Bottleneck(CauseGroup.TRANSFERS, _merged(over_links[link] for link in its), node=far))
        cost = {link: ns for link, ns in cost.items() if link not in its}
    for pair, ns in _pairs(cost).items():
        ways = [link for link in (pair, pair[::-1]) if link in cost]
        apart = any(cost[link] >= ONE_WAY * ns for link in ways)
        for group in [[link] for link in ways] if apart else [ways]:
            found.append(Bottleneck(CauseGroup.TRANSFERS, _merged(over_links[link] for link in group)))
    return found


def _pairs(cost: dict[Link, int]) -> dict[Link, int]:
    """The cost of both directions together."""
    found: Counter[Link] = Counter()
    for (a, b), ns in cost.items():
        found[min(a, b), max(a, b)] += ns
    return dict(found)


def _distant_node(cost: dict[Link, int]) -> int | None:
    """The node that has several links on the path, each of which costs clearly more than every other link."""
    pairs = _pairs(cost)
    for node in sorted({end for pair in pairs for end in pair}):
        own = [ns for pair, ns in pairs.items() if node in pair]
        others = [ns for pair, ns in pairs.items() if node not in pair]
        if len(own) > 1 and others and min(own) > CLEARLY * max(others):
            return node
    return None


def _merged(groups: Iterable[dict[Cause, int]]) -> dict[Cause, int]:
    every = {cause: ns for causes in groups for cause, ns in causes.items()}
    return dict(sorted(every.items(), key=lambda entry: -entry[1]))


@dataclass(frozen=True)
class SlowestLane:
    """The lane whose last microbatch is back last."""

    lane: int
    back_ns: int
    alone_ns: int
    """Nanoseconds of all its microbatches if there were no other lanes."""


def slowest_lane(plan: Plan, timeline: Timeline) -> SlowestLane:
    back_ns = _back_ns(plan, timeline)
    number = back_ns.index(max(back_ns))
    alone = replace(plan, lanes=(plan.lanes[number],))
    return SlowestLane(number, back_ns[number], max(_back_ns(alone, simulate(alone, timeline.timing))))


def _back_ns(plan: Plan, timeline: Timeline) -> list[int]:
    """When each lane's last microbatch is back."""
    back_ns = [0] * len(plan.lanes)
    for task in timeline.tasks:
        if task.step < steps(len(plan.lanes[task.lane].path)):
            back_ns[task.lane] = max(back_ns[task.lane], task.end_ns)
    return back_ns


def busiest_node(timeline: Timeline) -> tuple[int, int]:
    """The node that works longest, and for how many nanoseconds."""
    use = max(timeline.nodes, key=lambda each: each.busy_ns)
    return use.node, use.busy_ns


def busiest_link(plan: Plan, timeline: Timeline) -> tuple[Link, int]:
    """The link that sends longest, and for how many nanoseconds, all its messages one after another."""
    sends: Counter[Link] = Counter()
    for lane in plan.lanes:
        for a, b in circle(lane.path):
            for link in ((a, b), (b, a)):
                sends[link] += lane.microbatches * int(plan.costs.transmit_ns[link])
    if timeline.timing is Timing.FULL:
        averagings = [stage.averaging for stage in plan.stages]
        schedule = merged(tuple(averagings))
        times = transfer_times(plan.costs, averagings, range(len(averagings)))
        took_ns = times.transmit_ns.tolist()
        for sender, receiver, taken_ns in zip(schedule.senders, schedule.receivers, took_ns, strict=True):
            sends[int(sender), int(receiver)] += taken_ns
    return max(sorted(sends.items()), key=lambda entry: entry[1])
