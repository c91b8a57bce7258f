"""Initialisation of a lost stage from its neighbours.

After CheckFree ("All is not lost: LLM recovery without checkpoints", 2025): neighbouring layers of a transformer are
alike, so the weighted mean of the stages before and after is a start from which training soon recovers. The weights of
the mean are the squared norms of the neighbours' gradients, so the stage that is further from done counts more.

Embedding, final norm and head, which only stage 0 has, have no neighbour. As in CheckFree+, a backup of them is stored
on a node of another stage: the values of all these weights, one after another.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from skippipe.model.flat_params import layout_of_stage
from skippipe.model.model_spec import LAYER, ModelSpec
from skippipe.model.stage import layer_ranges
from skippipe.optim.interface import ParamSlot
from skippipe.runtime.state_source import StateSlice


def init_from_neighbours(
    spec: ModelSpec,
    layers: tuple[int, ...],
    stage: int,
    sources: Sequence[int],
    stages: Sequence[int],
    shares: Sequence[float],
) -> list[StateSlice]:
    """The slices to fetch from each source; `layers` of every stage, `stages` that the sources hold.

    Only weights, each from the layer at the same relative depth; the optimizer's state does not carry over. Weights
    that no neighbour has in the same shape (embedding and head of stage 0, layers of another kind) are left out: they
    keep their values. What only some have is the mean of those. Slices that are added must be loaded after the others.
    """
    held = [dict(neighbour_layers(spec, layers, stage, other)) for other in stages]
    begun: set[ParamSlot] = set()
    found: list[StateSlice] = []
    for source, mine, share in zip(sources, held, shares, strict=True):
        parts = []
        for place, first in mine.items():
            having = [each for each, theirs in zip(shares, held, strict=True) if place in theirs]
            weight = share if len(having) == len(shares) else _fraction(share, having)
            parts.append(StateSlice(source, first, place.size, place.start, weight, place in begun))
        begun |= mine.keys()
        found += _joined(parts)
    return found


def init_from_backup(places: Iterable[ParamSlot], source: int, iterations: int) -> list[StateSlice]:
    """The slices to fetch from the node that stores an embedding backup; `places` of stage 0."""
    found, first = [], 0
    for place in embedding_slots(places):
        found.append(StateSlice(source, first, place.size, place.start, backup=iterations))
        first += place.size
    return found


def embedding_slots(places: Iterable[ParamSlot]) -> list[ParamSlot]:
    """The weights of stage 0 that belong to no layer: embedding, final norm and head."""
    return [place for place in places if LAYER.match(place.name) is None]


def neighbour_layers(spec: ModelSpec, layers: tuple[int, ...], stage: int, other: int) -> list[tuple[ParamSlot, int]]:
    """The weights of the layers of a stage, and where in another stage the weights begin that they are made of."""
    ours, theirs = (layer_ranges(layers)[each] for each in (stage, other))
    there = {place.name: place for place in layout_of_stage(spec, layers, other)}
    found = []
    for place in layout_of_stage(spec, layers, stage):
        if (layer := LAYER.match(place.name)) is None:
            continue
        depth = layer_at_same_depth(int(layer[1]) - ours.start, len(ours), len(theirs))
        like = there.get(f"model.layers.{theirs[depth]}.{place.name[layer.end() :]}")
        if like is not None and like.shape == place.shape:
            found.append((place, like.start))
    return found


def layer_at_same_depth(index: int, count: int, other: int) -> int:
    """The one of `other` layers that is at the same relative depth as layer `index` of `count`."""
    return (other - 1) // 2 if count == 1 else round(index * (other - 1) / (count - 1))


def _fraction(share: float, of: Sequence[float]) -> float:
    return share / sum(of) if sum(of) else 1 / len(of)


def _joined(parts: Iterable[StateSlice]) -> list[StateSlice]:
    """Slices that are adjacent in both stages, and treated alike, as one."""
    joined: list[StateSlice] = []
    for part in parts:
        last = joined[-1] if joined else None
        if (
            last is not None
            and (last.first + last.count, last.at + last.count) == (part.first, part.at)
            and (last.share, last.added) == (part.share, part.added)
        ):
            part = StateSlice(part.source, last.first, last.count + part.count, last.at, part.share, part.added)
            joined.pop()
        joined.append(part)
    return joined
