"""Dispatch, which task a node runs next: the one definition that the simulator and the runtime share.

A microbatch with a path of L nodes passes 2L + 1 steps, one after another: forward on each node in order (0 … L−1),
head and loss at the data node (L), backward on each node in reverse (L+1 … 2L). With a split backward these compute
only the gradient of the input, and the gradient of the weights is a task of its own on every node, which no other step
waits for: step 2L+1+p at place p of the path, ready when the backward at that place ends.

A worker runs one task at a time and never interrupts it; a node has one, or one for each device that holds the whole
stage. While one of them is free, the node takes, of the tasks that are ready and may start, the one with the smallest
(urgency, time it became ready, lane). It never waits for a task that is not ready yet.

A pass of the teacher (see `whole_paths`) goes before all of these, as a head waits for it: of several, that which is
furthest on its path. Its steps are forward ones that hold no slot, and its end, back at the data node, is no task. On a
node of several workers it runs alone: while it waits for them to be free, nothing else starts.

A forward may start on a free worker that has a slot left: on the one that holds the fewest microbatches, and of several
on the first. Activations stay where they are, so all later tasks of the microbatch on this node are for the same worker
and may start when that is free.
"""

from __future__ import annotations

from enum import StrEnum

from skippipe.jit import Ints, inner_kernel, kernel


class Dispatch(StrEnum):
    """How a node ranks the tasks that are ready."""

    FIRST_COME = "first-come"
    """Tasks in the order in which they became ready."""
    BACKWARD_FIRST = "backward-first"
    """Head and backward before forward, so that slots come free early; then in the order they became ready."""
    LANES_IN_ORDER = "lanes-in-order"
    """Tasks of a lane before those of all lanes that come after it in the plan."""

    @property
    def order(self) -> int:
        """The number of the rule, for kernels."""
        return list(Dispatch).index(self)


BACKWARD_FIRST, LANES_IN_ORDER = Dispatch.BACKWARD_FIRST.order, Dispatch.LANES_IN_ORDER.order
LAST = 2**32


@kernel
def place(step: int, length: int) -> int:
    """The position in its path at which a microbatch takes a step; the step after the last forward is the head."""
    if step < length:
        return step
    if step == length:
        return 0
    if step <= 2 * length:
        return 2 * length - step
    return step - (2 * length + 1)


@kernel
def message_pass(step: int, length: int) -> int:
    """What kind of message makes a step ready: 0 an activation, 1 a gradient."""
    return 1 if step > length else 0


@kernel
def steps(length: int) -> int:
    """Steps of a microbatch from its first forward to its last backward, without weight gradients."""
    return 2 * length + 1


@kernel
def all_steps(length: int, split: bool) -> int:
    """Steps of a microbatch, with a weight gradient for every node of its path if the backward is split."""
    return 3 * length + 1 if split else 2 * length + 1


@kernel
def is_weights(step: int, length: int) -> bool:
    """Whether the step is the weight gradient of a split backward."""
    return step > 2 * length


@kernel
def weights_after(step: int, length: int) -> int:
    """The step that computes the weight gradient which a split backward leaves over."""
    return 2 * length + 1 + (2 * length - step)


@kernel
def frees_slot(step: int, length: int, split: bool) -> bool:
    """Whether the node frees its slot of the microbatch when this step ends."""
    return step > 2 * length if split else step > length


@kernel
def urgency(step: int, length: int, lane: int, order: int) -> int:
    """Rank of a task; the smaller goes first. Weight gradients fill the time that no other task can use."""
    if step > 2 * length:
        return LAST
    if order == LANES_IN_ORDER:
        return lane
    return 1 if order == BACKWARD_FIRST and step < length else 0


@kernel
def teacher_urgency(step: int) -> int:
    """Rank of a step of the teacher, before all others."""
    return -1 - step


@kernel
def may_start(step: int, length: int, held: int, slots: int) -> bool:
    """Whether a step may start on a free worker: a forward needs one of its memory slots, which the last task there
    gives back; other steps have one."""
    return step >= length or held < slots


@inner_kernel
def emptiest_worker(first: int, after: int, free_ns: Ints, held: Ints, now_ns: int) -> int:
    """Of workers `first` to before `after`, the free one that holds the fewest microbatches; −1: none is free."""
    found = -1
    for worker in range(first, after):
        if free_ns[worker] <= now_ns and (found < 0 or held[worker] < held[found]):
            found = worker
    return found


@kernel
def goes_before(
    urgency: int, ready_ns: int, lane: int, other_urgency: int, other_ready_ns: int, other_lane: int
) -> bool:
    """Whether the first of two tasks goes first. They never tie: of one lane, only one becomes ready on a node at a
    time."""
    if urgency != other_urgency:
        return urgency < other_urgency
    if ready_ns != other_ready_ns:
        return ready_ns < other_ready_ns
    return lane < other_lane
