"""Bridges that begin as the linear map that comes closest to what they leave out.

The bridge from stage p to stage t gives h + gain · n + up(down(n)), n = h / rms(h), where h is what stage p hands on.
In the whole model, what reaches stage t is h' instead. So gain, up and down are fitted to h' − h by least squares, on
text that goes through the whole model; each token counts by 1 / rms(h')², as the norms of the layers make it of any
size.

Of the map alone, the best of a given rank is known (reduced-rank regression: Izenman, 1975): the best map of full rank,
projected on the first principal components of what it predicts. Gain and map are fitted by turns. All that is needed of
the text are sums over its tokens of products of channels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from skippipe.model.stage import EPSILON, Bridges

RIDGE = 1e-3  # added to the mean square of every channel, relative to their mean
TURNS = 4


@torch.no_grad()
def fit_bridges(bridges: Sequence[Bridges], batches: Iterable[Sequence[Tensor]]) -> None:
    """Fit all bridges of a model, in place, by the hidden states of each batch after every stage of the whole model."""
    sums: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    for batch in batches:
        states = [each.flatten(0, -2).float() for each in batch]
        normed = [functional.rms_norm(each, each.shape[-1:], eps=EPSILON) for each in states]
        for start, end in _pairs(bridges):
            weight = 1 / (states[end - 1].square().mean(-1, keepdim=True) + EPSILON)
            weighted = (normed[start] * weight).T
            gram, cross = weighted @ normed[start], weighted @ (states[end - 1] - states[start])
            before = sums.get((start, end))
            new = gram.double(), cross.double()
            sums[start, end] = new if before is None else (before[0] + new[0], before[1] + new[1])
    for (start, end), (gram, cross) in sums.items():
        held, at = bridges[start], end - start - 2
        rank = held.down.shape[1] // held.width
        gain, down, up = fit_map(gram, cross, rank)
        fitted = down.shape[1]  # a rank beyond the channels has no use, and stays as it is
        held.gain.view(-1, held.width)[at] = gain
        held.down[at].view(held.width, rank)[:, :fitted] = down
        held.up[at].view(rank, held.width)[:fitted] = up


def fit_map(gram: Tensor, cross: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gain, down and up: with the inputs x of all tokens, `gram` is the sum of x xᵀ and `cross` that of x yᵀ, y being
    what is to be predicted."""
    width = len(gram)
    square = gram.diagonal()
    ridge = RIDGE * square.mean()
    whole = torch.linalg.solve(gram + ridge * torch.eye(width, device=gram.device, dtype=gram.dtype), cross)
    low = torch.zeros_like(whole)
    gain = torch.zeros_like(square)
    for _ in range(TURNS):
        gain = (cross - gram @ low).diagonal() / (square + ridge)
        left = whole - gain.diag()
        components = torch.linalg.eigh(left.T @ gram @ left).eigenvectors[:, -min(rank, width) :]
        down, up = left @ components, components.T
        low = down @ up
    size = down.norm(dim=0).clamp(min=1e-12).sqrt()  # both factors alike, as the optimizer's steps are
    return gain, down / size, up * size[:, None]


def _pairs(bridges: Sequence[Bridges]) -> list[tuple[int, int]]:
    """The stage at which each bridge begins, and the one to which it leads."""
    return [(start, int(end)) for start, held in enumerate(bridges) for end in held.targets]
