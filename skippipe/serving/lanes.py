"""Which way a token takes: for every stage that anybody holds, one node; all in all, the fastest way there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from skippipe.rules import circle


class Distance(Protocol):
    """What a token takes."""

    def task_s(self, stage: int, node: int) -> float:
        """On a node that holds this stage."""

    def hop_s(self, sender: int, receiver: int) -> float:
        """From node to node; infinite if there is no way."""


@dataclass(frozen=True)
class Even:
    """Nothing is known of nodes and links: all alike."""

    def task_s(self, stage: int, node: int) -> float:  # noqa: ARG002
        return 1.0

    def hop_s(self, sender: int, receiver: int) -> float:
        return 0.0 if sender == receiver else 1.0


@dataclass
class Lane:
    """A way through the stages, and the streams that take it."""

    number: int
    """Never given twice: caches are kept by it."""
    path: tuple[int, ...]
    """Begins at the node that embeds and samples."""
    slots: dict[int, int] = field(default_factory=dict)
    """Slot → the stream that has it."""
    step: int | None = None
    """That is on its way round."""
    stepped_ns: int = 0
    """When it set out."""

    def free_slot(self) -> int:
        """The lowest: caches stay dense."""
        return next(slot for slot in range(len(self.slots) + 1) if slot not in self.slots)


def fastest(
    holders: Sequence[Sequence[int]], distance: Distance, busy: Mapping[int, int], start: int
) -> tuple[int, ...] | None:
    """From this node of stage 0 through one node of every other stage that anybody holds, and back; None: no way.

    Whoever lies on `busy` lanes already takes so many times longer: lanes spread over replicas.
    """
    best: dict[int, tuple[float, tuple[int, ...]]] = {start: (0.0, (start,))}
    for stage, nodes in enumerate(holders):
        if stage == 0 or not nodes:
            continue
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for node in nodes:
            task_s = distance.task_s(stage, node) * (1 + busy.get(node, 0))
            found[node] = min(
                (so_far_s + distance.hop_s(last, node) + task_s, (*path, node))
                for last, (so_far_s, path) in best.items()
            )
        best = found
    whole_s, path = min((so_far_s + distance.hop_s(last, start), path) for last, (so_far_s, path) in best.items())
    return path if whole_s < inf else None


def links(path: Sequence[int]) -> set[frozenset[int]]:
    """Between one node and the next, and back to the first."""
    return {frozenset(pair) for pair in circle(path) if pair[0] != pair[1]}
