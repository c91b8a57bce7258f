"""Bridges and repeats that begin as the maps of low rank that come closest to what they stand for.

The bridge from stage p to stage t gives h + gain · n + up(down(n)), n = h / rms(h), where h is what stage p hands on.
In the whole model, what reaches stage t is h' instead. So gain, up and down are fitted to h' − h by least squares, on
text that goes through the whole model; each token counts by 1 / rms(h')², as the norms of the layers make it of any
size.

A stage that repeats its layers in the place of a later stage does so with adapters. They are fitted one linear map
after another, in the order in which the maps run: what a map gives on what reaches the later stage is to be what the
map at its place there gives. So with the rank of the maps themselves a repeat is the later stage. What repeats stand
for is no longer the bridge's part: that begins where they end. Layer after layer runs on all batches, once for each
group of maps with the same input, and as far as these: so a layer's activations need not be kept.

Of a map alone, the best of a given rank is known (reduced-rank regression: Izenman, 1975): the best map of full rank,
projected on the first principal components of what it predicts. A bridge's gain and map are fitted by turns. All that
is needed of the text are sums over its tokens of products of channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from skippipe.model.stage import StageModel
from skippipe.model.stand_ins import EPSILON, AdaptedLinear, Bridges, StageAdapters, adapted_maps

RIDGE = 1e-3  # added to the mean square of every channel, relative to their mean
TURNS = 4


@torch.no_grad()
def fit_bridges(bridges: Sequence[Bridges], batches: Iterable[Sequence[Tensor]], reached: Sequence[int]) -> None:
    """Fit all bridges of a model, in place, by the hidden states of each batch after every stage of the whole model.
    `reached`: of the stages after each, how many it takes the place of itself."""
    sums: dict[tuple[int, int], tuple[Tensor, ...]] = {}
    for batch in batches:
        states = [each.flatten(0, -2).float() for each in batch]
        normed = [functional.rms_norm(each, each.shape[-1:], eps=EPSILON) for each in states]
        for start, end in _pairs(bridges):
            begins = min(start + reached[start], end - 1)
            weight = 1 / (states[end - 1].square().mean(-1, keepdim=True) + EPSILON)
            weighted = (normed[begins] * weight).T
            new = weighted @ normed[begins], weighted @ (states[end - 1] - states[begins])
            sums[start, end] = _added(sums.get((start, end)), new)
    for (start, end), (gram, cross) in sums.items():
        held, at = bridges[start], end - start - 2
        rank = held.down.shape[1] // held.width
        gain, down, up = fit_map(gram, cross, rank)
        fitted = down.shape[1]  # a rank beyond the channels has no use, and stays as it is
        held.gain.view(-1, held.width)[at] = gain
        held.down[at].view(held.width, rank)[:, :fitted] = down
        held.up[at].view(rank, held.width)[:fitted] = up


@torch.no_grad()
def fit_repeats(
    stages: Sequence[StageModel],
    adapters: Sequence[StageAdapters],
    batches: Sequence[Sequence[Tensor]],
    progress: Callable[[int, int], None],
) -> list[int]:
    """Fit the adapters of all repeats of a model, in place, by the hidden states of each batch after every stage of the
    whole model. Of the stages after each, how many it takes the place of now: those before the first with another
    number of layers. Repeats in the place of others begin with a gate of zero. `progress` is called with the number of
    stages that are done, and of all."""
    reached = []
    for number, (stage, own) in enumerate(zip(stages, adapters, strict=True)):
        progress(number, len(stages))
        others = stages[number + 1 : number + 1 + own.repeats]
        equal = [len(other.layers) == len(stage.layers) for other in others]
        reached.append(equal.index(False) if False in equal else len(equal))
        gates = own.gates.view(own.repeats, -1)
        gates[: reached[-1]], gates[reached[-1] :] = 1.0, 0.0
        for turn, other in enumerate(others[: reached[-1]], start=1):
            _fit_repeat(stage, own, turn, other, [states[number + turn - 1] for states in batches])
    return reached


def _fit_repeat(stage: StageModel, own: StageAdapters, turn: int, other: StageModel, batches: Sequence[Tensor]) -> None:
    """Fit the adapters of one turn to a later stage, on what reaches that in the whole model, layer by layer."""
    pairs = [(hidden, hidden) for hidden in batches]
    for at in range(len(stage.layers)):
        ours, theirs = _Layer(stage, at, own, turn), _Layer(other, at)
        _fit_layer(ours, theirs, pairs)
        if at + 1 < len(stage.layers):
            pairs = [(ours.run(made), theirs.run(wanted)) for made, wanted in pairs]


class _Layer(NamedTuple):
    """A layer of a stage, or of one of its repeats."""

    stage: StageModel
    at: int
    repeats: StageAdapters | None = None
    turn: int = 0

    def run(self, hidden: Tensor) -> Tensor:
        run = partial(self.stage, only=slice(self.at, self.at + 1))
        return self.repeats.repeat(self.turn, hidden, lambda given, _turn: run(given)) if self.repeats else run(hidden)

    @property
    def maps(self) -> list[AdaptedLinear]:
        return adapted_maps(self.stage.layers[self.at])


def _fit_layer(ours: _Layer, theirs: _Layer, pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Fit the adapters of a repeated layer to a later one; `pairs`: what reaches both of them, batch by batch."""
    maps, their_maps = ours.maps, theirs.maps
    parts = [module.adapter.of_turn(ours.turn) for module in maps]
    for _, up in parts:
        up.zero_()
    for group in _with_same_input(maps, partial(ours.run, pairs[0][0][:1])):
        sums: tuple[Tensor, ...] | None = None
        for ours_given, theirs_given in pairs:
            made = _calls([maps[at] for at in group], partial(ours.run, ours_given))
            wanted = _calls([their_maps[at] for at in group], partial(theirs.run, theirs_given))
            given = made[maps[group[0]]].given.flatten(0, -2).float()
            apart = [(wanted[their_maps[at]].output - made[maps[at]].output).flatten(0, -2).float() for at in group]
            with torch.autocast(given.device.type, enabled=False):  # sums are exact, whatever stages compute in
                sums = _added(sums, (given.T @ given, given.T @ torch.cat(apart, -1)))
        assert sums is not None
        gram, cross = sums
        wholes = torch.split(_solved(gram, cross), [maps[at].out_features for at in group], 1)
        for at, whole in zip(group, wholes, strict=True):
            down, up = parts[at]
            new_down, new_up = _balanced(*low_rank(gram, whole, len(down)))
            fitted = new_down.shape[1]  # a rank beyond the channels has no use
            down[:fitted], up[:, :fitted] = new_down.T, new_up.T


def fit_map(gram: Tensor, cross: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gain, down and up: with the inputs x of all tokens, `gram` is the sum of x xᵀ and `cross` that of x yᵀ, y being
    what is to be predicted."""
    square = gram.diagonal()
    whole = _solved(gram, cross)
    low = torch.zeros_like(whole)
    gain = torch.zeros_like(square)
    for _ in range(TURNS):
        gain = (cross - gram @ low).diagonal() / (square + RIDGE * square.mean())
        down, up = low_rank(gram, whole - gain.diag(), rank)
        low = down @ up
    return gain, *_balanced(down, up)


def _solved(gram: Tensor, cross: Tensor) -> Tensor:
    """The best map of any rank."""
    solved: Tensor = torch.linalg.solve(_ridged(gram), cross)
    return solved


def _ridged(gram: Tensor) -> Tensor:
    return gram + RIDGE * gram.diagonal().mean() * torch.eye(len(gram), device=gram.device, dtype=gram.dtype)


def low_rank(gram: Tensor, whole: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The two factors of the map of this rank that comes closest to another on inputs with this `gram`."""
    inputs, outputs = whole.shape
    rank = min(rank, inputs, outputs)
    if inputs >= outputs:
        components = torch.linalg.eigh(whole.T @ gram @ whole).eigenvectors[:, -rank:]
        return whole @ components, components.T
    root = torch.linalg.cholesky(_ridged(gram))  # the same by the smaller of two matrices
    components = torch.linalg.eigh(root.T @ whole @ whole.T @ root).eigenvectors[:, -rank:]
    return torch.linalg.solve_triangular(root.T, components, upper=True), components.T @ root.T @ whole


def _balanced(down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of the same size, as the optimizer's steps are."""
    size = (down.norm(dim=0) / up.norm(dim=1)).clamp(min=1e-12).sqrt()
    return down / size, up * size[:, None]


def _added(before: tuple[Tensor, ...] | None, new: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(each.double() if before is None else before[at] + each for at, each in enumerate(new))


class _Call(NamedTuple):
    given: Tensor
    output: Tensor


class _AllSeen(Exception):
    """The rest of a pass is of no interest."""


def _calls(modules: Sequence[nn.Module], run: Callable[[], object]) -> dict[nn.Module, _Call]:
    """What each of the modules is given, and makes of it, in the order in which they run, which ends with the last."""
    seen: dict[nn.Module, _Call] = {}

    def note(module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        seen[module] = _Call(given[0], output)
        if len(seen) == len(modules):
            raise _AllSeen

    hooks = [module.register_forward_hook(note) for module in modules]
    try:
        run()
    except _AllSeen:
        pass
    finally:
        for hook in hooks:
            hook.remove()
    return seen


def _with_same_input(modules: Sequence[nn.Module], run: Callable[[], object]) -> list[list[int]]:
    """Numbers of modules that have their input in common, as the projections of attention have, in the order in which
    they run."""
    calls, groups = _calls(modules, run), dict[int, list[int]]()
    for module, call in calls.items():
        groups.setdefault(id(call.given), []).append(modules.index(module))
    return list(groups.values())


def _pairs(bridges: Sequence[Bridges]) -> list[tuple[int, int]]:
    """The stage at which each bridge begins, and the one to which it leads."""
    return [(start, int(end)) for start, held in enumerate(bridges) for end in held.targets]
