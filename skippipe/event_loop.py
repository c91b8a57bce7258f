"""The event loop of the simulator: one pass over the events of an iteration, in the order of time.

A lane has one microbatch in flight, so it has one pending event at most: its next task becomes ready. A node needs an
event of its own only when a task waits for it, or when it has several workers: one for each that comes free. Everything
that happens at one time is taken in before any node decides, so the outcome does not depend on the order in which
simultaneous events are looked at.

Weight gradients of a split backward need no events either: they wait on their worker, in the order in which its
backwards ran, for a moment when it could start nothing else.

Sends of a node with one worker need no events: its tasks end one after another, so the transfers on a directed link,
and through the node's own upload, are known in their order when the task that feeds them starts. Tasks side by side may
end in another order than they start in, so each of theirs has an event when it ends. When a message leaves is written
out in both places: a kernel that both call halves the speed of the whole, measured in two forms. At a receiver with a
download rate of its own messages of several senders meet: each has an event there, when its first byte arrives.

Events are in a binary heap of two arrays: the smallest key with its value is at index 0; of equal keys, the smallest
value.
"""

from __future__ import annotations

import numpy as np

from skippipe.dispatch import (
    all_steps,
    emptiest_worker,
    frees_slot,
    goes_before,
    may_start,
    message_pass,
    place,
    steps,
    teacher_urgency,
    urgency,
    weights_after,
)
from skippipe.jit import Ints, inner_kernel, kernel


@kernel
def run_iteration(
    paths: Ints,  # [lane, hop] node; rows are padded at the end
    lengths: Ints,  # [lane]
    microbatches: Ints,  # [lane]
    forward_ns: Ints,  # [node], as are all up to the workers
    backward_ns: Ints,
    weight_ns: Ints,
    head_ns: Ints,
    slots: Ints,  # of each worker
    workers: Ints | None,  # None: one each; that makes a kernel of its own, without what several take
    flight_ns: Ints,  # [from, to]
    transmit_ns: Ints,  # [pass, from, to]
    upload_ns: Ints,  # [pass, from, to]: time for which a message keeps the sender's upload busy; 0: for none
    download_ns: Ints,  # [pass, from, to]: likewise the receiver's download
    queued: bool,  # transfers on one directed link wait for each other, and for the nodes' uploads and downloads
    order: int,  # of dispatch
    split: bool,  # weight gradients are tasks of their own
    slack_ns: Ints,  # in, out: [lane] by how much it may still wait, or the run ends at once; empty: for ever
    done_ns: Ints,  # out: [node] end of its last task
    link_free_ns: Ints,  # out: [from, to] end of its last transmission, if queued
    upload_free_ns: Ints,  # out: [node], as is the next
    download_free_ns: Ints,
    record: Ints,  # out: [task, (ready, start, end, worker of the node)]; no rows: do not record
    teaches: Ints | None,  # [lane]: the lane that passes of the teacher are for; −1: it is a lane like any other
) -> tuple[int, int]:
    """The end of the last task, and how many microbatches did not come back; if any, a deadlock or a lane too late.

    Passes of the teacher are lanes of their own, after all others; their tasks are not recorded."""
    lanes = len(lengths)
    nodes = len(forward_ns)
    recording = len(record) > 0
    has_slack = len(slack_ns) > 0

    step = np.zeros(lanes, np.int64)
    microbatch = np.zeros(lanes, np.int64)
    ready_ns = np.zeros(lanes, np.int64)
    first_task = np.zeros(lanes, np.int64)

    waiting = np.full(nodes, -1, np.int64)  # first lane of a linked list of those that are ready
    behind = np.full(lanes, -1, np.int64)  # the next in that list
    several = workers is not None
    # a node with one worker has its own number for that; all workers of others come after these
    all_workers = nodes
    first_worker = last_worker = node_of = lengths  # [node], [node], [worker]: of use with several alone
    worker_at = paths  # [lane, hop]: which worker has its microbatch; likewise
    if workers is not None:
        first_worker, last_worker = np.arange(nodes), np.arange(nodes)
        for node in range(nodes):
            if workers[node] > 1:
                first_worker[node] = all_workers
                all_workers += workers[node]
                last_worker[node] = all_workers - 1
        node_of = np.empty(all_workers, np.int64)
        for node in range(nodes):
            for worker in range(first_worker[node], last_worker[node] + 1):
                node_of[worker] = node
        worker_at = np.empty(paths.shape, np.int64)
    free_ns = np.zeros(all_workers, np.int64)  # [worker], as are the next three
    held = np.zeros(all_workers, np.int64)
    will_wake = np.zeros(all_workers, np.bool_)
    undone = np.zeros(all_workers, np.int64)  # weight gradients of the microbatches whose backward has been there

    times = np.empty(lanes + all_workers, np.int64)  # a heap of events: (time, code)
    # a lane whose next task is ready; lanes + a lane whose message has come to the receiver's download; −1 − a worker
    # that comes free; or, below all these, the lanes in order whose message leaves a node with several workers
    codes = np.empty(lanes + all_workers, np.int64)
    leaving = -all_workers - lanes
    deciding = np.empty(lanes + 2 * all_workers, np.int64)
    size = 0
    tasks = 0
    left = 0
    for lane in range(lanes):
        first_task[lane] = tasks
        if teaches is None or teaches[lane] < 0:
            tasks += microbatches[lane] * all_steps(lengths[lane], split)
            left += microbatches[lane]
        if microbatches[lane] > 0:
            size = push(times, codes, size, 0, lane)
    teacher_of = taught = turn = parked = lengths  # [lane]: of use with a teacher alone
    if teaches is not None:
        teacher_of = np.full(lanes, -1, np.int64)
        taught = np.zeros(lanes, np.int64)  # microbatches that the teacher is done with
        turn = np.zeros(lanes, np.int64)  # the microbatch that is on its way
        parked = np.zeros(lanes, np.int64)  # 1: the teacher's next pass waits for that
        for lane in range(lanes):
            if teaches[lane] >= 0:
                teacher_of[teaches[lane]] = lane
    oldest = np.empty(all_workers, np.int64)  # the first task of a linked list of undone weight gradients, if recorded
    newest = np.empty(all_workers, np.int64)
    after = np.empty(tasks if split and recording else 0, np.int64)  # the next in that list
    done_ns[:] = 0
    if queued:
        link_free_ns[:] = 0
        upload_free_ns[:] = 0
        download_free_ns[:] = 0
    last_ns = 0

    while size > 0:
        now = times[0]
        decisions = 0
        while size > 0 and times[0] == now:
            code = codes[0]
            size = drop_first(times, codes, size)
            if code >= lanes:
                lane = code - lanes
                length = lengths[lane]
                sender = paths[lane, place(step[lane] - 1, length)]
                node = paths[lane, place(step[lane], length)]
                kind = message_pass(step[lane], length)
                start = max(now, download_free_ns[node])
                download_free_ns[node] = start + download_ns[kind, sender, node]
                if has_slack:
                    slack_ns[lane] -= start - now
                size = push(times, codes, size, start + transmit_ns[kind, sender, node], lane)
                continue
            if several and code < -all_workers:
                lane = code - leaving
                length = lengths[lane]
                node = paths[lane, place(step[lane] - 1, length)]
                target = paths[lane, place(step[lane], length)]
                kind = message_pass(step[lane], length)
                start = now
                if upload_ns[kind, node, target] > 0:
                    start = max(now, upload_free_ns[node])
                    upload_free_ns[node] = start + upload_ns[kind, node, target]
                start = max(start, link_free_ns[node, target])
                if has_slack:
                    slack_ns[lane] -= start - now
                arrival = start + transmit_ns[kind, node, target]
                link_free_ns[node, target] = arrival
                if download_ns[kind, node, target] > 0:
                    size = push(times, codes, size, start + flight_ns[node, target], lanes + lane)
                else:
                    size = push(times, codes, size, arrival + flight_ns[node, target], lane)
                continue
            if code < 0:
                node = -1 - code
                will_wake[node] = False
                if several:
                    node = node_of[node]
            else:
                node = paths[code, place(step[code], lengths[code])]
                begins = code  # what waits for the node from now on
                if teaches is not None and teaches[code] >= 0 and step[code] == lengths[code]:  # a pass is back
                    student = teaches[code]
                    microbatch[code] += 1
                    taught[student] = microbatch[code]
                    step[code] = 0
                    if microbatch[code] == microbatches[code]:
                        begins = -1
                    elif microbatch[code] > turn[student] + 1:
                        parked[code] = 1
                        begins = -1
                elif teaches is not None and step[code] == 0 and teacher_of[code] >= 0:
                    turn[code] = microbatch[code]
                    teacher = teacher_of[code]
                    if parked[teacher] == 1:
                        parked[teacher] = 0
                        ready_ns[teacher] = now
                        behind[teacher] = waiting[node]
                        waiting[node] = teacher
                if begins >= 0:
                    ready_ns[code] = now
                    behind[code] = waiting[node]
                    waiting[node] = code
                if free_ns[node] > now:  # never, of several workers
                    if not will_wake[node]:
                        will_wake[node] = True
                        size = push(times, codes, size, free_ns[node], -1 - node)
                    continue
            deciding[decisions] = node
            decisions += 1

        decision = 0
        while decision < decisions:
            node = deciding[decision]
            decision += 1
            worker = node
            alone = not several or first_worker[node] == node
            if not alone:
                worker = emptiest_worker(first_worker[node], last_worker[node] + 1, free_ns, held, now)
                if worker < 0:
                    continue
            elif free_ns[node] > now:
                continue  # decided already
            best = -1
            before_best = -1
            best_urgency = 0
            previous = -1
            lane = waiting[node]
            while lane >= 0:
                length = lengths[lane]
                of_teacher = teaches is not None and teaches[lane] >= 0
                if of_teacher or (
                    may_start(step[lane], length, held[worker], slots[node])
                    and (alone or step[lane] < length or free_ns[worker_at[lane, place(step[lane], length)]] <= now)
                    and (
                        teaches is None
                        or step[lane] != length
                        or teacher_of[lane] < 0
                        or taught[lane] > microbatch[lane]
                    )
                ):
                    if of_teacher:
                        lane_urgency = teacher_urgency(step[lane])
                    else:
                        lane_urgency = urgency(step[lane], length, lane, order)
                    if best < 0 or goes_before(lane_urgency, ready_ns[lane], lane, best_urgency, ready_ns[best], best):
                        best = lane
                        before_best = previous
                        best_urgency = lane_urgency
                previous = lane
                lane = behind[lane]
            lane = best
            of_teacher = teaches is not None and best >= 0 and teaches[best] >= 0
            if of_teacher and not alone:
                busy = False
                for each in range(first_worker[node], last_worker[node] + 1):
                    busy = busy or free_ns[each] > now
                if busy:
                    continue
            if lane >= 0:
                if before_best < 0:
                    waiting[node] = behind[lane]
                else:
                    behind[before_best] = behind[lane]
                length = lengths[lane]
                at = step[lane]
                if of_teacher and not alone:
                    for each in range(first_worker[node], last_worker[node] + 1):
                        free_ns[each] = now + forward_ns[node]
                elif not alone:
                    if at < length:
                        worker_at[lane, at] = worker
                    worker = worker_at[lane, place(at, length)]
                if of_teacher:
                    end = now + forward_ns[node]
                elif at < length:
                    end = now + forward_ns[node]
                    held[worker] += 1
                elif at == length:
                    end = now + head_ns[node]
                else:
                    end = now + backward_ns[node]
                    if frees_slot(at, length, split):
                        held[worker] -= 1  # the worker is busy until the slot is really free
                    else:
                        if recording:
                            first = first_task[lane] + microbatch[lane] * all_steps(length, split)
                            weights = first + weights_after(at, length)
                            record[weights, 0] = end
                            if undone[worker] > 0:
                                after[newest[worker]] = weights
                            else:
                                oldest[worker] = weights
                            newest[worker] = weights
                        undone[worker] += 1
                if has_slack:
                    slack_ns[lane] -= now - ready_ns[lane]
                    if slack_ns[lane] < 0:
                        return last_ns, left
                if recording and not of_teacher:
                    task = first_task[lane] + microbatch[lane] * all_steps(length, split) + at
                    record[task, 0] = ready_ns[lane]
            else:  # weight gradients: of all urgencies theirs comes last
                if not alone:
                    worker = first_worker[node]
                    while worker < last_worker[node] and (undone[worker] == 0 or free_ns[worker] > now):
                        worker += 1
                if undone[worker] == 0 or free_ns[worker] > now:
                    continue
                end = now + weight_ns[node]
                held[worker] -= 1
                undone[worker] -= 1
                if recording:
                    task = oldest[worker]
                    oldest[worker] = after[task]
            free_ns[worker] = end
            if not alone:
                deciding[decisions] = node  # another worker may be free
                decisions += 1
            done_ns[node] = max(done_ns[node], end)
            last_ns = max(last_ns, end)
            if (waiting[node] >= 0 or undone[worker] > 0 or not alone) and not will_wake[worker]:
                will_wake[worker] = True
                size = push(times, codes, size, end, -1 - worker)
            if recording and not of_teacher:
                record[task, 1] = now
                record[task, 2] = end
                record[task, 3] = 0 if alone else worker - first_worker[node]
            if lane < 0:
                continue

            arrival = end
            at += 1
            if at == steps(length):
                at = 0
                microbatch[lane] += 1
                left -= 1
                if microbatch[lane] == microbatches[lane]:
                    continue
            else:
                target = paths[lane, place(at, length)]
                if target != node:
                    kind = message_pass(at, length)
                    if queued and not alone:
                        step[lane] = at
                        size = push(times, codes, size, end, leaving + lane)
                        continue
                    if queued:
                        start = end
                        if upload_ns[kind, node, target] > 0:
                            start = max(end, upload_free_ns[node])
                            upload_free_ns[node] = start + upload_ns[kind, node, target]
                        start = max(start, link_free_ns[node, target])
                        if has_slack:
                            slack_ns[lane] -= start - end
                        arrival = start + transmit_ns[kind, node, target]
                        link_free_ns[node, target] = arrival
                        if download_ns[kind, node, target] > 0:
                            step[lane] = at
                            size = push(times, codes, size, start + flight_ns[node, target], lanes + lane)
                            continue
                        arrival += flight_ns[node, target]
                    else:
                        arrival = end + transmit_ns[kind, node, target] + flight_ns[node, target]
            step[lane] = at
            size = push(times, codes, size, arrival, lane)

    return last_ns, left


@inner_kernel
def push(keys: Ints, values: Ints, size: int, key: int, value: int) -> int:
    """The new size."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and values[parent] <= value):
            break
        keys[child] = keys[parent]
        values[child] = values[parent]
        child = parent
    keys[child] = key
    values[child] = value
    return size + 1


@inner_kernel
def drop_first(keys: Ints, values: Ints, size: int) -> int:
    """The new size."""
    size -= 1
    key = keys[size]
    value = values[size]
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        other = child + 1
        if other < size and (
            keys[other] < keys[child] or (keys[other] == keys[child] and values[other] < values[child])
        ):
            child = other
        if keys[child] > key or (keys[child] == key and values[child] >= value):
            break
        keys[parent] = keys[child]
        values[parent] = values[child]
        parent = child
    keys[parent] = key
    values[parent] = value
    return size
