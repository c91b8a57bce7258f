"""The timeline of an iteration, task by task: promised by the simulator, stored in the plan.

Whole nanoseconds in memory, seconds with up to nine decimals in files, node numbers in memory, names in files.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple

from skippipe.cost_model import ns, seconds
from skippipe.errors import UserError
from skippipe.json_fields import Fields, as_integer, as_number
from skippipe.value_ranges import CENTURY_S, DEVICES


class Timing(StrEnum):
    """Which parts of an iteration are counted."""

    FULL = "full"
    """Transfers on one directed link wait for each other; gradient averaging and the optimizer step are counted."""
    CONTENTION_ONLY = "contention-only"
    """The published model: links carry any number of transfers at once; the iteration ends with the last backward."""


class Task(NamedTuple):
    """One step of one microbatch on one node."""

    lane: int
    microbatch: int
    """Number of the microbatch on its lane, from 0."""
    step: int
    """0 … L−1 forward, L head, L+1 … 2L backward, then weight gradients if they are split off (see `dispatch`)."""
    node: int
    ready_ns: int
    start_ns: int
    end_ns: int
    device: int = 0
    """Which of the node's devices runs it; 0 where the stage is sharded over them."""


NODE_TIMES = ("forward_s", "backward_s", "weight_s", "head_s", "optimizer_s", "busy_s", "collision_s")
TIME_COLUMNS = ("ready_s", "start_s", "end_s")
TASK_COLUMNS = ("lane", "microbatch", "step", "node", *TIME_COLUMNS)


class NodeUse(NamedTuple):
    """What one node does in an iteration."""

    node: int
    stage: int
    slots: int
    workers: int
    """Tasks that it runs side by side."""
    forward_ns: int
    backward_ns: int
    """Backward pass; only the input gradient, if the backward is split."""
    weight_ns: int
    """Weight gradients; 0 if the backward is not split."""
    head_ns: int
    """Head and loss; 0 but for data nodes."""
    optimizer_ns: int
    busy_ns: int
    """Duration of all its tasks together."""
    collision_ns: int
    """For how long ready tasks waited for the node, summed over the tasks; weight gradients, which no task waits for,
    do not count."""

    @property
    def worker_busy_ns(self) -> int:
        """Duration of all tasks of one of its workers, on average."""
        return self.busy_ns // self.workers


class LinkUse(NamedTuple):
    sender: int
    receiver: int
    sent_bytes: int


@dataclass(frozen=True)
class Timeline:
    """The timeline of one iteration."""

    timing: Timing
    iteration_ns: int
    last_backward_ns: int
    averaging_ns: tuple[tuple[int, int], ...]
    """For each stage: from when all its nodes are done until its gradients are averaged. Empty if not counted."""
    nodes: tuple[NodeUse, ...]
    links: tuple[LinkUse, ...]
    tasks: tuple[Task, ...]
    """Tasks in the order of their start, then of lane, microbatch and step."""

    @property
    def iteration_s(self) -> float:
        return seconds(self.iteration_ns)

    @property
    def collision_s(self) -> float:
        return seconds(sum(use.collision_ns for use in self.nodes))

    @property
    def bytes_moved(self) -> int:
        return sum(use.sent_bytes for use in self.links)

    def done_ns(self, nodes: int) -> list[int]:
        """For each of so many nodes, the end of its last task; 0 if it has none."""
        done = [0] * nodes
        for task in self.tasks:
            done[task.node] = max(done[task.node], task.end_ns)
        return done

    def idle_ns(self, use: NodeUse) -> int:
        """For how long the node's workers have nothing to do, on average."""
        return self.iteration_ns - use.worker_busy_ns

    def to_json(self, names: Sequence[str]) -> dict[str, Any]:
        side_by_side = any(use.workers > 1 for use in self.nodes)
        return {
            "timing": str(self.timing),
            "iteration_s": seconds(self.iteration_ns),
            "last_backward_s": seconds(self.last_backward_ns),
            "averaging_s": [[seconds(start), seconds(end)] for start, end in self.averaging_ns],
            "nodes": [
                {
                    "name": names[use.node],
                    "stage": use.stage,
                    "slots": use.slots,
                    **({"workers": use.workers} if use.workers > 1 else {}),
                    **{name: seconds(taken_ns) for name, taken_ns in zip(NODE_TIMES, use[4:], strict=True)},
                }
                for use in self.nodes
            ],
            "links": [[names[use.sender], names[use.receiver], use.sent_bytes] for use in self.links],
            "task_columns": [*TASK_COLUMNS, *(["device"] * side_by_side)],
            "tasks": [
                [
                    *(task.lane, task.microbatch, task.step, names[task.node]),
                    *(seconds(task.ready_ns), seconds(task.start_ns), seconds(task.end_ns)),
                    *([task.device] * side_by_side),
                ]
                for task in self.tasks
            ],
        }

    @classmethod
    def from_json(cls, value: Any, number: dict[str, int]) -> Timeline:
        fields = Fields(value, "expected")

        def node(name: Any, at: str) -> int:
            if not isinstance(name, str) or name not in number:
                raise UserError(f"{at}: no node is called {name!r}")
            return number[name]

        def time(value: Any, at: str) -> int:
            return ns(as_number(value, at, CENTURY_S))

        def row(values: Any, at: str, size: int) -> list[Any]:
            if not isinstance(values, list) or len(values) != size:
                raise UserError(f"{at}: expected a list of {size} values")
            return values

        timing = Timing(fields.text("timing", tuple(Timing)))
        iteration_ns = time(fields.take("iteration_s"), fields.at("iteration_s"))
        last_ns = time(fields.take("last_backward_s"), fields.at("last_backward_s"))
        averaging = []
        for index, entry in enumerate(fields.items("averaging_s")):
            at = f"{fields.at('averaging_s')}[{index}]"
            start, end = row(entry, at, 2)
            averaging.append((time(start, at), time(end, at)))
        nodes = []
        for use in fields.objects("nodes"):
            nodes.append(
                NodeUse(
                    node(use.take("name"), use.at("name")),
                    use.integer("stage"),
                    use.integer("slots"),
                    use.integer("workers", DEVICES) if use.mentions("workers") else 1,
                    *(
                        time(0 if name == "weight_s" and not use.mentions(name) else use.take(name), use.at(name))
                        for name in NODE_TIMES
                    ),
                )
            )
            use.close()
        links = []
        for index, entry in enumerate(fields.items("links")):
            at = f"{fields.at('links')}[{index}]"
            sender, receiver, sent = row(entry, at, 3)
            links.append(LinkUse(node(sender, at), node(receiver, at), as_integer(sent, at)))
        columns = fields.items("task_columns")
        expected = [*TASK_COLUMNS, *(["device"] * any(use.workers > 1 for use in nodes))]
        if columns != expected:
            raise UserError(f"{fields.at('task_columns')}: expected {expected}")
        tasks = []
        for index, entry in enumerate(fields.items("tasks")):
            at = f"{fields.at('tasks')}[{index}]"
            lane, microbatch, step, name, *times = row(entry, at, len(columns))
            whole = (as_integer(lane, at), as_integer(microbatch, at), as_integer(step, at))
            device = as_integer(times.pop(), at) if len(times) > len(TIME_COLUMNS) else 0
            ready_ns, start_ns, end_ns = (time(each, at) for each in times)
            tasks.append(Task(*whole, node(name, at), ready_ns, start_ns, end_ns, device))
        fields.close()
        return cls(timing, iteration_ns, last_ns, tuple(averaging), tuple(nodes), tuple(links), tuple(tasks))


class BarKind(StrEnum):
    """Kinds of bars in a Gantt chart."""

    FORWARD = "forward"
    HEAD = "head"
    BACKWARD = "backward"
    WEIGHTS = "weights"
    WAITING = "waiting"
    AVERAGING = "averaging"
    OPTIMIZER = "optimizer"


TASK_KINDS = (BarKind.FORWARD, BarKind.HEAD, BarKind.BACKWARD, BarKind.WEIGHTS)


# Eight hues of Okabe & Ito and of Tol, which red-blind and green-blind eyes can tell apart too. A ninth data node takes
# the first hue again; the lane numbers on the bars say whose it is.
HUES = ("#0072B2", "#E69F00", "#882255", "#117733", "#CC79A7", "#56B4E9", "#999933", "#EE6677")


def ranges_text(numbers: Iterable[int]) -> str:
    """Numbers as ranges: 0, 1, 2, 5 as '0–2, 5'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in runs)
