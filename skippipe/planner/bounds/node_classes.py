"""Equivalence classes of nodes, and the closed tours over them.

Two nodes are equivalent if every task takes both equally long, both have as many slots and workers, and every other
node is equally far there and back, as at one site. A lane goes round a tour of L nodes, and no microbatch comes round
in less than the tour takes alone. Which stage a node holds is left open but for stage 0, so every other node of a tour
counts with its cheapest stage.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, combinations_with_replacement, permutations
from math import comb, factorial

import numpy as np
from numpy.typing import NDArray

from skippipe.cost_model import NEVER_NS, CostModel
from skippipe.jit import Ints
from skippipe.planner.problem import Problem

MOST_TOURS = 300_000  # that are looked at one by one
MOST_ORDERS = 20_000_000  # of the nodes on them


@dataclass(frozen=True, eq=False)
class NodeClasses:
    """Equivalence classes of nodes: task times, slots and workers by [stage, class], as in `CostModel`."""

    count: Ints
    """[class]: number of its nodes."""
    between_ns: Ints
    """[class, class]: a hop there and one back; from a class to itself: between two of its nodes."""
    hop_in_ns: Ints
    """[class]: the shortest hop from any node."""
    hop_out_ns: Ints
    """[class]: the shortest hop to any node."""
    forward_ns: Ints
    backward_ns: Ints
    """[stage, class]: backward pass; only the input gradient, if the backward is split."""
    weight_ns: Ints
    """[stage, class]: weight gradients; 0 if the backward is not split."""
    head_ns: Ints
    """[class]: head and loss."""
    slots: Ints
    workers: Ints

    @classmethod
    def of(cls, problem: Problem) -> NodeClasses:
        costs, split = problem.costs, problem.split_backward
        both_ns = np.minimum(costs.hop_ns + costs.hop_ns.T, NEVER_NS)
        class_of = _class_of(costs, both_ns)
        _, member, count = np.unique(class_of, return_index=True, return_counts=True)
        between_ns = both_ns[np.ix_(member, member)]
        for node_class in range(len(member)):
            alike = np.flatnonzero(class_of == node_class)
            between_ns[node_class, node_class] = both_ns[alike[0], alike[1]] if len(alike) > 1 else NEVER_NS
        elsewhere_ns = costs.hop_ns + np.diag(np.full(costs.nodes, NEVER_NS))
        in_ns, out_ns = (np.full(len(member), NEVER_NS) for _ in range(2))
        np.minimum.at(in_ns, class_of, elsewhere_ns.min(axis=0))
        np.minimum.at(out_ns, class_of, elsewhere_ns.min(axis=1))
        return cls(
            count=count,
            between_ns=between_ns,
            hop_in_ns=in_ns,
            hop_out_ns=out_ns,
            forward_ns=costs.forward_ns[:, member],
            backward_ns=(costs.input_ns if split else costs.backward_ns)[:, member],
            weight_ns=costs.weight_ns[:, member] * int(split),
            head_ns=costs.head_ns[member],
            slots=costs.slots[:, member],
            workers=costs.workers[:, member],
        )

    def __len__(self) -> int:
        return len(self.count)

    @property
    def data_turn_ns(self) -> Ints:
        """[class]: time of a data node for one microbatch, weight gradients apart."""
        turn_ns: Ints = self.forward_ns[0] + self.backward_ns[0] + self.head_ns
        return turn_ns

    @property
    def other_turn_ns(self) -> Ints:
        """[class]: time of another node for one microbatch, on the cheapest stage that it has slots for."""
        turn_ns = np.where(self.slots[1:] > 0, self.forward_ns[1:] + self.backward_ns[1:], NEVER_NS)
        least: Ints = turn_ns.min(axis=0)
        return least

    @property
    def other_slots(self) -> Ints:
        most: Ints = self.slots[1:].max(axis=0)
        return most


def _class_of(costs: CostModel, both_ns: Ints) -> Ints:
    """[node]: its class. Being equally far from all others is an equivalence: such nodes are equally far apart."""
    tasks = np.vstack(
        [costs.forward_ns, costs.backward_ns, costs.weight_ns, costs.slots, costs.workers, costs.head_ns[None]]
    )
    first_of: dict[bytes, list[tuple[int, int]]] = {}  # task times → (class, its first node)
    class_of = np.empty(costs.nodes, np.int64)
    classes = 0
    for node in range(costs.nodes):
        candidates = first_of.setdefault(tasks[:, node].tobytes(), [])
        for node_class, first in candidates:
            differs = both_ns[node] != both_ns[first]
            differs[[node, first]] = False
            if not differs.any():
                class_of[node] = node_class
                break
        else:
            candidates.append((classes, node))
            class_of[node] = classes
            classes += 1
    return class_of


@dataclass(frozen=True, eq=False)
class Tours:
    """The cheapest tour for every choice of a class to start at and classes to visit."""

    start: Ints
    """[tour]: the class of its data node."""
    others: NDArray[np.int16]
    """[tour, place]: the classes of its other nodes, in any order."""
    round_ns: Ints
    """[tour]: a round trip alone, from the first forward to the last backward."""

    def least_ns(self, classes: NodeClasses) -> Ints:
        """[class]: the shortest round trip through it."""
        least_ns = np.full(len(classes), NEVER_NS)
        np.minimum.at(least_ns, self.start, self.round_ns)
        for place in range(self.others.shape[1]):
            np.minimum.at(least_ns, self.others[:, place], self.round_ns)
        return least_ns


def all_tours(classes: NodeClasses, length: int) -> Tours | None:
    """All tours of so many nodes; None: they are too many."""
    number = comb(len(classes) + length - 1, length)
    if number > MOST_TOURS or number * max(1, factorial(length - 1) // 2) > MOST_ORDERS:
        return None
    members = np.fromiter(
        chain.from_iterable(combinations_with_replacement(range(len(classes)), length)), np.int64, number * length
    ).reshape(number, length)
    visits = np.zeros((number, len(classes)), np.int8)
    for place in range(length):
        visits[np.arange(number), members[:, place]] += 1
    there = (visits <= classes.count).all(axis=1)
    members, visits = members[there], visits[there]
    hops_ns = np.full(len(members), NEVER_NS)
    for inner in permutations(range(1, length)):
        if inner[0] <= inner[-1]:  # the other way round it costs the same
            order = (0, *inner)
            way = zip(order, (*inner, 0), strict=True)
            hops_ns = np.minimum(hops_ns, sum(classes.between_ns[members[:, a], members[:, b]] for a, b in way))
    other_ns = visits @ classes.other_turn_ns
    found = []
    for place in range(length):  # where the data node is; of several of one class, the first
        node_class = members[:, place]
        round_ns = hops_ns + other_ns - classes.other_turn_ns[node_class] + classes.data_turn_ns[node_class]
        good = (classes.slots[0, node_class] > 0) & (round_ns < NEVER_NS)
        if place:
            good &= members[:, place - 1] != node_class
        others = np.delete(members[good], place, axis=1).astype(np.int16)
        found.append((node_class[good], others, round_ns[good]))
    start, others, round_ns = (np.concatenate([each[part] for each in found]) for part in range(3))
    return Tours(start, others, round_ns)


def shortest_rounds_ns(classes: NodeClasses, length: int) -> Ints:
    """[class]: a bound on the round trip of lanes through it, from closed walks, which may pass a node again and
    again."""
    data_ns = np.where(classes.slots[0] > 0, classes.data_turn_ns, NEVER_NS)
    turn_ns = np.minimum(data_ns, classes.other_turn_ns)
    extra_ns = int((data_ns - turn_ns)[classes.slots[0] > 0].min(initial=NEVER_NS))  # there is one data node on a tour
    # half of each node's turn on the hop that comes in and half on the one that goes out, all times two
    edge_ns = 2 * classes.between_ns + turn_ns[:, None] + turn_ns[None, :]
    walk_ns = edge_ns
    for _ in range(length // 2 - 1):
        walk_ns = _joined(walk_ns, edge_ns)
    back_ns = walk_ns if length % 2 == 0 else _joined(walk_ns, edge_ns)
    closed_ns: Ints = (walk_ns + back_ns.T).min(axis=1) // 2 + extra_ns
    return np.minimum(closed_ns, NEVER_NS)


def _joined(walks_ns: Ints, edges_ns: Ints) -> Ints:
    """[from, to]: the shortest walk with one more hop."""
    return np.stack([(walks_ns + edges_ns[:, to]).min(axis=1) for to in range(len(edges_ns))], axis=1)
