"""Small clusters, workloads and plans for tests: drawn by hypothesis, cheap to simulate."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from random import Random
from typing import Any

import numpy as np
from hypothesis import assume
from hypothesis import strategies as st

from skippipe.cluster import Cluster, DeviceMode, Node
from skippipe.collectives.schedule import Averaging, Piece
from skippipe.dispatch import Dispatch
from skippipe.model_shape import ModelShape
from skippipe.plan import Lane, Plan, Stage
from skippipe.planner.problem import Problem, lane_unit
from skippipe.simulator import Deadlock, simulate
from skippipe.timeline import Timeline, Timing
from skippipe.whole_paths import find_teacher_paths
from skippipe.workload import LinkDtypes, Workload

weight_shares = st.sampled_from([0.5, 0.2, 0.75])
TINY = ModelShape("tiny", 8, 16, 2, 2, 8, 32, 64)


def uniform_cluster(nodes: int, latency_s: float = 0.01, bandwidth: float = 1e6, flops_per_s: float = 1e9) -> Cluster:
    machines = tuple(Node(f"n{index}", "here", flops_per_s, 2**30) for index in range(nodes))
    shape = (nodes, nodes)
    return Cluster("uniform", machines, np.full(shape, latency_s), np.full(shape, bandwidth))


def without_rates(cluster: Cluster) -> Cluster:
    """The same machines and links; none has an upload or download rate of its own."""
    nodes = [replace(node, upload_bytes_per_s=None, download_bytes_per_s=None) for node in cluster.nodes]
    return replace(cluster, nodes=tuple(nodes))


def without_ties(cluster: Cluster, seed: int) -> Cluster:
    """A cluster much like this one, in which hardly two things happen at the same time."""
    random, shape = np.random.default_rng(seed), cluster.latency_s.shape
    nodes = [replace(node, flops_per_s=node.flops_per_s * float(random.uniform(0.9, 1.1))) for node in cluster.nodes]
    latency_s = cluster.latency_s + random.uniform(1e-5, 1e-3, shape)
    bandwidth = cluster.bandwidth_bytes_per_s * random.uniform(0.9, 1.1, shape)
    return replace(cluster, nodes=tuple(nodes), latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)


def can_be_taught(plan: Plan) -> bool:
    """Does a lane leave stages out, and does a path lead from each such lane's data node through all stages?"""
    return bool(find_teacher_paths(plan))


@st.composite
def clusters(draw: st.DrawFn, least: int = 2, most: int = 14, rates: bool = True, devices: bool = False) -> Cluster:
    """Unequal nodes, directed links; round numbers, so that events coincide now and then, or often: in some clusters
    speeds, links and rates are all the same.

    `rates`: in half of the clusters, some nodes have upload and download rates. `devices`: in half of them, some have
    several devices.
    """
    count = draw(st.sampled_from(range(least, most + 1)))
    seed = draw(st.integers(0, 2**32 - 1))
    random = np.random.default_rng(seed)
    alike = draw(st.integers(0, 3)) == 3

    def values(*choices: float) -> list[float]:
        return [float(random.choice(choices))] if alike else list(choices)

    speeds = values(1e9, 2e9, 4e9)
    machines = [
        Node(f"n{index}", "somewhere", float(random.choice(speeds)), int(random.integers(2**22, 2**25)))
        for index in range(count)
    ]
    latency_s = random.choice(values(0.0, 0.001, 0.01, 0.05), (count, count))
    bandwidth = random.choice(values(1e5, 1e6, 1e7), (count, count))
    overhead_s = float(random.choice([0.0, 0.002]))
    if rates and draw(st.booleans()):
        drawn = random.choice([0.0, *values(1e5, 1e6, 2e6)], (count, 2)).tolist()
        machines = [
            replace(node, upload_bytes_per_s=up or None, download_bytes_per_s=down or None)
            for node, (up, down) in zip(machines, drawn, strict=True)
        ]
    if devices and draw(st.booleans()):
        modes = [None, None, *DeviceMode]
        machines = [
            replace(node, devices=int(random.integers(1, 5)), device_mode=modes[random.integers(len(modes))])
            for node in machines
        ]
    return Cluster("drawn", tuple(machines), latency_s, bandwidth, overhead_s)


@st.composite
def averagings(draw: st.DrawFn, members: Sequence[Any], holders: Sequence[Any]) -> list[dict[str, Any]]:
    """The field `averaging` of a stage: pieces, trees, and relays among the nodes that hold any stage. In half of the
    cases there are none: the stage is a ring."""
    found: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 5)) if len(members) > 0 and draw(st.booleans()) else 0):
        nodes: list[Any] = list(draw(st.permutations(members)))
        root, others = nodes[0], nodes[1:]
        piece: dict[str, Any] = {"root": root, "share": draw(st.sampled_from([1, 1, 2, 7, 2**31]))}
        trees, relayed = draw(st.booleans()), draw(st.booleans())
        via: dict[Any, Any] = {}
        relays: dict[Any, Any] = {}
        for node in others:
            parent = draw(st.sampled_from([root, *others[: others.index(node)]])) if trees else root
            if parent != root:
                via[node] = parent
            third = [other for other in holders if other not in (node, parent)]
            if relayed and len(third) > 0 and draw(st.booleans()):
                relays[node] = draw(st.sampled_from(third))
        found.append(piece | ({"via": via} if via else {}) | ({"relays": relays} if relays else {}))
    return found


def pieces_of(averaging: Sequence[dict[str, Any]]) -> tuple[Piece, ...]:
    """What a stage has of a drawn field `averaging` whose labels are numbers of nodes."""
    return tuple(
        Piece(each["root"], each["share"], *(tuple(each.get(way, {}).items()) for way in ("via", "relays")))
        for each in averaging
    )


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Demands that are well formed; whether memory suffices is for the planner to say."""
    cluster = draw(clusters(least=3, devices=True))
    stages = draw(st.sampled_from(range(2, min(6, len(cluster)) + 1)))
    visited = draw(st.sampled_from(range(2, stages + 1)))
    workload = Workload(
        TINY,
        sequence_tokens=32,
        samples_per_microbatch=draw(st.integers(1, 4)),
        microbatches=lane_unit(stages, visited) * draw(st.integers(1, 6)),
        max_slots=draw(st.sampled_from([None, 1, 2, 3])),
        weight_share=draw(weight_shares),
    )
    return Problem(
        cluster,
        workload,
        stages,
        visited,
        timing=draw(st.sampled_from(list(Timing))),
        dispatch=draw(st.sampled_from(list(Dispatch))),
        split_backward=draw(st.booleans()),
    )


AVERAGING_KINDS = ("ring", "direct exchange", "star", "trees")
ALL_AVERAGING_KINDS = (*AVERAGING_KINDS, "direct exchange with relays", "trees with relays")


def relayed(random: Random, averaging: Averaging, relays: Sequence[int]) -> Averaging:
    """The same piece by piece, but about half of the messages go by way of these nodes, whichever stage they hold."""
    if len(averaging.order) < 2:
        return averaging
    pieces = []
    for piece in averaging.pieces or [Piece(node, 1) for node in averaging.order]:
        drawn = [(node, random.choice(relays)) for node in averaging.order if random.random() < 0.5]
        ways = [(a, by) for a, by in drawn if a != piece.root and by not in (a, piece.parent_of(a))]
        pieces.append(replace(piece, relays=tuple(ways)))
    return replace(averaging, pieces=tuple(pieces))


def drawn_averaging(random: Random, nodes: Sequence[int], kind: str | None = None) -> Averaging:
    """Any way to average: round a ring, or pieces of unequal shares, straight to their roots or along any trees."""
    order, kind = random.sample(nodes, len(nodes)), kind or random.choice(AVERAGING_KINDS)
    if kind == "ring" or len(order) < 2:
        return Averaging(tuple(order))
    if kind == "star":
        return Averaging(tuple(order), (Piece(random.choice(order), 1),))
    if kind == "direct exchange":
        return Averaging(tuple(order), tuple(Piece(node, random.randint(1, 9)) for node in order))
    pieces = []
    for _ in range(random.randint(1, len(order) + 2)):
        root, *others = random.sample(order, len(order))
        parents = {node: random.choice([root, *others[:at]]) for at, node in enumerate(others)}
        via = tuple((node, parent) for node, parent in parents.items() if parent != root)
        pieces.append(Piece(root, random.choice([1, 2, 30]), via))
    return Averaging(tuple(order), tuple(pieces))


def averaging_of(seed: int, kind: str, size: int) -> Averaging:
    """Nodes 0 to `size` − 1 average; two more hold other stages, and may be relays as well as the others."""
    random, (kind, *by) = Random(seed), kind.split(" with ")
    averaging = drawn_averaging(random, range(size), kind)
    while by and not averaging.schedule.forwarded:
        averaging = relayed(random, averaging, range(size + 2))
    return averaging


@st.composite
def plans(draw: st.DrawFn, lost: bool = False) -> Plan:
    """Well-formed plans that may break any rule: paths wander at random over nodes that hold a stage; stages average in
    any way.

    `lost`: nobody holds one more stage.
    """
    cluster = draw(clusters(least=3, most=8, devices=True))
    count = len(cluster)
    stages = draw(st.integers(2, min(4, count)))
    owner = [*range(stages), *(draw(st.integers(0, stages - 1)) for _ in range(count - stages))]
    members = [tuple(node for node in range(count) if owner[node] == stage) for stage in range(stages)]
    lanes = []
    for _ in range(draw(st.integers(1, 6))):
        order = draw(st.permutations(range(stages)))
        visits = order[: draw(st.integers(2, stages))]
        path = tuple(draw(st.sampled_from(members[stage])) for stage in visits)
        lanes.append(Lane(path, draw(st.integers(1, 3))))
    workload = Workload(
        TINY,
        sequence_tokens=16,
        samples_per_microbatch=1,
        microbatches=sum(lane.microbatches for lane in lanes),
        max_slots=draw(st.sampled_from([1, 2, 3, None])),
        weight_share=draw(weight_shares),
        collective="auto",
    )
    if lost:
        members.insert(draw(st.integers(0, stages)), ())
    workload = replace(workload, **draw(codecs(cluster, len(members))))
    layers = workload.layer_split(len(members))
    pieces = [pieces_of(draw(averagings(nodes, range(count)))) for nodes in members]
    return Plan(
        cluster,
        workload,
        tuple(Stage(count, nodes, nodes, cut) for count, nodes, cut in zip(layers, members, pieces, strict=True)),
        tuple(lanes),
        dispatch=draw(st.sampled_from(list(Dispatch))),
        split_backward=draw(st.booleans()),
    )


@st.composite
def codecs(draw: st.DrawFn, cluster: Cluster, stages: int) -> dict[str, Any]:
    """Fields of a workload: codecs of some links, or of none, and of every stage, or of none."""
    codec, low_rank = st.sampled_from(["fp32", "bf16", "int8"]), st.sampled_from(["rank-4", "rank-16"])
    name = st.sampled_from([node.name for node in cluster.nodes])
    link = st.builds(LinkDtypes, name, name, codec, codec)
    rows = st.lists(link, min_size=1, max_size=30, unique_by=lambda row: row[:2])
    of_stages = st.lists(codec | low_rank, min_size=stages, max_size=stages)
    drawn = draw(st.just(()) | rows), draw(st.just(()) | of_stages)
    return dict(zip(("wire_dtypes", "gradient_dtypes"), map(tuple, drawn), strict=True))


MOST_SKIPPED = 0.9  # of the cases; some 0.25 as a rule, but cases that hypothesis draws one after another are alike


def may_skip(skipped: type[Exception]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let the property below, a test with `@given`, give up on at most MOST_SKIPPED of the cases by this exception.

    A property that gives up without being counted also holds for code that always gives up.
    """

    def decorate(test: Any) -> Callable[..., None]:
        case, counts = test.hypothesis.inner_test, Counter[str]()

        @wraps(case)
        def counted(*arguments: Any, **named: Any) -> None:
            counts["drawn"] += 1
            try:
                case(*arguments, **named)
            except skipped:
                counts["skipped"] += 1

        @wraps(test)
        def run(*arguments: Any, **named: Any) -> None:
            counts.clear()
            test(*arguments, **named)
            assert counts["drawn"] and counts["skipped"] <= MOST_SKIPPED * counts["drawn"], f"{dict(counts)}"

        test.hypothesis.inner_test = counted
        return run

    return decorate


def simulated(plan: Plan, timing: Timing) -> Timeline:
    """Plans that lock up are not what a test is about."""
    try:
        return simulate(plan, timing)
    except Deadlock:
        assume(False)
        raise


def wide_plan() -> Plan:
    """Two data nodes, and three nodes on each of two other stages; six lanes, two over every one of those."""
    stages = (Stage(2, (0, 1), (0, 1)), Stage(3, (2, 3, 4), (2, 3, 4)), Stage(3, (5, 6, 7), (5, 6, 7)))
    lanes = tuple(Lane((at % 2, 2 + at % 3, 5 + at % 3), 2) for at in range(6))
    plan = Plan(uniform_cluster(8), Workload(TINY, 16, 1, 12, max_slots=3), stages, lanes)
    return plan.promising(simulate(plan, Timing.FULL))


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set one value, as in `nodes.1.name`; the value ... removes it."""

    def apply(raw: Any) -> None:
        *way, last = path.split(".")
        for name in way:
            raw = raw[int(name) if isinstance(raw, list) else name]
        key: Any = int(last) if isinstance(raw, list) else last
        if value is ...:
            del raw[key]
        else:
            raw[key] = value

    return apply
