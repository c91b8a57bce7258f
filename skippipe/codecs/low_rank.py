"""Weight gradients of low rank (PowerSGD: Vogels, Karimireddy and Jaggi, 2019).

Of a matrix of R × C, nodes sum factors of R × r and C × r in its place, one after the other: in two rounds of averaging.
Vectors, and matrices that are no larger than their factors, are summed as they are, in the first. How many values that
are depends on the shapes of all weights, so this is no codec of tensors: `collectives.low_rank` has what nodes compute,
and factors are sent by a codec as any tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt, prod
from typing import ClassVar, NamedTuple


class Matrices(NamedTuple):
    """Matrices of one shape."""

    count: int
    rows: int
    columns: int

    @classmethod
    def of(cls, shape: tuple[int, ...]) -> Matrices:
        """Those of a weight: of three dimensions, as of experts, one for each of the first; a vector is one column."""
        *others, rows, columns = (*shape, 1) if len(shape) == 1 else shape
        return cls(prod(others), rows, columns)


@dataclass(frozen=True)
class LowRank:
    """What job files and plans call `rank-16`, and so on."""

    rank: int
    factors: ClassVar[str] = "fp32"
    """Codec of factors, and of what is summed as it is."""
    error_feedback: ClassVar[bool] = True

    @property
    def id(self) -> str:
        return f"rank-{self.rank}"

    def factored(self, each: Matrices) -> bool:
        """Whether factors have fewer values than the matrix."""
        return self.rank * (each.rows + each.columns) < each.rows * each.columns

    def round_values(self, values: int, matrices: Iterable[Matrices]) -> tuple[int, ...]:
        """Values that are summed in each round, of a gradient of so many; one round if there is nothing to factor."""
        factored = [each for each in matrices if self.factored(each)]
        if not factored:
            return (values,)
        left, right, replaced = (
            sum(each.count * size(each) for each in factored)
            for size in (
                lambda each: self.rank * each.rows,
                lambda each: self.rank * each.columns,
                lambda each: each.rows * each.columns,
            )
        )
        return values - replaced + left, right

    def expected_bytes(self, values: int) -> int:
        """Bytes of one square matrix of so many values: to compare with codecs, where shapes are not known."""
        return 4 * self.rank * 2 * isqrt(values)
