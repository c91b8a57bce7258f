"""Which part of the text goes to which microbatch: a pure function of seed, iteration and index.

The text is taken as windows of `sequence` tokens, which do not overlap; the token after a window is the label of its
last. Position p = (iteration × microbatches + microbatch) × samples + sample runs through epochs of all windows, and
within an epoch a keyed permutation says which window stands where. Nothing is stored and nodes need not agree on
anything: a restart, or a microbatch given to another node, repeats nothing and loses nothing.

Where the text is conversations, a window is a sample that holds as many whole ones as fit (best fit, the longest
first). Of conversation after conversation the inputs are all tokens but the last, the labels all but the first; labels
that no loss is taken of are IGNORED, as are those of the padding after the last one.
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

IGNORED = -100
"""The label of a token that does not count; torch's cross entropy leaves it out."""
ANSWER, BEGINS = 1, 2
"""Bits of a token's mark: the loss of predicting it counts; a conversation begins with it."""

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

    def __init__(
        self, tokens: npt.ArrayLike, sequence: int, seed: int, microbatches: int, samples: int, *, windows: int = 0
    ) -> None:
        """There are as many windows as the text has, unless another number is said."""
        for name, value in {"sequence": sequence, "microbatches": microbatches, "samples": samples}.items():
            if value < 1:
                raise UserError(f"{name}: {value} must be 1 or more")
        self.tokens = np.asarray(tokens)
        self.sequence = sequence
        self.seed = seed
        self.microbatches = microbatches
        self.samples = samples
        self.windows = windows or (len(self.tokens) - 1) // sequence
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

    @property
    def summary(self) -> str:
        """What became of conversations, in a line; empty: there are none."""
        return ""

    def epochs_text(self, iterations: int) -> str:
        """How often so many iterations go over the text, in a line."""
        samples = self.microbatches * self.samples
        return (
            f"{samples:,} samples an iteration; the text has {self.windows:,}, so {iterations:,} iterations are "
            f"{samples * iterations / self.windows:.3g} epochs"
        )

    def starts(self, iteration: int, microbatch: int) -> npt.NDArray[np.bool_] | None:  # noqa: ARG002
        """Where conversations begin, [samples, sequence]; None: every sample is one piece of text."""
        return None

    def share(self, iteration: int, microbatch: int) -> float:  # noqa: ARG002
        """What the mean loss of the microbatch is multiplied by, so that the mean over all microbatches of the
        iteration is the mean over all of its tokens that count."""
        return 1.0


class ConversationSampler(BatchSampler):
    """Batches of conversations, several in a sample or each in its own."""

    def __init__(
        self,
        tokens: npt.ArrayLike,
        marks: npt.NDArray[np.uint8],
        sequence: int,
        seed: int,
        microbatches: int,
        samples: int,
        *,
        padding: int = 0,
        packing: bool = True,
    ) -> None:
        """`marks` are of ANSWER and BEGINS. `padding` is the token after the last conversation of a sample. One that is
        too long for a sample is cut."""
        self.padding, self._marks = padding, marks
        begins = np.append(np.flatnonzero(marks & BEGINS), len(marks))
        lengths = np.minimum(np.diff(begins) - 1, sequence)
        ends = begins[:-1] + lengths + 1
        counted = np.append(marks & ANSWER, 0).astype(np.uint8)
        spans = np.stack([begins[:-1] + 1, ends], 1)  # what labels are taken of
        answers = np.where(lengths > 0, np.add.reduceat(counted, spans.ravel(), dtype=np.int64)[::2], 0)
        used = np.flatnonzero(answers)
        self.left_out = len(lengths) - len(used)
        """Conversations without a label that counts."""
        self.cut = int((np.diff(begins)[used] > sequence + 1).sum())
        """Conversations whose end is cut off."""
        if not len(used):
            raise UserError(
                f"no conversation has an answer in its first {sequence + 1:,} tokens: use a larger batch.sequence"
            )
        self._spans = np.stack([begins[:-1], ends], 1)
        bins = _packed(lengths[used].tolist(), sequence) if packing else [[each] for each in range(len(used))]
        self._bins = [used[each] for each in bins]
        self.answers = np.array([int(answers[each].sum()) for each in self._bins])
        """Labels that count, of each window."""
        super().__init__(tokens, sequence, seed, microbatches, samples, windows=len(bins))

    @property
    def summary(self) -> str:
        used = len(self._spans) - self.left_out
        filled = float(sum(int(np.diff(self._spans[each]).sum()) - len(each) for each in self._bins))
        samples = len(self._bins)
        text = f"{used:,} conversations in {samples:,} samples, {filled / (samples * self.sequence):.0%} full"
        if self.cut:
            text += f"; {self.cut:,} are longer than batch.sequence and end there"
        if self.left_out:
            text += f"; {self.left_out:,} without an answer are left out"
        return text

    def batch(self, iteration: int, microbatch: int) -> Batch:
        inputs, labels, _ = self._batch(iteration, microbatch)
        return inputs, labels

    def starts(self, iteration: int, microbatch: int) -> npt.NDArray[np.bool_] | None:
        return self._batch(iteration, microbatch)[2]

    def share(self, iteration: int, microbatch: int) -> float:
        here = sum(int(self.answers[self.window(iteration, microbatch, sample)]) for sample in range(self.samples))
        return self.microbatches * here / _answers_of_iteration(self, iteration)

    def _batch(
        self, iteration: int, microbatch: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        shape = self.samples, self.sequence
        inputs, labels = np.full(shape, self.padding, np.int64), np.full(shape, IGNORED, np.int64)
        starts = np.zeros(shape, np.bool_)
        for sample in range(self.samples):
            at = 0
            for first, end in self._spans[self._bins[self.window(iteration, microbatch, sample)]].tolist():
                ids, here = self.tokens[first:end].astype(np.int64), slice(at, at + end - first - 1)
                inputs[sample, here] = ids[:-1]
                labels[sample, here] = np.where(self._marks[first + 1 : end] & ANSWER, ids[1:], IGNORED)
                starts[sample, at] = True
                at = here.stop
            if at < self.sequence:
                starts[sample, at] = True
        return inputs, labels, starts


@lru_cache(maxsize=8)
def _answers_of_iteration(sampler: ConversationSampler, iteration: int) -> int:
    """Labels that count, of all microbatches."""
    return sum(
        int(sampler.answers[sampler.window(iteration, microbatch, sample)])
        for microbatch in range(sampler.microbatches)
        for sample in range(sampler.samples)
    )


def _packed(lengths: list[int], room: int) -> list[list[int]]:
    """Numbers of conversations, in samples with so much room: each goes where the least room is left over. Samples come
    in the order of their first conversations."""
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # room that is left → samples
    open_rooms = 0  # bit r: there is a sample with room r
    for number in sorted(range(len(lengths)), key=lambda each: -lengths[each]):
        length = lengths[number]
        enough = open_rooms >> length
        if enough:
            left = length + (enough & -enough).bit_length() - 1
            chosen = by_room[left].pop()
            open_rooms ^= 0 if by_room[left] else 1 << left
        else:
            left, chosen = room, len(bins)
            bins.append([])
        bins[chosen].append(number)
        by_room.setdefault(left - length, []).append(chosen)
        open_rooms |= 1 << (left - length)
    return sorted(bins, key=min)
