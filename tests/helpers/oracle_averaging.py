"""The transfers of averaging, for the simulator of `oracle`, and as that one written from docs/formats.md alone."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

Json: TypeAlias = dict[str, Any]
Link: TypeAlias = tuple[str, str]


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
    round: int = 0
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


def piece_transfers(
    tree: Tree, stage: int, piece: int, size: int, has_sums: dict[str, list[Transfer]] | None = None
) -> list[Transfer]:
    """`has_sums` is by node, what has to arrive there before it has all sums of the round before."""
    made: list[Transfer] = []
    earlier = has_sums or {}

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
            before = before + earlier.get(child, [])
            leaving = Transfer(False, level, stage, piece, ("", ""), child, size, after_tasks=[child], after=before)
            arriving.append(over(child, name, child, tree.relay.get(child), leaving))
        return arriving

    def sums_from(name: str, level: int, waits: list[str], before: list[Transfer]) -> None:
        for child in [child for child, source in tree.source.items() if source == name]:
            leaving = Transfer(True, level, stage, piece, ("", ""), child, size, after_tasks=waits, after=before)
            last = over(name, child, child, tree.relay.get(child), leaving)
            sums_from(child, last.level + 1, [], [last])

    sums_from(tree.root, 0, [tree.root], contributions_to(tree.root) + earlier.get(tree.root, []))
    return made


def stage_transfers(stage: Json, index: int, rounds: list[int]) -> list[Transfer]:
    """All of a stage, with a gradient of so many bytes in each round."""
    cut, found = trees(stage), list[Transfer]()
    whole = sum(tree.share for tree in cut)
    has_sums: dict[str, list[Transfer]] = {}
    for number, gradient_bytes in enumerate(rounds):
        bringing: dict[str, list[Transfer]] = {name: [] for name in stage["ring"]}
        for piece, tree in enumerate(cut):
            made = piece_transfers(tree, index, piece, -(-gradient_bytes * tree.share // whole), has_sums)
            for transfer in made:
                transfer.round, (_, receiver) = number, transfer.link
                to_root = not transfer.is_sum and receiver == tree.parent[transfer.about] == tree.root
                if to_root or (transfer.is_sum and receiver == transfer.about):
                    bringing[receiver].append(transfer)
            found += made
        has_sums = bringing
    return found


def rounds_of(model: Json, has_ends: bool, layers: int, values: int, dtype: str) -> list[int]:
    """Bytes of each round of gradients of low rank; none of others."""
    if not dtype.startswith("rank-"):
        return []
    rank, d, f, e = int(dtype.removeprefix("rank-")), model["hidden"], model["intermediate"], model["experts"]
    h, k = model["heads"] * model["head_dim"], model["kv_heads"] * model["head_dim"]
    matrices = [(h, d), (k, d), (k, d), (d, h)]
    into = 2 if model.get("gated", True) else 1
    mapped = f if e == 1 else model.get("shared_intermediate", 0)
    matrices += [(mapped, d)] * into + [(d, mapped)]
    matrices += [(into * f, d), (d, f)] * e + [(e, d)] if e > 1 else []
    matrices *= layers
    if has_ends:
        matrices += [(model["vocab"], d)] * (1 if model["tied_embeddings"] else 2)
    factored = [(rows, columns) for rows, columns in matrices if rank * (rows + columns) < rows * columns]
    rest = values - sum(rows * columns for rows, columns in factored)
    sizes = [rest + rank * sum(rows for rows, _ in factored), rank * sum(columns for _, columns in factored)]
    return [4 * size for size in sizes[: 1 + bool(factored)]]
