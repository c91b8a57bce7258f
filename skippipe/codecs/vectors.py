"""Vectors of the values of a tile in LLVM's own terms, for kernels of codecs.

LLVM cuts a vector into the registers of the processor. Each operation on a whole tile is done to all its registers
before the next begins, so what needs more registers than there are is given to LLVM in parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir

BLOCK = 128
ROW = 64  # values of a tile that are rotated among themselves first, …
COLUMNS = 16  # … and of each row, that are then rotated across rows at a time
FLOAT, BYTE, SHORT, WORD = ir.FloatType(), ir.IntType(8), ir.IntType(16), ir.IntType(32)


def vector_of(element: ir.Type, values: Any = None, count: int = BLOCK) -> Any:
    """The type of a vector; with values, a constant."""
    kind = ir.VectorType(element, count)
    if values is None:
        return kind
    every = values if isinstance(values, list) else [values] * count
    return ir.Constant(kind, [ir.Constant(element, each) for each in every])


def address_of(context: Any, builder: Any, array_type: Any, array: Any, vector: Any, start: Any = None) -> Any:
    """The address of a vector in an array."""
    data = context.make_array(array_type)(context, builder, array).data
    if start is not None:
        data = builder.gep(data, [start])
    return builder.bitcast(data, vector.as_pointer())


def load(builder: Any, address: Any) -> Any:
    found = builder.load(address)
    found.align = 1
    return found


def store(builder: Any, vector: Any, address: Any) -> None:
    builder.store(vector, address).align = 1


def chosen(builder: Any, one: Any, other: Any, places: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(WORD, len(places)), [ir.Constant(WORD, place) for place in places])
    return builder.shuffle_vector(one, other, mask)


def spread(builder: Any, number: Any, count: int = BLOCK) -> Any:
    """A vector of one number."""
    undefined = ir.Constant(vector_of(number.type, count=count), ir.Undefined)
    first = builder.insert_element(undefined, number, ir.Constant(WORD, 0))
    return chosen(builder, first, first, [0] * count)


def parts(builder: Any, vector: Any, size: int) -> list[Any]:
    """A vector in parts of so many values."""
    starts = range(0, vector.type.count, size)
    return [chosen(builder, vector, vector, list(range(start, start + size))) for start in starts]


def joined(builder: Any, parts: list[Any]) -> Any:
    """Parts of a vector, whose number is a power of two, one after the other."""
    while len(parts) > 1:
        size = 2 * parts[0].type.count
        pairs = zip(parts[::2], parts[1::2], strict=True)
        parts = [chosen(builder, one, other, list(range(size))) for one, other in pairs]
    return parts[0]


def butterfly(builder: Any, vector: Any, distance: int, add: Callable[..., Any], sub: Callable[..., Any]) -> Any:
    """Sums and differences of values at this distance, in their places."""
    count = vector.type.count
    left = [place for place in range(count) if not place & distance]
    ones = chosen(builder, vector, vector, left)
    others = chosen(builder, vector, vector, [place + distance for place in left])
    at = {place: number for number, place in enumerate([*left, *(place + distance for place in left)])}
    return chosen(builder, add(ones, others), sub(ones, others), [at[place] for place in range(count)])


def hadamard(builder: Any, rows: list[Any], add: Callable[..., Any], sub: Callable[..., Any]) -> list[list[Any]]:
    """H of a tile that comes in rows: sums and differences of neighbours first, then of pairs, and so on.

    First within a row, then across rows, a few columns at a time; [columns][row], so that one group of columns can be
    used before the next is computed. A step over the whole tile would be more than a processor has registers for.
    """
    size = rows[0].type.count
    done = []
    for row in rows:
        distance = 1
        while distance < size:
            row = butterfly(builder, row, distance, add, sub)
            distance *= 2
        done.append(parts(builder, row, COLUMNS))
    found = []
    for column in zip(*done, strict=True):
        values, distance = list(column), 1
        while distance < len(values):
            for place in range(len(values)):
                if not place & distance:
                    one, other = values[place], values[place + distance]
                    values[place], values[place + distance] = add(one, other), sub(one, other)
            distance *= 2
        found.append(values)
    return found
