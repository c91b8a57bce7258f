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
from itertools import chain, combinations, pairwise, product
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Link: TypeAlias = tuple[str, str]
CAP_NS = 10**15


class LockedUp(Exception):
    """Microbatches are left, but nothing runs and nothing is on its way."""


@dataclass(frozen=True)
class Node:
    stage: int
    slots: int
    times: dict[str, int]  # of forward, backward, weights, head and optimizer


@dataclass(frozen=True)
class Costs:
    nodes: dict[str, Node]  # those in a stage, in the order of the cluster
    hop_bytes: dict[bool, dict[Link, int]]  # of activations, and (True) of their gradients
    gradient_bytes: list[int]  # by stage, like the next two
    fixed_bytes: list[int]
    held_bytes: list[int]
    bandwidth: dict[Link, float]  # in the order of sender, then receiver, in the cluster
    flight: dict[Link, int]
    upload: dict[str, float]  # of nodes that have such a rate, like the next
    download: dict[str, float]


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


def is_split(plan: Json) -> bool:
    return bool(plan.get("split_backward", False))


def costs(plan: Json) -> Costs:
    work, stages, cluster = plan["workload"], plan["stages"], plan["cluster"]
    model, t, n = work["model"], work["sequence_tokens"], work["samples_per_microbatch"]
    d, f, v, e = model["hidden"], model["intermediate"], model["vocab"], model["experts"]
    h, k = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]

    def wire(values: int, dtype: str) -> int:
        return {"fp32": 4 * values, "bf16": 2 * values, "int8": values + 4 * -(-values // 128)}[dtype]

    attention = d * (2 * h + 2 * k)
    layer_parameters = attention + 3 * d * f * e + 2 * d + (d * e if e > 1 else 0)
    layer_forward = n * (2 * t * (attention + 3 * d * f * model["experts_active"]) + 2 * t**2 * h)
    token_bytes = {"fp32": 4, "bf16": 2}[work["compute_dtype"]] * n * t
    layer_bytes = token_bytes * (4 * d + 2 * h + 2 * k + 4 * f * model["experts_active"])
    checkpointing = work["activation_checkpointing"]
    parameters = [stage["layers"] * layer_parameters for stage in stages]
    parameters[0] += (v if model["tied_embeddings"] else 2 * v) * d + d
    adapters, share = work.get("adapter_parameters", 0), work.get("weight_share", 0.5)
    bridges = work.get("bridge_parameters", 0)
    trained = [stage["layers"] * adapters for stage in stages] if adapters else [each + bridges for each in parameters]
    gradient_dtypes = work.get("gradient_dtypes", [work["gradient_dtype"]] * len(stages))
    kept = [20 if dtype == "fp32" else 24 for dtype in gradient_dtypes]
    fixed_bytes = [each * count + checkpointing * layer_bytes for each, count in zip(kept, trained, strict=True)]
    if adapters:
        linear = [stage["layers"] * (attention + (3 * d * f if e == 1 else 0)) for stage in stages]
        linear[0] += (v if model["tied_embeddings"] else 2 * v) * d + d
        saved = 4 - {"fp32": 4, "bf16": 2}[work["compute_dtype"]]
        for index, (count, matrices) in enumerate(zip(parameters, linear, strict=True)):
            fixed_bytes[index] += 4 * count - saved * matrices
    ratio = work["backward_ratio"] * (1 - share) if adapters else work["backward_ratio"]
    fixed_bytes[0] += 8 * n * t * v
    held_bytes = [stage["layers"] * (token_bytes * d if checkpointing else layer_bytes) for stage in stages]

    bridge = 0 if adapters else 4 * n * t * d * work.get("bridge_rank", 0)

    def node_costs(node: Json, stage: int) -> Node:
        r, r_0 = (2 * stages[s]["layers"] * n * t * adapters for s in (stage, 0))
        model_forward = stages[stage]["layers"] * layer_forward + bridge
        forward, stage_0_forward = model_forward + r, stages[0]["layers"] * layer_forward + bridge + r_0
        gradients = ratio * model_forward + 2 * r
        slots = max(0, (node["memory_bytes"] - fixed_bytes[stage]) // held_bytes[stage])
        head = (1 + ratio) * n * (2 * t * d * v)
        head = head if work["head_ratio"] is None else work["head_ratio"] * stage_0_forward
        operations = {
            "forward": forward,
            "backward": gradients + checkpointing * forward if adapters else (ratio + checkpointing) * forward,
            "gradients": gradients,
            "head": 2 * head if work.get("early_exit", False) else head,
            "optimizer": 250 * trained[stage],
        }
        times = {
            kind: max(1, round(min(count / node["flops_per_s"] * 1e9, CAP_NS))) for kind, count in operations.items()
        }
        times["weight"], gradients_ns = 0, times.pop("gradients")
        if is_split(plan):
            of_layer = 2 * n * t * adapters
            part = of_layer / (ratio * layer_forward + 2 * of_layer) if adapters else share
            times["weight"] = max(1, round(part * gradients_ns))
            times["backward"] = max(1, times["backward"] - times["weight"])
        return Node(
            stage=stage,
            slots=slots if work["max_slots"] is None else min(slots, work["max_slots"]),
            times=times,
        )

    stage_of = {name: index for index, stage in enumerate(stages) for name in stage["nodes"]}
    placed = [node for node in cluster["nodes"] if node["name"] in stage_of]
    links = list(product([node["name"] for node in cluster["nodes"]], repeat=2))
    rates = [
        {node["name"]: node[f"{way}_bytes_per_s"] for node in cluster["nodes"] if f"{way}_bytes_per_s" in node}
        for way in ("upload", "download")
    ]
    hop_dtypes = {way: dict.fromkeys(links, work["wire_dtype"]) for way in (False, True)}
    for sender, receiver, forward, backward in work.get("wire_dtypes", []):
        hop_dtypes[False][sender, receiver], hop_dtypes[True][sender, receiver] = forward, backward
    delays = [latency + cluster.get("hop_overhead_s", 0) for latency in chain(*cluster["latency_s"])]
    return Costs(
        nodes={node["name"]: node_costs(node, stage_of[node["name"]]) for node in placed},
        hop_bytes={
            way: {link: wire(n * t * d, dtype) + work["header_bytes"] for link, dtype in each.items()}
            for way, each in hop_dtypes.items()
        },
        gradient_bytes=[wire(count, dtype) for count, dtype in zip(trained, gradient_dtypes, strict=True)],
        fixed_bytes=fixed_bytes,
        held_bytes=held_bytes,
        bandwidth=dict(zip(links, chain(*cluster["bandwidth_bytes_per_s"]), strict=True)),
        flight={link: round(min(delay * 1e9, CAP_NS)) for link, delay in zip(links, delays, strict=True)},
        upload=rates[0],
        download=rates[1],
    )


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


def run_tasks(plan: Json, network: Network) -> list[Task]:
    cost, lanes = network.cost, plan["lanes"]
    steps: list[list[tuple[str, str]]] = []  # of every lane: node and kind of task
    for path in [lane["path"] for lane in lanes]:
        there, back = [(node, "forward") for node in path], [(node, "backward") for node in reversed(path)]
        steps.append([*there, (path[0], "head"), *back])
    held: Counter[str] = Counter()

    def following(ended: Task) -> list[Task]:
        """The lane's next task, ready as soon as the one before ends; none after its last."""
        lane, microbatch, step = ended.lane, ended.microbatch, ended.step + 1
        if step == len(steps[lane]):
            microbatch, step = microbatch + 1, 0
        if microbatch == lanes[lane]["microbatches"]:
            return []
        node, kind = steps[lane][step]
        return [Task(lane, microbatch, step, node, kind, ready=ended.end)]

    def weights_of(ended: Task) -> Task:
        """What a split backward leaves to be done on the same node."""
        length = len(lanes[ended.lane]["path"])
        place = lanes[ended.lane]["path"].index(ended.node)
        step = 2 * length + 1 + place
        return Task(ended.lane, ended.microbatch, step, ended.node, "weight", ready=ended.end)

    def rank(task: Task) -> tuple[int, int, int]:
        urgency = {
            "first-come": 0,
            "backward-first": 1 if task.kind == "forward" else 0,
            "lanes-in-order": task.lane,
        }[plan["dispatch"]]
        return (len(lanes) + 2 if task.kind == "weight" else urgency, task.ready, task.lane)

    waiting = [Task(lane, 0, 0, *steps[lane][0], ready=0) for lane in range(len(lanes))]
    running: dict[str, Task] = {}
    flying: list[tuple[int, int, Link, Task]] = []  # when the first byte comes, lane, link, what the message is for
    done: list[Task] = []
    now = 0
    while waiting or running or flying:
        for ended in sorted((task for task in running.values() if task.end == now), key=lambda task: task.lane):
            del running[ended.node]
            held[ended.node] -= ended.kind == ("weight" if is_split(plan) else "backward")
            done.append(ended)
            if ended.kind == "weight":
                continue
            for task in following(ended):
                if task.node == ended.node:
                    waiting.append(task)
                    continue
                link = (ended.node, task.node)
                comes = network.first_byte(link, cost.hop_bytes[task.kind == "backward"][link], now)
                flying.append((comes, task.lane, link, task))
            if ended.kind == "backward" and is_split(plan):
                waiting.append(weights_of(ended))
        for message in sorted((message for message in flying if message[0] == now), key=lambda message: message[1]):
            flying.remove(message)
            comes, _, link, task = message
            task.ready = network.arrival(link, cost.hop_bytes[task.kind == "backward"][link], comes)
            waiting.append(task)
        for node in cost.nodes.keys() - running.keys():
            room = held[node] < cost.nodes[node].slots
            ready = [t for t in waiting if t.node == node and t.ready <= now and (room or t.kind != "forward")]
            if ready:
                chosen = min(ready, key=rank)
                chosen.start, chosen.end = now, now + cost.nodes[node].times[chosen.kind]
                held[node] += chosen.kind == "forward"
                waiting.remove(chosen)
                running[node] = chosen
        coming = [task.end for task in running.values()] + [task.ready for task in waiting if task.ready > now]
        coming += [comes for comes, *_ in flying]
        if waiting and not coming:
            raise LockedUp
        now = min(coming, default=now)
    return done


@dataclass
class Transfer:
    is_sum: bool  # else a contribution
    level: int
    stage: int
    piece: int
    link: Link
    about: str  # whose contribution or copy it is
    size: int
    after_tasks: list[str]  # nodes that have to end their last tasks before it is ready
    after: list[Transfer]  # what has to arrive before it is ready
    by_relay: bool = False  # a relay sends it
    arrived: int | None = None


@dataclass
class Tree:
    """How one piece of a gradient goes to its root, and its sum from there."""

    share: int
    root: str
    parent: dict[str, str]  # of contributions
    source: dict[str, str]  # from which a node has its copy of the sum
    relay: dict[str, str]


def trees(stage: Json) -> list[Tree]:
    ring = stage["ring"]
    if "averaging" in stage:
        found = []
        for piece in stage["averaging"]:
            root, via = piece["root"], piece.get("via", {})
            parent = {name: via.get(name, root) for name in ring if name != root}
            found.append(Tree(piece["share"], root, parent, parent, piece.get("relays", {})))
        return found
    found = []
    for p in range(len(ring)):
        there = ring[p:] + ring[:p]  # from r(p) to the root r(p-1)
        back = there[-1:] + there[:-1]
        found.append(Tree(1, there[-1], dict(pairwise(there)), {j: i for i, j in pairwise(back)}, {}))
    return found


def piece_transfers(tree: Tree, stage: int, piece: int, size: int) -> list[Transfer]:
    made: list[Transfer] = []

    def over(sender: str, receiver: str, about: str, relay: str | None, first: Transfer) -> Transfer:
        """The last transfer of a way with a relay or without; `first` is like that which leaves the sender."""
        first.link = (sender, receiver if relay is None else relay)
        made.append(first)
        if relay is None:
            return first
        waits = [] if first.is_sum else [relay]
        way = (relay, receiver)
        onward = Transfer(first.is_sum, first.level + 1, stage, piece, way, about, size, waits, [first], by_relay=True)
        made.append(onward)
        return onward

    def contributions_to(name: str) -> list[Transfer]:
        """Those that end at a node."""
        arriving = []
        for child in [child for child, parent in tree.parent.items() if parent == name]:
            before = contributions_to(child)
            level = max((transfer.level + 1 for transfer in before), default=0)
            leaving = Transfer(False, level, stage, piece, ("", ""), child, size, after_tasks=[child], after=before)
            arriving.append(over(child, name, child, tree.relay.get(child), leaving))
        return arriving

    def sums_from(name: str, level: int, waits: list[str], before: list[Transfer]) -> None:
        for child in [child for child, source in tree.source.items() if source == name]:
            leaving = Transfer(True, level, stage, piece, ("", ""), child, size, after_tasks=waits, after=before)
            last = over(name, child, child, tree.relay.get(child), leaving)
            sums_from(child, last.level + 1, [], [last])

    sums_from(tree.root, 0, [tree.root], contributions_to(tree.root))
    return made


def average(plan: Json, network: Network, ended: dict[str, int]) -> list[Transfer]:
    """All transfers of all stages, with the times at which they arrive; `ended`: when nodes end their last tasks."""
    cost, transfers, places = network.cost, [], []
    for index, (stage, gradient_bytes) in enumerate(zip(plan["stages"], cost.gradient_bytes, strict=True)):
        cut = trees(stage)
        whole = sum(tree.share for tree in cut)
        for piece, tree in enumerate(cut):
            transfers += piece_transfers(tree, index, piece, -(-gradient_bytes * tree.share // whole))
        others = [name for name in cost.nodes if name not in stage["ring"]]
        places.append({name: place for place, name in enumerate(stage["ring"] + others)})

    def rank(transfer: Transfer) -> tuple[object, ...]:
        place = places[transfer.stage]
        named = [place[name] for name in (*transfer.link, transfer.about)]
        return (not transfer.by_relay, transfer.is_sum, transfer.level, transfer.stage, transfer.piece, *named)

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
    tasks = run_tasks(plan, network)
    last_backward = iteration = max(task.end for task in tasks)
    averaging: list[tuple[int, int]] = []
    sent: Counter[Link] = Counter()
    for lane in plan["lanes"]:
        for i, j in circle(lane["path"]):
            sent[i, j] += lane["microbatches"] * cost.hop_bytes[False][i, j]
            sent[j, i] += lane["microbatches"] * cost.hop_bytes[True][j, i]
    if timing == "full":
        ended = {name: max((task.end for task in tasks if task.node == name), default=0) for name in cost.nodes}
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
        busy = sum(task.end - task.start for task in own)
        collision = sum(task.start - task.ready for task in own if task.kind != "weight")
        times = node.times | {"busy": busy, "collision": collision} | ({"head": 0} if node.stage else {})
        return {"name": name, "stage": node.stage, "slots": node.slots} | {f"{k}_s": v / 1e9 for k, v in times.items()}

    return {
        "timing": timing,
        "iteration_s": iteration / 1e9,
        "last_backward_s": last_backward / 1e9,
        "averaging_s": [[start / 1e9, end / 1e9] for start, end in averaging],
        "nodes": [node_json(name, node) for name, node in cost.nodes.items()],
        "links": [[*link, sent[link]] for link in cost.flight if link in sent],
        "task_columns": ["lane", "microbatch", "step", "node", "ready_s", "start_s", "end_s"],
        "tasks": [
            [task.lane, task.microbatch, task.step, task.node, task.ready / 1e9, task.start / 1e9, task.end / 1e9]
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
