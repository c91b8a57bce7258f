"""The event loop of the simulator: one pass over the events of an iteration, in the order of time.

A lane has one microbatch in flight, so it has one pending event at most: its next task becomes ready. A node needs
an event of its own only when somebody waits for it. Everything that happens at one time is taken in before any node
decides, so the outcome does not depend on the order in which simultaneous events are looked at.

Sends need no events: a node's tasks end one after another, so the transfers on a directed link are known in their
order when the task that feeds them starts.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from skippipe.compiled import kernel
from skippipe.dispatch import goes_before, may_start, place, steps
from skippipe.heap import drop_first, push

Ints = NDArray[np.int64]


@kernel
def run(
    paths: Ints,  # [lane, hop] node; rows are padded at the end
    lengths: Ints,  # [lane]
    microbatches: Ints,  # [lane]
    forward_ns: Ints,  # [node], as are the next three
    backward_ns: Ints,
    head_ns: Ints,
    slots: Ints,
    flight_ns: Ints,  # [from, to]
    transmit_ns: Ints,  # [from, to]
    queued: bool,  # transfers on one directed link wait for each other
    forward_urgency: int,
    done_ns: Ints,  # out: [node] end of its last task
    record: Ints,  # out: [task, (ready, start, end)]; no rows: do not record
) -> tuple[int, int]:
    """The end of the last task, and how many microbatches came back (fewer than were sent: a deadlock)."""
    lanes = len(lengths)
    nodes = len(forward_ns)
    recording = len(record) > 0

    step = np.zeros(lanes, np.int64)
    microbatch = np.zeros(lanes, np.int64)
    ready_ns = np.zeros(lanes, np.int64)
    first_task = np.zeros(lanes, np.int64)

    waiting = np.full(nodes, -1, np.int64)  # first lane of a linked list of those that are ready
    behind = np.full(lanes, -1, np.int64)  # the next in that list
    free_ns = np.zeros(nodes, np.int64)
    held = np.zeros(nodes, np.int64)
    will_wake = np.zeros(nodes, np.bool_)
    link_free_ns = np.zeros((nodes, nodes) if queued else (1, 1), np.int64)

    times = np.empty(lanes + nodes, np.int64)  # a heap of events: (time, code)
    codes = np.empty(lanes + nodes, np.int64)  # a lane whose next task is ready, or −1 − a node that comes free
    deciding = np.empty(lanes + nodes, np.int64)
    size = 0
    tasks = 0
    for lane in range(lanes):
        first_task[lane] = tasks
        tasks += microbatches[lane] * steps(lengths[lane])
        if microbatches[lane] > 0:
            size = push(times, codes, size, 0, lane)
    done_ns[:] = 0
    last_ns = 0
    completed = 0

    while size > 0:
        now = times[0]
        decisions = 0
        while size > 0 and times[0] == now:
            code = codes[0]
            size = drop_first(times, codes, size)
            if code < 0:
                node = -1 - code
                will_wake[node] = False
            else:
                node = paths[code, place(step[code], lengths[code])]
                ready_ns[code] = now
                behind[code] = waiting[node]
                waiting[node] = code
                if free_ns[node] > now:
                    if not will_wake[node]:
                        will_wake[node] = True
                        size = push(times, codes, size, free_ns[node], -1 - node)
                    continue
            deciding[decisions] = node
            decisions += 1

        for decision in range(decisions):
            node = deciding[decision]
            if free_ns[node] > now:
                continue  # decided already
            best = -1
            before_best = -1
            best_urgency = 0
            previous = -1
            lane = waiting[node]
            while lane >= 0:
                length = lengths[lane]
                if may_start(step[lane], length, held[node], slots[node]):
                    urgency = forward_urgency if step[lane] < length else 0
                    if best < 0 or goes_before(urgency, ready_ns[lane], lane, best_urgency, ready_ns[best], best):
                        best = lane
                        before_best = previous
                        best_urgency = urgency
                previous = lane
                lane = behind[lane]
            if best < 0:
                continue
            if before_best < 0:
                waiting[node] = behind[best]
            else:
                behind[before_best] = behind[best]

            lane = best
            length = lengths[lane]
            at = step[lane]
            if at < length:
                end = now + forward_ns[node]
                held[node] += 1
            elif at == length:
                end = now + head_ns[node]
            else:
                end = now + backward_ns[node]
                held[node] -= 1  # the node is busy until the slot is really free
            free_ns[node] = end
            done_ns[node] = end
            last_ns = max(last_ns, end)
            if waiting[node] >= 0 and not will_wake[node]:
                will_wake[node] = True
                size = push(times, codes, size, end, -1 - node)
            if recording:
                task = first_task[lane] + microbatch[lane] * steps(length) + at
                record[task, 0] = ready_ns[lane]
                record[task, 1] = now
                record[task, 2] = end

            arrival = end
            at += 1
            if at == steps(length):
                at = 0
                microbatch[lane] += 1
                completed += 1
                if microbatch[lane] == microbatches[lane]:
                    continue
            else:
                target = paths[lane, place(at, length)]
                if target != node:
                    if queued:
                        arrival = max(end, link_free_ns[node, target]) + transmit_ns[node, target]
                        link_free_ns[node, target] = arrival
                        arrival += flight_ns[node, target]
                    else:
                        arrival = end + transmit_ns[node, target] + flight_ns[node, target]
            step[lane] = at
            size = push(times, codes, size, arrival, lane)

    return last_ns, completed
