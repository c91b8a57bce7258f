"""A stage at inference: the very layers that were trained, and their KV cache for many sequences at once.

A stage takes hidden states [rows, tokens, d] and their rows, and returns hidden states; that is all that has to travel
when each stage is on a machine of its own.

A sequence has a slot; the rows of a batch name their slots. For each layer there is one tensor of keys and one of
values, [slots, heads, room, head size], made once and doubled when it is too small, so that a step writes a token for
each row and copies nothing else: rows whose slots follow one another read a view.

Prompts and single tokens go in separate passes: a row that adds one token would be padded to the length of a prompt and
cost as much. Within a pass rows may be of different lengths, padded at the end. Padding is never written.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.model.model_spec import MASKS
from skippipe.model.stage import StageModel
from skippipe.model.stand_ins import Repeated
from skippipe.stage_subset import StageHop, Visits

MIN_ROOM = 64  # tokens of a slot, at first
Value = TypeVar("Value")
DtypeName = Literal["fp32", "bf16"]
DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


class CacheFull(UserError):
    """The cache has no room for so many tokens."""


@dataclass(frozen=True)
class BatchRows:
    """The rows of a batch [rows, tokens, d]: each one's slot, and which tokens of its sequence are there."""

    slots: tuple[int, ...]
    starts: tuple[int, ...]
    """Tokens of the sequence that come before; tokens that its slot holds beyond them are overwritten."""
    counts: tuple[int, ...]
    """Tokens of each row; the rest of it, which may be all, is padding."""

    @cached_property
    def width(self) -> int:
        return max(self.counts)

    @cached_property
    def end(self) -> int:
        """Tokens of the longest sequence, those of the batch included."""
        return max(start + count for start, count in zip(self.starts, self.counts, strict=True))

    @cached_property
    def fresh(self) -> bool:
        """Do all rows begin their sequences?"""
        return not any(self.starts)

    @cached_property
    def even(self) -> bool:
        """Do all rows begin at the same position?"""
        return len(set(self.starts)) == 1

    @cached_property
    def uniform(self) -> bool:
        """Do all rows begin and end at the same position?"""
        return self.even and len(set(self.counts)) == 1

    @cached_property
    def block(self) -> slice | None:
        """The slots as a slice, if they follow one another."""
        first, count = self.slots[0], len(self.slots)
        return slice(first, first + count) if self.slots == tuple(range(first, first + count)) else None

    @cached_property
    def positions(self) -> Tensor:
        """Positions [rows, tokens]; padding repeats its row's last one: it attends to something and nothing new."""
        starts, counts = torch.tensor(self.starts)[:, None], torch.tensor(self.counts)[:, None]
        return starts + torch.minimum(torch.arange(self.width), counts - 1)

    @cached_property
    def single(self) -> bool:
        """Has every row one token, and no padding?"""
        return self.width == 1 and all(self.counts)

    @cached_property
    def _memo(self) -> dict[Hashable, Any]:
        return {}

    def once(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """A value that all stages of a pass share: it is computed and sent to the device once."""
        if key not in self._memo:
            self._memo[key] = make()
        return cast(Value, self._memo[key])

    def positions_on(self, device: torch.device) -> Tensor:
        return self.once(("positions", device), lambda: self.positions.to(device))

    def first_seen(self, window: int | None) -> int:
        """The first position that any token attends to, if each attends to `window` tokens, itself included."""
        return 0 if window is None else max(0, min(self.starts) - window + 1)


class CacheSlots(NamedTuple):
    """The tokens of a batch that are not padding and their places in the cache, as tensors on the device."""

    row: Tensor
    column: Tensor
    slot: Tensor
    position: Tensor
    slots: Tensor
    """Slots of all rows."""

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
        """Tokens that each layer attends to; None: all."""
        self.max_tokens = max_tokens
        """Tokens of all slots together."""
        self.stores: list[tuple[Tensor, Tensor] | None] = [None] * len(windows)
        self._slots = 0
        self._room = 0
        self._lengths: dict[int, int] = {}
        self._touched: dict[int, int] = {}
        """Slot → tokens that were written there since it was free."""

    def length(self, slot: int) -> int:
        """Tokens that a slot holds."""
        return self._lengths.get(slot, 0)

    @property
    def shape(self) -> tuple[int, int]:
        """Slots, and tokens that each has room for. While it stays as it is, tensors keep their places."""
        return self._slots, self._room

    def begin(self, rows: BatchRows) -> CacheView:
        """Makes room for a batch; to be called before the layers of a pass."""
        self.extend(rows)
        return CacheView(self, rows)

    def extend(self, rows: BatchRows) -> None:
        """Counts the tokens of a batch, which are written then, and makes room for them."""
        assert len(set(rows.slots)) == len(rows.slots), "a slot named twice"
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
            assert not count or start <= self.length(slot), f"slot {slot} ends before token {start}"
        self.reserve(max(rows.slots) + 1, rows.end)
        for slot, start, count in zip(rows.slots, rows.starts, rows.counts, strict=True):
            if count:
                self._lengths[slot] = start + count
                self._touched[slot] = max(start + count, self._touched.get(slot, 0))

    @torch.inference_mode()
    def free(self, slot: int) -> None:
        """Frees a slot and wipes it: masked values get a factor of 0, which does not make 0 of NaN."""
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
        """The stores of a layer, allocated by the size and type of its first keys and values."""
        stores = self.stores[index]
        if stores is None:
            new = [each.new_zeros(self._slots, each.shape[1], self._room, each.shape[3]) for each in (keys, values)]
            stores = self.stores[index] = new[0], new[1]
        return stores

    def _tensors(self) -> list[Tensor]:
        return [store for pair in self.stores if pair is not None for store in pair]

    @torch.inference_mode()
    def reserve(self, slots: int, tokens: int) -> None:
        """Makes room for so many slots, of so many tokens each; CacheFull if that is too much."""
        if slots <= self._slots and tokens <= self._room:
            return
        used = max(slots, *(slot + 1 for slot in self._touched)) if self._touched else slots
        longest = max(tokens, *self._touched.values()) if self._touched else tokens
        wanted = max(self._slots, _doubled(slots)), max(self._room, _doubled(tokens, MIN_ROOM))
        if wanted[0] * wanted[1] > self.max_tokens:
            wanted = used, self.max_tokens // used  # all the room there is, as it is needed now
        if wanted[1] < longest:
            raise CacheFull(
                f"{used} texts of up to {longest:,} tokens need room for {used * longest:,}, and there is room for "
                f"{self.max_tokens:,}: ask for fewer or shorter ones"
            )
        self._slots, self._room = wanted
        for index, pair in enumerate(self.stores):
            if pair is not None:
                self.stores[index] = self._resized(pair[0]), self._resized(pair[1])

    def _resized(self, store: Tensor) -> Tensor:
        new = store.new_zeros(self._slots, store.shape[1], self._room, store.shape[3])
        slots, room = min(self._slots, store.shape[0]), min(self._room, store.shape[2])
        new[:slots, :, :room] = store[:slots, :, :room]
        return new


class CacheView:
    """The cache as the layers see it, as `past_key_values`, while a batch goes through them."""

    def __init__(self, cache: StageCache, rows: BatchRows) -> None:
        self._cache = cache
        self._rows = rows
        self._plain = rows.uniform and rows.block is not None

    def update(self, keys: Tensor, values: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Stores new keys and values, and returns all that the layer attends to."""
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
        to = self._places(store.device)
        store[to.slot, :, to.position] = new[:, :, 0] if self._rows.single else new[to.row, :, to.column]

    def _read(self, store: Tensor, seen: slice) -> Tensor:
        if self._rows.block is not None:
            return store[self._rows.block, :, seen]
        return store[:, :, seen].index_select(0, self._places(store.device).slots)

    def _places(self, device: torch.device) -> CacheSlots:
        return self._rows.once(("places", device), lambda: CacheSlots.of(self._rows, device))


def _doubled(count: int, smallest: int = 1) -> int:
    """The smallest power of two that is not below `count` or `smallest`."""
    return max(smallest, 1 << (count - 1).bit_length())


class CachedStage:
    def __init__(self, model: StageModel, max_tokens: int) -> None:
        self.model = model
        config, kinds = model.spec.config, [model.spec.mask_kind(layer) for layer in model.numbers]
        for kind in kinds:
            if kind not in MASKS:
                raise UserError(f"layers of the kind '{kind}' are not supported; {', '.join(MASKS)} are")
        found = getattr(model.rotary, "rope_type", "default")
        for rotation in found.values() if isinstance(found, dict) else (found,):
            if rotation not in FIXED_ROTATIONS:
                raise UserError(
                    f"rope_type '{rotation}' depends on the length of the text, and cached keys were rotated before: "
                    f"generation supports {', '.join(FIXED_ROTATIONS)}"
                )
        self._windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.cache = StageCache(model.numbers.start, self._windows, max_tokens)
        self._repeat_caches: list[StageCache] = []
        """One for each turn in which the stage has taken the place of another."""
        self._rotations: dict[str, tuple[Tensor, Tensor]] = {}

    @torch.inference_mode()
    def forward(
        self, hidden: Tensor, rows: BatchRows, residual_scale: float = 1.0, hop: StageHop | None = None
    ) -> Tensor:
        """What the stage hands on; what it adds to the residual stream is multiplied by `residual_scale`. `hop`: where
        it goes, if stages are missing."""
        assert hidden.shape[:2] == (len(rows.slots), rows.width), "hidden states of other rows"
        positions = None if rows.even else rows.positions_on(hidden.device)
        rotations = {
            angles: self._rotation(rows, positions, hidden, angles) for angles in dict.fromkeys(self.model.angles)
        }
        if positions is None:
            there = hidden.device
            begin, end = rows.starts[0], rows.starts[0] + rows.width
            positions = rows.once(("even", there), lambda: torch.arange(begin, end, device=there)[None])
        always = self.model.spec.holds_scores
        masks = {window: mask(rows, window, hidden, always=always) for window in dict.fromkeys(self._windows)}

        def through(given: Tensor, turn: int) -> Tensor:
            past = self._cache_of(turn).begin(rows)
            for layer, window, angles in zip(self.model.layers, self._windows, self.model.angles, strict=True):
                given = layer(
                    given,
                    attention_mask=masks[window],
                    position_ids=positions,
                    position_embeddings=rotations[angles],
                    past_key_values=past,
                )
            return given

        self.model.set_hop(hop)
        return self.handed_on(hidden, through(hidden, 0), residual_scale, hop, through)

    def handed_on(
        self,
        hidden: Tensor,
        output: Tensor,
        residual_scale: float,
        hop: StageHop | None,
        repeated: Repeated | None = None,
    ) -> Tensor:
        """What the stage hands on, from its input and the output of its layers; `repeated`: as `StageModel.cross`."""
        scaled = output if residual_scale == 1.0 else torch.lerp(hidden, output, residual_scale)
        return self.model.cross(scaled, hop, repeated)

    def free(self, slot: int) -> None:
        for cache in self._caches:
            cache.free(slot)

    def move(self, source: int, target: int) -> None:
        for cache in self._caches:
            if cache.length(source):
                cache.move(source, target)

    @property
    def _caches(self) -> list[StageCache]:
        return [self.cache, *self._repeat_caches]

    def _cache_of(self, turn: int) -> StageCache:
        while turn > len(self._repeat_caches):
            self._repeat_caches.append(StageCache(self.cache.first_layer, self._windows, self.cache.max_tokens))
        return self._caches[turn]

    def rotations(self, end: int, like: Tensor, angles: str = "") -> tuple[Tensor, Tensor]:
        """Cosines and sines of all positions before `end`, and perhaps more: [1, positions, head size]."""
        if angles not in self._rotations or self._rotations[angles][0].shape[1] < end:
            found = self.model.rotation(like, torch.arange(2 * end, device=like.device)[None], angles)
            if not isinstance(found, tuple):
                name = self.model.spec.config.model_type
                raise UserError(f"{name} models rotate positions by complex numbers: they can be trained, but not used")
            self._rotations[angles] = found
        return self._rotations[angles]

    def _rotation(self, rows: BatchRows, positions: Tensor | None, like: Tensor, angles: str) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, out of a table: they depend on nothing else."""
        end = max(rows.starts) + rows.width
        cosines, sines = self.rotations(end, like, angles)
        if positions is None:
            return cosines[:, rows.starts[0] : end], sines[:, rows.starts[0] : end]
        return cosines[0, positions], sines[0, positions]


class StageChain:
    """Stages one after another in one process, each with a KV cache of its own."""

    def __init__(
        self,
        models: Sequence[StageModel],
        visits: Visits,
        residual_scale: float,
        max_tokens: int,
        hops: Mapping[int, StageHop] | None = None,
    ) -> None:
        """`hops` from these stages, if others are missing."""
        self.visits = visits
        self.residual_scale = residual_scale
        self._hops = hops or {}
        self.stages = [CachedStage(models[number], max_tokens) for number in visits]

    def forward(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        for number, stage in zip(self.visits, self.stages, strict=True):
            hidden = stage.forward(hidden, rows, *self.way_on(number))
        return hidden

    def way_on(self, number: int) -> tuple[float, StageHop | None]:
        """How much a stage adds, and where the path goes on from it, if not to the next one."""
        return self.residual_scale if number else 1.0, self._hops.get(number)

    def extend(self, rows: BatchRows) -> None:
        for stage in self.stages:
            stage.cache.extend(rows)

    def reserve(self, slots: int, tokens: int) -> None:
        for stage in self.stages:
            stage.cache.reserve(slots, tokens)

    def free(self, slot: int) -> None:
        for stage in self.stages:
            stage.free(slot)

    def move(self, source: int, target: int) -> None:
        for stage in self.stages:
            stage.move(source, target)


@torch.inference_mode()
def embed(model: StageModel, tokens: Sequence[Sequence[int]]) -> Tensor:
    """Embeddings of each row's tokens: [rows, tokens, d], padded at the end."""
    assert model.embedding is not None, "only stage 0 embeds"
    width = max(map(len, tokens))
    padded = torch.tensor([[*row, *[0] * (width - len(row))] for row in tokens])
    weight: Tensor = next(model.embedding.parameters())
    return model.embed(padded.to(weight.device))


@torch.inference_mode()
def logits(model: StageModel, hidden: Tensor) -> Tensor:
    """Logits of every position that is given, in fp32."""
    assert model.norm is not None, "only stage 0 has the head"
    assert model.head is not None
    values: Tensor = model.head(model.norm(hidden))
    return values.float()


def mask(rows: BatchRows, window: int | None, like: Tensor, *, always: bool = False) -> Tensor | None:
    """The attention mask, to be added to scores of [rows, 1, tokens, seen tokens].

    None where the attention kernel's own causal mask will do: at the beginning of texts, padding being at the end. And
    where a single token of each row attends to all there is. `always`: there is no such kernel.
    """
    if not always and rows.fresh and (window is None or rows.width <= window):
        return None
    if rows.uniform and rows.width == 1:
        return None
    return rows.once(("mask", window, like.dtype, like.device), lambda: _build_mask(rows, window, like))


def _build_mask(rows: BatchRows, window: int | None, like: Tensor) -> Tensor:
    at = rows.positions_on(like.device)[: 1 if rows.uniform else None, :, None]
    others = torch.arange(rows.first_seen(window), rows.end, device=like.device)
    hidden = others > at
    if window is not None:
        hidden |= others <= at - window
    return torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill(hidden, -torch.inf)[:, None]


def convert(staged: StagedModel, dtype: DtypeName) -> None:
    """Converts the stages in place, all but the rotary angles, which bf16 would make coarse."""
    for stage in staged.stages:
        convert_stage(stage, dtype)


def convert_stage(stage: StageModel, dtype: DtypeName) -> None:
    for module in (stage.layers, stage.embedding, stage.norm, stage.head, stage.stand_ins):
        if module is not None:
            module.to(DTYPES[dtype])
