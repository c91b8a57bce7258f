"""A second checker and simulator, written from docs/formats.md alone: the package's own must agree with it.

It shares no line with the package and prefers the plain way to the fast one. `plan` is always the parsed JSON of a
well-formed plan file; times inside are whole nanoseconds.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations

from tests.helpers.oracle_averaging import Json, Link, Transfer, piece_transfers, stage_transfers, trees
from tests.helpers.oracle_costs import CAP_NS, Costs, Node, costs, is_split


class LockedUp(Exception):
    """Microbatches are left, but nothing runs and nothing is on its way; or a lane has no path for a teacher's pass."""


@dataclass
class Task:
    lane: int
    microbatch: int
    step: int
    node: str
    kind: str
    ready: int
    start: int = 0  # this and the next count once the node has taken the task
    end: int = 0
    worker: int = 0


def sending_ns(size: int, rate: float) -> int:
    return round(min(size / rate * 1e9, CAP_NS)) if rate else CAP_NS


def transmit(cost: Costs, link: Link, size: int) -> int:
    sender, receiver = link
    limits = [cost.bandwidth[link], cost.upload.get(sender), cost.download.get(receiver)]
    return sending_ns(size, min(rate for rate in limits if rate is not None))


class Network:
    """When uploads, links and downloads are free again; under contention-only timing nobody waits for them."""

    def __init__(self, cost: Costs, timing: str) -> None:
        self.cost, self.shared = cost, timing == "full"
        self.upload_free: Counter[str] = Counter()
        self.link_free: Counter[Link] = Counter()
        self.download_free: Counter[str] = Counter()

    def first_byte(self, link: Link, size: int, leaves: int, least: int = 0) -> int:
        """When the first byte comes to the receiver. Messages are given in the order in which they leave. `least`: for
        how long they keep uploads, links and downloads busy in any case."""
        start = leaves
        if self.shared:
            sender, _ = link
            if sender in self.cost.upload:
                start = max(leaves, self.upload_free[sender])
                self.upload_free[sender] = start + max(least, sending_ns(size, self.cost.upload[sender]))
            start = max(start, self.link_free[link])
            self.link_free[link] = start + max(least, transmit(self.cost, link, size))
        return start + self.cost.flight[link]

    def arrival(self, link: Link, size: int, comes: int, least: int = 0) -> int:
        """When all of a message is there. Messages are given in the order in which their first bytes come."""
        _, receiver = link
        if self.shared and receiver in self.cost.download:
            comes = max(comes, self.download_free[receiver])
            self.download_free[receiver] = comes + max(least, sending_ns(size, self.cost.download[receiver]))
        return comes + max(least, transmit(self.cost, link, size))


def circle(nodes: list[str]) -> list[Link]:
    """The edges of a ring, or the hops of a path with the one back: from each node to the next, if that is another."""
    return [(i, j) for i, j in zip(nodes, nodes[1:] + nodes[:1], strict=True) if i != j]


def pass_paths(plan: Json, cost: Costs) -> dict[int, list[str]]:
    """Of every lane that has a teacher, the nodes of its passes."""
    stages, teacher = plan["stages"], plan["workload"].get("teacher", "")
    lanes = [lane for lane, each in enumerate(plan["lanes"]) if teacher and len(each["path"]) < len(stages)]
    used = {node for each in plan["lanes"] for node in each["path"]}
    beside: Counter[str | Link] = Counter()

    def crowded(taken: int, what: str | Link) -> int:
        return min(taken, 2**46) * (32 + beside[what]) // 32

    def hop(link: Link) -> int | None:
        if not cost.bandwidth[link]:
            return None
        return crowded(cost.flight[link] + transmit(cost, link, cost.hop_bytes[False][link]), link)

    found: dict[int, list[str]] = {}
    for lane in lanes:
        own = plan["lanes"][lane]["path"]
        best: dict[str, tuple[int, list[str]]] = {own[0]: (0, [own[0]])}  # node → the least sum, and its path
        for stage, each in enumerate(stages):
            nodes = [node for node in cost.nodes if node in each["nodes"] and node in used]
            same = [node for node in own if node in each["nodes"]] if teacher == "hidden" else []
            if stage == 0:
                continue
            after: dict[str, tuple[int, list[str]]] = {}
            for node in same[-1:] or nodes:
                ways = [(taken + way, path) for before, (taken, path) in best.items() if (way := hop((before, node)))]
                if ways:
                    taken, path = min(ways, key=lambda each: each[0])
                    after[node] = taken + crowded(cost.nodes[node].times["forward"], node), [*path, node]
            best = after
        back = [(taken + way, path) for node, (taken, path) in best.items() if (way := hop((node, own[0])))]
        if not back:
            raise LockedUp
        found[lane] = min(back, key=lambda each: each[0])[1]
        for link in zip(found[lane], [*found[lane][1:], own[0]], strict=True):
            beside[link] += plan["lanes"][lane]["microbatches"]
            beside[link[0]] += plan["lanes"][lane]["microbatches"]
    return found


def run_tasks(plan: Json, network: Network) -> tuple[list[Task], list[Task]]:
    """All tasks, and all steps of passes of a teacher."""
    cost, lanes = network.cost, plan["lanes"]
    passes = pass_paths(plan, cost)
    turn = dict.fromkeys(passes, 0)  # the lane's microbatch that is ready for step 0, or was last
    begun, came = dict.fromkeys(passes, 0), dict.fromkeys(passes, 0)  # how many passes
    steps: list[list[tuple[str, str]]] = []  # of every lane: node and kind of task
    for path in [lane["path"] for lane in lanes]:
        there, back = [(node, "forward") for node in path], [(node, "backward") for node in reversed(path)]
        steps.append([*there, (path[0], "head"), *back])
    held: Counter[tuple[str, int]] = Counter()  # by node and worker

    def following(ended: Task) -> list[Task]:
        """The lane's next task, ready as soon as the one before ends; none after its last."""
        lane, microbatch, step = ended.lane, ended.microbatch, ended.step + 1
        if ended.kind == "pass":
            is_back = step == len(passes[lane])
            where, kind = passes[lane][0 if is_back else step], "back" if is_back else "pass"
            return [Task(lane, microbatch, step, where, kind, ready=ended.end)]
        if step == len(steps[lane]):
            microbatch, step = microbatch + 1, 0
        if microbatch == lanes[lane]["microbatches"]:
            return []
        node, kind = steps[lane][step]
        worker = -1 if kind == "forward" else holder[lane, microbatch, node]
        return [Task(lane, microbatch, step, node, kind, ready=ended.end, worker=worker)]

    def weights_of(ended: Task) -> Task:
        """What a split backward leaves to be done on the same node."""
        length = len(lanes[ended.lane]["path"])
        place = lanes[ended.lane]["path"].index(ended.node)
        step = 2 * length + 1 + place
        return Task(ended.lane, ended.microbatch, step, ended.node, "weight", ready=ended.end, worker=ended.worker)

    def rank(task: Task) -> tuple[int, int, int]:
        urgency = {
            "first-come": 0,
            "backward-first": 1 if task.kind == "forward" else 0,
            "lanes-in-order": task.lane,
        }[plan["dispatch"]]
        return (len(lanes) + 2 if task.kind == "weight" else urgency, task.ready, task.lane)

    waiting = [Task(lane, 0, 0, *steps[lane][0], ready=0) for lane in range(len(lanes))]
    running: dict[tuple[str, int], Task] = {}  # by node and worker; a pass has all of them, and stands at −1
    holder: dict[tuple[int, int, str], int] = {}  # the worker that has a microbatch of a lane on a node
    flying: list[tuple[int, int, Link, Task]] = []  # when the first byte comes, lane, link, what the message is for
    done: list[Task] = []
    now = 0
    while waiting or running or flying:
        ending = [task for task in running.values() if task.end == now]
        for ended in sorted(ending, key=lambda task: (task.kind == "pass", task.lane)):
            del running[ended.node, ended.worker]
            held[ended.node, ended.worker] -= ended.kind == ("weight" if is_split(plan) else "backward")
            done.append(ended)
            if ended.kind == "weight":
                continue
            for task in following(ended):
                if task.node == ended.node:
                    waiting.append(task)
                    continue
                link = (ended.node, task.node)
                comes = network.first_byte(link, cost.hop_bytes[task.kind == "backward"][link], now)
                flying.append((comes, task.lane + len(lanes) * (ended.kind == "pass"), link, task))
            if ended.kind == "backward" and is_split(plan):
                waiting.append(weights_of(ended))
        for message in sorted((message for message in flying if message[0] == now), key=lambda message: message[1]):
            flying.remove(message)
            comes, _, link, task = message
            task.ready = network.arrival(link, cost.hop_bytes[task.kind == "backward"][link], comes)
            waiting.append(task)
        for task in [task for task in waiting if task.kind == "back" and task.ready <= now]:
            waiting.remove(task)
            came[task.lane] += 1
        for task in waiting:
            if task.step == 0 and task.kind == "forward" and task.ready <= now and task.lane in turn:
                turn[task.lane] = task.microbatch
        for lane, path in passes.items():
            if begun[lane] == came[lane] <= turn[lane] + 1 and begun[lane] < lanes[lane]["microbatches"]:
                waiting.append(Task(lane, begun[lane], 0, path[0], "pass", ready=now, worker=-1))
                begun[lane] += 1
        for node, its in cost.nodes.items():
            taught = [task for task in waiting if task.node == node and task.kind == "pass" and task.ready <= now]
            busy = [worker for there, worker in running if there == node]
            if taught and not busy:
                chosen = min(taught, key=lambda task: (-task.step, task.ready, task.lane))
                chosen.start, chosen.end, chosen.worker = now, now + its.times["forward"], -1
                waiting.remove(chosen)
                running[node, -1] = chosen
            if taught or -1 in busy:
                continue
            while free := [worker for worker in range(its.workers) if (node, worker) not in running]:
                room = [worker for worker in free if held[node, worker] < its.slots // its.workers]
                here = [task for task in waiting if task.node == node and task.ready <= now]
                here = [task for task in here if task.kind != "head" or came.get(task.lane, 4) > task.microbatch]
                ready = [task for task in here if (room if task.kind == "forward" else task.worker in free)]
                if not ready:
                    break
                chosen = min(ready, key=rank)
                chosen.start, chosen.end = now, now + its.times[chosen.kind]
                if chosen.kind == "forward":
                    chosen.worker = min(room, key=lambda worker: (held[node, worker], worker))
                    held[node, chosen.worker] += 1
                    holder[chosen.lane, chosen.microbatch, node] = chosen.worker
                waiting.remove(chosen)
                running[node, chosen.worker] = chosen
        coming = [task.end for task in running.values()] + [task.ready for task in waiting if task.ready > now]
        coming += [comes for comes, *_ in flying]
        if waiting and not coming:
            raise LockedUp
        now = min(coming, default=now)
    return [task for task in done if task.kind != "pass"], [task for task in done if task.kind == "pass"]


def average(plan: Json, network: Network, ended: dict[str, int]) -> list[Transfer]:
    """All transfers of all stages, with the times at which they arrive; `ended`: when nodes end their last tasks."""
    cost, transfers, places = network.cost, [], []
    for index, (stage, rounds) in enumerate(zip(plan["stages"], cost.gradient_bytes, strict=True)):
        transfers += stage_transfers(stage, index, rounds)
        others = [name for name in cost.nodes if name not in stage["ring"]]
        places.append({name: place for place, name in enumerate(stage["ring"] + others)})

    def rank(transfer: Transfer) -> tuple[object, ...]:
        place = places[transfer.stage]
        named = [place[name] for name in (*transfer.link, transfer.about)]
        of_round = transfer.round, transfer.is_sum, transfer.level, transfer.stage, transfer.piece
        return (not transfer.by_relay, *of_round, *named)

    def ready(transfer: Transfer) -> int | None:
        sender, receiver = transfer.link
        times = [before.arrived for before in transfer.after]
        known = [time for time in times if time is not None]
        if len(known) < len(times):
            return None
        known += [ended[name] for name in transfer.after_tasks]
        if receiver in cost.download:
            known.append(ended[receiver] + cost.flight[receiver, sender])
        return max(known)

    ranked = sorted(transfers, key=rank)
    following: dict[int, list[int]] = {}  # by the id of a transfer: ranks of those that wait for it
    for at, transfer in enumerate(ranked):
        for before in transfer.after:
            following.setdefault(id(before), []).append(at)
    events: list[tuple[int, bool, int]] = []  # time, whether a first byte comes, rank

    def leave_if_ready(ranks: Iterable[int]) -> None:
        for at in ranks:
            time = ready(ranked[at])
            if time is not None:
                heappush(events, (time, False, at))

    leave_if_ready(range(len(ranked)))
    while events:
        now, comes, at = heappop(events)
        transfer = ranked[at]
        if comes:
            transfer.arrived = network.arrival(transfer.link, transfer.size, now, least=1)
            leave_if_ready(following.get(id(transfer), []))
        else:
            heappush(events, (network.first_byte(transfer.link, transfer.size, now, least=1), True, at))
    return transfers


def simulate(plan: Json, timing: str) -> Json:
    """What `expected` of the plan file must be."""
    cost = costs(plan)
    network = Network(cost, timing)
    tasks, taught = run_tasks(plan, network)
    last_backward = iteration = max(task.end for task in tasks)
    averaging: list[tuple[int, int]] = []
    sent: Counter[Link] = Counter()
    for lane in plan["lanes"]:
        for i, j in circle(lane["path"]):
            sent[i, j] += lane["microbatches"] * cost.hop_bytes[False][i, j]
            sent[j, i] += lane["microbatches"] * cost.hop_bytes[True][j, i]
    for lane, path in pass_paths(plan, cost).items():
        for link in zip(path, [*path[1:], path[0]], strict=True):
            sent[link] += plan["lanes"][lane]["microbatches"] * cost.hop_bytes[False][link]
    if timing == "full":
        every = tasks + taught
        ended = {name: max((task.end for task in every if task.node == name), default=0) for name in cost.nodes}
        transfers = average(plan, network, ended)
        for index, stage in enumerate(plan["stages"]):
            start = max((ended[name] for name in stage["nodes"]), default=0)
            arrivals = [transfer.arrived or 0 for transfer in transfers if transfer.stage == index]
            averaging.append((start, max([start, *arrivals])))
        for transfer in transfers:
            sent[transfer.link] += transfer.size
        iteration = max(end for _, end in averaging) + max(node.times["optimizer"] for node in cost.nodes.values())

    def node_json(name: str, node: Node) -> Json:
        own = [task for task in tasks if task.node == name]
        busy = sum(task.end - task.start for task in [*own, *(task for task in taught if task.node == name)])
        collision = sum(task.start - task.ready for task in own if task.kind != "weight")
        times = node.times | {"busy": busy, "collision": collision} | ({"head": 0} if node.stage else {})
        several = {"workers": node.workers} if node.workers > 1 else {}
        first = {"name": name, "stage": node.stage, "slots": node.slots} | several
        return first | {f"{k}_s": v / 1e9 for k, v in times.items()}

    device = ["device"] * any(node.workers > 1 for node in cost.nodes.values())

    return {
        "timing": timing,
        "iteration_s": iteration / 1e9,
        "last_backward_s": last_backward / 1e9,
        "averaging_s": [[start / 1e9, end / 1e9] for start, end in averaging],
        "nodes": [node_json(name, node) for name, node in cost.nodes.items()],
        "links": [[*link, sent[link]] for link in cost.flight if link in sent],
        "task_columns": ["lane", "microbatch", "step", "node", "ready_s", "start_s", "end_s", *device],
        "tasks": [
            [task.lane, task.microbatch, task.step, task.node, task.ready / 1e9, task.start / 1e9, task.end / 1e9]
            + [task.worker] * len(device)
            for task in sorted(tasks, key=lambda task: (task.start, task.lane, task.microbatch, task.step))
        ],
    }


def violations(plan: Json) -> set[str]:
    """The names of the rules that the plan breaks."""
    cost, lanes, stages = costs(plan), plan["lanes"], range(len(plan["stages"]))
    paths = [lane["path"] for lane in lanes]
    visits = [[cost.nodes[name].stage for name in path] for path in paths]
    drops = [[a - b for a, b in combinations(visited, 2) if a > b] for visited in visits]
    swaps: list[list[int]] = [[]] if plan["workload"].get("bridge_parameters") else [[], [1], [1, 1]]
    sizes = [lane["microbatches"] for lane in lanes]
    visitors = [sum(size for size, seen in zip(sizes, visits, strict=True) if s in seen) for s in stages]
    lanes_on = Counter(name for path in paths for name in set(path))
    overfull = {name for name, node in cost.nodes.items() if lanes_on[name] > node.slots}
    arrows = {(i, j) for path in paths for i, j in combinations(path, 2) if i != j and {i, j} <= overfull}
    hops = [hop for path in paths for i, j in circle(path) for hop in ((i, j), (j, i))]
    cut = [tree for stage in plan["stages"] for tree in trees(stage)]
    edges = [transfer.link for tree in cut for transfer in piece_transfers(tree, 0, 0, 0)]
    holds = {
        "stages": all(stage["nodes"] for stage in plan["stages"]),
        "CC1": all(visited[0] == 0 and 0 not in visited[1:] for visited in visits),
        "CC2": all(drop in swaps for drop in drops) and all(len(set(seen)) == len(seen) for seen in visits),
        "CC3": len(set(visitors[1:])) == 1,
        "TC1": not overfull,
        "deadlock": not has_circle(arrows) and all(cost.nodes[name].slots for name in overfull),
        "link": all(cost.bandwidth[link] for link in hops + edges),
        "microbatches": sum(sizes) == plan["workload"]["microbatches"],
        "promise": plan["expected"] is None or keeps_promise(plan),
    }
    return {rule for rule, kept in holds.items() if not kept}


def has_circle(arrows: set[Link]) -> bool:
    """Whether arrows are left when those to dead ends are taken away, again and again."""
    onward = {(i, j) for i, j in arrows if any(j == start for start, _ in arrows)}
    return bool(arrows) and (onward == arrows or has_circle(onward))


def keeps_promise(plan: Json) -> bool:
    def to_the_nanosecond(expected: Json) -> object:
        return json.loads(json.dumps(expected), parse_float=lambda text: round(float(text), 9))

    nodes = [{"weight_s": 0.0} | node for node in plan["expected"]["nodes"]]
    stated = to_the_nanosecond(plan["expected"] | {"nodes": nodes})
    try:
        return to_the_nanosecond(simulate(plan, plan["expected"]["timing"])) == stated
    except LockedUp:
        return False
