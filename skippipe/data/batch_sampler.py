"""Which part of the text goes to which microbatch: a pure function of seed, iteration and index.

The text is taken as windows of `sequence` tokens, which do not overlap; the token after a window is the label of its
last. Position p = (iteration × microbatches + microbatch) × samples + sample runs through epochs of all windows, and
within an epoch a keyed permutation says which window stands where. Nothing is stored and nodes need not agree on
anything: a restart, or a microbatch given to another node, repeats nothing and loses nothing.
"""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from skippipe.errors import UserError

Batch = tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]
"""Inputs and labels, [samples, sequence] each."""

ROUNDS = 6
MASK = 2**64 - 1


def permute(seed: int, epoch: int, offset: int, n: int) -> int:
    """The place of `offset` in the permutation of 0…n−1 that belongs to seed and epoch.

    A Feistel network permutes 0…4^h−1, the smallest such range with n in it. A value that lands at n or beyond is
    sent through again: the way back from any value below n passes such values only, so that no two meet.
    """
    if not 0 <= offset < n:
        raise ValueError(f"offset {offset} is not in 0…{n - 1}")
    keys = _keys(seed, epoch)
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    value = offset
    while True:
        left, right = value >> half, value & mask
        for key in keys:
            mixed = ((right ^ key) * 0xBF58476D1CE4E5B9) & MASK  # as in splitmix64
            mixed = ((mixed ^ (mixed >> 31)) * 0x94D049BB133111EB) & MASK
            left, right = right, left ^ ((mixed >> 40) & mask)
        value = (left << half) | right
        if value < n:
            return value


@lru_cache(maxsize=64)
def _keys(seed: int, epoch: int) -> tuple[int, ...]:
    digest = blake2b(f"skippipe {seed} {epoch}".encode(), digest_size=8 * ROUNDS).digest()
    return tuple(int.from_bytes(digest[at : at + 8], "little") for at in range(0, len(digest), 8))


class BatchSampler:
    """Batches for training from an array of ids."""

    def __init__(self, tokens: npt.ArrayLike, sequence: int, seed: int, microbatches: int, samples: int) -> None:
        for name, value in {"sequence": sequence, "microbatches": microbatches, "samples": samples}.items():
            if value < 1:
                raise UserError(f"{name}: {value} must be 1 or more")
        self.tokens = np.asarray(tokens)
        self.sequence = sequence
        self.seed = seed
        self.microbatches = microbatches
        self.samples = samples
        self.windows = (len(self.tokens) - 1) // sequence
        self.first_window = 0
        if self.windows < 1:
            count = len(self.tokens)
            raise UserError(
                f"a text of {count:,} tokens is too short for a sequence of {sequence:,}, which takes {sequence + 1:,}"
                f": use a longer text, or a sequence of {max(1, count - 1):,} or less"
            )

    def window(self, iteration: int, microbatch: int, sample: int) -> int:
        """The number of the window that this sample is."""
        if iteration < 0 or not 0 <= microbatch < self.microbatches or not 0 <= sample < self.samples:
            raise ValueError(
                f"iteration {iteration}, microbatch {microbatch} of {self.microbatches}, "
                f"sample {sample} of {self.samples}: there is no such sample"
            )
        position = (iteration * self.microbatches + microbatch) * self.samples + sample
        epoch, offset = divmod(position, self.windows)
        return self.first_window + permute(self.seed, epoch, offset, self.windows)

    def part(self, windows: range, microbatches: int) -> BatchSampler:
        """A sampler of some windows only, of which so many microbatches are an iteration."""
        found = copy(self)
        found.first_window, found.windows, found.microbatches = windows.start, len(windows), microbatches
        return found

    def batch(self, iteration: int, microbatch: int) -> Batch:
        starts = [self.sequence * self.window(iteration, microbatch, sample) for sample in range(self.samples)]
        rows = np.stack([self.tokens[start : start + self.sequence + 1] for start in starts]).astype(np.int64)
        return rows[:, :-1].copy(), rows[:, 1:].copy()
