"""The critical path of an iteration: going back from its end, what determined each moment.

A task starts when it is ready or when its node comes free; it is ready when its message has arrived; a message is sent
when its task has ended, or when the link has sent the one before. Of two things that something waits for, the later
one is on the path. So every nanosecond of the iteration has one cause, and the causes add up to the whole.

While a task that is on the path was ready and waited, that wait is the cause, whatever those that it waited for were
doing: a busy node, a memory slot, a link that still sent for others. The path itself goes on with them, because the
task would have started no sooner had it been ready sooner.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from skippipe.averaging import Rings
from skippipe.dispatch import frees_slot, is_weights, place, steps
from skippipe.plan import Plan
from skippipe.timeline import Task, Timeline, Timing


class Kind(StrEnum):
    COMPUTING = "computing"
    BUSY = "busy"
    """A task was ready, and its node was at work on others: a collision."""
    SLOT = "slot"
    """A forward was ready, and its node had no memory slot left."""
    LATENCY = "latency"
    """Of a hop, with the overhead of the message."""
    BANDWIDTH = "bandwidth"
    """A hop's message was on its way into the link."""
    QUEUE = "queue"
    """A message waited until the link had sent others."""
    AVERAGING_LATENCY = "averaging-latency"
    AVERAGING_BANDWIDTH = "averaging-bandwidth"
    OPTIMIZER = "optimizer"


class Cause(NamedTuple):
    kind: Kind
    node: int
    """Where; of a link, the sender."""
    to: int | None = None
    """Of a link, the receiver."""
    stage: int | None = None
    """Whose gradients are averaged."""


@dataclass(frozen=True)
class Piece:
    """A stretch of the critical path."""

    cause: Cause
    start_ns: int
    end_ns: int

    @property
    def took_ns(self) -> int:
        return self.end_ns - self.start_ns


def critical_path(plan: Plan, timeline: Timeline) -> list[Piece]:
    """From 0 to the end of the iteration without a gap; `timeline` is what `simulate` gives for the plan."""
    return _Walk(plan, timeline).pieces()


class _Message(NamedTuple):
    """On a link where messages queue."""

    task: Task
    """Whose result it is."""
    sent_from_ns: int
    """When its transmission starts."""
    before: _Message | None
    """On the same directed link."""


class _Walk:
    """Back in time; `now_ns` is where it has got to."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.now_ns = timeline.iteration_ns
        self.found: list[Piece] = []
        self.waits: list[tuple[Cause, int]] = []  # until when, going back, a wait is the cause; the latest first
        self.task = {(task.lane, task.microbatch, task.step): task for task in timeline.tasks}
        self.on_node: dict[int, list[Task]] = {node: [] for node in plan.stage_of}
        for task in timeline.tasks:  # in the order of their start
            self.on_node[task.node].append(task)
        self.position = {task: at for mine in self.on_node.values() for at, task in enumerate(mine)}
        self.held = {task: held for mine in self.on_node.values() for task, held in self._held(mine)}
        self.messages = self._messages() if timeline.timing is Timing.FULL else {}

    def pieces(self) -> list[Piece]:
        task = self._last_task()
        while task is not None:
            task = self._before(task)
        assert self.now_ns == 0, "the path begins where the iteration does"
        return self.found[::-1]

    # what is known of the iteration

    def _length(self, task: Task) -> int:
        return len(self.plan.lanes[task.lane].path)

    def _held(self, tasks: list[Task]) -> Iterator[tuple[Task, int]]:
        """How many microbatches the node holds when it starts each of its tasks."""
        held = 0
        for task in tasks:
            yield task, held
            length = self._length(task)
            held += (task.step < length) - frees_slot(task.step, length, self.plan.split_backward)

    def _messages(self) -> dict[Task, _Message]:
        """By the task that sends it."""
        found: dict[Task, _Message] = {}
        last: dict[tuple[int, int], _Message] = {}
        for tasks in self.on_node.values():
            for task in tasks:
                following = self.task.get((task.lane, task.microbatch, task.step + 1))
                if following is None or task.step + 1 >= steps(self._length(task)) or following.node == task.node:
                    continue
                link = (task.node, following.node)
                before = last.get(link)
                free_ns = before.sent_from_ns + int(self.plan.costs.transmit_ns[link]) if before else 0
                found[task] = last[link] = _Message(task, max(task.end_ns, free_ns), before)
        return found

    # one step back

    def _spend(self, start_ns: int, cause: Cause) -> None:
        """The cause of all that lies between `start_ns` and now, but for waits."""
        while self.now_ns > start_ns:
            while self.waits and self.waits[0][1] >= self.now_ns:
                self.waits.pop(0)
            blamed, since_ns = self.waits[0] if self.waits else (cause, start_ns)
            since_ns = max(since_ns, start_ns)
            self.found.append(Piece(blamed, since_ns, self.now_ns))
            self.now_ns = since_ns

    def _wait(self, cause: Cause, since_ns: int) -> None:
        """Somebody on the path waited from `since_ns` until now; whoever was on it already goes before."""
        if not self.waits or since_ns < self.waits[-1][1]:
            self.waits.append((cause, since_ns))

    def _before(self, task: Task) -> Task | None:
        """Through a task to the one that it started after."""
        self._spend(task.start_ns, Cause(Kind.COMPUTING, task.node))
        if task.ready_ns == task.start_ns:
            return self._sender(task)
        if not is_weights(task.step, self._length(task)):  # nobody waits for those, nor do they collide
            for cause, since_ns in self._waited(task):
                self._wait(cause, since_ns)
        return self.on_node[task.node][self.position[task] - 1]

    def _waited(self, task: Task) -> Iterator[tuple[Cause, int]]:
        """What a task that was ready waited for, and since when, going back."""
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
            yield Cause(Kind.SLOT if full else Kind.BUSY, task.node), until_ns

    def _sender(self, task: Task) -> Task | None:
        """Back over what made the task ready; None: the iteration begins with it."""
        length = self._length(task)
        if is_weights(task.step, length):
            return self.task[task.lane, task.microbatch, 2 * length - place(task.step, length)]
        if task.step == 0:
            return self.task[task.lane, task.microbatch - 1, steps(length) - 1] if task.microbatch else None
        sender = self.task[task.lane, task.microbatch, task.step - 1]
        if sender.node == task.node:
            return sender
        link = (sender.node, task.node)
        self._spend(self.now_ns - int(self.plan.costs.flight_ns[link]), Cause(Kind.LATENCY, *link))
        sending = Cause(Kind.BANDWIDTH, *link)
        if self.timeline.timing is Timing.CONTENTION_ONLY:
            self._spend(sender.end_ns, sending)
            return sender
        message = self.messages[sender]
        self._spend(message.sent_from_ns, sending)
        while message.sent_from_ns > message.task.end_ns:
            self._wait(Cause(Kind.QUEUE, *link), message.task.end_ns)
            assert message.before is not None
            message = message.before
            self._spend(message.sent_from_ns, sending)
        return message.task

    # the end of the iteration

    def _last_task(self) -> Task | None:
        """Back over optimizer step and averaging."""
        if self.timeline.timing is Timing.CONTENTION_ONLY:
            return max(self.timeline.tasks, key=lambda task: task.end_ns)
        slowest = max(self.timeline.nodes, key=lambda use: use.optimizer_ns)
        ends = [end for _, end in self.timeline.averaging_ns]
        self._spend(max(ends), Cause(Kind.OPTIMIZER, slowest.node))
        stage = ends.index(max(ends))
        node = self._round_the_ring(stage)
        return self.on_node[node][-1] if self.on_node[node] else None

    def _round_the_ring(self, stage: int) -> int:
        """Back to the node whose last task the averaging of this stage waited for; docs/formats.md has the formulas."""
        ring = self.plan.stages[stage].ring
        edges = Rings.of(self.plan.costs, [each.ring for each in self.plan.stages])
        first = sum(len(each.ring) for each in self.plan.stages[:stage])
        transmit_ns = edges.transmit_ns[first : first + len(ring)].tolist()
        flight_ns = edges.flight_ns[first : first + len(ring)].tolist()
        done = [self.on_node[node][-1].end_ns if self.on_node[node] else 0 for node in ring]
        has, sent = [done], [done]  # [step][place], Aₖ and Eₖ of the formulas
        for _ in range(2 * (len(ring) - 1)):
            sent.append(
                [max(h, s) + took for h, s, took in zip(has[-1], sent[-1], transmit_ns, strict=True)],
            )
            comes = [sent[-1][at - 1] + flight_ns[at - 1] for at in range(len(ring))]
            has.append([max(pair) for pair in zip(has[-1], comes, strict=True)])
        step, at = len(has) - 1, has[-1].index(max(has[-1]))
        while step > 0:
            if has[step][at] == has[step - 1][at]:
                step -= 1
                continue
            at = (at - 1) % len(ring)
            link = (ring[at], ring[(at + 1) % len(ring)])
            self._spend(sent[step][at], Cause(Kind.AVERAGING_LATENCY, *link, stage))
            while step > 0:
                self._spend(sent[step][at] - transmit_ns[at], Cause(Kind.AVERAGING_BANDWIDTH, *link, stage))
                step -= 1
                if has[step][at] >= sent[step][at]:
                    break
        return ring[at]
