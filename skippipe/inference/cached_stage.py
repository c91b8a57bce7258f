"""A stage at inference: the very layers that were trained, and their KV cache.

A stage takes hidden states [rows, tokens, d] and their rows, and returns hidden states; that is all that has to travel
when each stage is on a machine of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from skippipe.errors import UserError
from skippipe.inference.checkpoint_loader import StagedModel
from skippipe.inference.kv_cache import BatchRows, StageCache
from skippipe.model.model_spec import MASKS
from skippipe.model.stage import StageModel
from skippipe.stage_subset import Visits

DtypeName = Literal["fp32", "bf16"]
DTYPES: dict[DtypeName, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}
FIXED_ROTATIONS = ("default", "linear", "llama3", "yarn")


class CachedStage:
    def __init__(self, model: StageModel, max_tokens: int) -> None:
        self.model = model
        config, kinds = model.spec.config, [model.spec.mask_kind(layer) for layer in model.numbers]
        for kind in kinds:
            if kind not in MASKS:
                raise UserError(f"layers of the kind '{kind}' are not supported; {', '.join(MASKS)} are")
        rotation = getattr(model.rotary, "rope_type", "default")
        if rotation not in FIXED_ROTATIONS:
            raise UserError(
                f"rope_type '{rotation}' depends on the length of the text, and cached keys were rotated before: "
                f"generation supports {', '.join(FIXED_ROTATIONS)}"
            )
        self._windows = [config.sliding_window if kind == "sliding_attention" else None for kind in kinds]
        self.cache = StageCache(model.numbers.start, self._windows, max_tokens)
        self._rotations: tuple[Tensor, Tensor] | None = None

    @torch.inference_mode()
    def forward(self, hidden: Tensor, rows: BatchRows, residual_scale: float = 1.0) -> Tensor:
        """The stage's output; what it adds to the residual stream is multiplied by `residual_scale`."""
        assert hidden.shape[:2] == (len(rows.slots), rows.width), "hidden states of other rows"
        past = self.cache.begin(rows, hidden.device)
        positions = None if rows.even else rows.positions_on(hidden.device)
        rotation = self._rotation(rows, positions, hidden)
        masks = {window: mask(rows, window, hidden) for window in dict.fromkeys(self._windows)}
        output = hidden
        for layer, window in zip(self.model.layers, self._windows, strict=True):
            output = layer(output, attention_mask=masks[window], position_embeddings=rotation, past_key_values=past)
        return output if residual_scale == 1.0 else torch.lerp(hidden, output, residual_scale)

    def _rotation(self, rows: BatchRows, positions: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the positions, out of a table: they depend on nothing else."""
        end = max(rows.starts) + rows.width
        if self._rotations is None or self._rotations[0].shape[1] < end:
            self._rotations = self.model.rotary(like, torch.arange(2 * end, device=like.device)[None])
        cosines, sines = self._rotations
        if positions is None:
            return cosines[:, rows.starts[0] : end], sines[:, rows.starts[0] : end]
        return cosines[0, positions], sines[0, positions]


class StageChain:
    """Stages one after another in one process, each with a KV cache of its own."""

    def __init__(self, models: Sequence[StageModel], visits: Visits, residual_scale: float, max_tokens: int) -> None:
        self.visits = visits
        self.residual_scale = residual_scale
        self._stages = [CachedStage(models[number], max_tokens) for number in visits]

    def forward(self, hidden: Tensor, rows: BatchRows) -> Tensor:
        for number, stage in zip(self.visits, self._stages, strict=True):
            hidden = stage.forward(hidden, rows, self.residual_scale if number else 1.0)
        return hidden

    def free(self, slot: int) -> None:
        for stage in self._stages:
            stage.cache.free(slot)

    def move(self, source: int, target: int) -> None:
        for stage in self._stages:
            stage.cache.move(source, target)


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


def mask(rows: BatchRows, window: int | None, like: Tensor) -> Tensor | None:
    """The attention mask, to be added to scores of [rows, 1, tokens, seen tokens].

    None where the attention kernel's own causal mask will do: at the beginning of texts, padding being at the end. And
    where a single token of each row attends to all there is.
    """
    if rows.fresh and (window is None or rows.width <= window):
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
    for module in (stage.layers, stage.embedding, stage.norm, stage.head):
        if module is not None:
            module.to(DTYPES[dtype])
