"""Keys and values of one stage, for many sequences at once.

A sequence has a slot; the rows of a batch name their slots. For each layer there is one tensor of keys and one of
values, [slots, heads, room, head size], made once and doubled when it is too small, so that a step writes a token for
each row and copies nothing else: rows whose slots follow one another read a view.

Prompts and single tokens go in separate passes: a row that adds one token would be padded to the length of a prompt and
cost as much. Within a pass rows may be of different lengths, padded at the end. Padding is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from skippipe.errors import UserError

SMALLEST_ROOM = 64  # tokens of a slot, at first
Made = TypeVar("Made")


class CacheFull(UserError):
    """More tokens than there may be."""


@dataclass(frozen=True)
class BatchRows:
    """Of a batch [rows, tokens, d]: which sequence each row is of, and which of its tokens are there."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    """Tokens of the sequence that come before. Fewer than its slot holds: what the slot holds beyond is forgotten."""
    counts: tuple[int, ...]
    """Tokens of each row; the rest of it is padding, which may be all of it."""

    @cached_property
    def width(self) -> int:
        return max(self.counts)

    @cached_property
    def end(self) -> int:
        """Tokens of the longest sequence, these ones included."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @cached_property
    def fresh(self) -> bool:
        """Nothing comes before."""
        return not any(self.starts)

    @cached_property
    def even(self) -> bool:
        """All begin at the same place."""
        return len(set(self.starts)) == 1

    @cached_property
    def uniform(self) -> bool:
        """All begin and end at the same place."""
        return self.even and len(set(self.counts)) == 1

    @cached_property
    def block(self) -> slice | None:
        """Slots that follow one another."""
        first, count = self.slots[0], len(self.slots)
        return slice(first, first + count) if self.slots == tuple(range(first, first + count)) else None

    @cached_property
    def positions(self) -> Tensor:
        """[rows, tokens]; padding stays at the last token of its row, so that it sees something and nothing new."""
        starts, counts = torch.tensor(self.starts)[:, None], torch.tensor(self.counts)[:, None]
        return starts + torch.minimum(torch.arange(self.width), counts - 1)

    @cached_property
    def single(self) -> bool:
        """A token of each, and no padding."""
        return self.width == 1 and all(self.counts)

    @cached_property
    def _made(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """For all stages of a pass the same: what they need to know of the rows is made and sent to the device once."""
        if key not in self._made:
            self._made[key] = make()
        return cast(Made, self._made[key])

    def positions_on(self, device: torch.device) -> Tensor:
        return self.once(("positions", device), lambda: self.positions.to(device))

    def first_seen(self, window: int | None) -> int:
        """The first position that any of the tokens looks at, if each looks at so many, itself included."""
        return 0 if window is None else max(0, min(self.starts) - window + 1)


class CacheSlots(NamedTuple):
    """On the device: the tokens of a batch that are not padding, and where in the cache they go."""

    row: Tensor
    column: Tensor
    slot: Tensor
    position: Tensor
    slots: Tensor
    """Of all rows."""

    @classmethod
    def of(cls, rows: BatchRows, device: torch.device) -> CacheSlots:
        real = torch.arange(rows.width) < torch.tensor(rows.counts)[:, None]
        row, column = real.nonzero(as_tuple=True)
        slots = torch.tensor(rows.slots)
        where = torch.stack([row, column, slots[row], rows.positions[row, column]]).to(device)
        return cls(where[0], where[1], where[2], where[3], where[2] if rows.single else slots.to(device))


class StageCache:
    def __init__(self, first_layer: int, windows: Sequence[int | None], max_tokens: int) -> None:
        self.first_layer = first_layer
        self.windows = windows
        """How many tokens each layer looks at; None: all of them."""
        self.max_tokens = max_tokens
        """Room in all slots together."""
        self.stores: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)
        self._slots = 0
        self._room = 0
        self._lengths: dict[int, int] = {}
        self._touched: dict[int, int] = {}
        """Up to where each slot was written since it was free."""

    def length(self, slot: int) -> int:
        """Tokens that it holds."""
        return self._lengths.get(slot, 0)

    def begin(self, rows: BatchRows, device: torch.device) -> CacheView:
        """Before the layers of a pass."""
        assert len(set(rows.slots)) == len(rows.slots), "a slot named twice"
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
            assert not count or start <= self.length(slot), f"slot {slot} ends before token {start}"
        self._make_room(max(rows.slots) + 1, rows.end)
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
            if count:
                self._lengths[slot] = start + count
                self._touched[slot] = max(start + count, self._touched.get(slot, 0))
        return CacheView(self, rows, device)

    @torch.inference_mode()
    def free(self, slot: int) -> None:
        """Wiped: the next sequence there looks away from it by a factor of 0, which does not make 0 of NaN."""
        self._lengths.pop(slot, None)
        touched = self._touched.pop(slot, 0)
        for store in self._tensors() if touched else ():
            store[slot, :, :touched] = 0

    @torch.inference_mode()
    def move(self, source: int, target: int) -> None:
        assert target not in self._lengths, f"slot {target} is taken"
        assert target < self._slots
        length = self._lengths[source]
        for store in self._tensors():
            store[target, :, :length] = store[source, :, :length]
        self._lengths[target] = self._touched[target] = length
        self.free(source)

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Made when its first keys and values are there, which say of what size and kind they are."""
        found = self.stores[index]
        if found is None:
            made = [new.new_zeros(self._slots, new.shape[1], self._room, new.shape[3]) for new in (keys, values)]
            found = self.stores[index] = made[0], made[1]
        return found

    def _tensors(self) -> list[Tensor]:
        return [store for pair in self.stores if pair is not None for store in pair]

    @torch.inference_mode()
    def _make_room(self, slots: int, tokens: int) -> None:
        if slots <= self._slots and tokens <= self._room:
            return
        used = max(slots, *(slot + 1 for slot in self._touched)) if self._touched else slots
        longest = max(tokens, *self._touched.values()) if self._touched else tokens
        wanted = max(self._slots, _doubled(slots)), max(self._room, _doubled(tokens, SMALLEST_ROOM))
        if wanted[0] * wanted[1] > self.max_tokens:
            wanted = used, self.max_tokens // used  # all there is, as it is needed now
        if wanted[1] < longest:
            raise CacheFull(
                f"{used} texts of up to {longest:,} tokens need room for {used * longest:,}, and there is room for "
                f"{self.max_tokens:,}: fewer or shorter ones, please"
            )
        self._slots, self._room = wanted
        for index, pair in enumerate(self.stores):
            if pair is not None:
                self.stores[index] = self._resized(pair[0]), self._resized(pair[1])

    def _resized(self, store: Tensor) -> Tensor:
        made = store.new_zeros(self._slots, store.shape[1], self._room, store.shape[3])
        slots, room = min(self._slots, store.shape[0]), min(self._room, store.shape[2])
        made[:slots, :, :room] = store[:slots, :, :room]
        return made


class CacheView:
    """What the layers know as `past_key_values` while a batch goes through them."""

    def __init__(self, cache: StageCache, rows: BatchRows, device: torch.device) -> None:
        self._cache = cache
        self._rows = rows
        self._plain = rows.uniform and rows.block is not None
        if not self._plain:
            self._places = rows.once(("places", device), lambda: CacheSlots.of(rows, device))

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keeps the new ones and gives back all that the layer looks at."""
        index = layer - self._cache.first_layer
        stores = self._cache.layer(index, keys, values)
        for store, new in zip(stores, (keys, values), strict=True):
            self._write(store, new)
        if self._rows.fresh:
            return keys, values
        seen = slice(self._rows.first_seen(self._cache.windows[index]), self._rows.end)
        return self._read(stores[0], seen), self._read(stores[1], seen)

    def _write(self, store: Tensor, new: Tensor) -> None:
        if self._plain:
            store[self._rows.block, :, self._rows.starts[0] : self._rows.end] = new
            return
        to = self._places
        store[to.slot, :, to.position] = new[:, :, 0] if self._rows.single else new[to.row, :, to.column]

    def _read(self, store: Tensor, seen: slice) -> Tensor:
        if self._rows.block is not None:
            return store[self._rows.block, :, seen]
        return store[:, :, seen].index_select(0, self._places.slots)


def _doubled(count: int, smallest: int = 1) -> int:
    """The power of two that is enough."""
    return max(smallest, 1 << (count - 1).bit_length())
