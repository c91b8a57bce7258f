"""Who goes next on a node: the one definition that the simulator and the runtime share.

A microbatch with a path of L nodes passes 2L + 1 steps: forward on each node in order (0 … L−1), head and loss at the
data node (L), backward on each node in reverse (L+1 … 2L). A node runs one task at a time and never interrupts it.
When it is free, it takes, of the tasks that are ready and may start, the one with the smallest
(urgency, time it became ready, lane). Nothing waits for a task that is not there yet.
"""

from __future__ import annotations

from enum import StrEnum

from skippipe.compiled import kernel


class Dispatch(StrEnum):
    """How a node ranks the tasks that are ready."""

    FIRST_COME = "first-come"
    """In the order in which they became ready."""
    BACKWARD_FIRST = "backward-first"
    """Head and backward before forward, so that slots come free early; then in the order they became ready."""

    @property
    def forward_urgency(self) -> int:
        """Of forward tasks; that of head and backward is 0, and the smaller goes first."""
        return 1 if self is Dispatch.BACKWARD_FIRST else 0


@kernel
def place(step: int, length: int) -> int:
    """The position in its path at which a microbatch takes a step; the step after the last forward is the head."""
    if step < length:
        return step
    if step == length:
        return 0
    return 2 * length - step


@kernel
def steps(length: int) -> int:
    """Of a microbatch, from its first forward to its last backward."""
    return 2 * length + 1


@kernel
def may_start(step: int, length: int, held: int, slots: int) -> bool:
    """A forward needs a free memory slot, which its backward gives back; head and backward use the slot they have."""
    return step >= length or held < slots


@kernel
def goes_before(
    urgency: int, ready_ns: int, lane: int, other_urgency: int, other_ready_ns: int, other_lane: int
) -> bool:
    if urgency != other_urgency:
        return urgency < other_urgency
    if ready_ns != other_ready_ns:
        return ready_ns < other_ready_ns
    return lane < other_lane
