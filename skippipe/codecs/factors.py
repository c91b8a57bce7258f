"""Factors of matrices: columns made orthonormal."""

from __future__ import annotations

import torch
from torch import Tensor

DEPENDENT = 1e-10  # of a column's squared length: what is left of it without earlier ones is rounding errors


def orthonormal(columns: Tensor, *, same_bits: bool = False) -> Tensor:
    """The columns of each matrix [matrix, row, column] made orthonormal, by Gram and Schmidt; one that depends on those
    before it, or nearly, becomes zero. Nothing waits for the device, as factorisations of a library may.

    `same_bits`: on every device, by sums in a fixed order, which takes many small steps.
    """
    largest = columns.abs().amax(-2, keepdim=True)
    found = columns / torch.where(largest == 0, 1.0, largest)  # so that no square is too large or too small
    least = DEPENDENT * _lengths(found, same_bits)
    for at in range(found.shape[-1]):
        one, earlier = found[..., at : at + 1], found[..., :at]
        for _ in range(2 if at else 0):  # once leaves rounding errors, which may be all that is left
            if same_bits:
                one.sub_(sum_of_rows((earlier * sum_of_rows(earlier * one)).mT).mT)
            else:
                one.sub_(earlier @ (earlier.mT @ one))
        left = _lengths(one, same_bits)
        one.div_(torch.where(left == 0, 1.0, left.sqrt())).mul_(left > least[..., at : at + 1])
    return found


def _lengths(columns: Tensor, same_bits: bool) -> Tensor:
    """Squared."""
    squares = columns * columns
    return sum_of_rows(squares) if same_bits else squares.sum(-2, keepdim=True)


def sum_of_rows(values: Tensor) -> Tensor:
    """[matrix, 1, column] of [matrix, row, column]: the second half is added to the first until one row is left."""
    while (rows := values.shape[1]) > 1:
        half = rows - rows // 2
        first = values[:, :half].clone()
        first[:, : rows - half] += values[:, half:]
        values = first
    return values
