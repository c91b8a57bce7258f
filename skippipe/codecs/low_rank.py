"""Weight gradients of low rank (PowerSGD: Vogels, Karimireddy and Jaggi, 2019).

Of a matrix of R × C, nodes sum factors of R × r and C × r in its place, one after the other: averaging has two rounds.
Vectors, and matrices that are no larger than their factors, are summed as they are, in the first. How many values that
are depends on the shapes of all weights, so this is no codec of tensors: `collectives.low_rank` has what nodes compute,
and factors are sent by a codec as any tensor is.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import isqrt, prod
from typing import TYPE_CHECKING, ClassVar, NamedTuple

if TYPE_CHECKING:
    from skippipe.model_shape import ModelShape

FACTOR_BYTES = 4  # of a value


class Matrices(NamedTuple):
    """Matrices of one shape."""

    number: int
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

    def round_bytes(self, values: int, matrices: Iterable[Matrices]) -> tuple[int, ...]:
        """Bytes of each round of averaging, of a gradient of so many values; one if there is nothing to factor."""
        factored = [each for each in matrices if self.factored(each)]
        rest = values - sum(each.number * each.rows * each.columns for each in factored)
        left = self.rank * sum(each.number * each.rows for each in factored)
        right = self.rank * sum(each.number * each.columns for each in factored)
        return tuple(FACTOR_BYTES * count for count in (rest + left, right) if count)

    def expected_bytes(self, values: int) -> int:
        """Bytes of one square matrix of so many values: to compare with codecs, where shapes are not known."""
        return FACTOR_BYTES * self.rank * 2 * isqrt(values)


def decoder_matrices(model: ModelShape, layers: int, *, ends: bool) -> list[Matrices]:
    """Those of so many layers, and with `ends` of embedding and head."""
    d, width, shared = model.hidden, model.intermediate, model.linear_intermediate
    into = model.feed_forward_matrices - 1  # gate and up, or up alone
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    found = [Matrices(1, queries, d), Matrices(2, keys, d), Matrices(1, d, queries)]
    if shared:
        found += [Matrices(into, shared, d), Matrices(1, d, shared)]
    if model.experts > 1:  # gate and up of an expert are one matrix; and the router
        found += [
            Matrices(model.experts, into * width, d),
            Matrices(model.experts, d, width),
            Matrices(1, model.experts, d),
        ]
    found = [each._replace(number=layers * each.number) for each in found]
    return [*found, Matrices(1 if model.tied_embeddings else 2, model.vocab, d)] if ends else found
