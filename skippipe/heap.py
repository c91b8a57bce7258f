"""A binary heap in two arrays, for kernels: the smallest key with its value is at index 0."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from skippipe.compiled import kernel

Ints = NDArray[np.int64]


@kernel
def push(keys: Ints, values: Ints, size: int, key: int, value: int) -> int:
    """The new size."""
    child = size
    while child > 0:
        parent = (child - 1) >> 1
        if keys[parent] <= key:
            break
        keys[child] = keys[parent]
        values[child] = values[parent]
        child = parent
    keys[child] = key
    values[child] = value
    return size + 1


@kernel
def drop_first(keys: Ints, values: Ints, size: int) -> int:
    """The new size."""
    size -= 1
    key = keys[size]
    value = values[size]
    parent = 0
    while True:
        child = 2 * parent + 1
        if child >= size:
            break
        if child + 1 < size and keys[child + 1] < keys[child]:
            child += 1
        if keys[child] >= key:
            break
        keys[parent] = keys[child]
        values[parent] = values[child]
        parent = child
    keys[parent] = key
    values[parent] = value
    return size
