"""One stage with static shapes, for a node that serves: single tokens of a batch pass it as one CUDA graph.

As in `static_decoding`, but from hidden states to hidden states, and rows may name any slots, whose keys and values are
gathered for attention. Rows that fill a batch up to a power of two are copies of the first: they write the same values
to the same places. Prompts, and stages whose layers `fused_layers` does not know, are computed plainly.
"""

from __future__ import annotations

from collections.abc import Hashable

import torch
from torch import Tensor

from skippipe.inference.cached_stage import BatchRows, CachedStage
from skippipe.inference.fused_layers import Layer, fused_layers, layer_step, position_mask
from skippipe.inference.static_decoding import recorded
from skippipe.model.stage import StageModel
from skippipe.stage_subset import Hop

MOST_GRAPHS = 32  # of a stage; beyond them it is computed plainly


class StaticStage(CachedStage):
    """A stage and its KV cache that passes batches of single tokens in one step, as far as it can."""

    def __init__(self, model: StageModel, max_tokens: int) -> None:
        super().__init__(model, max_tokens)
        self._layers = fused_layers(self)
        self._steps: dict[Hashable, StageStaticStep] = {}
        self._shape = 0, 0

    @torch.inference_mode()
    def forward(self, hidden: Tensor, rows: BatchRows, residual_scale: float = 1.0, hop: Hop | None = None) -> Tensor:
        if self._layers is None or not rows.single or any(each is None for each in self.cache.stores):
            return super().forward(hidden, rows, residual_scale, hop)
        self.cache.reserve(max(rows.slots) + 1, rows.end)
        if self.cache.shape != self._shape:  # graphs of before write where the cache was
            self._shape = self.cache.shape
            self._steps.clear()
        batch = 1 << (len(rows.slots) - 1).bit_length()
        key = batch, residual_scale, hop
        if key not in self._steps:
            if len(self._steps) >= MOST_GRAPHS:
                return super().forward(hidden, rows, residual_scale, hop)
            self._steps[key] = StageStaticStep(self, self._layers, batch, hidden[:1, 0], residual_scale, hop)
        self.cache.extend(rows)
        return self._steps[key].run(hidden, rows)


class StageStaticStep:
    """The step of one size of batch."""

    def __init__(
        self, stage: CachedStage, layers: list[Layer], batch: int, like: Tensor, residual_scale: float, hop: Hop | None
    ) -> None:
        self._stage, self._layers = stage, layers
        self._way_on = residual_scale, hop
        self._room = stage.cache.shape[1]
        self._rotations = stage.rotations(self._room, like)  # kept, because a graph reads them where they are
        self._hidden = torch.zeros(batch, like.shape[-1], dtype=like.dtype, device=like.device)
        self._where = torch.zeros(2, batch, dtype=torch.long, device=like.device)
        """Slots and positions."""
        self._graph: torch.cuda.CUDAGraph | None = None
        self._output: Tensor

    def run(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        count, missing = len(rows.slots), len(self._hidden) - len(rows.slots)
        slots, positions = rows.slots + rows.slots[:1] * missing, rows.starts + rows.starts[:1] * missing
        self._where.copy_(torch.tensor([slots, positions]))
        self._hidden[:count].copy_(hidden[:, 0])
        self._hidden[count:].copy_(hidden[:1, 0].expand(missing, -1))
        if self._hidden.is_cuda:
            if self._graph is None:
                self._graph, self._output = recorded(self._step, self._hidden.device)
            self._graph.replay()
        else:
            self._output = self._step()
        return self._output[:count, None].clone()

    def _step(self) -> Tensor:
        slots, positions = self._where
        cosines, sines = self._rotations
        rotation = cosines[0, positions][:, None], sines[0, positions][:, None]
        cache, output = self._stage.cache, self._hidden
        masks = {window: position_mask(positions, self._room, window, output.dtype) for window in set(cache.windows)}
        for (weights, settings), window, stores in zip(self._layers, cache.windows, cache.stores, strict=True):
            assert stores is not None
            output = layer_step(
                output, weights, settings, stores, slots, positions, rotation, masks[window], gathered=True
            )
        return self._stage.handed_on(self._hidden, output, *self._way_on)
