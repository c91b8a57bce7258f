"""The critical path of an iteration: going back from its end, what determined each moment.

A task starts when it is ready or when its worker comes free (see `dispatch`); it is ready when its message has arrived;
a message is sent when its task has ended, or when the sender's upload and the link have sent the one before, and
arrives when the receiver's download has taken in the one before. Of two things that something waits for, the later one
is on the path. So every nanosecond of the iteration has one cause, and the causes add up to the whole.

While a task or message that is on the path was ready and waited, that wait is the cause, whatever it waited for was
doing: a busy node, a memory slot, a link or an access line that still sent for others. The path itself goes on with
that, because the task would have started no sooner had it been ready sooner.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from skippipe.collectives.transfers import MergedSchedule, TransferTimes, free_links, merged, transfer_times
from skippipe.dispatch import frees_slot, is_weights, message_pass, place, steps
from skippipe.plan import Plan
from skippipe.timeline import Task, Timeline, Timing

Link = tuple[int, int]
UPLOAD, LINK, DOWNLOAD = range(3)
"""Where a message may have to wait for another: at the sender's upload, the link, the receiver's download."""


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
    UPLOAD = "upload"
    """A message went no faster than its sender's upload, or waited until that had sent others."""
    DOWNLOAD = "download"
    """A message went no faster than its receiver's download, or waited until that had taken in others."""
    AVERAGING_LATENCY = "averaging-latency"
    AVERAGING_BANDWIDTH = "averaging-bandwidth"
    AVERAGING_UPLOAD = "averaging-upload"
    AVERAGING_DOWNLOAD = "averaging-download"
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
    """The path from 0 to the end of the iteration without a gap; `timeline` is what `simulate` gives for the plan.

    The plan has no teacher: a timeline has no rows for its passes."""
    assert not plan.workload.teacher, "tasks that wait for passes of the teacher wait for nothing that is known here"
    return _Walk(plan, timeline).segments()


@dataclass(eq=False)
class _Message:
    """A message under full timing: of a hop, or a transfer of averaging."""

    link: Link
    order: tuple[int, ...]
    """Which of two goes first that leave, or come to a download, at the same time."""
    leaves_ns: int
    flight_ns: int
    busy_ns: tuple[int, int, int]
    """Time for which it keeps upload, link and download busy; 0: that has no limit."""
    task: Task | None = None
    """The task whose result it carries; None: it is a transfer."""
    stage: int | None = None
    """The stage that averages."""
    start_ns: list[int] = field(default_factory=lambda: [0, 0, 0])
    """When upload, link and download begin with it."""
    before: list[_Message | None] = field(default_factory=lambda: [None, None, None])
    """The message before it at each of them."""

    def ready_ns(self, where: int) -> int:
        """When it comes to the upload, the link or the download, with its first byte."""
        return (self.leaves_ns, self.start_ns[UPLOAD], self.start_ns[LINK] + self.flight_ns)[where]

    def end_ns(self, where: int) -> int:
        return self.start_ns[where] + self.busy_ns[where]


class _Network:
    """Messages one after another on uploads, links and downloads, as docs/formats.md has it."""

    def __init__(self) -> None:
        self.last: dict[tuple[int, int | Link], _Message] = {}
        """The last message at each upload (by its node), link and download."""

    def carry(self, messages: Iterable[_Message]) -> None:
        """All of them go after those that were carried before."""
        for message in sorted(messages, key=lambda each: (each.leaves_ns, each.order)):
            self._queue(message, UPLOAD, message.link[0])
            self._queue(message, LINK, message.link)
        for message in sorted(messages, key=lambda each: (each.ready_ns(DOWNLOAD), each.order)):
            self._queue(message, DOWNLOAD, message.link[1])

    def _queue(self, message: _Message, where: int, which: int | Link) -> None:
        start_ns = message.ready_ns(where)
        if message.busy_ns[where] or where == LINK:
            message.before[where] = before = self.last.get((where, which))
            start_ns = max(start_ns, before.end_ns(where) if before else 0)
            self.last[where, which] = message
        message.start_ns[where] = start_ns


class _Walk:
    """The walk back in time; `now_ns` is where it has got to."""

    def __init__(self, plan: Plan, timeline: Timeline) -> None:
        self.plan = plan
        self.timeline = timeline
        self.now_ns = timeline.iteration_ns
        self.found: list[PathSegment] = []
        self.waits: list[tuple[Cause, int]] = []  # until when, going back, a wait is the cause; the latest first
        self.task = {(task.lane, task.microbatch, task.step): task for task in timeline.tasks}
        self.on_worker: dict[tuple[int, int], list[Task]] = {}
        for task in timeline.tasks:  # in the order of their start
            self.on_worker.setdefault((task.node, task.device), []).append(task)
        self.position = {task: at for mine in self.on_worker.values() for at, task in enumerate(mine)}
        self.held = {task: held for mine in self.on_worker.values() for task, held in self._held(mine)}
        self.slots = {use.node: use.slots // use.workers for use in timeline.nodes}
        """Slots of each worker of a node."""
        self.network = _Network()
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
        """For each task of a worker, how many microbatches that holds when it starts."""
        held = 0
        for task in tasks:
            yield task, held
            length = self._length(task)
            held += (task.step < length) - frees_slot(task.step, length, self.plan.split_backward)

    def _messages(self) -> dict[Task, _Message]:
        """Messages of hops by the task that sends them."""
        costs, found = self.plan.costs, {}
        for task in self.timeline.tasks:
            following = self.task.get((task.lane, task.microbatch, task.step + 1))
            if following is None or task.step + 1 >= steps(self._length(task)) or following.node == task.node:
                continue
            link = (task.node, following.node)
            message = (message_pass(following.step, self._length(task)), *link)
            found[task] = _Message(
                link,
                (task.lane,),
                task.end_ns,
                int(costs.flight_ns[link]),
                (int(costs.upload_ns[message]), int(costs.transmit_ns[message]), int(costs.download_ns[message])),
                task,
            )
        self.network.carry(found.values())
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
        return self.on_worker[task.node, task.device][self.position[task] - 1]

    def _waited(self, task: Task) -> Iterator[tuple[Cause, int]]:
        """What a ready task waited for, and since when, going back."""
        mine = self.on_worker[task.node, task.device]
        at, until_ns = self.position[task] - 1, task.start_ns
        while until_ns > task.ready_ns:
            running = mine[at] if at >= 0 else None
            if running is None or running.end_ns < until_ns:  # idle all the same
                full, since_ns = True, running.end_ns if running else 0
            else:
                full = task.step < self._length(task) and self.held[running] >= self.slots[task.node]
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
        if self.timeline.timing is Timing.FULL:
            return self._back_over_messages(self.messages[sender]).task
        link = (sender.node, task.node)
        self._spend(self.now_ns - int(self.plan.costs.flight_ns[link]), Cause(CauseKind.LATENCY, *link))
        self._spend(sender.end_ns, self._sending(link, None))
        return sender

    def _sending(self, link: Link, stage: int | None) -> Cause:
        """What determines how long a message is sent: the slowest of the link, the upload and the download."""
        sender, receiver = link
        costs = self.plan.costs
        rate = self.plan.cluster.bandwidth_bytes_per_s[link]
        if rate <= min(costs.upload_bytes_per_s[sender], costs.download_bytes_per_s[receiver]):
            kind = CauseKind.BANDWIDTH if stage is None else CauseKind.AVERAGING_BANDWIDTH
            return Cause(kind, *link, stage)
        if costs.upload_bytes_per_s[sender] <= costs.download_bytes_per_s[receiver]:
            return self._upload(sender, stage)
        return self._download(receiver, stage)

    def _upload(self, node: int, stage: int | None) -> Cause:
        return Cause(CauseKind.UPLOAD if stage is None else CauseKind.AVERAGING_UPLOAD, node, stage=stage)

    def _download(self, node: int, stage: int | None) -> Cause:
        return Cause(CauseKind.DOWNLOAD if stage is None else CauseKind.AVERAGING_DOWNLOAD, node, stage=stage)

    def _back_over_messages(self, message: _Message) -> _Message:
        """Go back from the arrival of a message, over those that it waited for, to when the first of them left."""
        self._spend(message.start_ns[DOWNLOAD], self._sending(message.link, message.stage))
        message = self._back_in_queue(message, DOWNLOAD)
        latency = CauseKind.LATENCY if message.stage is None else CauseKind.AVERAGING_LATENCY
        self._spend(message.start_ns[LINK], Cause(latency, *message.link, message.stage))
        return self._back_in_queue(self._back_in_queue(message, LINK), UPLOAD)

    def _back_in_queue(self, message: _Message, where: int) -> _Message:
        """Go back over the messages that it waited for there, to the first that did not wait."""
        while message.start_ns[where] > (ready_ns := message.ready_ns(where)):
            self._wait(self._queued(message, where), ready_ns)
            before = message.before[where]
            assert before is not None
            message = before
            held_up_by = self._sending(message.link, message.stage) if where == LINK else self._queued(message, where)
            self._spend(message.start_ns[where], held_up_by)
        return message

    def _queued(self, message: _Message, where: int) -> Cause:
        if where == UPLOAD:
            return self._upload(message.link[0], message.stage)
        if where == DOWNLOAD:
            return self._download(message.link[1], message.stage)
        kind = CauseKind.QUEUE if message.stage is None else CauseKind.AVERAGING_BANDWIDTH
        return Cause(kind, *message.link, message.stage)

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
        schedule = merged(self.plan.costs, averagings)
        done = self.timeline.done_ns(len(self.plan.cluster))
        times = transfer_times(self.plan.costs, averagings, range(len(averagings)))
        transfers, arrived = self._transfers(schedule, times, done)
        number_of = {transfer: number for number, transfer in enumerate(transfers)}
        needs: list[list[int]] = [[] for _ in transfers]
        for number in range(len(transfers)):
            for following in schedule.followers(number).tolist():
                needs[following].append(number)

        def last_of(moment_ns: int, numbers: Iterable[int]) -> int | None:
            """The transfer that arrived at this moment; None: a node was done then."""
            return next((number for number in numbers if arrived[number] == moment_ns), None)

        found = last_of(self.now_ns, np.flatnonzero(schedule.stages == stage).tolist())
        if found is None:
            return self._last_on(next(node for node in averagings[stage].order if done[node] == self.now_ns))
        while True:
            message = self._back_over_messages(transfers[found])
            if message.task is not None:
                return message.task
            (sender, receiver), number = message.link, number_of[message]
            found = last_of(message.leaves_ns, needs[number])
            if found is not None:
                continue
            if done[sender] != message.leaves_ns:  # its receiver had to tell that it is done
                notice = Cause(CauseKind.AVERAGING_LATENCY, receiver, sender, message.stage)
                self._spend(message.leaves_ns - int(times.notice_ns[number]), notice)
                return self._last_on(receiver)
            return self._last_on(sender)

    def _transfers(
        self, schedule: MergedSchedule, times: TransferTimes, done: list[int]
    ) -> tuple[list[_Message], list[int]]:
        """All transfers by their ranks, and when they arrive."""
        record = np.zeros((len(schedule.stages), 4), np.int64)
        free_ns = free_links(len(self.plan.cluster))
        for (where, which), message in self.network.last.items():
            (free_ns.upload_ns, free_ns.link_ns, free_ns.download_ns)[where][which] = message.end_ns(where)
        schedule.run(np.array(done, np.int64), times, free_ns, record)
        columns = (schedule.stages, schedule.senders, schedule.receivers, record[:, 0], *times)
        transfers = [
            _Message((sender, receiver), (number,), ready, flight, (upload, transmit, download), stage=stage)
            for number, (stage, sender, receiver, ready, transmit, flight, _, upload, download) in enumerate(
                zip(*(column.tolist() for column in columns), strict=True)
            )
        ]
        self.network.carry(transfers)
        return transfers, record[:, 3].tolist()

    def _last_on(self, node: int) -> Task | None:
        lasts = [mine[-1] for (where, _), mine in self.on_worker.items() if where == node]
        return max(lasts, key=lambda task: task.end_ns, default=None)
