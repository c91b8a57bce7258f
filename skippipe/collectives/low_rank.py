"""What a node computes of gradients of low rank (PowerSGD, see `codecs.low_rank`), beside any collective in messages.

The gradient of a matrix, M, is approximated by P·Qᵀ, of which nodes sum the factors in two rounds. In the first each
has M·Q, with the Q of the iteration before; the sum, made orthonormal, is P. In the second each has Mᵀ·P; the sum is Q.
A node keeps what it could not tell of its own M, M − P·(Mᵀ·P)ᵀ, and adds it to its gradient in the next iteration: what
is applied and what nodes keep is together what they had, whoever is lost.

All replicas have the same bits, whatever they compute on: both sums are copied from one node, and what every node works
out of them by itself, P and P·Qᵀ, is made of additions, multiplications, divisions and square roots of single numbers,
in an order that is fixed. A library's matrix product has an order of its own on every device; it is good enough for
what a node adds to a sum.

Nodes need not agree on the Q that they begin with: any has a share in the choice of P, and the next Q is the same for
all. So it is not part of a node's state: it begins with small random numbers, next to which those of nodes that have
averaged before count for nearly everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from skippipe.codecs import EncodedTensor, LowRank
from skippipe.codecs.factors import orthonormal
from skippipe.codecs.low_rank import Matrices
from skippipe.collectives.interface import Averager, MakeAverager
from skippipe.collectives.peer_to_peer import empty_beside
from skippipe.collectives.schedule import Schedule

FIRST_SCALE = 2.0**-20  # of the first Q; later ones are as large as gradients
LEAST_VALUES = 256  # of a round: every piece has one
BLOCK_VALUES = {"cpu": 2**16, "cuda": 2**24}  # of a product at a time: what fits into a cache, or what keeps a GPU busy


class Matrix(NamedTuple):
    """Where a matrix lies in a flat gradient."""

    start: int
    rows: int
    columns: int

    def of(self, flat: Tensor) -> Tensor:
        return flat[self.start : self.start + self.rows * self.columns].view(self.rows, self.columns)


def factored_matrices(weights: Iterable[tuple[int, tuple[int, ...]]], low_rank: LowRank) -> list[Matrix]:
    """The matrices, among weights given as start and shape, of which factors are averaged."""
    found = []
    for start, shape in weights:
        each = Matrices.of(shape)
        if low_rank.factored(each):
            size = each.rows * each.columns
            found += [Matrix(start + number * size, each.rows, each.columns) for number in range(each.number)]
    return found


class LowRankAverager:
    """An `Averager` of two rounds, each of which another averager carries out."""

    def __init__(
        self, gradient: Tensor, low_rank: LowRank, matrices: Sequence[Matrix], make: MakeAverager, offload: bool = False
    ) -> None:
        """`matrices` are those of which factors are averaged; `make` makes the averager of a round."""
        self._gradient = gradient
        self._matrices = sorted(matrices)
        self._offload = offload and gradient.is_cuda
        self.remainder = self._empty().zero_()
        """What factors could not tell in the iteration before."""
        self._sum: Tensor | None = None
        self._summed = False
        chance, rank = torch.Generator().manual_seed(0), low_rank.rank
        self._right = [
            FIRST_SCALE * torch.randn(each.columns, rank, generator=chance).to(gradient.device)
            for each in self._matrices
        ]
        """Q of every matrix, from the iteration before."""
        ends = [(each.start, each.start + each.rows * each.columns) for each in self._matrices]
        between = zip([0, *(end for _, end in ends)], [*(start for start, _ in ends), len(gradient)], strict=True)
        self._rest = [slice(start, end) for start, end in between if end > start]
        """What is summed as it is."""
        rest = sum(each.stop - each.start for each in self._rest)
        sizes = rest + rank * sum(each.rows for each in self._matrices), rank * sum(e.columns for e in self._matrices)
        self._own = [gradient.new_zeros(max(size, LEAST_VALUES)) for size in sizes]
        """What this node contributes to each round; perhaps with zeros at the end."""
        self._shapes: list[list[tuple[int, ...]]] = [
            [*((each.stop - each.start,) for each in self._rest), *((each.rows, rank) for each in self._matrices)],
            [(each.columns, rank) for each in self._matrices],
        ]
        self._rounds: list[Averager] = [make(own, low_rank.factors, offload) for own in self._own]
        self._left: list[Tensor] = []
        """P of every matrix, in the second round."""
        self._schedule: Schedule | None = None
        """That of the attempt; None: no attempt was made in this iteration."""
        self._missing = 0
        """Totals of the first round that are still to come."""

    def begin(self, schedule: Schedule) -> None:
        assert schedule.rounds == len(self._rounds)
        if self._schedule is None:
            self._gradient.add_(self.remainder.to(self._gradient.device))
        self._schedule, self._missing, self._summed = schedule, len(schedule.shares), False
        parts = [self._gradient[each] for each in self._rest]
        parts += [each.of(self._gradient) @ right for each, right in zip(self._matrices, self._right, strict=True)]
        self._contribute_to(0, parts)

    def contribute(self, piece: int, given: Sequence[EncodedTensor], *, total: bool) -> EncodedTensor:
        of_round, at = self._place(piece)
        made = self._rounds[of_round].contribute(at, given, total=total)
        if total:
            self._adopted(of_round)
        return made

    def adopt(self, piece: int, given: EncodedTensor) -> None:
        of_round, at = self._place(piece)
        self._rounds[of_round].adopt(at, given)
        self._adopted(of_round)

    def fits(self, given: EncodedTensor, schedule: Schedule, piece: int) -> bool:
        of_round, at = divmod(piece, len(schedule.shares))
        return of_round < len(self._rounds) and self._rounds[of_round].fits(given, schedule, at)

    @property
    def summed(self) -> Tensor:
        if self._sum is None:
            self._sum = self._empty()
        if not self._summed:
            for part, total in zip(self._rest, self._totals(0), strict=False):
                self._sum[part] = total
            for each, left, right in zip(self._matrices, self._left, self._totals(1), strict=True):
                multiply(left, right, each.of(self._sum))
            self._summed = True
        return self._sum

    def close(self, *, followed: bool) -> None:
        if followed and self._summed:
            for own, total in zip(self._right, self._totals(1), strict=True):
                own.copy_(torch.where(total.any(dim=0), total, own))  # without a direction there is no way back to one
        elif not followed and self._schedule is not None:
            self.remainder.zero_()  # the optimizer did not follow, or followed this node's own gradient, as a whole
        self._schedule = None
        for each in self._rounds:
            each.close(followed=followed)

    def _empty(self) -> Tensor:
        return empty_beside(self._gradient, len(self._gradient), offload=self._offload)

    def _place(self, piece: int) -> tuple[int, int]:
        assert self._schedule is not None, "a piece before averaging has begun"
        return divmod(piece, len(self._schedule.shares))

    def _contribute_to(self, of_round: int, parts: Iterable[Tensor]) -> None:
        for place, part in zip(self._cut(self._own[of_round], of_round), parts, strict=True):
            place.copy_(part)
        assert self._schedule is not None
        self._rounds[of_round].begin(self._schedule)

    def _cut(self, flat: Tensor, of_round: int) -> list[Tensor]:
        """What lies in the values of a round, one after another."""
        found, start = [], 0
        for shape in self._shapes[of_round]:
            size = prod(shape)
            found.append(flat[start : start + size].view(shape))
            start += size
        return found

    def _totals(self, of_round: int) -> list[Tensor]:
        summed = self._rounds[of_round].summed
        assert summed is not None, "low rank needs a collective in messages"
        return self._cut(summed.to(self._gradient.device), of_round)

    def _adopted(self, of_round: int) -> None:
        if of_round > 0:
            return
        self._missing -= 1
        if self._missing == 0:
            self._begin_second()

    def _begin_second(self) -> None:
        """The first round is over: all nodes have the same P, and what each has of Q is all that it can tell."""
        self._left = orthonormal_factors(self._totals(0)[len(self._rest) :])
        own = []
        for each, left in zip(self._matrices, self._left, strict=True):
            matrix = each.of(self._gradient)
            own.append(matrix.mT @ left)
            each.of(self.remainder).copy_(torch.addmm(matrix, left, own[-1].mT, alpha=-1))
        self._contribute_to(1, own)


def orthonormal_factors(factors: Sequence[Tensor]) -> list[Tensor]:
    """The columns of each factor made orthonormal, with the same bits on every device."""
    found: dict[int, Tensor] = {}
    by_rows: dict[int, list[int]] = {}
    for number, factor in enumerate(factors):
        by_rows.setdefault(len(factor), []).append(number)
    for numbers in by_rows.values():  # those of one shape together: there are many small steps
        whole = torch.stack([factors[number] for number in numbers])
        found.update(zip(numbers, orthonormal(whole, same_bits=True), strict=True))
    return [found[number] for number in range(len(factors))]


def multiply(left: Tensor, right: Tensor, out: Tensor) -> None:
    """P·Qᵀ, column by column of the factors in their order, with the same bits on every device."""
    rows = max(1, BLOCK_VALUES.get(left.device.type, 2**16) // len(right))
    columns = right.mT.contiguous()
    for start in range(0, len(left), rows):
        block = left[start : start + rows]
        total = block[:, :1] * columns[0]
        for at in range(1, len(columns)):
            total += block[:, at : at + 1] * columns[at]
        out[start : start + rows] = total
